"""``cargohold replay`` and ``cargohold plan``, as a user calls them."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cargohold.cli.traces import TraceOptions, load_trace
from cargohold.process import memory_limit_bytes
from tests.command import Command
from tests.data.make_trace import TRACE

TRACE_FILE = str(TRACE)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A trace of a few lines."""
    paths = [[1, 2, 3], [1, 2, 4], [7, 8], [1, 2, 3]]
    lines = [
        json.dumps(
            {"timestamp_ms": 1000 * at, "session_id": f"s{at % 2}", "input_length": 16 * len(path), "hash_ids": path}
        )
        for at, path in enumerate(paths)
    ]
    file = tmp_path / "small.jsonl"
    file.write_text("\n".join(lines))
    return str(file)


def first_requests(directory: Path, number: int) -> str:
    """A trace of the first requests of ``TRACE``."""
    file = directory / "first.jsonl"
    file.write_text("\n".join(TRACE.read_text().splitlines()[:number]))
    return str(file)


class TestReplay:
    def test_tables(self, cargohold: Command) -> None:
        result = cargohold("replay", TRACE_FILE, "-p", "lru,optimum", "-p", "infinite", "-s", "64,5%")
        assert result.status == 0, result.err
        assert "1,400 requests" in result.out and "prefix-hit ratio" in result.out and "what moved" in result.out
        (row,) = [line.split() for line in result.out.splitlines() if line.strip().startswith("64 ")]
        assert row[2:] == ["41.57", "62.59", "76.77"]

    def test_a_policy_of_ones_own(
        self, cargohold: Command, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = "from cargohold.cache.policies.base import FIFOPolicy\n\nclass Mine(FIFOPolicy): ...\n"
        (tmp_path / "policies_of_mine.py").write_text(text)
        monkeypatch.setattr(sys, "path", list(sys.path))
        mine = "policies_of_mine:Mine"
        asked = ("replay", small, "-p", f"fifo,{mine}", "-s", "2,3", "--disk", "4", "--disk-policy", mine, "--json")
        assert "cannot be imported from here (ModuleNotFoundError" in cargohold(*asked).err
        monkeypatch.chdir(tmp_path)
        result = cargohold(*asked, "--jobs", "2")
        assert result.status == 0, result.err
        hits = {
            (found["policy"], *found["capacity_chunks"]): found["prefix_hits"]
            for found in json.loads(result.out)["results"]
        }
        assert [hits[mine, size, 4] for size in (2, 3)] == [hits["fifo", size, 4] for size in (2, 3)]

    def test_hints_are_one_more_column_per_policy(self, cargohold: Command, small: str) -> None:
        result = cargohold("replay", small, "-p", "lru,optimum", "-s", "3", "--hints", "known", "--json")
        assert result.status == 0, result.err
        assert [found["policy"] for found in json.loads(result.out)["results"]] == ["lru", "lru+hints", "optimum"]

    def test_hints_that_there_are_not_are_refused(self, cargohold: Command, small: str) -> None:
        result = cargohold("replay", small, "--hints", "derived")
        assert result.status != 0 and "it must be known" in result.err

    def test_an_infinite_cache_alone_is_of_no_size(self, cargohold: Command, small: str) -> None:
        lines = cargohold("replay", small, "-p", "infinite").out.splitlines()
        assert ["everything", "45.45"] in [line.split() for line in lines]

    def test_json_has_all_of_it(self, cargohold: Command, small: str) -> None:
        result = cargohold(
            "replay", small, "-p", "lru", "-s", "2", "--disk", "4", "--bytes-per-token", "1024", "--json",
            "--prefill-tokens-per-s", "100",
        )  # fmt: skip
        facts = json.loads(result.out)
        assert facts["trace"]["requests"] == 4
        assert facts["trace"]["block_tokens"] == 16
        (found,) = facts["results"]
        assert found["policy"] == "lru" and found["capacity_bytes"] == [2 * 16 * 1024, 4 * 16 * 1024]
        host, disk = found["tiers"]
        assert host["loaded_chunks"] + disk["loaded_chunks"] == found["prefix_hits"] > 0
        assert disk["stored_bytes"] == disk["stored_chunks"] * 16 * 1024
        assert 0 < found["saved_prefill_s"] < found["hit_tokens"] / 100

    def test_the_model_tells_the_bytes(self, cargohold: Command, small: str, tiny_model: Callable[[str], str]) -> None:
        result = cargohold("replay", small, "-s", "12KiB", "-p", "lru", "--model", tiny_model("llama"), "--json")
        facts = json.loads(result.out)
        assert facts["cost_model"]["bytes_per_token"] == 2 * 2 * 2 * 12 * 4
        assert facts["results"][0]["capacity_chunks"] == [2]

    def test_processes_find_the_same(self, cargohold: Command) -> None:
        arguments = ("replay", TRACE_FILE, "-p", "lru,fifo", "-s", "64", "--json")
        alone, together = (json.loads(cargohold(*arguments, "--jobs", jobs).out) for jobs in ("1", "2"))
        for facts in (*alone["results"], *together["results"]):
            del facts["seconds"]
        assert alone == together

    def test_chunks_of_several_blocks(self, cargohold: Command, small: str) -> None:
        def requests(*options: str) -> tuple[int, int]:
            facts = json.loads(cargohold("replay", small, "-p", "infinite", "--json", *options).out)
            return facts["trace"]["requests"], facts["trace"]["lookups"]

        assert requests() == (4, 11)
        assert requests("--blocks-per-chunk", "2") == (4, 4)

    def test_standard_input(self, cargohold: Command, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
        data = gzip.compress(Path(small).read_bytes())
        expected = cargohold("replay", small, "-p", "lru", "-s", "2").out
        monkeypatch.setattr(io, "StringIO", lambda _: io.TextIOWrapper(io.BytesIO(data)))  # what ``cargohold`` pipes in
        assert cargohold("replay", "-", "-p", "lru", "-s", "2").out == expected

    def test_texts_with_a_tokenizer(self, cargohold: Command, chat_model: str, tmp_path: Path) -> None:
        log = tmp_path / "log"
        talk = [{"role": "user", "content": "Tell me of ships and bread, and of the railway."}]
        log.write_text(f"{json.dumps({'messages': talk})}\n{json.dumps({'messages': talk})}\n")
        arguments = ("replay", str(log), "-p", "infinite", "--block-tokens", "4", "--json")
        facts = json.loads(cargohold(*arguments, "--tokenizer", chat_model).out)
        assert facts["results"][0]["prefix_hit_ratio"] == 0.5
        refused = cargohold(*arguments)
        assert refused.status == 2 and "tokenizer" in refused.err

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["/no/such/file"], "No such file"),
            (["SMALL", "-p", "mru"], "mru"),
            (["SMALL", "-s", "0"], "size zero"),
            (["SMALL", "-s", "12%,0%"], "size zero"),
            (["SMALL", "-s", "1GiB"], "--bytes-per-token"),
            (["SMALL", "-s", "100B", "--bytes-per-token", "8"], "at least one chunk"),
            (["SMALL", "--disk", "no"], "disk"),
            (["SMALL", "--disk", "4", "--disk-policy", "optimum"], "--disk-policy="),
            (["SMALL", "--disk", "5GiB"], "--disk='5GiB'"),
            (["SMALL", "--disk", "1B", "--bytes-per-token", "8"], "--disk='1B'"),
            (
                ["SMALL", "--disk-policy", "fifo"],
                "--disk-policy='fifo' is not possible: there is no disk; give its size, too: --disk\n",
            ),
            (["SMALL", "-s", "64G"], "bytes such as 64GiB; the units are B, KB, MB, GB, TB"),
            (["SMALL", "-s", "1", "--blocks-per-chunk", "2"], "at least one chunk, which is 2 blocks"),
            (["SMALL", "-s", "100B", "--bytes-per-token", "65"], "at least one chunk, which is 1,040 bytes"),
            (
                ["SMALL", "--host-bandwidth", "0"],
                "--host-bandwidth='0' is not possible: it must be a number of bytes per",
            ),
            (["SMALL", "--disk-bandwidth", "3G"], "such as 20GB; the units are B, KB, MB, GB, TB"),
            (["SMALL", "--kv-dtype-bytes", "1"], "--kv-dtype-bytes=1 is not possible"),
            (["SMALL", "--jobs", "two"], "'two'"),
            (["SMALL", "--block-tokens", "9" * 20], "it must be an integer from 1 to 2147483647"),
            (["SMALL", "--blocks-per-chunk", "9"], "no prompt has so many blocks"),
            (["SMALL", "--blocks-per-chunk", "0"], "--blocks-per-chunk="),
            (["SMALL", "--on-bad-line", "cry"], "stop or skip"),
            (["SMALL", "--tokenizer", "/no/such/model"], "/no/such/model"),
            (["SMALL", "--model", "/no/such/model"], "/no/such/model"),
            (["SMALL", "--bytes-per-token", "0"], "--bytes-per-token="),
            (["SMALL", "--host-bandwidth", "fast"], "--host-bandwidth="),
            (["SMALL", "--prefill-tokens-per-s", "0"], "--prefill-tokens-per-s="),
        ],
    )
    def test_bad_input_is_told_in_a_line(self, cargohold: Command, small: str, arguments: list[str], told: str) -> None:
        result = cargohold("replay", *(small if argument == "SMALL" else argument for argument in arguments))
        assert result.status in (1, 2)
        assert result.out == "" and told in result.err
        assert "Traceback" not in result.err
        assert len([line for line in result.err.splitlines() if line.strip()]) == 1

    def test_a_tokenizer_that_nothing_needs_is_told(
        self, cargohold: Command, chat_model: str, small: str, tmp_path: Path
    ) -> None:
        log = tmp_path / "log"
        log.write_text(f"{json.dumps({'token_ids': list(range(40))})}\n" * 2)
        for trace in (small, str(log)):
            result = cargohold("replay", trace, "-s", "2", "-p", "lru", "--tokenizer", chat_model)
            assert result.status == 0
            assert result.err == "note: the trace has no texts, so --tokenizer made no difference\n"

    def test_broken_lines_stop_or_are_skipped(self, cargohold: Command, small: str) -> None:
        lines = Path(small).read_text().splitlines()
        Path(small).write_text("\n".join([*lines[:2], '{"hash_ids": "none"}', *lines[2:]]))
        stopped = cargohold("replay", small)
        assert stopped.status == 1 and f"{small}, line 3" in stopped.err
        skipped = cargohold("replay", small, "--on-bad-line", "skip", "-p", "infinite", "--json")
        facts = json.loads(skipped.out)
        assert facts["trace"]["requests"] == 4
        assert "1 broken line of the trace was skipped" in facts["remarks"][0] and "line 3" in skipped.err

    def test_lines_that_are_skipped_are_not_kept(self, small: str) -> None:
        with Path(small).open("a") as file:
            file.writelines(f'\n{{"what": "{"x" * 10_000}"}}' for _ in range(1000))
        tracemalloc.start()
        try:
            trace = load_trace([small], TraceOptions(on_bad_line="skip"))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert trace.workload.num_requests == 4 and "1,000 broken lines of the trace were skipped" in trace.remarks[0]
        assert peak < 4_000_000  # of the 10 MB that were skipped

    def test_lines_that_are_all_broken_are_no_empty_trace(self, cargohold: Command, tmp_path: Path) -> None:
        (tmp_path / "prose").write_text("Once upon\na time\n")
        result = cargohold("replay", str(tmp_path / "prose"), "--on-bad-line", "skip")
        assert (
            result.status == 1
            and "2 lines, and none is a request; the first: " in result.err
            and "line 1" in result.err
        )

    def test_a_tier_larger_than_memory_is_only_as_large_as_what_there_is_to_keep(
        self, cargohold: Command, small: str
    ) -> None:
        options = ("-p", "lru,arc,fifo,reuse-index,infinite", "--bytes-per-token", "8", "--json")
        result = cargohold("replay", small, "-s", "900TiB", "--disk", "900TiB", *options)
        assert result.status == 0, result.err
        found = json.loads(result.out)["results"]
        assert {one["prefix_hits"] for one in found} == {found[-1]["prefix_hits"]}
        assert found[0]["tiers"][1]["capacity_chunks"] == 900 * 1024**4 // (8 * 16)
        assert cargohold("replay", small, "-s", "9" * 40, "--disk", f"{'9' * 40}%", *options[:-1]).status == 0

    def test_tables_fit_a_terminal(self, cargohold: Command, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        cost = ("--bytes-per-token", "131072", "--prefill-tokens-per-s", "8000")
        policies = "lru,arc,fifo,reuse-index,optimum,infinite"
        result = cargohold("replay", small, "-p", policies, "-s", "4MiB,10MiB", "--disk", "64GiB", *cost)
        assert result.status == 0, result.err
        assert "…" not in result.out and "prefill" in result.out
        assert max(map(len, result.out.splitlines()[1:])) <= 80

    def test_in_a_narrow_terminal_no_number_is_cut_off(
        self, cargohold: Command, small: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "30")
        cost = ("--bytes-per-token", "131072", "--prefill-tokens-per-s", "8000")
        policies = "lru,arc,fifo,reuse-index,optimum,infinite"
        result = cargohold("replay", small, "-p", policies, "-s", "4MiB,10MiB", "--disk", "64GiB", *cost)
        assert result.status == 0 and "…" not in result.out and "45.45" in result.out

    def test_requests_shorter_than_a_block_are_told_of_the_option(self, cargohold: Command, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text('{"token_ids": [1, 2, 3]}\n{"token_ids": [1, 2], "output_token_ids": [3, 4, 5]}\n')
        result = cargohold("replay", str(log))
        told = "the longest prompt has 3 tokens, less than a block of 16; give a smaller --block-tokens\n"
        assert result.status == 2 and result.err == f"cargohold: {told}"
        result = cargohold("replay", str(log), "--block-tokens", "16")
        assert result.err == f"cargohold: --block-tokens=16 is not possible: {told}"
        assert cargohold("replay", str(log), "--block-tokens", "3", "-s", "1").status == 0

    @pytest.mark.parametrize(
        ("line", "options", "status", "told"),
        [
            (
                {"token_ids": [1, 2, 3], "output_token_ids": [4] * 40},
                (),
                2,
                "the longest prompt has 3 tokens, less than a block of 16; give a smaller --block-tokens",
            ),
            (
                {"hash_ids": [], "output_hash_ids": [1, 2]},
                (),
                1,
                "/trace: the 1 request in it has no full block, so there is nothing to replay",
            ),
            (
                {"hash_ids": [1], "output_hash_ids": [2]},
                ("--blocks-per-chunk", "2"),
                2,
                "--blocks-per-chunk=2 is not possible: there is nothing to replay: no prompt has so many blocks",
            ),
        ],
    )
    def test_answers_without_prompts_are_nothing_to_replay(
        self, cargohold: Command, tmp_path: Path, line: dict[str, Any], options: tuple[str, ...], status: int, told: str
    ) -> None:
        trace = tmp_path / "trace"
        trace.write_text(json.dumps(line))
        for command in (("replay", str(trace)), ("plan", "--trace", str(trace), "--bytes-per-token", "8")):
            result = cargohold(*command, *options)
            assert result.status == status and told in result.err

    @pytest.mark.parametrize(
        ("options", "missing"),
        [
            ((), "how many bytes a token has: --model or --bytes-per-token\n"),
            (
                ("--bytes-per-token", "8"),
                "how many tokens a block has, which the trace does not say: --block-tokens\n",
            ),
        ],
    )
    def test_why_no_times_are_shown_is_told(
        self, cargohold: Command, tmp_path: Path, options: tuple[str, ...], missing: str
    ) -> None:
        trace = tmp_path / "trace"
        told = '"block_tokens": 16, ' if not options else ""
        trace.write_text(f'{{{told}"hash_ids": [1, 2]}}\n' * 2)
        result = cargohold("replay", str(trace), "-s", "2", "-p", "lru", "--prefill-tokens-per-s", "100", *options)
        assert result.status == 0
        assert result.err == f"note: prefill saved is not shown: it is not known {missing}"
        assert "prefill" not in result.out

    def test_an_empty_trace(self, cargohold: Command, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        result = cargohold("replay", str(tmp_path / "empty"))
        assert result.status == 1 and "empty" in result.err

    def test_ids_that_form_no_trie_are_warned_of_and_have_no_optimum(self, cargohold: Command, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        trace.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [2]}\n')
        result = cargohold("replay", str(trace), "-s", "1")
        assert result.status == 0 and "do not stand for whole prefixes" in result.err
        assert "optimum" not in result.out

    def test_what_the_engine_counted_is_told(self, cargohold: Command, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        trace.write_text('{"hash_ids": [1], "reused_blocks": 0}\n{"hash_ids": [1, 2], "reused_blocks": 1}\n')
        assert "reused 1 block itself: 33.33%" in cargohold("replay", str(trace), "-s", "9").err

    def test_blocks_that_no_chunk_has_are_counted_where_the_engine_did(
        self, cargohold: Command, tmp_path: Path
    ) -> None:
        trace = tmp_path / "trace"
        trace.write_text('{"hash_ids": [1, 2, 3], "reused_blocks": 3}\n' * 2)
        result = cargohold("replay", str(trace), "-s", "100%", "--blocks-per-chunk", "2")
        assert "reused 6 blocks itself: 100.00%" in result.err

    @pytest.mark.parametrize(
        ("sizes", "options", "told"),
        [
            ((16, 16), (), None),
            ((16, 512), (), "have 16 to 512 tokens, and all are counted as 16"),
            ((16, 16), ("--block-tokens", "64"), "have 16 tokens, and all are counted as 64"),
            ((16, 16), ("--block-tokens", "16"), None),
        ],
    )
    def test_blocks_of_other_sizes_than_counted_are_told(
        self, cargohold: Command, tmp_path: Path, sizes: tuple[int, int], options: tuple[str, ...], told: str | None
    ) -> None:
        trace = tmp_path / "trace"
        trace.write_text("".join(f'{{"hash_ids": [1, 2], "block_tokens": {size}}}\n' for size in sizes))
        result = cargohold("replay", str(trace), "-s", "2", "-p", "lru", *options)
        assert result.status == 0
        assert result.err == "" if told is None else told in result.err

    def test_the_order_of_requests_is_told_as_it_is(self, cargohold: Command, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        late_first = '{"hash_ids": [1], "timestamp_ms": 9}\n{"hash_ids": [2], "timestamp_ms": 3}\n'
        trace.write_text(late_first)
        assert "order of their times; they are replayed in it\n" in cargohold("replay", str(trace), "-s", "2").err
        trace.write_text(late_first + '{"hash_ids": [3]}')
        assert (
            "some have none, so they are replayed in that of the trace\n"
            in cargohold("replay", str(trace), "-s", "2").err
        )


class TestPlan:
    def test_words_and_table(self, cargohold: Command, tmp_path: Path) -> None:
        result = cargohold(
            "plan", "--trace", first_requests(tmp_path, 196), "--bytes-per-token", "1024",
            "--host-bytes", "8MiB", "--disk-bytes", "64MiB",
            "--prefill-tokens-per-s", "2000", "--policy", "lru",
        )  # fmt: skip
        assert result.status == 0, result.err
        for words in ("* Recommended: ", "8.0 MiB of host memory", "64 MiB of disk", "This machine", "next GiB"):
            assert words in result.out

    def test_of_a_request_that_nobody_repeats_nothing_is_recommended(self, cargohold: Command, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        trace.write_text('{"hash_ids": [1, 2, 3], "block_tokens": 16}')
        arguments = ("plan", "--trace", str(trace), "--bytes-per-token", "8", "--policy", "lru")
        result = cargohold(*arguments)
        assert result.status == 0, result.err
        assert "1 request asks for" in result.out and "No size is recommended" in result.out
        assert json.loads(cargohold(*arguments, "--json").out)["recommended_host_bytes"] is None

    def test_prices_and_what_a_disk_endures_are_options(self, cargohold: Command, tmp_path: Path) -> None:
        arguments = (
            "plan", "-t", first_requests(tmp_path, 97), "--bytes-per-token", "1024",
            "--host-bytes", "8MiB", "--disk-bytes", "16MiB",
            "--prefill-tokens-per-s", "2000", "--policy", "lru", "--json",
        )  # fmt: skip
        facts = json.loads(cargohold(*arguments).out)
        assert facts["disk"]["problems"] != [] and "Not recommended: 16 MiB of disk." in facts["advice"][2]
        wears = ("--disk-writes-per-day", "1e9", "--disk-write-bandwidth", "1TB", "--disk-price", "0.001")
        facts = json.loads(cargohold(*arguments, *wears, "--host-price", "100").out)
        assert facts["disk"]["problems"] == [] and facts["host_price_s"] == 100
        assert "Recommended below 8.0 MiB of host memory: 16 MiB of disk." in facts["advice"][2]

    def test_json(self, cargohold: Command, small: str, tiny_model: Callable[[str], str]) -> None:
        result = cargohold("plan", "-t", small, "--model", tiny_model("gemma3"), "--host-bytes", "1MiB", "--json")
        facts = json.loads(result.out)
        assert facts["cost_model"]["bytes_per_token"] == 6 * 2 * 2 * 12 * 4, "five layers, in groups of two"
        assert {result["policy"] for result in facts["results"]} == {"reuse-index", "lru", "optimum", "infinite"}
        assert facts["memory_limit_bytes"] == memory_limit_bytes()
        assert facts["curve"][-1]["host_bytes"] <= 1 << 20
        assert facts["advice"][0].startswith("No size is recommended")

    @pytest.mark.parametrize("columns", ["1", "80"])
    def test_no_number_is_cut_off(
        self, cargohold: Command, small: str, monkeypatch: pytest.MonkeyPatch, columns: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, this makes it a terminal
        result = cargohold("plan", "--trace", small, "--bytes-per-token", "1", "--policy", "lru")
        assert result.status == 0 and "…" not in result.out and "45.5%" in result.out

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ([], "cargohold: --trace FILE is required\n"),
            (["--trace", "SMALL"], "cargohold: a plan needs --model or --bytes-per-token\n"),
            (
                ["--trace", "SMALL", "--bytes-per-token", "8", "--disk-bytes", "1GiB"],
                "is not possible: a disk needs host memory above it: give host_bytes too",
            ),
            (
                ["--trace", "SMALL", "--bytes-per-token", "8", "--host-bytes", "1B"],
                "--host-bytes='1B' is not possible: that is smaller than any chunk of KV; did you mean 1GiB?",
            ),
            (
                ["--trace", "SMALL", "--bytes-per-token", "8", "--policy", "optimum"],
                "--policy='optimum' is not possible: it must",
            ),
            (
                ["--trace", "SMALL", "--bytes-per-token", "8", "--disk-policy", "fifo"],
                "give its size, too: --disk-bytes\n",
            ),
            (["--trace", "SMALL", "--bytes-per-token", "8", "--model", "smollm2"], "use either this or --model"),
            (["--trace", "SMALL", "--bytes-per-token", "8", "--host-price", "0"], "--host-price=0.0 is not possible"),
            (
                ["--trace", "SMALL", "--bytes-per-token", "8", "--disk-writes-per-day", "nan"],
                "--disk-writes-per-day=nan",
            ),
            (["--trace", "SMALL", "--bytes-per-token", "8", "--disk-write-bandwidth", "2G"], "such as 20GB"),
        ],
    )
    def test_bad_input_is_told_in_a_line(self, cargohold: Command, small: str, arguments: list[str], told: str) -> None:
        result = cargohold("plan", *(small if argument == "SMALL" else argument for argument in arguments))
        assert result.status == 2 and told in result.err
        assert len([line for line in result.err.splitlines() if line.strip()]) == 1


def test_output_is_not_needed_to_be_a_terminal(cargohold: Command, small: str) -> None:
    assert not sys.stdout.isatty()
    assert "\x1b" not in cargohold("replay", small, "-s", "2").out
