"""Agent and manager load at their start what every endpoint needs, and nothing that only some do: it is memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

_OF_ENVIRONMENTS = ("farcall_endpoint.environments.launcher", "farcall_endpoint.worker.template")


@pytest.mark.parametrize(
    ("process", "unwanted"),
    [
        ("agent", {*_OF_ENVIRONMENTS, "rich", "pygments", "click"}),
        (
            "manager",
            {
                *_OF_ENVIRONMENTS,
                *("farcall_common.objects.store", "farcall_common.payload", "httpx", "landlockpy", "uv"),
                *("difflib", "email", "importlib.metadata", "tomllib"),
            },
        ),
    ],
)
def test_a_process_loads_what_every_endpoint_needs(process: str, unwanted: set[str]) -> None:
    code = f"import sys, farcall_endpoint.{process}.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert f"farcall_endpoint.{process}.core.{process}" in loaded
    assert unwanted & set(loaded) == set()
