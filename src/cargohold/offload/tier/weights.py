"""Digests of the contents of a model's files, because the same name may be given to other weights tomorrow."""

from __future__ import annotations

import math
import mmap
import stat
from collections.abc import Iterable, Iterator
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

    Call it when the model has been loaded: then what was loaded is what is digested, or it raises.

    Raises:
        ConfigError: there are no weights in local files, or other files that determine the KV are not local; or a file has
            changed since ``model.read_after_s``.
    """
    place = find_files(model.path, model.revision, "weights", model.download_dir)
    config_place = find_files(model.path, model.revision, "configuration")
    weights = [place] if place.is_file() else sorted(file for file in place.rglob("*") if _holds_weights(file))
    if not weights:
        raise ConfigError(
            "tiers",
            model.path,
            f"to recognise KV of an earlier run, the model's weights must be in local files; none are in {place}",
        )
    config = config_place / CONFIG_FILE
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    others = {
        **side_files(model, config_place, place),
        **index_files(place, weights),
        **code_files(model, config_place),
    }
    if others:
        digest = digest_facts({name: file.read_bytes().hex() for name, file in others.items()})
        text = f"{text}\nand beside it: {digest.hex()}"
    weights_digest = digest_weights(_contents(weights, place))
    if model.read_after_s is not None:
        files = [*weights, *others.values(), *([config] if text else [])]
        from_hub = None if Path(model.path).exists() else model.download_dir
        _refuse_changed(files, model.read_after_s, from_hub)
    return weights_digest, text


def _holds_weights(file: Path) -> bool:
    return file.suffix in WEIGHT_SUFFIXES and file.is_file() and file.stat().st_size > 0


def _contents(files: list[Path], place: Path) -> Iterator[tuple[str, memoryview]]:
    """Yield each file's path inside ``place`` and its bytes. The path, because directories may have files of equal names."""
    for file in files:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            view = memoryview(contents)
            yield file.name if file == place else file.relative_to(place).as_posix(), view
            view.release()


def _refuse_changed(files: Iterable[Path], since_s: float, download_dir: str | None) -> None:
    """Raise ``ConfigError`` if a file, or a link or directory that leads to it, was changed or replaced after ``since_s``.

    Files in the caches of the Hugging Face hub are left out: the default one, and ``download_dir`` if there is one. They are
    named by what they hold, and the engine itself may have downloaded them since.
    """
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415  # slow to import

    caches = [HF_HUB_CACHE] if download_dir is None else [HF_HUB_CACHE, download_dir]
    for file in files:
        if any(file.is_relative_to(cache) for cache in caches):
            continue
        for name in _names_on_the_way_to(file.absolute()):
            if _changed_at(name) > since_s:
                raise ConfigError(
                    "tiers",
                    str(name),
                    "it was changed or replaced while the engine started, so the model that was loaded may not be the one that "
                    "is there now, and KV would be kept under the wrong name; start again when nobody writes there",
                )


def _names_on_the_way_to(file: Path) -> Iterator[Path]:
    """Yield an absolute path and all directories and links on it, and those on the way to what a link points at."""
    for name in (file, *file.parents):
        yield name
        if name.is_symlink():
            yield from _names_on_the_way_to(name.parent / name.readlink())


def _changed_at(name: Path) -> float:
    """Return when a file was last written to, or a file, link or directory was put where it is, in seconds since 1970.

    The file system notes that time itself. ``mtime`` would not do: copies and archives set it to what it was elsewhere.
    """
    try:
        status = name.lstat()
    except FileNotFoundError:
        return math.inf  # it was there when it was read
    if stat.S_ISDIR(status.st_mode) and status.st_ctime_ns == status.st_mtime_ns:
        return 0.0  # entries came or went, which changes both times; only if the directory itself is renamed do they differ
    return status.st_ctime
