"""What a model's files hold, as a digest: names can be given to other weights tomorrow."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cargohold.errors import ConfigError
from cargohold.offload.tier.namespace import digest_weights

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth"})
CONFIG_FILE: Final = "config.json"


def digest_model(path: str, revision: str | None = None) -> tuple[str, str]:
    """A digest of a model's weights, and its configuration as it is written. Reads every byte of them.

    Args:
        path: a directory, a file with weights, or the id of a model that the Hugging Face hub's local cache has.
        revision: branch, tag or commit on the hub; ``None`` for the default one.

    Raises:
        ConfigError: there are no weights.
    """
    place = _find(path, revision)
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if _holds_weights(file))
    if not files:
        raise ConfigError("tiers", path, "to know KV again, the model's weights must be in local files; none are here")
    config = place / CONFIG_FILE
    return digest_weights(_contents(files, place)), config.read_text() if config.is_file() else ""


def _find(path: str, revision: str | None) -> Path:
    place = Path(path)
    if place.exists():
        return place
    from huggingface_hub import snapshot_download  # noqa: PLC0415  # slow to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError("tiers", path, "to know KV again, the model's weights must be in local files") from error


def _holds_weights(file: Path) -> bool:
    return file.suffix in WEIGHT_SUFFIXES and file.is_file() and file.stat().st_size > 0


def _contents(files: list[Path], place: Path) -> Iterator[tuple[str, memoryview]]:
    """Each file's bytes, under its path inside ``place``: several directories may have files of the same name."""
    for file in files:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            view = memoryview(contents)
            yield file.name if file == place else file.relative_to(place).as_posix(), view
            view.release()
