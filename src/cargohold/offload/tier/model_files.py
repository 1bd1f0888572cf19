"""Finds the files besides the weights that determine a model's KV: its own code, and configuration beside ``config.json``.

Other files do not change the KV of given tokens. Tokenizers and chat templates determine which tokens a prompt has, and keys
stand for tokens; ``generation_config.json`` determines sampling; ``model_index.json`` and the like belong to other models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cargohold.errors import ConfigError
from cargohold.protocol import ServedModel

CONFIG_FILE: Final = "config.json"
ADAPTER_FILE: Final = "adapter_config.json"

_QUANTIZATION: Final = ("hf_quant_config.json", "quant_config.json", "quantization_config.json", "quantize_config.json")
_MISTRAL: Final = ("params.json",)
# How pictures and sound become numbers. Block hashes do not cover this: they cover the bytes that came with the request.
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SIDE_FILES: Final = (ADAPTER_FILE, *_QUANTIZATION, *_MISTRAL, *_PROCESSORS)
_MAY_NAME_CODE: Final = (CONFIG_FILE, *_PROCESSORS)
_INDEXED: Final = (".safetensors", ".bin")


def find_files(path: str, revision: str | None, what: str, cache: str | None = None) -> Path:
    """Return a local file or directory, or the snapshot of a hub id in a local cache of the Hugging Face hub.

    Args:
        path: path of a directory or a file, or a hub id.
        revision: branch, tag or commit on the hub; ``None`` for the default one.
        what: what is wanted there, such as ``weights``, for the error.
        cache: directory of the cache; ``None`` for the default one.

    Raises:
        ConfigError: there are no local files.
    """
    place = Path(path)
    if place.exists():
        return place
    from huggingface_hub import snapshot_download  # noqa: PLC0415  # slow to import
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            "tiers",
            path,
            f"to recognise KV of an earlier run, the model's {what} must be in local files; none are in "
            f"{cache or HF_HUB_CACHE}",
        ) from error


def side_files(model: ServedModel, place: Path, weights_place: Path) -> dict[str, Path]:
    """Return the configuration files beside ``config.json`` and the weights, and the one used instead of it, by name.

    Args:
        model: the model.
        place: where ``config.json`` is.
        weights_place: where the weights are. With a ``download_dir`` that is not the same place, and engines read some of the
            files there.

    Raises:
        ConfigError: the weights are an adapter's whose base model is elsewhere, or the other configuration is in no local
            file.
    """
    found = {name: place / name for name in _SIDE_FILES if (place / name).is_file()}
    if weights_place != place:
        with_weights = {f"with the weights: {name}": weights_place / name for name in _SIDE_FILES}
        found |= {name: file for name, file in with_weights.items() if file.is_file()}
    if ADAPTER_FILE in found and not Path(model.path).exists():
        # With the package peft, transformers then loads the model that it names, whichever that is today.
        raise ConfigError(
            "tiers", model.path, f"it has an {ADAPTER_FILE}; to recognise KV of an earlier run, merge the adapter"
        )
    if model.config_path is not None:
        config = find_files(model.config_path, model.revision, "configuration")
        config = config / CONFIG_FILE if config.is_dir() else config
        if not config.is_file():
            raise ConfigError(
                "tiers", model.config_path, f"to recognise KV of an earlier run, its {CONFIG_FILE} must be a local file"
            )
        found[f"instead: {CONFIG_FILE}"] = config
    return found


def index_files(place: Path, weights: Sequence[Path]) -> dict[str, Path]:
    """Return the index files that select among the weight files, by name.

    An index that names exactly the weight files beside it is left out: it says only which tensor is in which file.
    """
    found = {}
    for suffix in _INDEXED:
        there = {file.name for file in weights if file.suffix == suffix and file.parent == place}
        for index in place.glob(f"*{suffix}.index.json"):
            if _files_of(index) != there:
                found[index.name] = index
    return found


def code_files(model: ServedModel, place: Path) -> dict[str, Path]:
    """Return the files of the model's own code, by a label of their place; nothing if the engine does not run it.

    All modules are returned, because any may import any other. Packages that they import are not looked at.

    Raises:
        ConfigError: code of another repository or revision is in no local file.
    """
    if not model.runs_code:
        return {}
    places = {"its own": place}
    if model.code_revision is not None and not Path(model.path).exists():
        places["of another revision"] = find_files(model.path, model.code_revision, "code")
    if model.config_path is not None:
        places["instead"] = find_files(model.config_path, model.revision, "configuration")
    named = {repository for directory in places.values() for repository in _repositories_named_in(directory)}
    places |= {f"of {repository}": find_files(repository, model.code_revision, "code") for repository in named}
    return {
        f"{label}: {file.relative_to(directory).as_posix()}": file
        for label, directory in places.items()
        if directory.is_dir()
        for file in directory.rglob("*.py")
        if file.is_file()
    }


def _repositories_named_in(directory: Path) -> set[str]:
    """Return the other repositories that a model's configuration takes code from."""
    names = set()
    for name in _MAY_NAME_CODE:
        for reference in _references(_read_json(directory / name)):
            repository, separator, _ = reference.partition("--")
            if separator:
                names.add(repository)
    return names


def _references(config: Any) -> Iterator[str]:
    """Yield the classes in all ``auto_map`` tables of a configuration: ``module.Class`` or ``repository--module.Class``."""
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        if key == "auto_map" and isinstance(value, Mapping):
            for named in value.values():
                yield from (name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
        else:
            yield from _references(value)


def _files_of(index: Path) -> set[str]:
    """Return the names of the files in an index."""
    data = _read_json(index)
    weight_map = data.get("weight_map") if isinstance(data, Mapping) else None
    return {str(name) for name in weight_map.values()} if isinstance(weight_map, Mapping) else set()


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None  # there is no such file, or it cannot be read
