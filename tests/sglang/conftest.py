"""A process group of one, which SGLang's cache wants, and SGLangs that are closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.sglang.host import Host

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
if find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.sglang import stand_ins

    stand_ins.install()  # before a test file imports SGLang


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    import torch.distributed as dist  # noqa: PLC0415  # this file is read where there is no torch too

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def start(group: None, tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Starts an SGLang over tiers in ``tmp_path``; the one before is closed first."""
    from tests.sglang import host  # noqa: PLC0415  # this file is read where there is no SGLang too

    with ExitStack() as running:

        def run(
            kind: str = "attention", layout: str = "page_first_direct", *, backend: str = "dynamic", **extra: Any
        ) -> Host:
            running.close()
            model = extra.pop("model", None) or host.write_model(tmp_path / "model")
            extra = extra or host.extra_config(host.disk(tmp_path / "kv"))
            args = running.enter_context(
                host.configured(
                    model,
                    page_size=host.PAGE_TOKENS[kind],
                    hicache_mem_layout=layout,
                    **host.with_backend(backend, extra),
                )
            )
            started = host.Host(kind, args)
            running.callback(started.close)
            return started

        yield run
