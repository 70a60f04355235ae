"""Progress of tasks in reports and results of agents: what is kept of it."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given

from farcall_common.progress import Progress
from farcall_common.store.model import EndpointStatus, RunningProgress
from farcall_common.wire import EndpointReport
from farcall_forwarder.core.untrusted import MAX_PROGRESS, MAX_PROGRESS_TEXT, clean_details, clean_status
from tests.unit.test_progress import values

NOW = 1_800_000_000.0
TASK = "00000000-0000-7000-8000-000000000001"


def kept(progress: Any) -> tuple[RunningProgress, ...]:
    return clean_status(EndpointReport(detail={"progress": progress}), now=NOW).progress


def test_progress_of_a_report_is_kept() -> None:
    rows = [{"task_id": TASK, "done": 3, "total": 10, "text": "fitting", "at": NOW - 5}]
    assert kept(rows) == (RunningProgress(TASK, Progress(3, 10, "fitting", NOW - 5)),)
    assert clean_status(EndpointReport(), now=NOW).progress == ()


@pytest.mark.parametrize(
    "row", [None, [], "x", {}, {"task_id": "t", "done": 1}, {"task_id": TASK}, {"task_id": TASK, "done": math.nan}]
)
def test_what_is_malformed_is_left_out(row: Any) -> None:
    good = {"task_id": TASK, "done": 1, "total": math.inf, "text": "a\0\x1bb", "at": "now"}
    assert kept([row, good]) == ()
    assert kept([row, good | {"at": 0.0}]) == (RunningProgress(TASK, Progress(1, None, "a b", NOW)),)


def test_a_report_of_progress_is_limited() -> None:
    ids = [f"00000000-0000-7000-8000-{number:012}" for number in range(300)]
    found = kept([{"task_id": id_, "done": 1, "text": "é" * 1000, "at": NOW} for id_ in ids])
    assert len(found) == MAX_PROGRESS
    assert 0 < sum(len(each.progress.text.encode()) for each in found) <= MAX_PROGRESS_TEXT
    assert len(msgspec.json.encode(found)) < 64 * 1024


def test_progress_of_a_result_is_kept_and_a_wrong_one_is_not() -> None:
    progress = {"done": 10, "total": 10, "at": NOW}
    assert clean_details({"progress": progress, "node": "n"}, now=NOW) == {"progress": progress, "node": "n"}
    for wrong in ("done", {"done": "10", "at": NOW}, {"total": 1, "at": NOW}, None, [1]):
        assert clean_details({"progress": wrong, "node": "n"}, now=NOW) == {"node": "n"}


@given(values)
def test_whatever_an_agent_reports_can_be_stored(value: Any) -> None:
    status = clean_status(EndpointReport(detail={"progress": value}), now=NOW)
    stored = msgspec.json.encode(status)
    assert b"NaN" not in stored
    assert msgspec.json.decode(stored, type=EndpointStatus) == status
    json.dumps(clean_details({"progress": value}, now=NOW), allow_nan=False)
