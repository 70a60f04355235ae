"""Engine: an executor over an endpoint's agent core, managers and workers, without a cloud."""

from farcall_common.task_options import TaskOptions
from farcall_endpoint.engine.executor import Engine
from farcall_endpoint.engine.future import EngineFuture
from farcall_endpoint.engine.loop import EngineStats

__all__ = ["Engine", "EngineFuture", "EngineStats", "TaskOptions"]
