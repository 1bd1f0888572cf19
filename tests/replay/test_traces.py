from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from cargohold.errors import TraceError
from cargohold.lab.replay import traces
from cargohold.lab.replay.traces import TraceRequest, read_trace
from cargohold.lab.replay.workload import load_workload

REQUESTS = [{"timestamp_ms": 10 * at, "hash_ids": list(range(at)), "session_id": at % 3} for at in range(1, 400)]
TEXT = "".join(f"{json.dumps(request)}\n" for request in REQUESTS).encode()

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
}


def ids(requests: list[TraceRequest]) -> list[list[int]]:
    return [request.hash_ids for request in requests]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.trace"
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_compression_is_recognised_by_content(compression: str, write: Callable[[bytes], Path]) -> None:
    compress = COMPRESSORS[compression]
    whole = list(read_trace([write(compress(TEXT))]))
    assert ids(whole) == [request["hash_ids"] for request in REQUESTS]
    assert [request.arrival_ms for request in whole] == [request["timestamp_ms"] for request in REQUESTS]
    in_parts = write(compress(TEXT[:1000]) + compress(TEXT[1000:]))
    assert list(read_trace([in_parts])) == whole


def test_a_file_of_pzstd_which_begins_with_a_frame_to_be_skipped(write: Callable[[bytes], Path]) -> None:
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    frames = [COMPRESSORS["zstd"](part) for part in (TEXT[:1000], TEXT[1000:])]
    assert len(list(read_trace([write(b"".join(skipped + frame for frame in frames))]))) == len(REQUESTS)


def test_a_byte_order_mark_in_front_does_not_matter(write: Callable[[bytes], Path]) -> None:
    assert ids(list(read_trace([write(b'\xef\xbb\xbf{"hash_ids": [1]}\r\n{"hash_ids": [2]}')]))) == [[1], [2]]
    assert list(read_trace([write(b"\xef\xbb\xbf")])) == []


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_cut_off_file_is_noticed(compression: str, write: Callable[[bytes], Path]) -> None:
    data = COMPRESSORS[compression](TEXT)
    with pytest.raises(TraceError, match="cut off"):
        list(read_trace([write(data[: len(data) // 2])]))


def of_one_byte(byte: bytes, num_blocks: int) -> bytes:
    """A frame of Zstandard in which four bytes stand for each 128 KiB."""
    size = 1 << 17
    last = [0] * (num_blocks - 1) + [1]
    blocks = b"".join((size << 3 | 0b010 | is_last).to_bytes(3, "little") + byte for is_last in last)
    return COMPRESSORS["zstd"](b"")[:4] + b"\x00\x58" + blocks


def test_a_small_file_that_stands_for_a_large_one_takes_no_memory_for_it(write: Callable[[bytes], Path]) -> None:
    """Found by forging: 128 KiB of a file were decompressed at once, which can be 4 GiB, and much more as lines."""
    data = of_one_byte(b" ", 4096)
    assert len(data) < 17_000
    pieces = [len(piece) for piece in traces._pieces(io.BytesIO(data), None)]  # what is in memory at once
    assert sum(pieces) == 4096 << 17 and max(pieces) <= 64 << 20
    with pytest.raises(TraceError, match="no end of the line within 256 MiB"):
        list(read_trace([write(data)]))


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_damaged_file_is_an_error_of_ours(compression: str, write: Callable[[bytes], Path]) -> None:
    data = bytearray(COMPRESSORS[compression](TEXT))
    data[20:60] = bytes(40)
    with pytest.raises(TraceError):
        list(read_trace([write(bytes(data))]))


def test_a_missing_package_is_named_with_its_extra(
    write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    file = write(COMPRESSORS["zstd"](TEXT))
    with pytest.raises(TraceError) as caught:
        list(read_trace([file]))
    assert str(caught.value).startswith(f"{file}: it is compressed with Zstandard: pip install 'cargohold[lab]'")


def test_several_files_are_read_in_order_and_lazily(write: Callable[[bytes], Path]) -> None:
    first, second = write(TEXT), write(b'{"hash_ids": [-1]}')
    requests = read_trace([first, second, "/nonexistent"])
    assert ids([next(requests) for _ in range(len(REQUESTS) + 1)])[-1] == [-1]
    with pytest.raises(TraceError, match="No such file"):
        next(requests)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(TEXT))))
    assert len(list(read_trace(["-"]))) == len(REQUESTS)


def test_standard_input_that_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(TraceError, match="there is no standard input"):
        list(read_trace(["-"]))


def test_blank_lines_and_a_missing_last_newline_do_not_matter(write: Callable[[bytes], Path]) -> None:
    assert ids(list(read_trace([write(b'\n \r\n{"hash_ids": [1]}\r\n\n{"hash_ids": [2]}')]))) == [[1], [2]]
    assert list(read_trace([write(b"")])) == []


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1, 2]",
        b"{}",
        b'{"hash_ids": 3}',
        b'{"hash_ids": ["a"]}',
        b'{"hash_ids": [1.5]}',
        b'{"hash_ids": [1], "input_length": -1}',
        b'{"hash_ids": [1], "input_length": 99999999999999999999}',
        b'{"hash_ids": [1], "reused_blocks": 2147483648}',
        b'{"hash_ids": [1], "block_tokens": 0}',
        b'{"hash_ids": [1], "block_tokens": 4611686018427387904}',
        b'{"hash_ids": [1], "step_tokens": 0}',
        b'{"hash_ids": [1], "timestamp_ms": "noon"}',
        b'{"hash_ids": [1], "timestamp": ' + b"9" * 400 + b"}",
        b'{"hash_ids": [1',
        pytest.param(b'{"hash_ids": [1], "x": ' + b"[" * 100_000, id="nested"),  # found by forging: a RecursionError
        b'\xff{"hash_ids": [1]}',
    ],
)
def test_a_broken_line_is_named_and_may_be_skipped(line: bytes, write: Callable[[bytes], Path]) -> None:
    path = write(b'{"hash_ids": [1]}\n\n' + line + b'\n{"hash_ids": [2]}\n')
    with pytest.raises(TraceError) as caught:
        list(read_trace([path]))
    assert (caught.value.file, caught.value.line) == (str(path), 3)
    assert "\n" not in str(caught.value)

    skipped: list[TraceError] = []
    assert ids(list(read_trace([path], on_bad_line=skipped.append))) == [[1], [2]]
    assert [error.line for error in skipped] == [3]


def test_a_number_that_cannot_be_is_told_with_what_can(write: Callable[[bytes], Path]) -> None:
    path = write(b'{"hash_ids": [1], "step_tokens": 0}')
    with pytest.raises(TraceError, match=r"line 1: step_tokens is 0; it must be an integer from 1 to 2147483647$"):
        list(read_trace([path]))


def test_the_largest_numbers_that_can_be_do_not_overflow(write: Callable[[bytes], Path]) -> None:
    most = 2**31 - 1
    request = {
        "hash_ids": [1, 2],
        **dict.fromkeys(("input_length", "block_tokens", "step_tokens", "reused_blocks"), most),
    }
    workload = load_workload(read_trace([write(f"{json.dumps(request)}\n".encode() * 3)]))
    assert workload.num_prompt_tokens == workload.num_reused_blocks == 3 * most
    assert workload.tokens_in(np.array([0, 2, 2])) == 2 * most


def test_a_file_without_lines_is_not_read_for_ever(
    write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.lab.replay.traces._MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("cargohold.lab.replay.traces._PIECE_BYTES", 100)
    with pytest.raises(TraceError, match="not a trace"):
        list(read_trace([write(bytes(5000))]))


def test_progress_adds_up_to_the_size_of_the_files(write: Callable[[bytes], Path]) -> None:
    files = [write(compress(TEXT)) for compress in COMPRESSORS.values()]
    read: list[int] = []
    list(read_trace(files, on_progress=read.append))
    assert sum(read) == sum(file.stat().st_size for file in files)


def test_mooncakes_own_files_are_understood(write: Callable[[bytes], Path]) -> None:
    path = write(b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47], "other": 1}')
    (request,) = read_trace([path])
    assert (request.arrival_ms, request.input_length, request.output_length) == (27482, 6955, 52)
