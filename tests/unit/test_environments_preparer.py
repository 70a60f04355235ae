"""The launcher's conversation with the process of preparations."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.environments.preparation import PreparationReport, PreparationSettings, Progressed
from farcall_endpoint.environments.preparer import Preparer
from farcall_endpoint.environments.settings import EnvironmentSettings


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
    reports: list[PreparationReport] = preparer.read()
    assert preparer.pid is None
    words = "own words" if is_answered else "the process that prepared it was killed"
    first, last = reports
    assert first == progressed
    assert words in str(last)
    preparer.close()
