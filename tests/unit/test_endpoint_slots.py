"""How a node is shared among workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.errors import ConfigurationError
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts.agent_manager import TaskOrder
from farcall_endpoint.host.slots import Affinity, Node, Sharing, Slot, extra_workers, partition
from farcall_endpoint.manager.core.limits import limited
from farcall_endpoint.manager.shell.worker_process import worker_environment

GB = 2**30
BIG = Node(cores=tuple(range(64)), memory_bytes=256 * GB, accelerators=("0", "1", "2", "3"))

nodes = st.builds(
    Node,
    cores=st.sets(st.integers(0, 255), min_size=1, max_size=96).map(lambda cores: tuple(sorted(cores))),
    memory_bytes=st.integers(1, 64 * GB),
    accelerators=st.lists(st.sampled_from("abcdefgh"), unique=True).map(tuple),
    cpus=st.none() | st.floats(0.1, 96),
)
sharings = st.builds(
    Sharing,
    max_workers=st.none() | st.integers(1, 128),
    cores_per_worker=st.none() | st.sampled_from([0.1, 0.25, 0.5, 1, 1.5, 2, 7]),
    memory_per_worker_bytes=st.none() | st.integers(1, 8 * GB),
    accelerators=st.just(()) | st.just(("a",)),
    cpu_affinity=st.sampled_from(["none", "block", "alternating"]),
)


@given(nodes, sharings)
def test_resources_are_assigned_once_and_within_the_node(node: Node, sharing: Sharing) -> None:
    try:
        slots = partition(node, sharing)
    except ConfigurationError:
        assert (
            (sharing.cores_per_worker or 0) > node.usable_cpus
            or (sharing.memory_per_worker_bytes or 0) > node.memory_bytes
            or (sharing.accelerators and not node.accelerators)
        )
        return
    assert slots
    assert [slot.index for slot in slots] == list(range(len(slots)))
    assert len(slots) <= (sharing.max_workers or len(node.cores) / (sharing.cores_per_worker or 1) + 1)
    assert len(slots) * (sharing.cores_per_worker or 0) <= node.usable_cpus + 1e-6
    assert len(slots) * (sharing.memory_per_worker_bytes or 0) <= node.memory_bytes
    bound = [core for slot in slots for core in slot.cores]
    assert len(set(bound)) == len(bound)
    assert set(bound) <= set(node.cores)
    assert all(bool(slot.cores) == (sharing.cpu_affinity != "none") for slot in slots)
    if sharing.cpu_affinity == "alternating":
        assert set(bound) == set(node.cores)
    if sharing.accelerators:
        given_out = [name for slot in slots for name in slot.accelerators]
        assert len(set(given_out)) == len(given_out) == len(slots)
        assert set(given_out) <= set(node.accelerators)


@pytest.mark.parametrize(
    ("sharing", "workers"),
    [
        (Sharing(), 64),
        (Sharing(max_workers=100), 100),
        (Sharing(max_workers=100, cpu_affinity="block"), 64),
        (Sharing(cores_per_worker=4), 16),
        (Sharing(cores_per_worker=0.5), 128),
        (Sharing(cores_per_worker=0.1), 640),
        (Sharing(cores_per_worker=3, max_workers=10), 10),
        (Sharing(memory_per_worker_bytes=10 * GB), 25),
        (Sharing(memory_per_worker_bytes=10 * GB, cores_per_worker=4), 16),
        (Sharing(accelerators=("0", "1", "2", "3")), 4),
        (Sharing(accelerators=("0", "1", "2", "3"), max_workers=2), 2),
    ],
)
def test_scarcest_resource_bounds_the_workers(sharing: Sharing, workers: int) -> None:
    assert len(partition(BIG, sharing)) == workers


def test_cpu_quota_counts_like_cores() -> None:
    node = Node(cores=(0, 1, 2, 3, 4, 5, 6, 7), memory_bytes=GB, cpus=2.5)
    assert len(partition(node, Sharing())) == 2
    assert len(partition(node, Sharing(cores_per_worker=0.5))) == 5
    assert len(partition(node, Sharing(max_workers=6))) == 6
    assert len(partition(Node(cores=(0, 1), memory_bytes=GB, cpus=0.5), Sharing())) == 1


@pytest.mark.parametrize(
    ("affinity", "cores"),
    [("none", [(), ()]), ("block", [(1, 3), (5, 7)]), ("alternating", [(1, 5, 9), (3, 7)])],
)
def test_cores_are_bound_as_parsl_does(affinity: Affinity, cores: list[tuple[int, ...]]) -> None:
    node = Node(cores=(1, 3, 5, 7, 9), memory_bytes=GB)
    slots = partition(node, Sharing(max_workers=2, cpu_affinity=affinity))
    assert [slot.cores for slot in slots] == cores
    assert [slot.threads for slot in slots] == [len(own) or None for own in cores]


def test_threads_follow_the_cores_of_an_unbound_worker() -> None:
    assert {slot.threads for slot in partition(BIG, Sharing(cores_per_worker=4))} == {4}
    assert {slot.threads for slot in partition(BIG, Sharing(cores_per_worker=0.5))} == {1}
    assert {slot.threads for slot in partition(BIG, Sharing(max_workers=4))} == {None}


@pytest.mark.parametrize(
    ("sharing", "words"),
    [
        (Sharing(cores_per_worker=65), ("65 cores", "cores_per_worker", "64")),
        (Sharing(memory_per_worker_bytes=300 * GB), ("300 GB", "mem_per_worker", "256 GB")),
    ],
)
def test_a_node_that_is_too_small_for_one_worker_is_an_error(sharing: Sharing, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        partition(BIG, sharing)
    assert all(word in str(caught.value) for word in words)


def test_missing_accelerators_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="available_accelerators"):
        partition(Node(cores=(0,), memory_bytes=GB), Sharing(accelerators=("0",)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_workers": 0},
        {"cores_per_worker": 0.0},
        {"memory_per_worker_bytes": -1},
        {"cpu_affinity": "scattered"},
        {"accelerators": ("0", "0")},
    ],
)
def test_impossible_requests_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Sharing(**wrong)  # type: ignore[arg-type]


@given(sharings)
def test_estimate_holds_for_a_sufficient_node(sharing: Sharing) -> None:
    node = Node(cores=tuple(range(32)), memory_bytes=2**50, accelerators=sharing.accelerators)
    workers = len(partition(node, sharing))
    assert sharing.guess(32) == workers or (sharing.cpu_affinity != "none" and workers == 32 < sharing.guess(32))


def test_command_line_options_are_complete() -> None:
    assert Sharing().options() == ["--cpu-affinity", "none"]
    told = Sharing(3, 0.5, GB, ("0,1", "2,3"), "block").options()
    assert told == [
        *("--cpu-affinity", "block", "--slots", "3", "--cores-per-worker", "0.5"),
        *("--mem-per-worker", str(GB), "--accelerators", "0,1", "2,3"),
    ]


# -- what a worker is shown --------------------------------------------------------------------------------------------


def test_unbound_worker_sees_all_of_its_manager() -> None:
    outer = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3", "FARCALL_WORKER_CORES": "7"}
    own = worker_environment(outer, worker_id=5, slot=Slot(1), amd=False)
    assert own == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "3",
        "FARCALL_WORKER_ID": "5",
        "FARCALL_WORKER_SLOT": "1",
    }


def test_worker_threads_equal_its_cores_unless_set_by_the_user() -> None:
    own = worker_environment({"MKL_NUM_THREADS": "9"}, worker_id=0, slot=Slot(0, cores=(2, 3), threads=2), amd=False)
    assert own["FARCALL_WORKER_CORES"] == "2,3"
    assert (own["OMP_NUM_THREADS"], own["OPENBLAS_NUM_THREADS"], own["NUMEXPR_NUM_THREADS"]) == ("2", "2", "2")
    assert own["MKL_NUM_THREADS"] == "9"


def test_a_worker_sees_only_its_accelerator() -> None:
    outer = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0,1,2,3"}
    slot = Slot(2, accelerators=("2",))
    own = worker_environment(outer, worker_id=0, slot=slot, amd=False)
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "FARCALL_WORKER_ACCELERATORS")
    assert [own[name] for name in names] == ["2"] * 4


def test_amd_visibility_is_set_once() -> None:
    outer = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0,1,2,3", "GPU_DEVICE_ORDINAL": "0,1,2,3"}
    own = worker_environment(outer, worker_id=0, slot=Slot(2, accelerators=("2",)), amd=True)
    assert own["ROCR_VISIBLE_DEVICES"] == "2"
    assert not outer.keys() & own.keys()


@pytest.mark.parametrize(
    ("wanted", "share", "limit"), [(None, 5, 5), (9, 5, 5), (3, 5, 3), (3, None, 3), (None, None, None)]
)
def test_task_cannot_use_more_than_its_worker_share(wanted: int | None, share: int | None, limit: int | None) -> None:
    order = limited(TaskOrder("t", 1, "h", 0, TaskOptions(walltime_s=2.5, memory_bytes=wanted)), share)
    assert (order.task_id, order.options) == ("t", TaskOptions(walltime_s=2.5, memory_bytes=limit))


@pytest.mark.parametrize(
    ("sharing", "by_default", "wanted"),
    [
        (Sharing(), 4, 7),
        (Sharing(cores_per_worker=0.5), 8, 7),
        (Sharing(memory_per_worker_bytes=2**30), 0, 7),
        (Sharing(accelerators=("0", "1")), 0, 0),
        (Sharing(cpu_affinity="block"), 0, 0),
        (Sharing(cpu_affinity="alternating"), 0, 0),
    ],
)
def test_workers_are_warm_beyond_the_slots_only_where_these_have_nothing_of_their_own(
    sharing: Sharing, by_default: int, wanted: int
) -> None:
    slots = partition(Node(cores=(0, 1, 2, 3), memory_bytes=16 * 2**30, accelerators=sharing.accelerators), sharing)
    assert extra_workers(slots, None) == by_default
    assert extra_workers(slots, 7) == wanted
    assert extra_workers(slots, 0) == 0
