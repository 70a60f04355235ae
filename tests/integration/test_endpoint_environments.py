"""Tasks in environments, on a real agent, manager and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.environments import Environment
from tests.support import images
from tests.support.endpoint import EndpointProcess, running_endpoint, wait_gone
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path_factory.mktemp("home")) as endpoint:
        yield endpoint


def tree(name: str = images.DEBIAN) -> Environment:
    return Environment(type="bubblewrap", location=str(images.image(name)), name="sci")


def python() -> tuple[str, bool]:
    import os
    import sys

    return sys.executable, os.path.exists("/usr/bin/apt-get")


def test_a_task_runs_in_its_environment(endpoint: EndpointProcess) -> None:
    cloud = endpoint.cloud
    ids = [cloud.submit(python, environment=tree()) for _ in range(4)] + [cloud.submit(python)]
    ends = cloud.ends(ids)
    assert [end.error for end in ends] == [None] * 5
    values = [end.value for end in ends]
    assert values[:4] == [("/usr/bin/python3.11", True)] * 4
    assert values[4][0] == sys.executable


def test_a_task_whose_environment_fails_is_told_why(endpoint: EndpointProcess) -> None:
    cloud = endpoint.cloud
    end = cloud.end(cloud.submit(python, environment=tree(images.WITHOUT_PYTHON)))
    assert end.error["code"] == "ENVIRONMENT_WITHOUT_PYTHON"
    assert "sci" in end.error["message"]
