"""Settings that an agent gives to its managers and services, made from the sections of the configuration."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from farcall_common.environments import Environment

PolicyName = Literal["pi", "threshold", "short-first", "static", "none"]
Admission = Literal["warn", "refuse"]
ActuatorName = Literal["auto", "cgroup2", "cgroup1", "autogroup", "none"]

DEFAULT_WEIGHT: Final = 100.0
"""The weight of a function for which none was set."""
_LONGEST_PERIOD_S: Final = 15.0
_SHORTEST_PERIOD_S: Final = 1.0


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


class QosSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an endpoint holds latency targets.

    :param policy: source of weights: ``pi`` (by the latency of a window), ``threshold`` (the paper's steps), ``static``
        (those of ``weights``), ``none``; ``short-first`` starts the shortest task first, as many as there are
        processors.
    :param actuator: the backend that sets the weights; ``auto`` is the best that the machine permits.
    :param interval_s: seconds between two decisions.
    :param min_weight, max_weight: bounds of the weight of a function with a target; batch work has 100.
    :param max_weights: maximum sum of the weights of another submitter's targets, by identity. Targets of submitters
        that are not named are measured, and their calls run as batch work.
    :param batch_share: fraction of the processors that batch work keeps, as far as the least weights permit it.
    :param latency_workers: maximum number of concurrent calls with a target on a node, beyond its ordinary workers; by
        default, the number of ordinary workers.
    :param weights: weights of ``static``, by the name of the function; other functions have 100.
    :param ratio, delta: of ``threshold``: from which multiple of its baseline a call is too slow, and the step in
        shares; ``deltas``: the steps of other functions, by name.
    :param admission: treatment of a call whose target cannot be held now.
    """

    policy: PolicyName = "pi"
    actuator: ActuatorName = "auto"
    interval_s: float = 0.25
    min_weight: float = DEFAULT_WEIGHT
    max_weight: float = 2000.0
    max_weights: dict[str, float] = {}
    batch_share: float = 0.05
    latency_workers: int | None = None
    weights: dict[str, float] = {}
    ratio: float = 2.0
    delta: int = 20
    deltas: dict[str, int] = {}
    admission: Admission = "warn"


class SweepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the data that submitters keep.

    :param shared_bytes: size of all shared directories; None: half of the free space there, at most 64 GiB.
    :param memory_bytes: size of all directories in memory; None: a quarter of the memory file system.
    :param retention_s: time to keep a file after its last use.
    :param max_age_s: the same for objects that stay until they are evicted.
    """

    shared_bytes: int | None = None
    memory_bytes: int | None = None
    retention_s: float = 86_400.0
    max_age_s: float = 30 * 86_400.0

    @property
    def period_s(self) -> float:
        """Between sweeps."""
        return min(max(self.retention_s / 10, _SHORTEST_PERIOD_S), _LONGEST_PERIOD_S)


class ValkeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How servers are.

    :param most: at a time; 0: none.
    :param memory_bytes: of the data of each.
    :param idle_s: a server ends so long after the end of its submitter's last task.
    """

    most: int = 4
    memory_bytes: int = 2**30
    idle_s: float = 600.0
