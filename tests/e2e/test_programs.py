"""Programs as users of other SDKs and of the standard library write them, on a real endpoint."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import farcall
from farcall import ShellFunction, ShellResult
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S


def cube(number: int) -> int:
    return number**3


def test_a_command_line_on_an_endpoint(executor: farcall.Executor) -> None:
    future = executor.submit(ShellFunction("echo Hello, {who}; echo aside >&2; exit 3", name="greet"), who="world")
    result = future.result(WAIT_S)
    assert type(result) is ShellResult
    assert (result.stdout, result.stderr, result.returncode) == ("Hello, world\n", "aside\n", 3)
    slow = executor.submit(ShellFunction("echo begun; sleep 600", walltime=0.5, return_dict=True))
    assert isinstance(ended := slow.result(WAIT_S), dict)
    assert ended["returncode"] == 124


def test_arrays_are_sent_as_bytes_and_printed_output_is_kept(executor: farcall.Executor) -> None:
    def double(array: Any) -> Any:
        print("doubling", len(array))
        array *= 2
        return array

    array = np.arange(1_200_000, dtype=np.float64)
    future = executor.options(keep_output=True).submit(double, array)
    doubled = future.result(WAIT_S)
    assert np.array_equal(doubled, 2 * array)
    doubled[0] = 1.0  # it is ours
    assert (future.stdout, future.stderr) == ("doubling 1200000\n", None)
    again = executor.client.get_task(future.task_id)
    assert np.array_equal(again.result(), 2 * array)
    assert again.details["stdout_tail"] == future.stdout


def test_source_text_and_the_machine_of_a_worker(executor: farcall.Executor) -> None:
    function_id = executor.register_source_code("import sys\ndef f(x):\n    return sys.version_info[:2], x\n", "f")
    version, value = executor.submit_to_registered_function(function_id, (7,)).result(WAIT_S)
    assert (tuple(version), value) == (sys.version_info[:2], 7)
    assert sys.version.split()[0] in executor.get_worker_hardware_details()


def test_task_groups_are_followed_and_resumed(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    with farcall.Executor(endpoint.endpoint_id, client) as first:
        assert list(first.map(cube, range(50), chunksize=7, timeout=WAIT_S)) == [n**3 for n in range(50)]
        first.task_group_id = group_id = "5eed0000-0000-4000-8000-000000000001"
        futures = [first.options(walltime_s=60).submit(cube, n) for n in range(5)]
        assert [future.result(WAIT_S) for future in futures] == [n**3 for n in range(5)]
    with farcall.Executor(endpoint.endpoint_id, client) as second:
        again = second.reload_tasks(group_id)
        assert [future.task_id for future in again] == [future.task_id for future in futures]
        assert [future.result(WAIT_S) for future in again] == [n**3 for n in range(5)]


def test_a_memoized_call_runs_once(client: farcall.Client, endpoint: LocalEndpoint, tmp_path: Path) -> None:
    calls = str(tmp_path / "calls")

    def note(path: str, *, value: int, unit: str) -> str:
        with Path(path).open("a") as file:
            file.write("x")
        return f"{value} {unit}"

    with farcall.Executor(endpoint.endpoint_id, client, memoize=True) as executor:
        assert executor.submit(note, calls, value=5, unit="m").result(WAIT_S) == "5 m"
        again = [executor.submit(note, calls, unit="m", value=5) for _ in range(20)]
        assert {future.result(WAIT_S) for future in again} == {"5 m"}
        assert all("memoized_from" in future.details for future in again)
        assert Path(calls).read_text() == "x"
        assert executor.options(memoize=False).submit(note, calls, value=5, unit="m").result(WAIT_S) == "5 m"
        assert Path(calls).read_text() == "xx"


def test_futures_are_arguments_of_other_calls(executor: farcall.Executor) -> None:
    small = executor.submit(cube, 2)
    big = executor.submit(cube, small)
    assert executor.submit(sum, [small, big]).result(WAIT_S) == 8 + 512


def test_a_waiting_task_has_a_reason(client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint]) -> None:
    endpoint = own_endpoint("sleepy")
    with farcall.Executor(endpoint.endpoint_id, client) as executor:
        assert executor.submit(cube, 1).result(WAIT_S) == 1
        endpoint.stop()
        first, second = executor.submit(cube, 2), executor.submit(cube, 3)
        deadline = time.monotonic() + WAIT_S
        while (why := second.why()).reason != "ENDPOINT_OFFLINE":
            assert time.monotonic() < deadline, why
            time.sleep(0.05)
        assert "Endpoint sleepy has been offline since" in str(why)
        assert (why.endpoint_online, why.queue_position) == (False, 1)
        endpoint.start()
        assert [first.result(WAIT_S), second.result(WAIT_S)] == [8, 27]
        assert client.why(second.task_id).reason == "ENDED"


def test_coroutines_await_tasks(executor: farcall.Executor) -> None:
    async def gather() -> list[int]:
        return await asyncio.gather(*(executor.submit(cube, n) for n in range(4)))

    assert asyncio.run(gather()) == [0, 1, 8, 27]
