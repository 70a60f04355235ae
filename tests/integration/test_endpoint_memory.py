"""The agent's memory for large arguments and results has a bound, however many there are. Counted by the kernel, as the
most that the process ever had."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.waiting import wait_until

VALUE_BYTES = 4_000_000
TASKS = 60
MOST_BYTES = 120_000_000
"""Half of what all values have: ``transfer_memory`` for each direction, a value more, and copies of some."""


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path, start=False) as endpoint:
        file = endpoint.directory.config_file
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "transfer_memory": 16}))
        endpoint.start()
        wait_until(lambda: endpoint.directory.read_status().get("workers") == 2)
        yield endpoint


def most_bytes(endpoint: EndpointProcess) -> int:
    assert endpoint.agent is not None
    status = Path(f"/proc/{endpoint.agent.pid}/status").read_text()
    [found] = re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found) * 1024


def forgotten(endpoint: EndpointProcess) -> bool:
    return not list(endpoint.directory.bodies_directory.iterdir())


def make(number: int, size_bytes: int) -> bytes:
    return number.to_bytes(8, "big") * (size_bytes // 8)


def first_number(data: bytes) -> int:
    return int.from_bytes(data[:8], "big")


def check(endpoint: EndpointProcess, submit: Callable[[], list[str]], value: Callable[[int], object]) -> None:
    cloud = endpoint.cloud
    at_rest = most_bytes(endpoint)
    task_ids = submit()
    assert [end.value for end in cloud.ends(task_ids)] == [value(number) for number in range(TASKS)]
    assert TASKS * VALUE_BYTES >= 2 * MOST_BYTES
    assert most_bytes(endpoint) - at_rest < MOST_BYTES
    wait_until(lambda: forgotten(endpoint))


def test_many_large_results(endpoint: EndpointProcess) -> None:
    calls = [(number, VALUE_BYTES) for number in range(TASKS)]
    check(endpoint, lambda: endpoint.cloud.submit_many(make, calls), lambda number: make(number, VALUE_BYTES))


def test_many_large_arguments(endpoint: EndpointProcess) -> None:
    noise = os.urandom(VALUE_BYTES)
    calls = [(number.to_bytes(8, "big") + noise,) for number in range(TASKS)]
    check(endpoint, lambda: endpoint.cloud.submit_many(first_number, calls), lambda number: number)
