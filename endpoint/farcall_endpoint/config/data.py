"""Section ``data`` of ``config.yaml``: directories of tasks, and Valkey for them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from farcall_endpoint.config.section import BYTES_PER_GB, FieldProblem, Section
from farcall_endpoint.config.settings import SweepSettings, ValkeySettings

_Gigabytes = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]


class DataConfig(Section, frozen=True, kw_only=True):
    """Directories in which tasks keep data of their submitters, and the Valkey servers that the endpoint starts."""

    shared: Annotated[
        _Gigabytes | None,
        msgspec.Meta(
            description="Disk space for the shared directories of all submitters, in GB; the oldest files are deleted "
            "first; default: half of what is free, at most 64."
        ),
    ] = None
    memory: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] | None,
        msgspec.Meta(
            description="The same for their directories in memory, with the local provider; 0: there are none; "
            "default: a quarter of the memory file system."
        ),
    ] = None
    retention: Annotated[
        float,
        msgspec.Meta(ge=60, le=366 * 86_400, description="Seconds for which a file there is kept after its last use."),
    ] = 86_400.0
    max_age: Annotated[
        float,
        msgspec.Meta(
            ge=60,
            le=10 * 366 * 86_400,
            description="The same, at most, for objects that are kept until they are evicted, or for "
            "a time of their own.",
        ),
    ] = 30 * 86_400.0
    valkey_servers: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=1000,
            description="Most submitters at a time for whose tasks the endpoint runs a Valkey server; 0: none.",
        ),
    ] = 4
    valkey_memory: Annotated[
        _Gigabytes, msgspec.Meta(description="Memory for the data of each of these servers, in GB.")
    ] = 1.0
    valkey_idle: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=7 * 86_400,
            description="Seconds after the last task of its submitter at which a server ends.",
        ),
    ] = 600.0

    def __post_init__(self) -> None:
        if self.max_age < self.retention:
            raise FieldProblem(
                "max_age",
                f"max_age ({self.max_age:g}) is less than retention ({self.retention:g})",
                fix="raise max_age, or lower retention",
            )

    @property
    def sweep_settings(self) -> SweepSettings:
        """Settings of the sweeper."""
        return SweepSettings(
            shared_bytes=None if self.shared is None else int(self.shared * BYTES_PER_GB),
            memory_bytes=None if self.memory is None else int(self.memory * BYTES_PER_GB),
            retention_s=self.retention,
            max_age_s=self.max_age,
        )

    @property
    def valkey_settings(self) -> ValkeySettings:
        """Settings of the Valkey servers."""
        return ValkeySettings(
            most=self.valkey_servers, memory_bytes=int(self.valkey_memory * BYTES_PER_GB), idle_s=self.valkey_idle
        )
