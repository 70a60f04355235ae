"""Programs of several processes on the nodes of a block, started by something that stands for ``mpiexec``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall import MPIFunction
from farcall._functions import registration
from farcall_common.wire import TaskState
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.waiting import wait_until

LAUNCHER = f"""#!{sys.executable}
import os, subprocess, sys

options = dict(zip(sys.argv[1:7:2], sys.argv[2:7:2]))
count, per_node, hosts = int(options["-n"]), int(options["-ppn"]), options["-hosts"].split(",")
ranks = [
    subprocess.Popen(sys.argv[7:], env={{**os.environ, "RANK": str(rank), "RANK_HOST": hosts[rank // per_node]}})
    for rank in range(count)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    home = tmp_path_factory.mktemp("home")
    launcher = home / "mpiexec"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    nodes = home / "nodes"
    nodes.write_text("n1\nn2\nn3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARCALL_MPI_LAUNCHER", str(launcher))
        patch.setenv("PBS_NODEFILE", str(nodes))
        with running_endpoint(home / "farcall", workers=3) as endpoint:
            wait_until(lambda: endpoint.directory.read_status().get("workers") == 3)
            yield endpoint


def start(endpoint: EndpointProcess, command: str, **asked: Any) -> str:
    body = registration(MPIFunction(command, return_dict=True))["function_code"].encode()
    [task_id] = endpoint.cloud.submit_raw(body, [endpoint.cloud.serializer.pack_call()], **asked)
    return task_id


def outcome(endpoint: EndpointProcess, task_id: str) -> dict[str, Any]:
    end = endpoint.cloud.end(task_id)
    assert end.spec.state is TaskState.SUCCESS, end.spec.error
    assert isinstance(end.value, dict)
    return end.value


def test_ranks_run_on_the_nodes_that_the_task_got(endpoint: EndpointProcess) -> None:
    task_id = start(endpoint, "sh -c 'echo $RANK on $RANK_HOST of $PARSL_NUM_RANKS'", num_nodes=2, ranks_per_node=2)
    ran = outcome(endpoint, task_id)
    assert ran["returncode"] == 0, ran
    said = [line.split() for line in ran["stdout"].splitlines()]
    assert sorted(rank for rank, *_ in said) == ["0", "1", "2", "3"]
    hosts = {host: sum(each[2] == host for each in said) for host in ("n1", "n2", "n3")}
    assert sorted(hosts.values()) == [0, 2, 2]
    assert {each[4] for each in said} == {"4"}


def test_no_two_programs_have_a_node_together(endpoint: EndpointProcess, tmp_path: Path) -> None:
    # mkdir fails for who comes while another is on the node.
    command = f"sh -c 'mkdir {tmp_path}/$RANK_HOST && sleep 0.3 && rmdir {tmp_path}/$RANK_HOST'"
    tasks = [start(endpoint, command, num_nodes=count) for count in (2, 2, 1, 3)]
    assert [outcome(endpoint, task_id)["stderr"] for task_id in tasks] == [""] * 4


def test_a_program_that_cannot_start_reports_the_reason(endpoint: EndpointProcess) -> None:
    for asked, code, words in (
        ({"num_nodes": 4}, "LIMIT_INVALID", "a block of this endpoint has 3"),
        ({"num_nodes": 2, "ranks_per_node": 2, "num_ranks": 5}, "LIMIT_INVALID", "5 ranks cannot be"),
        ({"resource_specification": {"num_nodes": 0}}, "LIMIT_INVALID", "num_nodes as 0"),
        ({}, "TASK_FAILED", "num_nodes"),
    ):
        end = endpoint.cloud.end(start(endpoint, "true", **asked))
        assert end.error["code"] == code, end.error
        assert words in end.error["message"]
