"""When an agent reports its numbers."""

from __future__ import annotations

from collections.abc import Iterable

from farcall_common.report_limiter import BURST, LEAST_S, SUSTAINED_S, ReportLimiter
from farcall_common.wire import EndpointReport
from farcall_endpoint.agent.core.reports import StatusReports

HEARTBEAT_S = 30.0


def in_session() -> StatusReports:
    reports = StatusReports()
    reports.restart(heartbeat_s=HEARTBEAT_S)
    return reports


def times(numbers: Iterable[tuple[float, int]], reports: StatusReports | None = None) -> list[float]:
    """The instants at which a report is sent, of an agent whose turns see these numbers of idle workers."""
    reports = reports or in_session()
    sent = []
    for now, idle in numbers:
        report = EndpointReport(idle_workers=idle)
        if now >= reports.due_at and reports.is_due(report, now=now):
            reports.sent(report, now=now)
            sent.append(now)
    return sent


def test_the_first_change_is_reported_at_once_and_the_next_after_a_second() -> None:
    assert times([(100.0, 4), (130.5, 4), (140.0, 3), (140.2, 2), (140.9, 1), (141.0, 1)]) == [
        100.0,
        130.5,
        140.0,
        141.0,
    ]


def test_nothing_is_reported_while_nothing_changes_but_for_heartbeats() -> None:
    assert times((number / 10, 4) for number in range(1000)) == [0.0, 30.0, 60.0, 90.0]


def test_a_steady_flow_is_reported_every_five_seconds() -> None:
    sent = times((turn / 1000, turn) for turn in range(120_000))
    assert len(sent) <= BURST + 120 / SUSTAINED_S + 1
    assert {round(later - earlier, 1) for earlier, later in zip(sent[-10:], sent[-9:], strict=False)} == {SUSTAINED_S}


def test_a_busy_agent_compares_ten_times_a_second_at_most() -> None:
    reports = in_session()
    report = EndpointReport(total_workers=4)
    reports.sent(report, now=0.0)
    compared = 0
    for turn in range(10_000):  # in ten seconds
        now = turn / 1000
        if now >= reports.due_at:
            compared += 1
            assert not reports.is_due(report, now=now)
    assert 80 <= compared <= 100


def test_a_new_session_gets_a_report_however_many_there_are() -> None:
    reports = in_session()
    assert times([(100.0, 4)], reports) == [100.0]
    reports.restart(heartbeat_s=HEARTBEAT_S)
    assert times([(100.5, 4), (101.0, 4)], reports) == [101.0]


def test_a_limiter_fills_again_while_nothing_happens() -> None:
    limiter = ReportLimiter()
    for _ in range(BURST):
        limiter.used(now=0.0)
    assert limiter.next_at == SUSTAINED_S
    limiter.used(now=1000.0)
    assert limiter.next_at == 1000.0 + LEAST_S
