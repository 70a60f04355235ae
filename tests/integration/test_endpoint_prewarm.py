"""``farcall-endpoint prewarm`` against a running endpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farcall_common.environments import Environment
from farcall_common.errors import Unavailable
from farcall_common.exit_codes import exit_code_of
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.support.endpoint.endpoint_command import EndpointCommand
from tests.waiting import wait_until

HERE = f"venv:{sys.prefix}"
ENVIRONMENT = Environment(type="venv", location=sys.prefix)


def prewarm(endpoint: EndpointProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return EndpointCommand(endpoint.environment, endpoint.home).run("prewarm", "test", *arguments)


def state(endpoint: EndpointProcess) -> tuple[int, int]:
    """Warm and busy workers of the environment, and those that start."""
    rows = [row for row in endpoint.directory.read_status().get("environments", ()) if row["environment"] == HERE]
    return sum(row["warm"] + row["busy"] for row in rows), sum(row["starting"] for row in rows)


def answer() -> int:
    return 42


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment")
def test_workers_are_warm_when_the_command_ends_and_again_after_a_restart(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, workers=2) as endpoint:
        done = prewarm(endpoint, HERE, "--count", "1", "--timeout", "60")
        assert done.returncode == 0, done.stderr
        assert "1 warm" in done.stdout
        assert state(endpoint)[0] == 1
        task = endpoint.cloud.submit(answer, environment=ENVIRONMENT)
        assert endpoint.cloud.end(task).value == 42
        endpoint.stop()
        endpoint.start()
        wait_until(lambda: state(endpoint)[0] == 1)
        again = prewarm(endpoint, ENVIRONMENT.key, "--count", "9", "--timeout", "60")
        assert again.returncode == 0, again.stderr
        assert "2 warm: the nodes have no slots for 9" in " ".join(again.stdout.split())
        ended = prewarm(endpoint, ENVIRONMENT.key, "--count", "0")
        assert ended.returncode == 0, ended.stderr
        assert not endpoint.directory.read_prewarms()


def test_what_cannot_be_warmed_is_refused_with_the_reason(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, workers=1) as endpoint:
        unknown = prewarm(endpoint, "sci")
        assert unknown.returncode != 0
        assert "knows no environment 'sci'" in " ".join(unknown.stderr.split())
        missing = prewarm(endpoint, f"venv:{tmp_path}/none", "--timeout", "60")
        assert missing.returncode == exit_code_of(Unavailable), missing.stderr
        assert "cannot be started on node" in " ".join(missing.stderr.split())
        elsewhere = prewarm(endpoint, HERE, "--node", "elsewhere", "--timeout", "60")
        assert "there is no node elsewhere" in " ".join(elsewhere.stderr.split())
