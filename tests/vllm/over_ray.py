"""A program that asks vLLM with two workers, which are Ray actors, the same prompts twice, and prints the results as JSON.

vLLM's CPU platform refuses Ray, because it does not say which of Ray's resources a worker takes. The platform here says it;
vLLM finds it as a plugin, for which ``write_plugin`` makes a package. A platform holds for a whole process, so this is a
program of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm.platforms.cpu import CpuPlatform

STAGED_WORKER = "tests.vllm.staged_worker.StagedWorker"


class RayCpuPlatform(CpuPlatform):  # type: ignore[misc]  # vLLM ships no types
    """A CPU platform whose workers take a GPU of Ray's each; there are none, but Ray is told that there are."""

    ray_device_key = "GPU"


def platform() -> str:
    """Entry point of the group ``vllm.platform_plugins``."""
    return f"{__name__}.{RayCpuPlatform.__name__}"


def write_plugin(directory: Path) -> None:
    """Make the platform known to every Python that has ``directory`` in its path."""
    package = directory / "ray_on_cpu-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-on-cpu\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[vllm.platform_plugins]\nray_on_cpu = tests.vllm.over_ray:platform\n")


def main(model: str, split: str) -> None:
    """Serve prompts, forget them, serve them again. ``split`` is vLLM's option for how two workers share a model."""
    # Imported here, because every process of vLLM imports this module, but only for the platform.
    import ray  # noqa: PLC0415

    from tests.vllm.common import EAGER, forget, make_prompts  # noqa: PLC0415
    from tests.vllm.engine import Engine  # noqa: PLC0415

    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    options: dict[str, Any] = {split: 2, "distributed_executor_backend": "ray", "worker_extension_cls": STAGED_WORKER}
    engine = Engine(model, EAGER, **options)
    engine.llm.collective_rpc("get_ready")
    prompts = make_prompts(2, 330)
    first = [engine.ask([prompt], 6)[0] for prompt in prompts]
    forget(engine)
    second = [engine.ask([prompt], 6)[0] for prompt in prompts]
    engine.check_settled()
    assert engine.side.guard.broken is None, engine.side.guard.broken
    result = {
        "actors": len(engine.llm.llm_engine.engine_core.engine_core.model_executor.ray_worker_handles),
        "world_size": engine.side.layout.world_size,
        "first": [answer.tokens for answer in first],
        "second": [answer.tokens for answer in second],
        "restored": [answer.restored for answer in second],
    }
    engine.close()
    ray.shutdown()
    print(json.dumps(result))  # noqa: T201  # what its caller reads


if __name__ == "__main__":
    main(*sys.argv[1:])
