"""Configuration of an endpoint: the schema, the reader and the writer of ``config.yaml``."""

from farcall_endpoint.config.environments import EnvironmentsConfig
from farcall_endpoint.config.from_globus import read_globus
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
from farcall_endpoint.config.reader import check_binds, parse_config, read_config
from farcall_endpoint.config.schema import Config, EngineConfig, InterfaceConfig, LimitsConfig
from farcall_endpoint.config.site_template import SiteTemplate, find_template, list_templates
from farcall_endpoint.config.template import write_config

__all__ = [
    "AprunLauncherConfig",
    "BatchProviderConfig",
    "CondorProviderConfig",
    "Config",
    "EngineConfig",
    "EnvironmentsConfig",
    "GnuParallelLauncherConfig",
    "GridEngineProviderConfig",
    "InterfaceConfig",
    "JsrunLauncherConfig",
    "KubernetesProviderConfig",
    "LSFProviderConfig",
    "LauncherConfig",
    "LimitsConfig",
    "LocalProviderConfig",
    "MpiExecLauncherConfig",
    "MpiRunLauncherConfig",
    "PBSProProviderConfig",
    "ProviderConfig",
    "SimpleLauncherConfig",
    "SingleNodeLauncherConfig",
    "SiteTemplate",
    "SlurmProviderConfig",
    "SrunLauncherConfig",
    "SrunMPILauncherConfig",
    "TorqueProviderConfig",
    "WrappedLauncherConfig",
    "check_binds",
    "find_template",
    "list_templates",
    "parse_config",
    "read_config",
    "read_globus",
    "write_config",
]
