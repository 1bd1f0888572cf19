"""Damage, other weights, kills, full and hanging disks; beside SGLang's own ``file`` storage where that is another story."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cargohold.integrations.sglang.backend
from cargohold.tiers import Tier, open_tier
from tests.sglang.host import Host, disk, extra_config, tokens_from, write_model
from tests.sglang.test_cache import same
from tests.wrapped_tiers import FaultyTier

Start = Callable[..., Host]
TOKENS = tokens_from(100)


def flip_bits(directory: Path, pattern: str) -> int:
    """Flip a bit in every 64 bytes of files that are not zeros; return in how many."""
    num_flipped = 0
    for file in directory.rglob(pattern):
        data = bytearray(file.read_bytes())
        for at in range(0, len(data), 64):
            if data[at]:
                data[at] ^= 1
                num_flipped += 1
        file.write_bytes(data)
    return num_flipped


def test_flipped_bits_are_a_miss_and_with_the_file_storage_they_are_other_kv(start: Start, tmp_path: Path) -> None:
    extra = {"prefetch_threshold": 4, "file_storage_path": str(tmp_path / "file")}
    found = {}
    for backend, of_backend, files in (("dynamic", {}, "segment-*.data"), ("file", extra, "*.bin")):
        host = start(backend=backend, **of_backend)
        computed = host.compute(TOKENS)
        host.back_up()
        host = start(backend=backend, **of_backend)
        host.close()
        assert flip_bits(tmp_path, files) >= 16
        host = start(backend=backend, **of_backend)
        found[backend] = host.prefetch(TOKENS)
        count, restored = host.load(TOKENS)
        assert count == found[backend]
        if backend == "file":  # so the comparison does see such damage
            assert not same(restored, computed)
    assert found == {"dynamic": 0, "file": 64}


def test_after_a_change_of_weights_nothing_is_found_and_with_the_file_storage_all_of_it_is(
    start: Start, tmp_path: Path
) -> None:
    extra = {"prefetch_threshold": 4, "file_storage_path": str(tmp_path / "file")}
    for backend, of_backend, expected in (("dynamic", {}, 0), ("file", extra, 64)):
        host = start(backend=backend, **of_backend)
        host.compute(TOKENS)
        host.back_up()
        other = write_model(tmp_path / "other", b"other weights")
        host = start(backend=backend, model=other, **of_backend)
        assert host.prefetch(TOKENS) == expected
        if backend == "dynamic":
            host = start()
            assert host.prefetch(TOKENS) == 64


def test_what_was_stored_before_a_kill_is_found_and_right(start: Start, tmp_path: Path) -> None:
    start().close()  # the model's files
    script = f"""
from pathlib import Path
from tests.sglang import stand_ins
stand_ins.install()
from tests.sglang.host import Host, configured, disk, extra_config, tokens_from, with_backend
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
extra = with_backend("dynamic", extra_config(disk(Path("{tmp_path}/kv"))))
with configured(Path("{tmp_path}/model"), page_size=4, **extra) as args:
    host = Host("attention", args)
    for first in range(100, 100000, 100):
        host.compute(tokens_from(first, 32))
        host.back_up()
        print(first, flush=True)
        host.evict()
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = [int(child.stdout.readline()) for _ in range(3)]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    host = start()
    for first in said:
        assert host.prefetch(tokens_from(first, 32)) == 32
        count, restored = host.load(tokens_from(first, 32))
        host.evict()
        assert count == 32 and same(restored, host.compute(tokens_from(first, 32)))


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], str | None]]:
    """What the media of storages that are opened from now on do, by operation."""
    faults: dict[str, Callable[[], str | None]] = {}

    def opened(*args: Any, **named: Any) -> Tier:
        return FaultyTier(open_tier(*args, **named), lambda operation: faults.get(operation, lambda: None)())

    monkeypatch.setattr(cargohold.integrations.sglang.backend, "open_tier", opened)
    return faults


def test_a_full_disk_stores_nothing_and_sglang_goes_on(
    start: Start, fault: dict[str, Callable[[], str | None]]
) -> None:
    host = start()
    computed = host.compute(TOKENS)
    fault["store"] = lambda: "No space left on device"
    host.back_up()
    fault.clear()
    later = host.compute(tokens_from(300))
    assert host.load(TOKENS)[0] == 64 and same(host.load(TOKENS)[1], computed)
    host.evict()
    assert host.prefetch(TOKENS) == 0
    assert len(later) == len(computed)


@pytest.mark.parametrize("operation", ["load", "store"])
def test_a_hanging_disk_costs_a_miss_and_no_thread_of_sglang(
    start: Start, tmp_path: Path, operation: str, fault: dict[str, Callable[[], str | None]]
) -> None:
    released = threading.Event()
    limits = {"load_timeout_s": 0.05, "store_timeout_s": 0.05}
    host = start(**extra_config(disk(tmp_path / "kv"), **limits))
    computed = host.compute(TOKENS)
    if operation == "load":
        host.back_up()
    fault[operation] = lambda: None if released.wait(60) else "hangs"
    host.back_up()
    host.evict()
    assert host.prefetch(TOKENS) == 0
    assert host.compute(TOKENS)[0].equal(computed[0])
    assert host.load(TOKENS)[0] == 64
    released.set()


def test_kv_of_pages_that_are_being_loaded_is_not_written_to_once_the_load_was_given_up(
    start: Start, tmp_path: Path, fault: dict[str, Callable[[], str | None]]
) -> None:
    released = threading.Event()
    host = start(**extra_config(disk(tmp_path / "kv"), load_timeout_s=0.05))
    host.compute(TOKENS)
    host.back_up()
    host.evict()
    fault["load"] = lambda: None if released.wait(60) else "hangs"
    assert host.prefetch(TOKENS) == 0
    buffer = host.cache.cache_controller.storage_host_pool.kv_buffer
    buffer.fill_(7)
    released.set()
    host.close()  # waits for the threads
    assert bool((buffer == 7).all())
