"""Does it pay? The arithmetic, and that the page which answers it for published cards and models uses it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cargohold.lab.replay.costs import Paying, describe_size, format_s, tokens_per_gib

PAGE = (Path(__file__).parents[2] / "docs" / "pays.md").read_text(encoding="utf-8")
OF_PEAK = 0.5
"""Part of its peak that a card is taken to reach in prefill, as the page says."""


def rows(title: str) -> list[list[str]]:
    """Cells of the table whose titles begin like this."""
    table = PAGE.split(f"\n| {title}")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


CARDS = {name: (float(tflops), float(link)) for name, tflops, link, *_ in rows("card | peak")}
MODELS = {name: (float(billions), int(size.replace(",", ""))) for name, billions, _, size, _, _ in rows("model")}


def test_loading_is_compared_with_computing() -> None:
    pays = Paying(prefill_tokens_per_s=8_000, bytes_per_token=131_072, bytes_per_s=20e9)
    assert (pays.compute_s, round(pays.load_s, 6), round(pays.saved_s, 6)) == (0.125, 0.006554, 0.118446)
    assert round(pays.break_even_tokens_per_s) == 152_588
    assert "saves 118 ms; it pays up to a prefill of 152,588 tokens/s" in pays.describe("host memory")
    assert "does not pay" in Paying(1e9, 131_072, 20e9).describe("host memory")


def test_where_it_breaks_even_nothing_is_saved() -> None:
    pays = Paying(1.0, 1_000, 5e9)
    at = Paying(pays.break_even_tokens_per_s, 1_000, 5e9)
    assert at.saved_s == pytest.approx(0)


def test_sizes_and_times_are_for_people() -> None:
    assert describe_size(131_072) == "128 KiB per token: a GiB holds 8,192 tokens"
    assert [format_s(time) for time in (2.34, 0.0131, 0.00042)] == ["2.3 s", "13 ms", "0.4 ms"]


@pytest.mark.parametrize("model", MODELS)
def test_the_page_multiplies_what_models_say_of_themselves(model: str) -> None:
    (row,) = (row for row in rows("model") if row[0] == model)
    factors = [int(number) for number in re.findall(r"\d+", row[2])]
    size = 1
    for factor in factors:
        size *= factor
    assert size == MODELS[model][1]
    assert row[4] == f"{tokens_per_gib(size):,}"


def test_the_page_computes_as_the_command_does() -> None:
    answers = rows("card | model")
    assert answers
    for card, model, compute, host, saved, disk, limit in answers:
        tflops, link = CARDS[card]
        billions, size = MODELS[model]
        prefill = OF_PEAK * tflops * 1e12 / (2 * billions * 1e9)
        from_host, from_disk = Paying(prefill, size, link * 1e9), Paying(prefill, size, 6e9)
        assert compute == format_s(from_host.compute_s), (card, model)
        assert host == format_s(from_host.load_s), (card, model)
        assert saved == format_s(from_host.saved_s), (card, model)
        shown = format_s(from_disk.saved_s) if from_disk.saved_s > 0 else "nothing"
        assert disk == shown, (card, model)
        assert limit == f"{size * prefill / 1e9:.1f} GB/s", (card, model)
