"""What this version can do of what a configuration may ask for. The rest is refused: a field is never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from farcall_common.errors import ConfigurationError
from farcall_endpoint.config import Config, EngineConfig, LocalProviderConfig

__all__ = ["require_supported"]

_NOT_YET: Final = (
    "cores_per_worker",
    "mem_per_worker",
    "available_accelerators",
    "cpu_affinity",
    "address",
    "worker_port_range",
    "drain_period",
    "max_idletime",
    "max_block_failures",
)


def require_supported(config: Config) -> None:
    """Check a configuration that is right in itself.

    :raises ConfigurationError: naming every field that asks for something that this version cannot do.
    """
    fields = list(_unsupported(config.engine))
    if fields:
        raise ConfigurationError(
            f"This version does not support what the configuration asks for in {', '.join(fields)}.",
            hint="Leave these fields out: workers then run on this machine, one for each core.",
        )


def _unsupported(engine: EngineConfig) -> Iterator[str]:
    plain = EngineConfig()
    for name in _NOT_YET:
        if getattr(engine, name) != getattr(plain, name):
            yield f"engine.{name}"
    if not isinstance(engine.provider, LocalProviderConfig):
        yield "engine.provider.type"
    elif engine.provider != LocalProviderConfig():
        yield "engine.provider (blocks)"
