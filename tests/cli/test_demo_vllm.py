"""``cargohold demo-vllm`` where it cannot run; ``make demo-vllm`` runs it where it can."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.command import Command


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_what_to_run(cargohold: Command) -> None:
    result = cargohold("demo-vllm")
    assert result.status == 2
    assert result.out == ""
    assert "'vllm'" in result.err
    assert "make demo-vllm installs it" in result.err
