"""Executors: run the scheduler's steps on workers, in this process or in several."""

from cargohold.engine.executor.base import Executor, InlineExecutor
from cargohold.engine.executor.worker import LayerHooks, ModelRunner, Worker

__all__ = ["Executor", "InlineExecutor", "LayerHooks", "ModelRunner", "Worker"]
