"""Template of the ``config.yaml`` that ``farcall-endpoint configure`` writes, with comments."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from farcall_common.files import write_whole
from farcall_endpoint.config.schema import Config
from farcall_endpoint.config.yaml12 import Dumper

_TEMPLATE: Final = """\
# Configuration of a Farcall endpoint. Restart the endpoint after a change; errors are reported with their line.
# Templates for Slurm, PBS Pro, LSF, HTCondor, Grid Engine and Kubernetes: `farcall-endpoint configure --template list`.

# The name shown to others.
{display_name}

engine:
  # Tasks at a time on each node. Without this line: one for each core.
  {workers}
{engine}
  # The source of nodes. LocalProvider is this machine.
  provider:
{provider}

# Seconds between heartbeats to the cloud.
heartbeat_period: {heartbeat_period:g}

# Seconds for running tasks to finish when the endpoint stops.
shutdown_grace: {shutdown_grace:g}
{rest}"""

_WIDTH: Final = 2**20
"""Maximum characters of a line: values are never folded."""

_SUGGESTIONS: Final = """
  # Upper limits of every task.
  #limits:
  #  walltime: "01:00:00"
  #  memory: 4             # GB, with all its processes

  # Accelerators of a node: each worker sees only its own.
  #available_accelerators: 2
"""


def write_config(path: Path, config: Config) -> None:
    """Write a file that reads as ``config``: commented, and without the fields that have their default values."""
    rest = _changed(config)
    for written in ("display_name", "heartbeat_period", "shutdown_grace"):
        rest.pop(written, None)
    engine = rest.pop("engine", {})
    engine.pop("provider", None)
    workers = engine.pop("max_workers_per_node", None)
    text = _TEMPLATE.format(
        display_name=_yaml({"display_name": config.display_name}).rstrip(),
        workers=f"max_workers_per_node: {workers}" if workers else f"#max_workers_per_node: {config.engine.slots}",
        engine="\n" + _yaml(engine, "  ") if engine else _SUGGESTIONS,
        provider=_yaml(_changed(config.engine.provider), "    ").rstrip(),
        heartbeat_period=config.heartbeat_period,
        shutdown_grace=config.shutdown_grace,
        rest="\n" + _yaml(rest) if rest else "",
    )
    write_whole(path, text.encode(), mode=0o600)


def _changed(section: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    info = section.__struct_config__
    changed: dict[str, Any] = {} if info.tag is None else {str(info.tag_field): info.tag}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if value == (field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()):
            continue
        changed[field.encode_name] = (
            _changed(value) if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)
        )
    return changed


def _yaml(data: dict[str, Any], indent: str = "") -> str:
    return textwrap.indent(yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH), indent)
