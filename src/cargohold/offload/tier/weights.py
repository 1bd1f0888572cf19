"""Digests of the contents of a model's files, because the same name may be given to other weights tomorrow."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cargohold.errors import ConfigError
from cargohold.offload.tier.model_files import CONFIG_FILE, code_files, find_files, index_files, side_files
from cargohold.offload.tier.namespace import digest_facts, digest_weights
from cargohold.protocol import ServedModel

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth"})


def digest_model(model: ServedModel) -> tuple[str, str]:
    """Return a digest of a model's weights, and the text of its configuration. Reads every byte of them.

    If other files determine its KV too, a digest of them is appended to the configuration: of the model's own code, if the
    engine runs it, and of the files that ``side_files`` and ``index_files`` find.

    Raises:
        ConfigError: there are no weights in local files, or other files that determine the KV are not local.
    """
    place = find_files(model.path, model.revision, "weights")
    weights = [place] if place.is_file() else sorted(file for file in place.rglob("*") if _holds_weights(file))
    if not weights:
        raise ConfigError(
            "tiers",
            model.path,
            "to recognise KV of an earlier run, the model's weights must be in local files; none are here",
        )
    config = place / CONFIG_FILE
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    others = {**side_files(model, place), **index_files(place, weights), **code_files(model, place)}
    if others:
        digest = digest_facts({name: file.read_bytes().hex() for name, file in others.items()})
        text = f"{text}\nand beside it: {digest.hex()}"
    return digest_weights(_contents(weights, place)), text


def _holds_weights(file: Path) -> bool:
    return file.suffix in WEIGHT_SUFFIXES and file.is_file() and file.stat().st_size > 0


def _contents(files: list[Path], place: Path) -> Iterator[tuple[str, memoryview]]:
    """Yield each file's path inside ``place`` and its bytes. The path, because directories may have files of equal names."""
    for file in files:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            view = memoryview(contents)
            yield file.name if file == place else file.relative_to(place).as_posix(), view
            view.release()
