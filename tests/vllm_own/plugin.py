"""A plugin for pytest that attaches our connector to the engines that vLLM's own tests configure.

Loaded by file with ``-p plugin``: under the name ``tests``, vLLM's tests expect their own helpers.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

_OURS: Final = "CargoholdConnector"

_MULTI: Final = "MultiConnector"

_ATTACHMENT: Final[dict[str, Any]] = {
    "kv_connector": _OURS,
    "kv_connector_module_path": "cargohold.integrations.vllm.connector",
    # A connector that does nothing would pass, too.
    "kv_connector_extra_config": {"host_bytes": "16MiB", "if_unsupported": "refuse"},
}

_MODELS: Final = {
    "facebook/opt-125m": "llama",
    "facebook/opt-350m": "llama",
    "Qwen/Qwen1.5-7B": "llama",
    "llava-hf/llava-1.5-7b-hf": "blip2",
    "Qwen/Qwen2.5-VL-3B-Instruct": "blip2",
}
"""A tiny model for each that the tests name: schedulers read its configuration, no test that we run computes with it."""

_REPLACED: Final = ("ExampleConnector", "NixlConnector")
"""What their tests configure where they only want a connector that can be made."""

_RANDOM: Final = "test_priority_scheduler_random.py"
_MOST_STEPS: Final = 500
"""Of 20,000 that each of its twelve tests takes: most of them are vLLM's own work, with up to 256 requests in each."""

_ATTACHED: Final[set[str]] = set()
"""Tests in which our connector was made."""

_DIRECTORY: Final = tempfile.TemporaryDirectory()
"""Of the tiny models."""


@cache
def _saved(kind: str) -> str:
    path = Path(__file__).parents[1] / "vllm" / "models.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    model = str(models.save_model(kind, Path(_DIRECTORY.name)))
    models.save_tokenizer(model)
    config = Path(model, "config.json")
    config.write_text(config.read_text().replace('"max_position_embeddings": 2048', '"max_position_embeddings": 4096'))
    return model


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of a run."""
    parser.addoption("--inside-multi", action="store_true", help="attach MultiConnector with ours alone inside")
    parser.addoption("--random-steps", type=int, default=_MOST_STEPS, help="steps of each test of random priorities")


def pytest_configure(config: pytest.Config) -> None:
    """Let vLLM configure a tiny model and our connector, give the connector memory, and a worker that copies."""
    is_inside = config.getoption("--inside-multi")
    model_made, config_made = ModelConfig.__post_init__, VllmConfig.__post_init__
    connector_made, updated = KVConnectorFactory.create_connector, Scheduler.update_from_output

    def of_tiny_model(self: Any, *args: Any, **kwargs: Any) -> None:
        if kind := _MODELS.get(self.model):
            self.model = _saved(kind)
        model_made(self, *args, **kwargs)

    def with_ours(self: Any) -> None:
        self.kv_transfer_config = _attached(self.kv_transfer_config, is_inside)
        config_made(self)

    def with_memory(config: Any, role: Any, kv_cache_config: Any) -> Any:
        transfer = config.kv_transfer_config
        if (options := _own_options(transfer)) is not None:
            # Our option sets vLLM's, and tests set vLLM's after the configuration is made.
            options["load_failure_policy"] = transfer.kv_load_failure_policy
            kv_cache_config = _with_tensors(kv_cache_config)
            _ATTACHED.add(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])
        return connector_made(config, role, kv_cache_config)

    def with_worker(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Some tests make a step's output by hand, without messages of connectors, or put a connector of their own in place.
        is_attached = type(self.connector).__name__ == (_MULTI if is_inside else _OURS)
        if is_attached and scheduler_output.kv_connector_metadata is not None:
            model_runner_output = _with_report(
                _worker_of(self), self.vllm_config, scheduler_output, model_runner_output
            )
        return updated(self, scheduler_output, model_runner_output)

    ModelConfig.__post_init__ = of_tiny_model
    VllmConfig.__post_init__ = with_ours
    KVConnectorFactory.create_connector = with_memory
    Scheduler.update_from_output = with_worker


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Expect that the tests of the table fail, and no others. One that passes, or is there no more, must leave the table."""
    groups = tomllib.loads(Path(__file__).with_name("expected.toml").read_text(encoding="utf-8"))["group"]
    reasons = {test: group["why"] for group in groups for test in group["tests"]}
    collected = {item.nodeid: item for item in items}
    files = {item.nodeid.partition("::")[0] for item in items}
    for module in {item.module for item in items if isinstance(item, pytest.Function) and item.path.name == _RANDOM}:
        module.range = lambda *ends: range(*(min(end, config.getoption("--random-steps")) for end in ends))
    for test, why in reasons.items():
        if test in collected:
            collected[test].add_marker(pytest.mark.xfail(reason=why, strict=True))
        elif test.partition("::")[0] in files and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"expected.toml names {test}, which vLLM has no more")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many of the tests have met our connector."""
    terminalreporter.write_line(f"our connector was made in {len(_ATTACHED)} tests")


def _own_options(transfer: Any) -> Any:
    """Options of our connector where it is what was attached, alone or alone inside ``MultiConnector``. Else, ``None``."""
    if transfer is not None and transfer.kv_connector == _MULTI:
        children = transfer.kv_connector_extra_config["connectors"]
        is_ours = [each["kv_connector"] for each in children] == [_OURS]
        return children[0]["kv_connector_extra_config"] if is_ours else None
    return transfer.kv_connector_extra_config if transfer is not None and transfer.kv_connector == _OURS else None


def _attached(transfer: Any, is_inside: bool) -> Any:
    """The configuration of a connector: ours, unless a test configures one of which it asks something.

    To connectors inside ``MultiConnector``, ours is added as the last.

    Args:
        transfer: what the test configures.
        is_inside: let ``MultiConnector`` stand around ours.
    """
    if transfer is not None and transfer.kv_connector == _MULTI:
        added = transfer.kv_connector_extra_config["connectors"]
        if all(each["kv_connector"] != _OURS for each in added):
            # Some of these tests have no KV at all.
            options = {**_ATTACHMENT["kv_connector_extra_config"], "if_unsupported": "disable"}
            added.append({**_ATTACHMENT, "kv_role": transfer.kv_role, "kv_connector_extra_config": options})
        return transfer
    if transfer is not None and transfer.kv_connector not in _REPLACED:
        return transfer
    kept = transfer or KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    attached = {**deepcopy(_ATTACHMENT), "kv_role": kept.kv_role}
    if is_inside:
        multi = {"kv_connector": _MULTI, "kv_connector_extra_config": {"connectors": [attached]}}
        attached = {**multi, "kv_role": kept.kv_role}
    return KVTransferConfig(**attached, kv_load_failure_policy=kept.kv_load_failure_policy)


def _with_tensors(kv_cache_config: Any) -> Any:
    """The configuration with memory for its layers: those of tests of the scheduler have none, and then we keep nothing."""
    if kv_cache_config.kv_cache_tensors:
        return kv_cache_config
    return replace(
        kv_cache_config,
        kv_cache_tensors=[
            KVCacheTensor(size=size, layers=list(group.layer_names), layer_stride=size, block_stride=page)
            for group in kv_cache_config.kv_cache_groups
            for page in [group.kv_cache_spec.page_size_bytes]
            for size in [page * kv_cache_config.num_blocks]
        ],
    )


def _worker_of(scheduler: Any) -> Any:
    """The scheduler's worker, with memory: these tests have none, and stores that nobody copies hold their blocks for ever."""
    if not hasattr(scheduler, "worker_of_ours"):
        config = _with_tensors(scheduler.kv_cache_config)
        worker = KVConnectorFactory.create_connector(scheduler.vllm_config, KVConnectorRole.WORKER, config)
        num_bytes = max(tensor.size for tensor in config.kv_cache_tensors)
        memory = torch.zeros(config.num_blocks, num_bytes // config.num_blocks, dtype=torch.uint8)
        worker.register_kv_caches({name: memory for group in config.kv_cache_groups for name in group.layer_names})
        scheduler.worker_of_ours = worker
    return scheduler.worker_of_ours


def _with_report(worker: Any, vllm_config: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    """What the worker reports of a step, in the model's output: as vLLM's model runner does it, without a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
        worker.handle_preemptions(scheduler_output.kv_connector_metadata)
        report = KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduler_output, vllm_config).kv_connector_output
    if report is None:
        return model_runner_output
    if told := model_runner_output.kv_connector_output:
        # A test plays other transfers.
        report = replace(told, kv_connector_worker_meta=report.kv_connector_worker_meta)
    return replace(model_runner_output, kv_connector_output=report)


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM logs. Their own conftest.py has this, and imports much that our environment has not."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog
