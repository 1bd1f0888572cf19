"""The storage below SGLang's HiCache beside SGLang's own file storage: speed, cost on its threads, and what faults do.

Both are called as SGLang's cache controller calls them, on its real host pool of attention. The disk is asked, not the page
cache: Cargohold reads around it, and what the file storage has written is dropped from it before it is read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from benchmarks.environment import NotInstalledError

NAMES: Final = ("cargohold", "file")
PAGE_TOKENS: Final = 64
WAIT_S: Final = 3.0
"""How long a call on a hanging disk is waited for."""


def run(*, quick: bool) -> dict[str, Any]:
    if find_spec("sglang") is None:
        raise NotInstalledError("SGLang is not installed; make bench-sglang installs it")
    from tests.sglang import stand_ins  # noqa: PLC0415  # for what SGLang and a CPU lack

    stand_ins.install()
    num_pages, repeats = (8, 1) if quick else (96, 7)
    with tempfile.TemporaryDirectory() as directory:
        bench = _Bench(Path(directory), num_pages)
        rows: dict[str, dict[str, list[float]]] = {name: {} for name in NAMES}
        for repeat in range(repeats):
            for name in NAMES[:: 1 if repeat % 2 else -1]:
                for what, value in bench.measure(name, repeat).items():
                    rows[name].setdefault(what, []).append(value)
        return {
            "workload": {"pages": num_pages, "page_bytes": bench.page_bytes, "repeats": repeats},
            "median": {name: {what: round(median(of), 3) for what, of in row.items()} for name, row in rows.items()},
            "cargohold_over_file": {what: _ratios(rows, what) for what in rows["file"]},
            "faults": {name: bench.faults(name) for name in NAMES},
        }


def _ratios(rows: dict[str, dict[str, list[float]]], what: str) -> dict[str, float]:
    """Median, smallest and largest ratio of neighbouring measurements."""
    ratios = [ours / theirs for ours, theirs in zip(rows["cargohold"][what], rows["file"][what], strict=True)]
    return {"median": round(median(ratios), 2), "min": round(min(ratios), 2), "max": round(max(ratios), 2)}


class _Bench:
    def __init__(self, directory: Path, num_pages: int) -> None:
        import torch  # noqa: PLC0415  # after the stand-ins
        from sglang.srt.managers.cache_controller import HiCacheController  # noqa: PLC0415
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool  # noqa: PLC0415
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415

        from tests.sglang import host  # noqa: PLC0415

        self._host, self._controller, self._directory, self._num_pages = host, HiCacheController, directory, num_pages
        with host.configured(host.write_model(directory / "model"), page_size=PAGE_TOKENS):
            device = MHATokenToKVPool(
                size=num_pages * PAGE_TOKENS,
                page_size=PAGE_TOKENS,
                dtype=torch.float16,
                head_num=8,
                head_dim=128,
                layer_num=8,
                device="cpu",
                enable_memory_saver=False,
            )
            self.pool: Any = build_kv_host_pool(kv_pool=device, page_size=PAGE_TOKENS, use_mla=False)
        generator = torch.Generator().manual_seed(0)
        self.pool.kv_buffer.copy_(torch.randn(self.pool.kv_buffer.shape, generator=generator).half())
        self.page_bytes = self.pool.get_dummy_flat_data_page().nbytes
        self._slots = torch.arange(num_pages * PAGE_TOKENS)

    # --- as SGLang's cache controller does it -----------------------------------------------------------------------------

    @contextmanager
    def storage(self, name: str, place: Path, model: str = "model", **options: object) -> Iterator[SimpleNamespace]:
        """A storage in a directory, within what the controller needs to call it."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: PLC0415
        from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: PLC0415

        host = self._host
        extra: dict[str, Any] = {"file_storage_path": str(place)}
        if name == "cargohold":
            extra = {**host.CARGOHOLD, "tiers": [{**host.disk(place), "max_bytes": "1GiB", **options}]}
        with host.configured(host.write_model(self._directory / model, model.encode()), page_size=PAGE_TOKENS):
            config = HiCacheStorageConfig(
                **{f"{of}_{what}": int(what == "size") for of in ("tp", "pp", "attn_cp") for what in ("rank", "size")},
                is_mla_model=False,
                enable_storage_metrics=False,
                is_page_first_layout=False,
                model_name="model",
                extra_config=extra,
            )
            backend = StorageBackendFactory.create_backend("file" if name == "file" else "dynamic", config, self.pool)
            backend.register_mem_pool_host(self.pool)
            backend.on_host_pools_registered()
            try:
                yield SimpleNamespace(
                    name=name, storage_backend=backend, storage_host_pool=self.pool, page_size=PAGE_TOKENS
                )
            finally:
                if hasattr(backend, "close"):
                    backend.close()

    def store(self, storage: SimpleNamespace, keys: list[str]) -> bool:
        ways = {"cargohold": "_page_set_zero_copy", "file": "_generic_page_set"}
        by = getattr(self._controller, ways[storage.name])
        return bool(by(storage, keys, self._slots))

    def load(self, storage: SimpleNamespace, keys: list[str]) -> int:
        ways = {"cargohold": "_page_get_zero_copy", "file": "_generic_page_get"}
        by = getattr(self._controller, ways[storage.name])
        return int(by(storage, SimpleNamespace(request_id="request", is_terminated=lambda: False), keys, self._slots))

    def keys(self, first: int = 0) -> list[str]:
        return [f"{number:064x}" for number in range(first * self._num_pages, (first + 1) * self._num_pages)]

    def measure(self, name: str, repeat: int) -> dict[str, float]:
        """Store and load all pages once: speeds, and processor time per page, of the calling thread and of all."""
        keys, place = self.keys(repeat), self._directory / f"speed-{name}-{repeat}"
        with self.storage(name, place) as storage:
            stored = _Taken()
            self.store(storage, keys)
            stored.end()
            found = _Taken()
            storage.storage_backend.batch_exists(keys)
            found.end()
            _drop_from_page_cache(place)
            loaded = _Taken()
            self.load(storage, keys)
            loaded.end()
        shutil.rmtree(place)
        num_bytes = len(keys) * self.page_bytes
        return {
            "store_mb_per_s": num_bytes / 1e6 / stored.real_s,
            "load_mb_per_s": num_bytes / 1e6 / loaded.real_s,
            "look_up_us_per_page": found.real_s * 1e6 / len(keys),
            "store_thread_ms_per_page": stored.thread_s * 1e3 / len(keys),
            "load_thread_ms_per_page": loaded.thread_s * 1e3 / len(keys),
            "store_process_ms_per_page": stored.process_s * 1e3 / len(keys),
            "load_process_ms_per_page": loaded.process_s * 1e3 / len(keys),
        }

    # --- faults -----------------------------------------------------------------------------------------------------------

    def faults(self, name: str) -> dict[str, object]:
        return {
            "bits_flip": self._after_bit_flips(name),
            "other_weights": self._after_other_weights(name),
            "kill_9": self._after_kill(name),
            "full_disk": self._on_a_full_disk(name),
            "hanging_disk": self._on_a_hanging_disk(name),
        }

    def _found(self, storage: SimpleNamespace, keys: list[str]) -> dict[str, int]:
        """How many pages a load brings, and how many of them are wrong."""
        right = self.pool.kv_buffer.clone()
        self.pool.kv_buffer.zero_()
        found = self.load(storage, keys)
        pages = range(0, found * PAGE_TOKENS, PAGE_TOKENS)
        loaded = [self.pool.get_data_page(at).clone() for at in pages]
        self.pool.kv_buffer.copy_(right)
        return {
            "found": found,
            "wrong": sum(not page.equal(self.pool.get_data_page(at)) for at, page in zip(pages, loaded, strict=True)),
        }

    def _after_bit_flips(self, name: str) -> dict[str, int]:
        place = self._directory / f"flips-{name}"
        with self.storage(name, place) as storage:
            self.store(storage, self.keys())
        for file in [*place.rglob("*.bin"), *place.rglob("segment-*.data")]:
            with file.open("r+b") as data:
                for at in range(self.page_bytes // 2, file.stat().st_size, self.page_bytes):
                    data.seek(at)
                    byte = data.read(1)
                    data.seek(at)
                    data.write(bytes([byte[0] ^ 1]))
        with self.storage(name, place) as storage:
            return self._found(storage, self.keys())

    def _after_other_weights(self, name: str) -> dict[str, int]:
        place = self._directory / f"weights-{name}"
        with self.storage(name, place) as storage:
            self.store(storage, self.keys())
        with self.storage(name, place, model="other") as storage:
            found = storage.storage_backend.batch_exists(self.keys())
            return {"found": found, "wrong": found}

    def _after_kill(self, name: str) -> dict[str, int]:
        place = self._directory / f"kill-{name}"
        script = (
            f"from benchmarks.sglang import store_until_killed as go; go({name!r}, {str(place)!r}, {self._num_pages})"
        )
        command = [sys.executable, "-c", script]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)  # noqa: S603  # ours, word by word
        assert child.stdout is not None
        while child.stdout.readline() != b"stored\n":
            pass
        time.sleep(0.05)  # into the middle of a write
        child.kill()
        child.wait()
        child.stdout.close()
        with self.storage(name, place) as storage:
            return {**self._found(storage, self.keys()), "files_left_behind": len(list(place.glob(".*.tmp")))}

    def _on_a_full_disk(self, name: str) -> dict[str, object]:
        place = self._directory / f"full-{name}"
        place.mkdir()
        size = 4 * self._num_pages * self.page_bytes
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if subprocess.run(mount, check=False, capture_output=True).returncode:  # noqa: S603  # ours, word by word
            return {"skipped": "no right to mount a small file system"}
        try:
            with self.storage(name, place / "kv", max_bytes=size // 2) as storage:
                ballast = place / "ballast"
                with suppress(OSError), ballast.open("wb") as file:
                    while True:
                        file.write(bytes(2**20))
                self.store(storage, self.keys())
                found = self._found(storage, self.keys())
                ballast.unlink()
                batches = 1
                while not self.store(storage, self.keys(1)) and batches < 20:
                    batches += 1
                return {**found, "batches_until_it_stores_again": batches}
        finally:
            subprocess.run(["umount", str(place)], check=True)  # noqa: S603, S607  # ours, word by word

    def _on_a_hanging_disk(self, name: str) -> dict[str, object]:
        from cargohold.integrations.sglang import backend  # noqa: PLC0415  # after the stand-ins
        from cargohold.tiers import Tier, open_tier  # noqa: PLC0415
        from tests.wrapped_tiers import FaultyTier  # noqa: PLC0415

        place, hangs, released = self._directory / f"hangs-{name}", threading.Event(), threading.Event()

        def opened(*of: Any, **named: Any) -> Tier:
            return FaultyTier(
                open_tier(*of, **named),
                lambda operation: operation if hangs.is_set() and not released.wait(60) else None,
            )

        with patch.object(backend, "open_tier", opened), self.storage(name, place) as storage:
            self.store(storage, self.keys())
            hangs.set()
            pipe = next(iter(sorted(place.glob("*.bin"))), None)
            if pipe is not None:  # in the place of a file: opening it never ends
                pipe.unlink()
                os.mkfifo(pipe)
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(self._load_or_fail(storage)), daemon=True)
            began = time.monotonic()
            thread.start()
            thread.join(60 if pipe is None else WAIT_S)
            waited_s, has_returned = round(time.monotonic() - began, 1), not thread.is_alive()
            released.set()
            if pipe is not None:
                pipe.open("wb").close()
            thread.join()
        return {"returned": has_returned, "waited_s": waited_s, "found": found[0] if has_returned else None}

    def _load_or_fail(self, storage: SimpleNamespace) -> int:
        try:
            return self.load(storage, self.keys())
        except OSError:  # as SGLang's thread would log it
            return 0


def store_until_killed(name: str, place: str, num_pages: int) -> None:
    """What a process does that is to be killed."""
    from tests.sglang import stand_ins  # noqa: PLC0415  # see above

    stand_ins.install()
    bench = _Bench(Path(place).parent, num_pages)
    with bench.storage(name, Path(place)) as storage:
        for at in range(1000):
            bench.store(storage, bench.keys(at % 4))
            print("stored", flush=True)


class _Taken:
    """Real time, and processor time of this thread and of all threads, from the creation to ``end``."""

    def __init__(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        taken = (end - begin for begin, end in zip(self._began, self._now(), strict=True))
        self.real_s, self.thread_s, self.process_s = taken

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), time.process_time()


def _drop_from_page_cache(place: Path) -> None:
    for file in place.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
