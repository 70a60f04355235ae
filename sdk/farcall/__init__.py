"""Call a Python function on any computer you may use: client, executor and command line of Farcall."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from farcall._client import Client
from farcall._decorator import Function, function
from farcall._display import track
from farcall._executor import Executor
from farcall._future import ComputeFuture, InputFailed
from farcall._include import include
from farcall._running import current
from farcall._settings import Settings
from farcall._shell import MPIFunction, ShellFunction
from farcall._shell_remote import ShellResult
from farcall._stages import StageInfo, Stages
from farcall._task_info import TaskInfo, Why
from farcall._task_output import OutputPart, TaskOutput
from farcall._version import __version__
from farcall_common.chains import Chain, chain
from farcall_common.errors import (
    ConfigurationError,
    ContainerUnknown,
    DeserializationError,
    EndpointIncompatible,
    EndpointUnknown,
    ErrorRecord,
    FarcallError,
    Forbidden,
    FunctionUnknown,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    ObjectGone,
    PayloadTooLarge,
    ResultRefused,
    SerializationError,
    TaskCancelled,
    TaskDeadLettered,
    TaskError,
    TaskFailed,
    TaskLost,
    TaskPending,
    TaskUnknown,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from farcall_common.file_arguments import File
from farcall_common.graph_builder import Graph
from farcall_common.graph_handles import StageHandle, StageList
from farcall_common.progress import Progress
from farcall_common.staging import StagedFile, Staging

if TYPE_CHECKING:
    from farcall._latencies import Baseline, FunctionLatency, LatencyReport
    from farcall._qos import LatencyTargets, QosWarning
    from farcall_common.objects import Reference, store
    from farcall_common.qos import QoS

__all__ = [
    "Baseline",
    "Chain",
    "Client",
    "ComputeFuture",
    "ConfigurationError",
    "ContainerUnknown",
    "DeserializationError",
    "EndpointIncompatible",
    "EndpointUnknown",
    "ErrorRecord",
    "Executor",
    "FarcallError",
    "File",
    "Forbidden",
    "Function",
    "FunctionLatency",
    "FunctionUnknown",
    "Graph",
    "InputFailed",
    "InvalidRequest",
    "LatencyReport",
    "LatencyTargets",
    "LimitExceeded",
    "MPIFunction",
    "NotFound",
    "ObjectGone",
    "OutputPart",
    "PayloadTooLarge",
    "Progress",
    "QoS",
    "QosWarning",
    "Reference",
    "ResultRefused",
    "SerializationError",
    "Settings",
    "ShellFunction",
    "ShellResult",
    "StageHandle",
    "StageInfo",
    "StageList",
    "StagedFile",
    "Stages",
    "Staging",
    "TaskCancelled",
    "TaskDeadLettered",
    "TaskError",
    "TaskFailed",
    "TaskInfo",
    "TaskLost",
    "TaskOutput",
    "TaskPending",
    "TaskUnknown",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Why",
    "__version__",
    "chain",
    "current",
    "function",
    "include",
    "store",
    "track",
]

#: Loaded at the first use: programs without references or latency targets start without them.
_LATER: Final = {
    "Baseline": "farcall._latencies",
    "FunctionLatency": "farcall._latencies",
    "LatencyReport": "farcall._latencies",
    "LatencyTargets": "farcall._qos",
    "QoS": "farcall_common.qos",
    "QosWarning": "farcall._qos",
    "Reference": "farcall_common.objects.references",
    "store": "farcall_common.objects.store",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    return module if name == "store" else getattr(module, name)
