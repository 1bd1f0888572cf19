"""What a model's files hold, as a digest: names can be given to other weights tomorrow."""

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
    """A digest of a model's weights, and its configuration as it is written. Reads every byte of them.

    Where other files decide on its KV too, a digest of them stands behind the configuration: of the model's own code, if the
    engine runs it, and of what ``side_files`` and ``index_files`` find.

    Raises:
        ConfigError: there are no weights in local files, or code that the engine runs is not in any.
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
    """Each file's bytes, under its path inside ``place``: several directories may have files of the same name."""
    for file in files:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            view = memoryview(contents)
            yield file.name if file == place else file.relative_to(place).as_posix(), view
            view.release()
