"""Refuses wrong options before vLLM's server starts a process: they would be found by an engine, once it has loaded the model.

The command line is read with vLLM's own parser, so what a ``--config`` file says counts, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath
from tempfile import gettempdir
from typing import Any, Final, Self

from vllm.utils.argparse_utils import FlexibleArgumentParser

from cargohold.errors import option_path
from cargohold.integrations.vllm.compat import VLLM_VERSION
from cargohold.integrations.vllm.settings import VllmSettings

NAME: Final = "CargoholdConnector"
_TRANSFER: Final = "kv-transfer-config"
_SIZE: Final = "kv-offloading-size"
_ELSEWHERE: Final[Mapping[str, str]] = {
    "distributed-executor-backend": "ray",
    "data-parallel-backend": "ray",
    "data-parallel-size-local": "0",
}
"""Options that let engines run on other machines, with these values."""
_DECIDING: Final = (
    "--model",
    "--revision",
    "--dtype",
    "--kv-cache-dtype",
    "--quantization -q",
    "--hf-overrides",
    "--load-format",
    "--block-size",
    "--tensor-parallel-size -tp",
    "--pipeline-parallel-size -pp",
)
"""Options that decide which KV it is, and their short forms: engines that have the same may not share a disk's files."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM ships no types
    """Knows a few of vLLM's options, and passes over all others."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and leave nothing over to complain of. The model may stand behind the program's first word."""
        found, others = super().parse_known_args(args, namespace)
        found.model = found.model or others[1:2]
        return found, []


@dataclass(frozen=True, slots=True)
class Command:
    """What a command line says that starts vLLM's server.

    Attributes:
        transfer: ``--kv-transfer-config``.
        is_replaced: whether vLLM will use a connector of its own instead, silently: no code of ours runs then.
        runs_here: whether all workers run on this machine.
        engine: a digest of the options that decide which KV the engine keeps.
    """

    transfer: Mapping[str, Any]
    is_replaced: bool
    runs_here: bool
    engine: str

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Read the words after the program's name.

        Raises:
            SystemExit: the parser has printed what it does not understand.
            ValueError: the configuration is not JSON.
        """
        parser = _Parser(add_help=False, allow_abbrev=False)
        for name in (_TRANSFER, _SIZE, *_ELSEWHERE):
            parser.add_argument(f"--{name}")
        parser.add_argument("--nnodes", "-n", default="1")
        for forms in _DECIDING:
            parser.add_argument(*forms.split())
        given = {name.replace("_", "-"): value for name, value in vars(parser.parse_args(list(words))).items()}
        transfer = json.loads(given[_TRANSFER] or "{}")
        deciding = [given[forms.split()[0].removeprefix("--")] for forms in _DECIDING]
        is_elsewhere = given["nnodes"] != "1" or any(
            given[name] == value and (value != "ray" or _joins_others()) for name, value in _ELSEWHERE.items()
        )
        return cls(
            transfer if isinstance(transfer, Mapping) else {},
            given[_SIZE] is not None,
            not is_elsewhere,
            sha256(f"{VLLM_VERSION} {deciding}".encode()).hexdigest(),
        )

    def connectors(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the options of each connector of ours, and the path at which they stand."""
        extra = "kv_connector_extra_config"
        kind, options = self.transfer.get("kv_connector"), self.transfer.get(extra) or {}
        if kind == NAME:
            yield "", options
        elif kind == "MultiConnector":
            for at, child in enumerate(options.get("connectors", ())):
                if child.get("kv_connector") == NAME:
                    yield f"{extra}.connectors[{at}].", child.get(extra) or {}


def _joins_others() -> bool:
    """Whether Ray would join a cluster, which may have other machines: one that its variable or its file here names."""
    file = Path(os.environ.get("RAY_TMPDIR") or gettempdir(), "ray", "ray_current_cluster")
    return os.environ.get("RAY_ADDRESS", "local") != "local" or file.exists()


def check(command: Command) -> None:
    """Refuse options of our connectors that cannot work, without changing anything.

    Raises:
        ConfigError: naming the option.
    """
    for path, options in command.connectors():
        with option_path(path):
            settings = VllmSettings.parse(options)
            settings.require_packages()
            if command.runs_here:
                settings.check_here(warns=False)  # the first worker warns, once the weights are loaded
                settings.require_unused(command.engine)


def of_this_process() -> Command | None:
    """Return the command line of this process; ``None`` if it is not one of vLLM's, or says nothing of connectors of ours."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_vllms = spec.name.startswith("vllm.") if spec is not None else PurePath(sys.argv[0]).name == "vllm"
    if not is_vllms or not ("--config" in sys.argv or any(NAME in word for word in sys.argv)):
        return None
    # vLLM reads the same words, and says by itself what is wrong with them.
    with suppress(Exception, SystemExit):
        command = Command.read(sys.argv[1:])
        return command if list(command.connectors()) else None
    return None
