"""Executors: run the scheduler's steps on workers, in this process or in several."""

from cargohold.engine.executor.base import Executor
from cargohold.engine.executor.inline import InlineExecutor
from cargohold.engine.executor.runner import LayerHooks, ModelRunner
from cargohold.engine.executor.worker import Worker

__all__ = ["Executor", "InlineExecutor", "LayerHooks", "ModelRunner", "Worker"]
