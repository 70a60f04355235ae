"""What forks of a template must not share of their container, by its mounts."""

from __future__ import annotations

import pytest

from farcall_endpoint.worker.namespaces import Mount, Renewed, plan

PROC = Renewed("/proc", ())


def mounts(*lines: str) -> list[Mount]:
    """Each on the root, or on the mount with the longest path around it: ``PATH KIND rw|ro``."""
    found: list[Mount] = []
    for number, line in enumerate(lines, 1):
        path, kind, mode = line.split()
        around = [each for each in found if path == each.path or path.startswith(each.path.rstrip("/") + "/")]
        parent = max(around, key=lambda each: len(each.path)).number if around else 0
        found.append(Mount(number, parent, path, kind, (mode,), mode == "rw"))
    return found


def test_directories_in_memory_are_each_child_s_own() -> None:
    found = plan(
        mounts("/ tmpfs ro", "/dev tmpfs rw", "/dev/pts devpts rw", "/proc proc rw", "/tmp tmpfs rw", "/work ext4 rw"),
        writable=["/work"],
    )
    assert found.renewed == (PROC, Renewed("/dev/shm", (), "1777"), Renewed("/tmp", (), "1777"))
    assert found.sealed == ("/dev",)


def test_what_is_mounted_below_stays() -> None:
    found = plan(
        mounts(
            *("/ overlay ro", "/proc proc rw", "/proc/sys proc ro", "/proc/sys/fs/binfmt_misc autofs rw"),
            *("/run tmpfs rw", "/run/farcall/worker ext4 ro", "/run/farcall/worker/run ext4 ro", "/run/lock tmpfs rw"),
        ),
        writable=[],
    )
    assert found.renewed == (
        Renewed("/proc", ("/proc/sys",)),
        Renewed("/run", ("/run/farcall/worker", "/run/lock"), "1777"),
    )
    assert found.sealed == ()


def test_the_node_s_directories_are_shared_as_by_fresh_containers() -> None:
    """Also where they lie in the node's memory, and whatever is mounted in them."""
    found = plan(
        mounts("/ ext4 ro", "/tmp tmpfs rw", "/scratch tmpfs rw", "/scratch/a tmpfs rw", "/data nfs rw"),
        writable=["/scratch", "/tmp"],
    )
    assert found == ((PROC,), ())


def test_what_is_covered_does_not_count() -> None:
    found = plan(mounts("/ ext4 ro", "/tmp tmpfs rw", "/tmp/a ext4 rw", "/tmp ext4 rw", "/tmp/b ext4 rw"), writable=[])
    assert found == ((PROC,), ())


def test_the_root_may_come_last() -> None:
    """As in a container whose root was moved."""
    [proc, root] = [Mount(7, 9, "/proc", "proc", ("rw",), True), Mount(9, 1, "/", "tmpfs", ("ro",), False)]
    covers = Mount(11, 7, "/proc/sys", "proc", ("ro",), False)
    assert plan([proc, covers, root], writable=[]).renewed == (Renewed("/proc", ("/proc/sys",)),)


@pytest.mark.parametrize("kind", ["overlay", "tmpfs", "fuse.fuse-overlayfs"])
def test_a_writable_root_cannot_be_shared(kind: str) -> None:
    with pytest.raises(OSError, match="written to"):
        plan(mounts(f"/ {kind} rw"), writable=[])


def test_a_writable_root_of_the_node_is_shared_by_all() -> None:
    assert plan(mounts("/ ext4 rw"), writable=[]) == ((PROC,), ())
