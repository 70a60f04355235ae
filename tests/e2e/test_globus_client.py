"""Globus Compute's own client, from the package index and unmodified, against our API and one of our endpoints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S

PYTHON = os.environ.get("FARCALL_GLOBUS_PYTHON")
DATA = Path(__file__).parent / "data"
pytestmark = pytest.mark.skipif(PYTHON is None, reason="FARCALL_GLOBUS_PYTHON names no Python with globus-compute-sdk")


def seen_by(program: str, cloud: Deployment, subject_id: str) -> Any:
    """The output of a program of Globus Compute's SDK about an endpoint or a task of Ada's."""
    assert PYTHON is not None
    variables = cloud.environment("ada")
    command = [PYTHON, str(DATA / program), variables["FARCALL_API_URL"], variables["FARCALL_TOKEN"], subject_id]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def large() -> bytes:
    return bytes(100_000)


def test_programs_of_globus_compute_run_unmodified(cloud: Deployment, endpoint: LocalEndpoint) -> None:
    seen = seen_by("globus_program.py", cloud, endpoint.endpoint_id)
    failure, unknown = seen.pop("failure"), seen.pop("unknown_function")
    assert "KeyError: 'not here'" in failure
    assert "raise KeyError" in failure or "in fail" in failure
    assert unknown[0] == 404
    [difference] = set(seen.pop("warnings"))  # in dill, which Globus pins; each client says so once
    assert f"Workers: Python {platform.python_version()}/Dill {importlib.metadata.version('dill')}" in difference
    assert endpoint.endpoint_id in difference
    assert seen == {
        "status": "online",
        "metadata": True,
        "endpoints": True,
        "function": "add",
        "run": 7,
        "batch": list(range(1, 21)),
        "batch_result": list(range(1, 21)),
        "pair": True,
        "large": 100_000,
        "json": [1, 2],
        "all_strategies": "ab",
    }


def test_the_globus_executor_is_refused_at_once_with_a_hint(cloud: Deployment, endpoint: LocalEndpoint) -> None:
    assert "use farcall.Executor" in seen_by("globus_executor.py", cloud, endpoint.endpoint_id)["error"]


def test_results_of_our_sdk_are_read_or_refused_with_a_reason(
    cloud: Deployment, endpoint: LocalEndpoint, client: farcall.Client
) -> None:
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        read = executor.submit(sum, [1, 2])
        unread: list[farcall.ComputeFuture[Any]] = [executor.submit(large), executor.submit(divmod, 7, 2)]
        dill = executor.options(result_serializers=["DillDataBase64"]).submit(divmod, 7, 2)
        assert [each.result(WAIT_S) for each in (read, *unread, dill)] == [3, bytes(100_000), (3, 1), (3, 1)]
    assert seen_by("globus_reader.py", cloud, read.task_id)["result"] == 3
    assert seen_by("globus_reader.py", cloud, dill.task_id)["result"] == [3, 1]
    for each in unread:
        assert "result_serializers" in seen_by("globus_reader.py", cloud, each.task_id)["error"]
