"""An endpoint's ``config.yaml``, checked field by field."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from farcall_common.errors import ConfigurationError

__all__ = ["Config", "EngineConfig", "LocalProviderConfig", "read_config", "write_config"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class LocalProviderConfig(_Section, frozen=True):
    """Workers on the machine that the agent runs on."""

    type: Literal["LocalProvider"] = "LocalProvider"


class EngineConfig(_Section, frozen=True):
    """How tasks are run.

    ``max_workers_per_node``: None is one for each core that this process may use. ``prefetch``: most tasks to keep
    ready behind each running one; 0 switches it off, and long tasks do so by themselves. ``working_dir``: where tasks
    run; relative to the endpoint's directory.
    """

    max_workers_per_node: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    prefetch: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 256
    scheduling: Literal["random", "round-robin"] = "random"
    provider: LocalProviderConfig = LocalProviderConfig()
    working_dir: str = "tasks_working_dir"

    @property
    def slots(self) -> int:
        """Workers per node."""
        return self.max_workers_per_node or len(os.sched_getaffinity(0))


class Config(_Section, frozen=True):
    """The whole file. ``heartbeat_period`` and ``shutdown_grace`` are in seconds; the latter is what running tasks get
    to finish when the endpoint stops."""

    display_name: str | None = None
    engine: EngineConfig = EngineConfig()
    heartbeat_period: Annotated[float, msgspec.Meta(ge=0.1, le=300)] = 30.0
    shutdown_grace: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 5.0
    log_format: Literal["text", "json"] = "text"
    debug: bool = False


_HEADER: Final = """\
# Configuration of a Farcall endpoint. Restart the endpoint after a change.
"""


def read_config(path: Path) -> Config:
    """Read and check a file.

    :raises ConfigurationError: naming the field that is wrong.
    """
    try:
        data = yaml.safe_load(path.read_text()) or {}
        return msgspec.convert(data, Config)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}.") from error
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}.", hint="The documentation lists the fields.") from error


def write_config(path: Path, config: Config) -> None:
    """Write a file with the fields that users change most."""
    engine = config.engine
    data: dict[str, Any] = {
        "display_name": config.display_name,
        "engine": {"max_workers_per_node": engine.slots, "provider": {"type": engine.provider.type}},
        "heartbeat_period": config.heartbeat_period,
    }
    path.write_text(_HEADER + yaml.safe_dump(data, sort_keys=False))
