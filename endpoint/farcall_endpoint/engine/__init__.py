"""The endpoint's engine without a cloud: an executor over the same agent core, managers and workers."""

from farcall_common.task_options import TaskOptions
from farcall_endpoint.engine.executor import Engine
from farcall_endpoint.engine.future import EngineFuture
from farcall_endpoint.engine.loop import EngineStats

__all__ = ["Engine", "EngineFuture", "EngineStats", "TaskOptions"]
