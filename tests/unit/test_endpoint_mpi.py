"""Nodes that the workers of a block share, and how ranks are started on them."""

from __future__ import annotations

import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from farcall_endpoint.worker.mpi import Nodes, Ranks, RanksImpossible, nodes_of_block, variables
from tests.waiting import WAIT_S


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ((2, 4, None), Ranks(2, 4)),
        ((2, None, 8), Ranks(2, 4)),
        ((None, 4, 8), Ranks(2, 4)),
        ((2, 4, 8), Ranks(2, 4)),
        ((3, None, None), Ranks(3, 1)),
        ((None, None, 6), Ranks(1, 6)),
        ((None, 5, None), Ranks(1, 5)),
    ],
)
def test_third_number_is_derived_from_two(asked: tuple[int | None, int | None, int | None], meant: Ranks) -> None:
    assert Ranks.of(*asked) == meant


@pytest.mark.parametrize("asked", [(2, 4, 9), (2, None, 7), (None, 4, 9)])
def test_contradicting_numbers_are_refused(asked: tuple[int | None, int | None, int | None]) -> None:
    with pytest.raises(RanksImpossible) as refused:
        Ranks.of(*asked)
    assert refused.value.record.code == "LIMIT_INVALID"


def test_launchers_get_hosts_and_rank_counts() -> None:
    ranks, nodes = Ranks(2, 4), ["n1", "n2"]
    told = {name: variables(name, ranks, nodes)["PARSL_MPI_PREFIX"] for name in ("srun", "mpiexec", "aprun")}
    assert told == {
        "srun": "srun --ntasks 8 --ntasks-per-node 4 --nodelist n1,n2 --nodes 2",
        "mpiexec": "mpiexec -n 8 -ppn 4 -hosts n1,n2",
        "aprun": "aprun -n 8 -N 4 -node-list n1,n2",
    }
    given = variables("/opt/mpich/bin/mpiexec", ranks, nodes)
    assert shlex.split(given["PARSL_MPIEXEC_PREFIX"])[0] == "/opt/mpich/bin/mpiexec"
    assert (given["PARSL_NUM_NODES"], given["PARSL_NUM_RANKS"], given["PARSL_RANKS_PER_NODE"]) == ("2", "8", "4")
    with pytest.raises(RanksImpossible, match="FARCALL_MPI_LAUNCHER"):
        variables("jsrun", ranks, nodes)


def test_nodes_come_from_the_scheduler(tmp_path: Path) -> None:
    listed = tmp_path / "nodes"
    listed.write_text("n1\nn1\nn2 slots=4\n\n")
    assert nodes_of_block({"PBS_NODEFILE": str(listed)}) == ["n1", "n2"]
    assert nodes_of_block({}) == ["localhost"]


HOLDER = """
import pathlib, sys
from farcall_endpoint.worker.mpi import Nodes

with Nodes(sys.argv[3:], pathlib.Path(sys.argv[1])).taken(int(sys.argv[2])) as taken:
    print(*taken, flush=True)
    sys.stdin.readline()
print("given back", flush=True)
sys.stdin.readline()
"""


class Holder:
    """A worker that takes nodes until it receives the order to release them."""

    def __init__(self, lock_file: Path, count: int, names: list[str]) -> None:
        command = [sys.executable, "-c", HOLDER, str(lock_file), str(count), *names]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def says_something(self, within_s: float) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], within_s)[0])

    def line(self) -> str:
        assert self.says_something(WAIT_S)
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def give_back(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def kill(self) -> None:
        with self.process:
            self.process.kill()


def test_nodes_are_exclusive_and_freed_when_a_worker_dies(tmp_path: Path) -> None:
    names, lock_file = ["n1", "n2", "n3"], tmp_path / "lock"
    holders: list[Holder] = []
    try:
        holders.append(Holder(lock_file, 2, names))
        first = holders[0].line().split()
        holders.append(Holder(lock_file, 1, names))
        assert sorted(first + holders[1].line().split()) == names
        holders.append(Holder(lock_file, 3, names))
        assert not holders[2].says_something(0.3)  # all are in use
        holders[0].give_back()
        assert holders[0].line() == "given back"
        assert not holders[2].says_something(0.3)  # one still is
        holders[1].kill()
        assert holders[2].line().split() == names
    finally:
        for holder in holders:
            holder.kill()


def test_request_for_too_many_nodes_fails_at_once(tmp_path: Path) -> None:
    nodes = Nodes(["localhost"], tmp_path / "lock")
    with pytest.raises(RanksImpossible, match="3 nodes, and a block of this endpoint has 1"), nodes.taken(3):
        raise AssertionError
