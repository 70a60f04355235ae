"""Trace context of a task: its submitter's span is the parent, with OpenTelemetry and without."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest
from opentelemetry import trace

from farcall_endpoint.worker.environment import Variables, trace_context
from tests.waiting import WAIT_S

SPAN: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def current() -> tuple[int, int]:
    context = trace.get_current_span().get_span_context()
    return context.trace_id, context.span_id


@pytest.mark.parametrize("former", [None, "of the program that started the endpoint"])
def test_the_span_is_current_for_the_task_only(former: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if former is None:
        monkeypatch.delenv("TRACEPARENT", raising=False)
    else:
        monkeypatch.setenv("TRACEPARENT", former)
    seen = []

    def task() -> None:
        with trace_context(SPAN, Variables()):
            seen.append((*current(), os.environ["TRACEPARENT"]))
            raise ValueError("of the task")

    with pytest.raises(ValueError, match="of the task"):
        task()
    assert seen == [(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, SPAN)]
    assert current() == (0, 0)
    assert os.environ.get("TRACEPARENT") == former


@pytest.mark.parametrize("broken", ["", "nonsense", SPAN.replace("4", "x"), "00-" + 32 * "0" + "-" + 16 * "0" + "-01"])
def test_an_invalid_span_is_ignored(broken: str) -> None:
    with trace_context(broken, Variables()):
        assert current() == (0, 0)


def test_without_opentelemetry_the_variable_is_set() -> None:
    program = f"""
import os, sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from farcall_endpoint.worker.environment import Variables, trace_context
with trace_context({SPAN!r}, Variables()):
    assert os.environ["TRACEPARENT"] == {SPAN!r}
assert "TRACEPARENT" not in os.environ
"""
    environ = {name: value for name, value in os.environ.items() if name != "TRACEPARENT"}
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=WAIT_S, env=environ)


def test_the_number_of_the_attempt_is_set_if_the_variable_has_another_value() -> None:
    variables = Variables()
    for attempt, changes in [(1, None), (1, None), (2, None), (2, "7"), (2, ""), (3, "7")]:
        if changes is not None:
            os.environ.pop("FARCALL_ATTEMPT") if not changes else os.environ.update(FARCALL_ATTEMPT=changes)
        variables.set_attempt(attempt)
        seen = subprocess.run(["printenv", "FARCALL_ATTEMPT"], capture_output=True, text=True, check=True).stdout
        assert os.environ["FARCALL_ATTEMPT"] == seen.strip() == str(attempt)
    del os.environ["FARCALL_ATTEMPT"]
