"""Configuration of an endpoint: the schema, the reader and the writer of ``config.yaml``.

Programs with an :class:`~farcall_endpoint.Engine` import its providers and launchers from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farcall_endpoint.config.providers import (
        AprunLauncherConfig,
        BatchProviderConfig,
        CondorProviderConfig,
        GnuParallelLauncherConfig,
        GridEngineProviderConfig,
        JsrunLauncherConfig,
        KubernetesProviderConfig,
        LauncherConfig,
        LocalProviderConfig,
        LSFProviderConfig,
        MpiExecLauncherConfig,
        MpiRunLauncherConfig,
        PBSProProviderConfig,
        ProviderConfig,
        SimpleLauncherConfig,
        SingleNodeLauncherConfig,
        SlurmProviderConfig,
        SrunLauncherConfig,
        SrunMPILauncherConfig,
        TorqueProviderConfig,
        WrappedLauncherConfig,
    )

__all__ = [
    "AprunLauncherConfig",
    "BatchProviderConfig",
    "CondorProviderConfig",
    "GnuParallelLauncherConfig",
    "GridEngineProviderConfig",
    "JsrunLauncherConfig",
    "KubernetesProviderConfig",
    "LSFProviderConfig",
    "LauncherConfig",
    "LocalProviderConfig",
    "MpiExecLauncherConfig",
    "MpiRunLauncherConfig",
    "PBSProProviderConfig",
    "ProviderConfig",
    "SimpleLauncherConfig",
    "SingleNodeLauncherConfig",
    "SlurmProviderConfig",
    "SrunLauncherConfig",
    "SrunMPILauncherConfig",
    "TorqueProviderConfig",
    "WrappedLauncherConfig",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("farcall_endpoint.config.providers"), name)
