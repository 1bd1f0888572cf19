"""Namespaces: everything that the bytes of a chunk depend on, besides its key.

A key says which tokens a chunk stands for. The bytes of their KV depend on much more. If any of that changes, chunks stored
before are not found any more, instead of being wrong.

Digests of the contents of a model's files, because the same name may be given to other weights tomorrow.

Besides the weights, a model's own code and some configuration next to ``config.json`` determine its KV. Other files do not
change the KV of given tokens: tokenizers and chat templates determine which tokens a prompt has, and keys stand for tokens;
``generation_config.json`` determines sampling; ``model_index.json`` and the like belong to other models.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import xxhash

from cargohold.errors import ConfigError
from cargohold.protocol import ServedModel

FORMAT_VERSION: Final = 2
"""Version of the format of chunks (``chunk_format``) and of the names of files and objects."""

MAX_DESCRIPTION_BYTES: Final = 16 * 1024**2
"""Maximum size of a description that is read: more than any model's configuration. A larger one was not written by us."""

DESCRIPTION: Final = "namespace.json"
"""Name of a namespace's description in an object store or a shared directory."""

ID_PATTERN: Final = "[0-9a-f]{32}"
"""What ids of namespaces look like, as a regular expression."""

_ID_BYTES = 16


@dataclass(frozen=True)
class Namespace:
    """Everything that changes the bytes of one worker's chunks. Namespaces that differ only in ``label`` are the same.

    Attributes:
        label: the model's name for people; changes nothing.
        weights: digest of the weights' contents, as ``digest_weights`` gives it: a name may be given to other weights
            tomorrow.
        config: digest or text of the model's configuration.
        dtype: element type of the KV.
        layout: how a chunk's bytes are arranged: groups, tokens per block, blocks per chunk, bytes.
        split: how the model is divided among workers, and which part this worker has.
        adapter: identity of an adapter that is added to the weights, or empty. An adapter that block hashes cover (in the
            root of a request's chain) need not be named here.
        hashing: how block hashes are made, so that equal keys mean equal tokens.
        encryption: id of the key that chunks are encrypted with, or empty.
        details_bytes: most bytes that the details of a chunk may take; see ``chunk_format.room_for_details``.
    """

    label: str
    weights: str
    config: str
    dtype: str
    layout: str
    split: str
    adapter: str = ""
    hashing: str = "sha256"
    encryption: str = ""
    details_bytes: int = 0

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of everything but the label, and of the format version."""
        facts = self._facts()
        del facts["label"]
        return digest_facts(facts)

    @property
    def id(self) -> str:
        """The start of the digest, in hexadecimal: the name of directories, prefixes and keys."""
        return self.digest[:_ID_BYTES].hex()

    def describe(self) -> dict[str, str]:
        """Return all fields, the format version and the full digest, for people and tools."""
        return {**self._facts(), "digest": self.digest.hex()}

    def outline(self) -> dict[str, str]:
        """Return the id, and a short digest of each field: enough to tell in which of them two namespaces differ.

        All fields except the label, which changes nothing, and ``details_bytes``, which follows from the layout.
        """
        facts = self._facts()
        del facts["label"], facts["details_bytes"]
        return {"id": self.id, **{name: digest_facts({name: fact})[:4].hex() for name, fact in facts.items()}}

    def _facts(self) -> dict[str, str]:
        return {**as_facts(asdict(self)), "format": str(FORMAT_VERSION)}


def parse_description(data: bytes) -> dict[str, Any]:
    """Parse the JSON description of a namespace; return an empty dict if it is malformed."""
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):  # anyone may have written it, nested however deep
        return {}
    return found if isinstance(found, dict) else {}


def as_facts(described: object) -> dict[str, str]:
    """Return a JSON object's names and values as text; an empty dict if it is no object."""
    return {str(name): str(value) for name, value in described.items()} if isinstance(described, dict) else {}


def digest_facts(facts: Mapping[str, str]) -> bytes:
    """Return the SHA-256 of names and values, independent of their order. Each is framed, so that none runs into the next."""
    digest = hashlib.sha256()
    for name in sorted(facts):
        for text in (name, facts[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def digest_weights(tensors: Iterable[tuple[str, memoryview]]) -> str:
    """Return a digest of the names, sizes and bytes of weights, in any order. Runs at the speed of memory.

    The bytes are hashed with XXH3, 128 bits, which separates weights that differ by accident or training. An attacker who can
    craft weights that collide can just as well serve them.

    Args:
        tensors: name and bytes of each. Iterated once; each is needed only while it is hashed.
    """
    return digest_facts({name: f"{len(data)} {_fast_digest(data)}" for name, data in tensors}).hex()


def _fast_digest(data: memoryview) -> str:
    digest = xxhash.xxh3_128()
    digest.update(data)
    return digest.hexdigest()


# --- digests of the contents of a model's files -----------------------------------------------------------------------

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth"})
CONFIG_FILE: Final = "config.json"
ADAPTER_FILE: Final = "adapter_config.json"

_QUANTIZATION: Final = ("hf_quant_config.json", "quant_config.json", "quantization_config.json", "quantize_config.json")
_MISTRAL: Final = ("params.json",)
# How pictures and sound become numbers. Block hashes do not cover this: they cover the bytes that came with the request.
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SIDE_FILES: Final = (ADAPTER_FILE, *_QUANTIZATION, *_MISTRAL, *_PROCESSORS)
_MAY_NAME_CODE: Final = (CONFIG_FILE, *_PROCESSORS)
_INDEXED: Final = (".safetensors", ".bin")


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
    for part in model.parts:
        of_part = digest_model(
            replace(model, path=part, revision=None, config_path=None, code_revision=None, parts=(), code_parts=())
        )
        text = f"{text}\nand elsewhere: {digest_facts(dict(zip(('weights', 'config'), of_part, strict=True))).hex()}"
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


_CHANGED: Final = (
    "it was changed or replaced while the engine started, so the model that was loaded may not be the one that is there now, "
    "and KV would be kept under the wrong name; start again when nothing writes there"
)
_FROM_LATER: Final = (
    "it was changed in the future, by this machine's clock, so it is unknown whether that was while the engine started; set "
    "the clock, or that of the file server, or, if they are right now, touch it (touch -h)"
)


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
            changed_s = _changed_at(name)
            if changed_s > since_s:
                raise ConfigError("tiers", str(name), _FROM_LATER if time.time() < changed_s < math.inf else _CHANGED)


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


# --- files besides the weights ------------------------------------------------------------------------------------------


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
    """Return the configuration files next to ``config.json`` and the weights, and the one used instead of it, by name.

    Args:
        model: the model.
        place: where ``config.json`` is.
        weights_place: where the weights are. With a ``download_dir`` that is not the same place, and engines read some of the
            files there.

    Raises:
        ConfigError: the weights are an adapter's whose base model is elsewhere, or the other configuration is in no local
            file.
    """
    found = _configurations(place)
    if weights_place != place:
        found |= {f"with the weights: {name}": file for name, file in _configurations(weights_place).items()}
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


def _configurations(place: Path) -> dict[str, Path]:
    """Return the configuration files next to ``config.json``, and all in directories below: a model's parts may have some."""
    own, names = place / CONFIG_FILE, {CONFIG_FILE, *_SIDE_FILES}
    files = (file for file in place.rglob("*") if file.name in names and file.is_file())
    return {file.relative_to(place).as_posix(): file for file in files if file != own}


def index_files(place: Path, weights: Sequence[Path]) -> dict[str, Path]:
    """Return the index files that select among the weight files, by name.

    An index that names exactly the weight files next to it is left out: it says only which tensor is in which file.
    """
    found = {}
    for suffix in _INDEXED:
        there = {file.name for file in weights if file.suffix == suffix and file.parent == place}
        for index in place.glob(f"*{suffix}.index.json"):
            if _files_of(index) != there:
                found[index.name] = index
    return found


def code_files(model: ServedModel, place: Path) -> dict[str, Path]:
    """Return the files of the model's own code if the engine runs it, and of other parts of it, by a label of their place.

    All modules are returned, because any may import any other. Packages that they import are not looked at.

    Raises:
        ConfigError: code of another repository or revision is in no local file.
    """
    places = {f"of {Path(part).name}": Path(part) for part in model.code_parts}
    if model.runs_code:
        places |= _places_of_own_code(model, place)
    return {
        f"{label}: {file.relative_to(directory).as_posix()}": file
        for label, directory in places.items()
        for file in ([directory] if directory.is_file() else directory.rglob("*.py"))
        if file.is_file()
    }


def places_of_plugins(
    groups: Iterable[str], chosen: Collection[str] | None, modules: Iterable[str], own: str
) -> list[str]:
    """Return where the code is that an engine runs and that is neither its own nor Cargohold's, for ``ServedModel.code_parts``.

    Args:
        groups: the groups of entry points of the engine's plugins: a model, a way to quantize or a platform may be theirs.
        chosen: names of those that it runs; ``None`` for all.
        modules: further modules, or what is in them, by their full names.
        own: the engine's package.
    """
    plugins = [plugin for group in groups for plugin in entry_points(group=group)]
    run = [plugin.module for plugin in plugins if chosen is None or plugin.name in chosen]
    packages = {name.partition(".")[0] for name in (*run, *modules)} - {"", "__main__", "cargohold", own}
    specs = [spec for spec in map(find_spec, packages) if spec is not None]
    return sorted(place for spec in specs for place in spec.submodule_search_locations or filter(None, [spec.origin]))


def why_another_hub(switch: str, path: str) -> Iterator[str]:
    """Yield why a model's files are not known if an engine's ``switch`` to ModelScope is on; nothing if they are local.

    The hub's cache that is looked into is Hugging Face's, which may have another model of that name.
    """
    if not Path(path).exists():
        yield f"{switch} brings {path} from another hub than Hugging Face's; name a directory instead"


def _places_of_own_code(model: ServedModel, place: Path) -> dict[str, Path]:
    """Return where code is that comes with the model, by a label."""
    places = {"its own": place}
    if model.code_revision is not None and not Path(model.path).exists():
        places["of another revision"] = find_files(model.path, model.code_revision, "code")
    if model.config_path is not None:
        places["instead"] = find_files(model.config_path, model.revision, "configuration")
    named = {repository for directory in places.values() for repository in _repositories_named_in(directory)}
    places |= {f"of {repository}": find_files(repository, model.code_revision, "code") for repository in named}
    return {label: directory for label, directory in places.items() if directory.is_dir()}


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
