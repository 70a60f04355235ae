"""cgroups: where they are found, made and removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farcall_endpoint.host.cgroups import Cgroups, Hierarchy, hierarchies_of, writable_hierarchies
from tests.waiting import wait_until

V1_MOUNTS = [
    "30 25 0:27 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755",
    "31 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct",
    "32 30 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
    "33 30 0:30 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices",
    "34 30 0:31 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd",
]
V1_OWN = ["5:devices:/", "4:memory:/slurm/job_7", "3:cpu,cpuacct:/slurm/job_7", "1:name=systemd:/"]


def test_version_1() -> None:
    assert hierarchies_of(V1_OWN, V1_MOUNTS) == [
        Hierarchy(Path("/sys/fs/cgroup/cpu,cpuacct/slurm/job_7"), ("cpu", "cpuacct")),
        Hierarchy(Path("/sys/fs/cgroup/memory/slurm/job_7"), ("memory",)),
    ]


def test_version_2() -> None:
    mounts = ["30 25 0:27 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"]
    own = ["0::/user.slice/user-1000.slice/user@1000.service/farcall.service"]
    place = Path("/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/farcall.service")
    assert hierarchies_of(own, mounts) == [Hierarchy(place)]


def test_a_container_that_sees_its_own_part_only() -> None:
    mounts = ["30 25 0:27 /docker/abc /sys/fs/cgroup ro,relatime - cgroup2 cgroup rw"]
    assert hierarchies_of(["0::/docker/abc/farcall"], mounts) == [Hierarchy(Path("/sys/fs/cgroup/farcall"))]
    assert hierarchies_of(["0::/docker/abc"], mounts) == [Hierarchy(Path("/sys/fs/cgroup"))]
    assert hierarchies_of(["0::/docker/abcd"], mounts) == []


def test_nothing_where_nothing_is_permitted(tmp_path: Path) -> None:
    assert writable_hierarchies(cgroup_file=tmp_path / "none", mounts_file=tmp_path / "none") == []
    groups = Cgroups([Hierarchy(tmp_path / "missing")])
    assert not groups.works
    assert groups.create("w1").paths == ()
    groups.close()


def test_processes_that_cannot_be_seen_here_are_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, _: killed.append(pid))
    group = tmp_path / f"farcall-{2**22 + 1}-1" / "slot-0"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text(f"0\n{2**22 + 2}\n0\n")
    Cgroups([Hierarchy(tmp_path)]).close()
    assert killed == [2**22 + 2]  # 0 would be the group of this process


def imitated(directory: Path, *, offered: str) -> Hierarchy:
    """A directory with the files of a group of version 2 that has processes."""
    texts = {"type": "domain", "procs": "1\n", "controllers": offered, "subtree_control": ""}
    for name, text in texts.items():
        (directory / f"cgroup.{name}").write_text(text)
    return Hierarchy(directory)


def test_groups_below_one_with_processes_are_threaded_when_they_need_the_cpu(tmp_path: Path) -> None:
    hierarchy = imitated(tmp_path, offered="cpu memory\n")
    groups = Cgroups([hierarchy])
    [root] = groups.directories
    (root / "cgroup.subtree_control").write_text("")
    groups.create("before")
    assert not list(root.rglob("cgroup.type"))
    groups.enable_cpu(hierarchy)
    [path] = groups.create("later").paths
    assert [(each / "cgroup.type").read_text() for each in (root, root / "before", path)] == ["threaded"] * 3
    assert [(each / "cgroup.subtree_control").read_text() for each in (tmp_path, root)] == ["+cpu"] * 2
    (path / "cgroup.threads").write_text(f"{os.getpid()}\n{2**22 + 1}\n")
    assert groups.create("later").processes() == {os.getpid()}


def test_a_controller_that_is_not_there(tmp_path: Path) -> None:
    hierarchy = imitated(tmp_path, offered="memory\n")
    groups = Cgroups([hierarchy])
    (groups.directories[0] / "cgroup.subtree_control").write_text("")
    with pytest.raises(FileNotFoundError, match="cpu is not in it") as error:
        groups.enable_cpu(hierarchy)
    assert error.value.filename == str(tmp_path / "cgroup.controllers")


def test_names() -> None:
    for name in ("../x", "", ".", "a/b", "-x"):
        with pytest.raises(ValueError, match="group"):
            Cgroups([]).create(name)


@pytest.mark.skipif(not writable_hierarchies(), reason="no cgroup is writable here")
def test_processes_join_and_leave() -> None:
    groups = Cgroups(writable_hierarchies())
    assert groups.works
    try:
        group = groups.create("worker-1")
        assert groups.groups() == [group]
        with subprocess.Popen(["sleep", "1000"]) as process:
            try:
                group.join(process.pid)
                assert group.processes() == {process.pid}
                assert not group.remove()
            finally:
                process.kill()
        wait_until(group.remove, "the group is empty")
        assert groups.groups() == []
    finally:
        groups.close()


@pytest.mark.skipif(not writable_hierarchies(), reason="no cgroup is writable here")
def test_groups_of_a_killed_manager_are_removed() -> None:
    program = """
import os, subprocess
from farcall_endpoint.host.cgroups import *
group = Cgroups(writable_hierarchies()).create("worker")
child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
group.join(child.pid)
print(group.paths[0].parent, child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False, text=True)
    left, pid = done.stdout.split()
    assert Path(left).is_dir()

    def start_again() -> bool:
        Cgroups(writable_hierarchies()).close()
        return not Path(left).exists()

    wait_until(start_again, "the groups of the dead manager are gone")
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text(), "killed")
    assert not [path for each in writable_hierarchies() for path in each.path.glob(f"farcall-{os.getpid()}-*")]
