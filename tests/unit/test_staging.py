"""Files on their way: what is kept of what others wrote, in a report and in a result, and how it is shown."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given

from farcall_common.progress import MAX_TEXT
from farcall_common.staging import (
    MAX_FILES_SHOWN,
    StagedFile,
    Staging,
    read_files,
    read_staging,
    shown_size,
)
from farcall_common.store.model import EndpointStatus, RunningStaging
from farcall_common.wire import EndpointReport
from farcall_forwarder.core.untrusted import (
    MAX_DETAILS,
    MAX_FILES_TEXT,
    MAX_STAGING,
    MAX_STAGING_TEXT,
    clean_details,
    clean_status,
)
from tests.unit.test_progress import values

NOW = 1_800_000_000.0
TASK = "00000000-0000-7000-8000-000000000001"
SHA = "ab" * 32
SCAN = "s3://lab/raw/scan7.h5"
ROW: dict[str, Any] = {"state": "staging-in", "files": 10, "files_done": 3, "bytes": 1_234_567_890, "since": NOW - 12}


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (ROW | {"total": 4_000_000_000, "url": SCAN}, f"3 of 10 files in, 1.2 of 4.0 GB: {SCAN}"),
        (ROW | {"total": 1}, "3 of 10 files in, 1.2 of 1.2 GB"),
        (ROW | {"bytes": 0}, "3 of 10 files in"),
        (ROW | {"state": "staging-out", "bytes": 999, "problem": "timeout"}, "3 of 10 files out, 999 bytes (timeout)"),
    ],
)
def test_staging_is_shown_in_words(row: dict[str, Any], shown: str) -> None:
    assert str(read_staging(row)) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 KB"), (4_000_000_000, "4.0 GB"), (10**18, "1000.0 PB")],
)
def test_size_is_shown_in_words(size: int, shown: str) -> None:
    assert shown_size(size) == shown


def test_what_was_written_is_read_again() -> None:
    staging = Staging("staging-in", 10, 3, 5, 100, SCAN, "slow", NOW)
    assert read_staging(staging.to_json(), now=NOW) == staging
    assert read_staging(Staging("staging-out", 1).to_json()) == Staging("staging-out", 1)
    to_node = Staging("staging-in", 2, 1, to_node=True)
    assert read_staging(to_node.to_json()) == to_node
    assert str(to_node) == "1 of 2 files to the node"
    assert read_staging(to_node.to_json() | {"state": "staging-out"}) == Staging("staging-out", 2, 1)
    assert "to_node" not in staging.to_json()
    file = StagedFile(SCAN, "r", 5, SHA, cached=True)
    assert read_files([file.to_json(), StagedFile("", "w", 0).to_json()]) == (file, StagedFile("", "w", 0))


@pytest.mark.parametrize(
    "row",
    [None, "x", [], {}, ROW | {"state": "copying"}, ROW | {"files": -1}, ROW | {"files": True}, ROW | {"files": 1.5}],
)
def test_what_is_no_staging_is_left_out(row: Any) -> None:
    assert read_staging(row, now=NOW) is None


@pytest.mark.parametrize("since", [None, "now", float("nan"), float("inf"), 10**400, 5])
def test_instant_that_makes_no_sense_becomes_the_reader_s(since: Any) -> None:
    found = read_staging(ROW | {"since": since}, now=NOW)
    assert found is not None
    assert found.since == NOW


def test_more_cannot_be_done_than_there_is_and_texts_are_limited() -> None:
    found = read_staging(ROW | {"files_done": 99, "total": "4", "url": "é\n" * 1000, "problem": 7}, now=NOW)
    assert found is not None
    assert (found.files_done, found.total, len(found.url), found.problem) == (10, None, MAX_TEXT, "")


@pytest.mark.parametrize(
    "row", [None, "x", {}, {"mode": "r"}, {"mode": "x", "size_bytes": 1}, {"mode": "r", "size_bytes": -1}]
)
def test_what_is_no_file_is_left_out(row: Any) -> None:
    good = {"url": SCAN, "mode": "r", "size_bytes": 3, "sha256": "../x", "cached": 1}
    assert read_files([row, good]) == (StagedFile(SCAN, "r", 3),)
    assert read_files(row) == ()


def kept(rows: Any) -> tuple[RunningStaging, ...]:
    return clean_status(EndpointReport(detail={"staging": rows}), now=NOW).staging


def test_staging_of_a_report_is_kept() -> None:
    assert kept([ROW | {"task_id": TASK, "url": SCAN}, ROW | {"task_id": "t"}, None]) == (
        RunningStaging(TASK, Staging("staging-in", 10, 3, 1_234_567_890, None, SCAN, "", NOW - 12)),
    )
    assert clean_status(EndpointReport(), now=NOW).staging == ()


def test_report_of_staging_is_limited() -> None:
    ids = [f"00000000-0000-7000-8000-{number:012}" for number in range(300)]
    found = kept([ROW | {"task_id": id_, "url": "é" * 1000, "problem": "é" * 1000} for id_ in ids])
    assert len(found) == MAX_STAGING
    assert 0 < sum(len((each.staging.url + each.staging.problem).encode()) for each in found) <= MAX_STAGING_TEXT
    assert len(msgspec.json.encode(found)) < 64 * 1024


def test_files_of_a_result_have_limits_of_their_own() -> None:
    files = [{"url": f"{SCAN}{number}", "mode": "w", "size_bytes": 1, "sha256": SHA} for number in range(200)]
    details = clean_details({"files": files, "stdout_tail": "x" * (MAX_DETAILS - 100)}, now=NOW)
    assert details["files"] == files[:MAX_FILES_SHOWN]
    assert len(details["stdout_tail"]) == MAX_DETAILS - 100
    long = clean_details({"files": [{**each, "url": "é" * 1000} for each in files]}, now=NOW)
    assert 0 < sum(len(each["url"].encode()) for each in long["files"]) <= MAX_FILES_TEXT
    assert clean_details({"files": "x", "node": "n"}, now=NOW) == {"node": "n"}


@given(values)
def test_whatever_an_agent_reports_can_be_stored(value: Any) -> None:
    for rows in (value, [value], [ROW | {"task_id": TASK, "since": value, "bytes": value, "url": value}]):
        status = clean_status(EndpointReport(detail={"staging": rows}), now=NOW)
        stored = msgspec.json.encode(status)
        assert b"NaN" not in stored
        assert msgspec.json.decode(stored, type=EndpointStatus) == status
        json.dumps(clean_details({"files": rows}, now=NOW), allow_nan=False)
