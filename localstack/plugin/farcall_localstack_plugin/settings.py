"""Settings of the plugin, from environment variables that the driver sets."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Settings:
    """Paths, and the differences between ECS tasks here and on AWS.

    Functions and tasks run under ``python``; ``python_tag`` is the tag of the wheels that it can load.
    ``task_environment`` overrides a task's variables; ``{task}`` in a value becomes the task's own directory. A task
    has started when ``task_ready_file`` exists in that directory. The periods of health checks and load balancers in
    templates are divided by ``speed``; timeouts are not. ``lifeline_fd`` is a pipe from the driver: LocalStack
    stops when its other end closes. With ``database_certificate``, a PEM file with its key, databases use TLS.
    """

    python: Path
    python_tag: str
    postgres_bin: Path
    valkey: Path
    directory: Path
    database_directory: Path
    task_environment: Mapping[str, str]
    task_ready_file: str
    speed: float
    lifeline_fd: int | None
    database_certificate: Path | None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the ``FARCALL_LOCALSTACK_*`` variables.

        :raises KeyError: if one is missing.
        """
        prefix = "FARCALL_LOCALSTACK_"
        lifeline = environ.get(f"{prefix}LIFELINE_FD")
        certificate = environ.get(f"{prefix}DATABASE_CERTIFICATE")
        return cls(
            python=Path(environ[f"{prefix}PYTHON"]),
            python_tag=environ[f"{prefix}PYTHON_TAG"],
            postgres_bin=Path(environ[f"{prefix}POSTGRES_BIN"]),
            valkey=Path(environ[f"{prefix}VALKEY"]),
            directory=Path(environ[f"{prefix}DIRECTORY"]),
            database_directory=Path(environ[f"{prefix}DATABASE_DIRECTORY"]),
            task_environment=json.loads(environ[f"{prefix}TASK_ENVIRONMENT"]),
            task_ready_file=environ[f"{prefix}TASK_READY_FILE"],
            speed=float(environ[f"{prefix}SPEED"]),
            lifeline_fd=int(lifeline) if lifeline else None,
            database_certificate=Path(certificate) if certificate else None,
        )


@functools.cache
def settings() -> Settings:
    """The settings of this process."""
    return Settings.from_environment(os.environ)
