"""Command line: a user's commands in order, each with what it needs from the one before."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.support.analytics_data import big_data
from tests.waiting import WAIT_S

SCRIPT = """
def invert(n):
    print("looking at", n)
    return 1 / n
"""

Farcall = Callable[..., str]


@pytest.fixture
def farcall(cloud: Deployment, endpoint: LocalEndpoint, tmp_path: Path) -> Farcall:
    """A user who is logged in and has an endpoint."""
    (tmp_path / "calls.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    environ["FARCALL_HOME"] = str(tmp_path / "home")

    def farcall(*arguments: str, code: int = 0, given: str | None = None) -> str:
        program = [sys.executable, "-c", "from farcall.cli import main; main()", *arguments]
        ended = subprocess.run(
            program, env=environ, cwd=tmp_path, input=given, capture_output=True, text=True, timeout=WAIT_S
        )
        assert ended.returncode == code, ended.stderr
        return ended.stdout

    farcall("login", "--api-url", cloud.api_url, given=cloud.tokens["ada"])
    farcall("config", "set", "endpoint", endpoint.endpoint_id)
    return farcall


@pytest.mark.smoke
def test_command_line_workflow(farcall: Farcall, endpoint: LocalEndpoint) -> None:
    assert json.loads(farcall("whoami", "--json"))["identity_id"]
    assert farcall("run", "calls.py:invert", "4") == "0.25\n"
    assert farcall("map", "calls.py:invert", "1", "2", "0", "4", code=1) == "1.0\n0.5\nnull\n0.25\n"

    (failed,) = json.loads(farcall("tasks", "ls", "--state", "failed", "--limit", "1", "--json"))
    assert farcall("tasks", "logs", failed["task_id"]) == "looking at 0\n"
    assert farcall("tasks", "why", failed["task_id"]).startswith("The task ended")
    again = json.loads(farcall("tasks", "retry", failed["task_id"], "--json"))
    fresh = again[failed["task_id"]]
    farcall("groups", "wait", failed["task_group_id"], code=1)
    assert json.loads(farcall("tasks", "show", fresh, "--json"))["error"]["exception_type"] == "ZeroDivisionError"

    lines = farcall("groups", "wait", failed["task_group_id"], "--results", code=1).splitlines()
    assert lines == ["1.0", "0.5", "null", "0.25", "null"]

    exported = [json.loads(line) for line in farcall("tasks", "export", "--since", "1h").splitlines()]
    assert {fresh, failed["task_id"]} <= {task["task_id"] for task in exported}
    heading, *rows = csv.reader(farcall("audit", "export", "--since", "1h", "--csv").splitlines())
    assert {"tasks.submit", "task.retry"} <= {row[heading.index("action")] for row in rows}
    farcall("tasks", "ls", "--state", "dead-lettered", "--endpoint", endpoint.endpoint_id)

    function_id = farcall("functions", "register", "calls.py:invert").strip()
    assert function_id in farcall("functions", "search", "invert")
    farcall("functions", "rm", function_id)
    farcall("functions", "show", function_id, code=66)
    assert "online" in farcall("endpoints", "status", endpoint.endpoint_id)
    farcall("logout")
    farcall("tasks", "ls", code=78)


def test_storages_are_measured_and_queries_explained(farcall: Farcall, endpoint: LocalEndpoint, tmp_path: Path) -> None:
    big_data(tmp_path / "big")
    storage = ("--storage", f"file://{tmp_path}/blocks")
    (tmp_path / "query.sql").write_text("select dest_url, sum(ad_revenue) as revenue from visits group by dest_url")
    tables = ("--table", f"visits={tmp_path}/big/visits/*.parquet")
    before = farcall("analytics", "explain", "query.sql", *tables, *storage)
    assert before.splitlines()[1].startswith("* ")
    assert "Nothing was measured here" in before
    measured = farcall("analytics", "profile", endpoint.name, *storage)
    assert [line.split("\t")[0] for line in measured.splitlines()[1:]] == ["shared files", "memory of nodes"]
    assert farcall("analytics", "profile", endpoint.name, *storage) == measured, "it is kept"
    after = farcall(
        "analytics", "explain", "-", "-e", endpoint.name, *tables, *storage, given="select 1 as a from visits"
    )
    assert "measured" not in after
    late = farcall("analytics", "explain", "query.sql", *tables, *storage, "--deadline", "1e-6", code=78)
    assert late == ""
    farcall("analytics", "explain", "query.sql", "--table", "visits", *storage, code=78)
    farcall("analytics", "explain", "no.sql", *tables, *storage, code=78)
