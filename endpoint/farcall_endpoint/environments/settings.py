"""Settings of the environments of an endpoint, as an agent gives them to its managers."""

from __future__ import annotations

from typing import Literal

import msgspec

from farcall_common.environments import Environment


class EnvironmentSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings with which a manager prepares and starts environments.

    :param types: the technologies that may be used; None: all that work on the node.
    :param default: the environment of tasks that name none; None: the endpoint's own Python.
    :param options: of the endpoint's owner, for the command of the runner of the default environment's type.
    :param locations: patterns (``fnmatch``) of locations that submitters other than the owner may name; paths that
        they may read in any case, and references to images, need no pattern unless there is one.
    :param binds: directories of the node in every container: ``source[:target[:ro]]``.
    :param network: whether containers share the node's network.
    :param cache_dir: directory on the node's disk for what was prepared: images, packages, the worker's own code.
    :param cache_bytes: most bytes in it; the least recently used go first.
    :param idle_s: time after which a warm worker without a task is ended.
    :param memory_bytes: memory of all warm workers without a task; templates may have half as much. None: half of the
        node's memory.
    :param eviction: which idle worker is ended first: by frequency, cost of a start and memory, or the oldest.
    :param extra_workers: warm workers of a node beyond its slots; None: as many as slots, where that is safe.
    :param start_limit_s: longest start of an environment, with the conversion of its image.
    :param fork: whether workers are forks of a template.
    :param tasks_per_worker: number of tasks after which a worker ends; 0: no limit.
    :param source_builds: whether uv may build packages that have no wheel.
    :param index_url: package index; empty: uv's default.
    """

    types: tuple[str, ...] | None = None
    default: Environment | None = None
    options: tuple[str, ...] = ()
    locations: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    network: bool = True
    cache_dir: str = ""
    cache_bytes: int = 20 * 10**9
    idle_s: float = 600.0
    memory_bytes: int | None = None
    eviction: Literal["greedy-dual", "lru"] = "greedy-dual"
    extra_workers: int | None = None
    start_limit_s: float = 600.0
    fork: bool = True
    tasks_per_worker: int = 0
    source_builds: bool = False
    index_url: str = ""


def options_for(environment: Environment, settings: EnvironmentSettings) -> tuple[str, ...]:
    """The owner's options for the command of a runner."""
    default = settings.default
    return settings.options if default is not None and default.type == environment.type else ()
