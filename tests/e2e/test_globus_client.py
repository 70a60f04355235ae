"""Globus Compute's own client, from the package index and unmodified, against our API and one of our endpoints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint

PYTHON = os.environ.get("FARCALL_GLOBUS_PYTHON")
PROGRAM = Path(__file__).parent / "data" / "globus_program.py"


@pytest.mark.skipif(PYTHON is None, reason="FARCALL_GLOBUS_PYTHON names no Python with globus-compute-sdk")
def test_programs_of_globus_compute_run_unmodified(cloud: Deployment, endpoint: LocalEndpoint) -> None:
    assert PYTHON is not None
    variables = cloud.environment("ada")
    command = [PYTHON, str(PROGRAM), variables["FARCALL_API_URL"], variables["FARCALL_TOKEN"], endpoint.endpoint_id]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
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
        "json": [1, 2],
        "all_strategies": "ab",
    }
