"""Versions and aliases of a function, through the whole system."""

from __future__ import annotations

from farcall import Client, Executor
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S


def test_a_call_runs_the_named_version(client: Client, endpoint: LocalEndpoint) -> None:
    function_id = client.register_source_code("def grow(x):\n    return x + 1\n", "grow")
    with Executor(endpoint.endpoint_id, client=client) as executor:
        before = executor.submit_to_registered_function(function_id, [1])
        assert before.result(WAIT_S) == 2

        def grow(x: int) -> int:
            return x * 100

        assert client.update_function(function_id, grow) == 2
        client.set_alias("grow-as-before", function_id, version=1)
        names = (function_id, f"{function_id}@1", f"{function_id}@2", "grow-as-before")
        futures = [executor.submit_to_registered_function(name, [1]) for name in names]
        assert [future.result(WAIT_S) for future in futures] == [100, 2, 100, 2]
    versions = {task["task_id"]: task["function_version"] for task in client.get_tasks(limit=50)}
    assert [versions[future.task_id] for future in (before, *futures)] == [1, 2, 1, 2, 1]
    client.delete_alias("grow-as-before")
    [group] = [each for each in client.get_task_groups() if each["task_group_id"] == executor.task_group_id]
    assert group["states"] == {"success": 5}
