"""Status of a deployment: stacks, API, forwarder, stores, alarms and metrics."""

from __future__ import annotations

import dataclasses
import datetime as dt
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from farcall_common.errors import FarcallError
from farcall_infra.cloud.account import Database, Metric, Queue, Sample, Stack, Tasks
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.lifecycle import created_resources, find_stacks
from farcall_infra.cloud.settings import DeployedSettings, deployed_settings
from farcall_infra.deployment import TARGET_OUTPUT, expected_stacks, stack_name
from farcall_infra.release import RELEASE_OUTPUT, this_release

_FIRING: Final = "ALARM"
_AT_REST: Final = frozenset({"CREATE_COMPLETE", "UPDATE_COMPLETE"})
#: Status of an instance that works, also during maintenance by RDS or ElastiCache.
_IN_USE: Final = frozenset(
    {"available", "backing-up", "modifying", "snapshotting", "storage-config-upgrade", "storage-optimization"}
)
#: The maximum age of a measurement in seconds: the canary runs at least once an hour.
_RECENT_S: Final = 2 * 3600
_PROBE_TIMEOUT_S: Final = 10.0
_SERVER_ERROR: Final = 500
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Status:
    """The status of a deployment at one moment.

    ``missing`` names stacks that do not exist, ``alarms`` those that are firing, of ``alarms_watched`` in total.
    ``api_problem`` is the reason why the API does not answer from here, or empty. ``measured`` has the newest values of
    metrics by name, without values older than two hours. ``unknown`` has the parts that could not be read, and why.
    ``installed`` is the release of this installation, ``settings`` are the deployed settings.
    """

    stacks: tuple[Stack, ...]
    missing: tuple[str, ...]
    api_url: str
    api_problem: str
    tasks: Tasks | None
    database: Database | None
    queue: Queue | None
    alarms: tuple[str, ...]
    alarms_watched: int
    measured: Mapping[str, Sample]
    unknown: Mapping[str, str]
    installed: str
    settings: DeployedSettings

    @property
    def releases(self) -> Mapping[str, str]:
        """The release that each stack was deployed with; empty for releases that did not record it."""
        return {stack.name: stack.outputs.get(RELEASE_OUTPUT, "") for stack in self.stacks}

    @property
    def is_current(self) -> bool:
        """Whether every stack was deployed with the release of this installation."""
        return set(self.releases.values()) == {self.installed}

    @property
    def is_asleep(self) -> bool:
        """Whether the forwarder service has scaled to zero because it is idle."""
        return self.tasks is not None and self.tasks.may_sleep and self.tasks.desired == 0

    @property
    def healthy(self) -> bool:
        """Whether all stacks are deployed and stable, and all parts could be read and work."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems of the deployment, one line of text each."""
        return tuple(self._problems())

    def _problems(self) -> Iterator[str]:
        for stack in self.stacks:
            if stack.status not in _AT_REST:
                yield f"{stack.name} is {stack.status}{': ' if stack.reason else ''}{stack.reason}"
        yield from (f"{name} is missing" for name in self.missing)
        yield from (f"alarm {alarm}" for alarm in self.alarms)
        if self.api_problem:
            yield f"the API does not answer from here: {self.api_problem}"
        if self.tasks and self.tasks.running < self.tasks.desired:
            event = f"; last event of ECS: {self.tasks.last_event}" if self.tasks.last_event else ""
            yield f"{self.tasks.running} of {self.tasks.desired} forwarders run{event}"
        for what, part in (("database", self.database), ("queue", self.queue)):
            if part and part.status not in _IN_USE:
                yield f"the {what} is {part.status}"
        for what, reason in self.unknown.items():
            yield f"{what} cannot be checked: {' '.join(reason.split())}"


def read_status(aws: Aws, name: str, *, now: dt.datetime, probe: Callable[[str], str]) -> Status:
    """Read the status of the deployment ``name``; ``probe`` returns why a URL does not answer, as
    :func:`unreachable_reason`.

    A part that cannot be read does not hide the others.

    :raises DeploymentUnknown: if there is none.
    """
    stacks = find_stacks(aws, name)
    unknown: dict[str, str] = {}

    def attempt(what: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except FarcallError as error:
            unknown[what] = error.record.message
            return None

    def first(part: str, kind: str) -> str | None:
        return next(iter(attempt(kind, lambda: created_resources(aws, stacks.get(part), kind)) or ()), None)

    service = first("forwarder", "AWS::ECS::Service")
    database = first("data", "AWS::RDS::DBInstance")
    group = first("data", "AWS::ElastiCache::ReplicationGroup")
    monitored = (
        attempt("Alarms", lambda: created_resources(aws, stacks.get("observability"), "AWS::CloudWatch::Alarm")) or ()
    )
    queue = attempt("Queue", lambda: aws.queue(group)) if group else None
    alarms = (attempt("Alarms", lambda: aws.alarms(monitored)) if monitored else None) or {}
    wanted = metrics_of(name, database=database, queue=queue)
    measured = attempt("Metrics", lambda: aws.newest(list(wanted.values()), now=now, within_s=_RECENT_S)) or {}
    api_url = _api_url(stacks.get("api"), aws.endpoint_url)
    target = stacks["data"].outputs.get(TARGET_OUTPUT, "") if "data" in stacks else ""
    return Status(
        stacks=tuple(stacks.values()),
        missing=tuple(stack_name(name, part) for part in expected_stacks(target) if part not in stacks),
        api_url=api_url,
        api_problem=probe(f"{api_url}/v2/version") if api_url else "",
        tasks=attempt("Forwarder", lambda: aws.tasks(service)) if service else None,
        database=attempt("Database", lambda: aws.database(database)) if database else None,
        queue=queue,
        alarms=tuple(alarm for alarm, state in alarms.items() if state == _FIRING),
        alarms_watched=len(monitored),
        measured={what: measured[metric] for what, metric in wanted.items() if metric in measured},
        unknown=unknown,
        installed=this_release(),
        settings=deployed_settings(stacks.get("data")),
    )


def _api_url(api: Stack | None, endpoint_url: str) -> str:
    """The URL of the API; empty if the stack does not have it yet. The output of a LocalStack is a name of AWS' form
    that no name server knows: there, the API is below the address of LocalStack itself."""
    outputs = api.outputs if api else {}
    if endpoint_url and {"ApiId", "ApiStage"} <= outputs.keys():
        return f"{endpoint_url}/_aws/execute-api/{outputs['ApiId']}/{outputs['ApiStage']}"
    return outputs.get("ApiUrl", "").rstrip("/")


def metrics_of(name: str, *, database: str | None, queue: Queue | None) -> Mapping[str, Metric]:
    """The metrics of a deployment's status, by their names in ``Status.measured``."""
    return dict(_metrics(name, database, queue))


def _metrics(name: str, database: str | None, queue: Queue | None) -> Iterator[tuple[str, Metric]]:
    ours = f"Farcall/{name}"
    yield "endpoints", Metric(ours, "ConnectedEndpoints", "Sum")
    yield "connections", Metric(ours, "Connections", "Sum")
    yield "tasks_waiting", Metric(ours, "TasksWaiting", "Maximum")
    yield "queue_wait_s", Metric(ours, "QueueWait", "Maximum")
    yield "canary_s", Metric(ours, "CanaryTime", "Maximum")
    if database:
        yield (
            "database_free_bytes",
            Metric("AWS/RDS", "FreeStorageSpace", "Minimum", ("DBInstanceIdentifier", database)),
        )
    for node in queue.nodes[:1] if queue else ():
        dimension = ("CacheClusterId", node)
        yield "queue_keys", Metric("AWS/ElastiCache", "CurrItems", "Maximum", dimension)
        yield "queue_memory_percent", Metric("AWS/ElastiCache", "DatabaseMemoryUsagePercentage", "Maximum", dimension)


def unreachable_reason(url: str) -> str:
    """Why ``url`` is unreachable; empty if a server answers, also with 401 because the request has no token."""
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S):  # noqa: S310 - the address is the stack's own output
            return ""
    except urllib.error.HTTPError as answer:
        with answer:
            return f"HTTP status {answer.code}" if answer.code >= _SERVER_ERROR else ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
