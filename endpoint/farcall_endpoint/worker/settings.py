"""Settings of a worker, in one variable of its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

VARIABLE: Final = "FARCALL_WORKER_SETTINGS"


class WorkerSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings that a manager chooses for each of its workers.

    ``sandboxed``: each task runs in a separate directory. ``allowed_serializers``: ids of the strategies that may be
    read; empty: all, except that arguments must be JSON with ``data_only``, here or in an order. ``native``: plain
    pickle is read and written on request; for an engine, whose tasks are its own user's. ``reports_imports``: the
    worker reports which modules its tasks import, so that a template can import them in advance. ``isolation``: the
    level by which the worker confines itself; empty for workers of the owner, and for workers that are only confined
    from outside. ``writable``: if not empty, the worker can access only these directories and ``readable`` paths.
    ``temporary``: path of its tasks' scratch directories. ``memory``: the tasks' directory in the memory file system;
    empty: none. ``is_of_node``: whether other nodes have other directories in memory. ``submitter``: submitter that the
    directories belong to; empty: the owner. ``block_key``: key for seals of blocks in memory, where another submitter's
    tasks could change the blocks; empty: no seals. ``processes``: arguments of
    :func:`~farcall_endpoint.host.isolation.process_limits.limit_processes`.
    """

    sandboxed: bool = False
    allowed_serializers: tuple[str, ...] = ()
    data_only: bool = False
    native: bool = False
    reports_imports: bool = False
    isolation: str = ""
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    temporary: str = ""
    memory: str = ""
    is_of_node: bool = False
    submitter: str = ""
    block_key: str = ""
    processes: tuple[int, int, str] = (0, 0, "")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> WorkerSettings:
        """The settings in an environment."""
        return _decode(environ.get(VARIABLE, "{}"))

    def to_variables(self) -> dict[str, str]:
        """The variables with these settings."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


_decode: Final = msgspec.json.Decoder(WorkerSettings).decode
