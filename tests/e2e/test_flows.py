"""Globus Flows' interface for action providers: the published client and models, unmodified, against our API and one of
our endpoints."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S

PYTHON = os.environ.get("FARCALL_FLOWS_PYTHON")
PROGRAM = Path(__file__).parent / "data" / "flows_program.py"


def add(x: Any, y: Any = 0) -> Any:
    return x + y


def fail() -> None:
    raise KeyError("not here")


def unreadable() -> bytes:
    return b"\0"


@pytest.mark.skipif(PYTHON is None, reason="FARCALL_FLOWS_PYTHON names no Python with globus-automate-client")
def test_the_published_client_runs_actions(
    cloud: Deployment, endpoint: LocalEndpoint, client: farcall.Client, other_client: farcall.Client
) -> None:
    assert PYTHON is not None
    idle = client.register_endpoint("never started")["endpoint_id"]
    functions = [client.register_function(each) for each in (add, fail, unreadable)]
    grace_id = other_client.whoami()["identity_id"]
    arguments = [cloud.api_url, cloud.tokens["ada"], cloud.tokens["grace"], grace_id, endpoint.endpoint_id, idle]

    ended = subprocess.run(
        [PYTHON, str(PROGRAM), *arguments, *functions], capture_output=True, text=True, check=False, timeout=WAIT_S
    )

    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert seen.pop("scope") is not None  # empty without Globus Auth
    assert seen == {
        "title": "Farcall",
        "started": [202, "Beam 7 <b>"],
        "result": ["SUCCEEDED", [3, [1, 2]], "2 of 2 tasks have ended"],
        "same outputs": True,
        "repeated": True,
        "reused": [409, "ActionConflict"],
        "of another user": [3, [1, 2]],
        "not to manage": [[404, "ActionNotFound"], [404, "ActionNotFound"]],
        "log": [3, True, False, 2],
        "older form": ["ab", 7],
        "failed": ["FAILED", "TASK_FAILED", True],
        "unreadable": [
            "SUCCEEDED",
            "The result is not JSON: read it with farcall.Client().get_result.",
            [None],
        ],
        "waiting": ["ACTIVE", "Endpoint never started was never online"],
        "foreign": [[404, "ActionNotFound"], [404, "ActionNotFound"]],
        "release too early": [409, "ActionConflict"],
        "cancelled": ["FAILED", "TASK_CANCELLED", "Cancelled"],
        "released": "FAILED",
        "gone": [404, "ActionNotFound"],
        "unknown": [[404, "ActionNotFound"], [404, "ActionNotFound"]],
        "malformed": [[422, "RequestValidationError"], [422, "RequestValidationError"], [404, "BadActionRequest"]],
    }
    client.delete_endpoint(idle)
