"""Sanitising of untrusted data: limits peers' values to those that the stores accept. PostgreSQL refuses some text and
numbers that MessagePack carries, and one peer's report must not fail a commit that it shares with others' reports."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from farcall_common import graphs
from farcall_common.errors import ErrorRecord, Fault
from farcall_common.progress import PROGRESS, read_progress
from farcall_common.qos_report import QOS, QosReport, infeasible_targets, read_report
from farcall_common.qos_report import REFUSE as REFUSE_INFEASIBLE
from farcall_common.retries import EARLIER_RUN_S, MAX_RETRIES, error_name
from farcall_common.staging import FILES, STAGING, read_files, read_staging
from farcall_common.store.model import EndpointStatus, EnvironmentState, RunningProgress, RunningStaging
from farcall_common.wire import EndpointReport, is_uuid
from farcall_forwarder.core.untrusted_graphs import MAX_SKEW_S, clean_graph, clean_graphs

#: Characters of one text, entries of one object, and levels of nesting that are kept.
MAX_TEXT: Final = 64 * 1024
MAX_ENTRIES: Final = 200
MAX_DEPTH: Final = 6
#: Bytes of one task's details, as JSON: two tails of output and some facts need a sixth of it.
MAX_DETAILS: Final = 64 * 1024
#: The detail that has times of a task by name, as Globus Compute's clients read it.
TRANSITIONS: Final = "task_transitions"
#: Bytes of the error of one task, as JSON, and the characters that each text keeps if there are more.
MAX_ERROR: Final = 256 * 1024
MAX_ERROR_TEXT: Final = 4096
#: Characters of an endpoint's problem, and of the reason why one attempt of a task failed.
MAX_PROBLEM: Final = 1000
MAX_REASON: Final = 1000
#: Environments that a report may have, and characters of their keys, names and sentences.
MAX_ENVIRONMENTS: Final = 20
MAX_KEY: Final = 32
MAX_LABEL: Final = 200
#: Tasks of a report whose progress is kept, and bytes of their texts: each submit reads the report.
MAX_PROGRESS: Final = 100
MAX_PROGRESS_TEXT: Final = 16 * 1024
#: Tasks of a report whose files are kept, and bytes of their texts, for the same reason.
MAX_STAGING: Final = 100
MAX_STAGING_TEXT: Final = 16 * 1024
#: Bytes of the URLs of one task's files.
MAX_FILES_TEXT: Final = 20 * 1024
#: The detail of the history's entries that have none.
NO_DETAIL: Final[Mapping[str, Any]] = {}
_MAX_INTEGER: Final = 2**53
_MAX_COUNT: Final = 2**31 - 1


def clean_map(value: Mapping[str, Any]) -> dict[str, Any]:
    """A free-form map as JSON that every store can hold. Other values are left out."""
    cleaned = _clean(value, MAX_DEPTH)
    return cleaned if isinstance(cleaned, dict) else {}


def clean_details(value: Mapping[str, Any], *, now: float) -> dict[str, Any]:
    """Details of one task, which are stored with it: all of them, or only what counts as usage if they are too large.
    Those of a graph and of files have limits of their own. ``now`` is in epoch seconds."""
    if graphs.DETAILS.isdisjoint(value) and FILES not in value:
        return _clean_details(value, now=now)
    rest = {name: each for name, each in value.items() if name not in graphs.DETAILS and name != FILES}
    return {**_clean_details(rest, now=now), **clean_graph(value, now=now), **_clean_files(value.get(FILES))}


def _clean_files(value: Any) -> dict[str, Any]:
    """The files that were copied for a task, some at most, as its details have them."""
    found: list[dict[str, Any]] = []
    room = MAX_FILES_TEXT
    for each in read_files(value):
        room -= len(each.url.encode())
        if room < 0:
            break
        found.append(each.to_json())
    return {FILES: found} if found else {}


def _clean_details(value: Mapping[str, Any], *, now: float) -> dict[str, Any]:
    cleaned = clean_map(value)
    if TRANSITIONS in cleaned:
        cleaned[TRANSITIONS] = _times(cleaned[TRANSITIONS])
    if PROGRESS in cleaned:
        progress = read_progress(cleaned.pop(PROGRESS), now=now)
        cleaned |= {} if progress is None else {PROGRESS: progress.to_json()}
    earlier_run_s = cleaned.get(EARLIER_RUN_S, 0)
    if not _is_number(earlier_run_s) or earlier_run_s < 0:  # it would take off the usage of the last run
        del cleaned[EARLIER_RUN_S]
    if len(json.dumps(cleaned)) <= MAX_DETAILS:
        return cleaned
    return {EARLIER_RUN_S: earlier_run_s} if EARLIER_RUN_S in cleaned else {}  # a task decides how long the others are


def clean_retry(value: Mapping[str, Any], *, now: float) -> Mapping[str, Any]:
    """Return the entry of a task's history about a retry: its number, their total, its time, and the name of the
    error's class. Empty if a report is not about a retry."""
    retry, retries, at, error = (value.get(name) for name in ("retry", "retries", "retry_at", "error"))
    if not (type(retry) is type(retries) is int and 1 <= retry <= retries <= MAX_RETRIES):
        return NO_DETAIL
    detail: dict[str, Any] = {"retry": retry, "retries": retries}
    if isinstance(at, float) and clean_time(at, now=now) is not None:
        detail["retry_at"] = at
    if isinstance(error, str) and error_name(error):
        detail["error"] = error
    return detail


def clean_time(at: float | None, *, now: float) -> float | None:
    """An instant of a peer's clock in epoch seconds, or None if it is out of range."""
    return at if at is not None and abs(at - now) < MAX_SKEW_S else None


def clean_error(data: Mapping[str, Any], *, endpoint_id: str, attempt: int) -> ErrorRecord:
    """The error of a task as its agent reported it. An unreadable record becomes a RESULT_MALFORMED one."""
    try:
        record = ErrorRecord.from_json(clean_map(data))
        fields = {key: _typed(key, value) for key, value in vars(record).items()}
        fields |= {"endpoint_id": endpoint_id, "attempt": attempt}
        return ErrorRecord(**(fields if len(json.dumps(fields)) <= MAX_ERROR else _shortened(fields)))
    except (KeyError, ValueError, TypeError):
        return ErrorRecord(
            code="RESULT_MALFORMED",
            message="The endpoint reported a failure without a reason.",
            hint="Upgrade the endpoint's software.",
            fault=Fault.PEER,
            endpoint_id=endpoint_id,
            attempt=attempt,
        )


def _shortened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an error with the ends of its texts, and without what can only be read whole."""
    texts = {name: value[-MAX_ERROR_TEXT:] for name, value in fields.items() if isinstance(value, str)}
    return {**fields, **texts, "fault": fields["fault"], "reasons": None, "exception_data": None, "sealed": None}


def clean_qos(report: EndpointReport, *, now: float) -> QosReport | None:
    """How an agent holds latency targets; None if it does not say. ``now`` is in epoch seconds."""
    return read_report(report.detail[QOS], now=now) if QOS in report.detail else None


def clean_status(report: EndpointReport, qos: QosReport | None = None, *, now: float) -> EndpointStatus:
    """An agent's numbers, within the range of an integer column, its environments, its problem, graphs that run,
    the progress of tasks, their files that move, and latency targets that it cannot meet. ``now`` is in epoch
    seconds."""
    detail = clean_map({name: value for name, value in report.detail.items() if name != QOS})
    problem, environments = detail.get("problem"), detail.get("environments")
    return EndpointStatus(
        managers=min(report.managers, _MAX_COUNT),
        total_workers=min(report.total_workers, _MAX_COUNT),
        idle_workers=min(report.idle_workers, _MAX_COUNT),
        pending_tasks=min(report.pending_tasks, _MAX_COUNT),
        outstanding_tasks=min(report.outstanding_tasks, _MAX_COUNT),
        problem=problem[:MAX_PROBLEM] if isinstance(problem, str) else "",
        blocks=min(report.blocks, _MAX_COUNT),
        pending_blocks=min(report.pending_blocks, _MAX_COUNT),
        environments=_environments(environments, now=now),
        reported_at=now,
        graphs=clean_graphs(report.detail.get("graphs"), now=now) if "graphs" in report.detail else (),
        progress=_progress(report.detail.get("progress"), now=now) if "progress" in report.detail else (),
        staging=_staging(report.detail.get(STAGING), now=now) if STAGING in report.detail else (),
        infeasible=infeasible_targets(qos) if qos is not None else (),
        refuses_infeasible=qos is not None and qos.admission == REFUSE_INFEASIBLE,
    )


def _staging(value: Any, *, now: float) -> tuple[RunningStaging, ...]:
    """Tasks in a report whose files move, some at most. What is malformed is left out."""
    found: dict[str, RunningStaging] = {}
    room = MAX_STAGING_TEXT
    for each in value[:MAX_STAGING] if isinstance(value, list | tuple) else ():
        task_id = each.get("task_id") if isinstance(each, Mapping) else None
        if not isinstance(task_id, str) or not is_uuid(task_id):
            continue
        if (staging := read_staging(each, now=now)) is not None:
            room -= len(staging.url.encode()) + len(staging.problem.encode())
            staging = staging if room >= 0 else dataclasses.replace(staging, url="", problem="")
            found[task_id] = RunningStaging(task_id, staging)
    return tuple(found.values())


def _progress(value: Any, *, now: float) -> tuple[RunningProgress, ...]:
    """The progress of tasks in a report, some at most. What is malformed is left out."""
    found: dict[str, RunningProgress] = {}
    room = MAX_PROGRESS_TEXT
    for each in value[:MAX_PROGRESS] if isinstance(value, list | tuple) else ():
        task_id = each.get("task_id") if isinstance(each, Mapping) else None
        if not isinstance(task_id, str) or not is_uuid(task_id):
            continue
        if (progress := read_progress(each, now=now)) is not None:
            room -= len(progress.text.encode())
            found[task_id] = RunningProgress(task_id, progress if room >= 0 else dataclasses.replace(progress, text=""))
    return tuple(found.values())


def _environments(value: Any, *, now: float) -> tuple[EnvironmentState, ...]:
    """The environments of a report, some at most. What is none is left out."""
    found = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else ()
    return tuple(_environment(each, now=now) for each in found[:MAX_ENVIRONMENTS])


def _environment(value: Mapping[str, Any], *, now: float) -> EnvironmentState:
    def text(name: str, most: int = MAX_LABEL) -> str:
        return found[:most] if isinstance(found := value.get(name), str) else ""

    def count(name: str) -> int:
        return min(found, _MAX_COUNT) if type(found := value.get(name)) is int and found > 0 else 0

    def time(name: str) -> float | None:
        at = value.get(name)
        return clean_time(float(at), now=now) if _is_number(at) and at else None

    return EnvironmentState(
        key=text("key", MAX_KEY),
        label=text("label"),
        type=text("type", MAX_KEY),
        node=text("node"),
        warm=count("warm"),
        busy=count("busy"),
        starting=count("starting"),
        forkable=value.get("forkable") is True,
        text=text("text"),
        since=time("since"),
        problem=text("problem", MAX_PROBLEM),
        retry_at=time("retry_at"),
    )


def _times(value: Any) -> dict[str, float]:
    """Epoch seconds by name. Other values are left out."""
    entries = value.items() if isinstance(value, dict) else ()
    return {name: at for name, at in entries if _is_number(at)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _typed(key: str, value: Any) -> Any:
    match key:
        case "fault":
            return Fault(value)
        case "retryable":
            return value is True
        case "retry_after_s" | "attempt" | "retries_used":
            return value if _is_number(value) else None
        case "reasons":
            return value and tuple(str(each)[:MAX_REASON] for each in value[:MAX_ENTRIES])
        case _:
            return value if value is None or isinstance(value, str) else str(value)


def _clean(value: Any, depth: int) -> Any:
    match value:
        case None | bool():
            return value
        case str():
            # The end of a traceback is more useful than its start.
            return value.replace("\0", "\N{REPLACEMENT CHARACTER}")[-MAX_TEXT:]
        case int():
            return value if abs(value) <= _MAX_INTEGER else str(value)
        case float():
            return value if math.isfinite(value) else None
        case Mapping() if depth:
            entries = list(value.items())[:MAX_ENTRIES]
            return {str(_clean(key, 0)): _clean(item, depth - 1) for key, item in entries}
        case list() | tuple() if depth:
            return [_clean(item, depth - 1) for item in value[:MAX_ENTRIES]]
        case _:
            return None
