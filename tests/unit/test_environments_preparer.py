"""The launcher's conversation with the process of preparations."""

from __future__ import annotations

import math
import os
import select
import sys
from pathlib import Path

import msgspec
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.prepare.preparation import (
    Failed,
    Located,
    PreparationReport,
    PreparationSettings,
    Progressed,
    Release,
)
from farcall_endpoint.environments.prepare.preparer import Preparer
from farcall_endpoint.host import process_reaper
from tests.waiting import WAIT_S


class Rig:
    """A conversation with a process that is a shell script."""

    def __init__(
        self, directory: Path, script: str, monkeypatch: pytest.MonkeyPatch, *, limit_s: float = 600.0
    ) -> None:
        program = directory / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        self.now = 0.0
        settings = PreparationSettings(environments=EnvironmentSettings(), cache=str(directory))
        self.preparer = Preparer(lambda: settings, limit_s=limit_s, clock=lambda: self.now)

    def heard(self) -> list[PreparationReport | Located]:
        """What is read as soon as the process has said something."""
        assert select.select([self.preparer.fileno()], [], [], WAIT_S)[0]
        return self.preparer.read()

    def due(self) -> list[PreparationReport | Located]:
        """What is read at the next deadline."""
        self.now = self.preparer.next_deadline()
        return self.preparer.read()

    def end(self) -> None:
        """End a process that does not end with its input."""
        assert self.preparer.pid is not None
        process_reaper.kill_trees({self.preparer.pid})
        self.preparer.close()


ALIVE = 'echo \'{"type":"Alive"}\''
SCI = Environment(type="venv", location="/opt/sci")


def test_a_long_preparation_is_left_alone_while_the_process_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, f"{ALIVE}; while read order; do {ALIVE}; done", monkeypatch)
    rig.preparer.prepare(SCI, trusted=True)
    pid = rig.preparer.pid
    assert rig.heard() == []
    for _ in range(100):
        assert rig.due() == []  # it is asked
        assert rig.heard() == []
    assert rig.preparer.pid == pid
    assert rig.now >= 1000
    rig.preparer.close()


@pytest.mark.parametrize(("script", "after_s"), [(f"{ALIVE}; sleep 1000", 30.0), ("sleep 1000", 120.0)])
def test_a_process_that_does_not_answer_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, after_s: float
) -> None:
    rig = Rig(tmp_path, script, monkeypatch)
    rig.preparer.prepare(SCI, trusted=True)
    pid = rig.preparer.pid
    if ALIVE in script:
        assert rig.heard() == []
        assert rig.due() == []  # it is asked
    [failed] = rig.due()
    assert rig.now == after_s
    assert isinstance(failed, Failed)
    assert failed.record.retryable
    rig.preparer.prepare(SCI, trusted=True)
    assert rig.preparer.pid not in (None, pid)
    rig.end()


def test_a_process_is_not_asked_while_no_answer_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, f"{ALIVE}; sleep 1000", monkeypatch)
    rig.preparer.order(Release("key"))
    assert rig.heard() == []
    assert rig.preparer.next_deadline() == math.inf
    rig.now = 100_000.0
    rig.preparer.prepare(SCI, trusted=True)
    assert rig.preparer.read() == []
    assert rig.preparer.next_deadline() == 100_015.0
    rig.end()


def test_a_location_that_is_not_looked_up_in_time_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, f"{ALIVE}; while read order; do {ALIVE}; done", monkeypatch, limit_s=10.0)
    rig.preparer.locate(SCI)
    rig.preparer.locate(SCI)
    assert rig.heard() == []
    [located] = rig.due()
    assert isinstance(located, Located)
    assert located.record is not None
    assert "/opt/sci has not answered for 10 s: does its file system hang?" in located.record.message
    rig.preparer.close()


def test_a_location_is_looked_up_by_three_processes_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, "read order; echo >>orders", monkeypatch)
    monkeypatch.chdir(tmp_path)
    rig.preparer.locate(SCI)
    found: list[PreparationReport | Located] = []
    while not found:
        found = rig.heard()
    assert [isinstance(each, Located) and each.record is not None for each in found] == [True]
    assert len((tmp_path / "orders").read_text()) == 3
    rig.preparer.close()


@pytest.mark.parametrize("is_answered", [True, False])
def test_what_was_reported_before_the_process_ended_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    environment = Environment(type="venv", location="/opt/sci")
    progressed = Progressed(environment.key, "it is being prepared")
    failed = b'{"type":"Failed","key":"%s","record":{"code":"C","message":"own words","fault":"caller"}}'
    said = [msgspec.json.encode(progressed), *([failed % environment.key.encode()] if is_answered else [])]
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nread order\n" + "".join(f"echo '{line.decode()}'\n" for line in said))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    preparer = Preparer(lambda: PreparationSettings(environments=EnvironmentSettings(), cache=str(tmp_path)))
    preparer.prepare(environment, trusted=True)
    pid = preparer.pid
    assert pid is not None
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    reports = preparer.read()
    assert preparer.pid is None
    words = "own words" if is_answered else "the process that prepared it was killed"
    first, last = reports
    assert first == progressed
    assert words in str(last)
    preparer.close()
