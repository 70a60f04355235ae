"""What a node has, read from files of the kinds that kernels and container runtimes make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from farcall_endpoint.host.node import discover_node, has_amd_accelerators, visible_accelerators
from farcall_endpoint.host.slots import Node

GB = 2**30
V2_MOUNT = "30 23 0:26 {mounted} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 {mounted} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime shared:11 master:3 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def machine(root: Path, files: Mapping[str, str]) -> Path:
    """A machine with 64 GB whose other files are these."""
    for name, text in {"proc/meminfo": "MemTotal:       67108864 kB\nMemFree:        1 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(root: Path, environ: Mapping[str, str] | None = None) -> Node:
    return discover_node(environ=environ or {}, cores={3, 1, 2, 0}, root=root)


def test_this_node_has_cores_and_memory() -> None:
    node = discover_node(environ={})
    assert node.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert 2**26 < node.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert node.usable_cpus <= len(node.cores)


def test_node_without_cgroups_uses_the_machine_values(tmp_path: Path) -> None:
    assert found(machine(tmp_path, {})) == Node(cores=(0, 1, 2, 3), memory_bytes=64 * GB)


def test_cgroup_v2_limits_apply_at_each_level(tmp_path: Path) -> None:
    node = found(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "0::/user.slice/job_1/step\n",
                "proc/self/mountinfo": V2_MOUNT.format(mounted="/"),
                "sys/fs/cgroup/user.slice/job_1/step/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/job_1/step/cpu.max": "max 100000\n",
                "sys/fs/cgroup/user.slice/job_1/memory.max": f"{8 * GB}\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{16 * GB}\n",
                "sys/fs/cgroup/user.slice/cpu.max": "250000 100000\n",
            },
        )
    )
    assert node == Node(cores=(0, 1, 2, 3), memory_bytes=8 * GB, cpus=2.5)


def test_cgroup_v1_limits_apply(tmp_path: Path) -> None:
    node = found(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/slurm/job_1\n4:memory:/slurm/job_1\n1:name=systemd:/x\n0::/\n",
                "proc/self/mountinfo": V1_MOUNTS.format(mounted="/"),
                "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": f"{4 * GB}\n",
                "sys/fs/cgroup/cpu,cpuacct/slurm/job_1/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/slurm/job_1/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_period_us": "100000\n",
            },
        )
    )
    assert node == Node(cores=(0, 1, 2, 3), memory_bytes=4 * GB, cpus=3.0)


@pytest.mark.parametrize("mounted", ["/docker/abc", "/../../docker/abc"])
def test_container_reads_limits_at_the_top_of_its_mount(tmp_path: Path, mounted: str) -> None:
    node = found(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
                "proc/self/mountinfo": V1_MOUNTS.format(mounted=mounted),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
        )
    )
    assert node == Node(cores=(0, 1, 2, 3), memory_bytes=2 * GB, cpus=0.5)


@pytest.mark.parametrize(
    ("environ", "memory_gb", "cpus"),
    [
        ({}, 64, 4),
        ({"SLURM_CPUS_ON_NODE": "2"}, 64, 2),
        ({"SLURM_CPUS_ON_NODE": "128"}, 64, 4),
        ({"SLURM_MEM_PER_NODE": "8192"}, 8, 4),
        ({"SLURM_MEM_PER_NODE": "0"}, 64, 4),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "3"}, 6, 3),
        ({"SLURM_MEM_PER_CPU": "2048"}, 8, 4),
    ],
)
def test_slurm_allocation_limits_the_node(tmp_path: Path, environ: dict[str, str], memory_gb: int, cpus: int) -> None:
    node = found(machine(tmp_path, {}), environ)
    assert (node.memory_bytes, node.usable_cpus) == (memory_gb * GB, cpus)


def test_unknown_memory_size_is_none(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("Nothing: 1 kB\n")
    with pytest.raises(OSError, match="MemTotal"):
        found(tmp_path)


@pytest.mark.parametrize(
    ("names", "environ", "visible"),
    [
        (("0", "1", "2"), {}, ("0", "1", "2")),
        (("0", "1", "2"), {"CUDA_VISIBLE_DEVICES": "2,3"}, ("2", "3")),
        (("0", "1"), {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c"}, ("GPU-a", "GPU-b")),
        (("GPU-b", "GPU-x"), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, ("GPU-b",)),
        (("0,1", "2,3"), {"CUDA_VISIBLE_DEVICES": "1,2,3"}, ("2,3",)),
        (("3", "2"), {"CUDA_VISIBLE_DEVICES": "2,3"}, ("3", "2")),
        (("0",), {"CUDA_VISIBLE_DEVICES": ""}, ()),
        (("0",), {"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        (("0",), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        (("0", "1"), {"ROCR_VISIBLE_DEVICES": "5"}, ("5",)),
        (("0.0", "0.1"), {"ZE_AFFINITY_MASK": "0.1"}, ("0.1",)),
        ((), {"CUDA_VISIBLE_DEVICES": "0,1"}, ()),
    ],
)
def test_accelerators_hidden_by_the_scheduler_are_not_assigned(
    names: tuple[str, ...], environ: dict[str, str], visible: tuple[str, ...]
) -> None:
    assert visible_accelerators(names, environ=environ) == visible


def test_amd_accelerators_are_found_by_their_driver(tmp_path: Path) -> None:
    assert not has_amd_accelerators(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert has_amd_accelerators(tmp_path)
