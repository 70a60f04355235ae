"""cgroups of a manager's slots, on the machine's own hierarchies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_common.environments import Environment
from farcall_endpoint.environments.cgroups import Cgroups, Group, Hierarchy, writable_hierarchies
from farcall_endpoint.manager.events import EnvironmentReady
from farcall_endpoint.manager.slot_groups import SlotGroups
from farcall_endpoint.process_reaper import tree
from tests.support import images
from tests.support.cgroups import made_hierarchies
from tests.support.endpoint import running_endpoint
from tests.support.environments import running_node
from tests.waiting import wait_until

needs_groups = pytest.mark.skipif(not writable_hierarchies(), reason="no cgroup is writable here")


@pytest.fixture
def parents() -> Iterator[list[Hierarchy]]:
    """Groups for this test alone, in which a manager's lie."""
    with made_hierarchies() as found:
        yield found


@needs_groups
def test_workers_join_with_their_descendants_and_are_found_no_more(parents: list[Hierarchy]) -> None:
    groups = SlotGroups(2, Cgroups(parents), period_s=0.01)
    command = ["sh", "-c", "sleep 1000 & wait"]
    with subprocess.Popen(command, start_new_session=True) as joins, subprocess.Popen(command) as ended:
        try:
            wait_until(lambda: tree(joins.pid))
            groups.add(ended.pid, 0)
            groups.remove(ended.pid)
            groups.add(joins.pid, 1)
            assert not groups.groups
            groups.make()
            wait_until(lambda: groups.groups[1].processes() == {joins.pid, *tree(joins.pid)})
            assert groups.groups[0].processes() == set()
        finally:
            os.killpg(joins.pid, signal.SIGKILL)
            for pid in tree(ended.pid):
                os.kill(pid, signal.SIGKILL)
            ended.kill()
    wait_until(lambda: not groups.groups[1].processes())
    groups.close()
    assert not any(directory.exists() for directory in groups.directories)


def test_nothing_happens_where_nothing_is_permitted(tmp_path: Path) -> None:
    groups = SlotGroups(2, Cgroups([Hierarchy(tmp_path / "missing")]))
    groups.add(os.getpid(), 0)
    assert (list(groups.make()), groups.directories) == ([], ())
    groups.close()


def wait() -> None:
    import time

    time.sleep(1000)


@needs_groups
@pytest.mark.parametrize("killed", [True, False])
def test_no_group_is_left_of_a_manager(tmp_path: Path, killed: bool) -> None:
    with running_endpoint(tmp_path / "home") as endpoint:
        endpoint.cloud.submit(wait)
        [manager] = endpoint.managers()

        def groups() -> list[Path]:
            return [path for each in writable_hierarchies() for path in each.path.glob(f"farcall-{manager.pid}-*")]

        wait_until(lambda: len(groups()) == len(writable_hierarchies()))
        for path in groups():  # as when something weighs slots
            group = Group("slot-0", (path / "slot-0",))
            group.paths[0].mkdir()
            for each in endpoint.workers():
                group.join(each.pid)
        if killed:
            os.kill(manager.pid, signal.SIGKILL)
            wait_until(lambda: not groups())
    wait_until(lambda: not groups())


def test_the_memory_of_a_worker_is_measured(tmp_path: Path) -> None:
    def fill() -> int:
        import builtins

        builtins.kept = bytearray(b"x") * 100_000_000  # type: ignore[attr-defined]
        return 0

    environment = Environment(type="bubblewrap", location=str(images.image(images.DEBIAN)))
    with running_node(tmp_path) as node:
        worker = node.ready(environment)
        before = node.launcher.measured(worker)
        node.run(worker, fill)
        after = node.launcher.measured(worker)
        assert isinstance(before, EnvironmentReady)
        assert isinstance(after, EnvironmentReady)
        assert before.memory_bytes is not None
        assert after.memory_bytes is not None
        assert 2_000_000 < before.memory_bytes < 90_000_000 < after.memory_bytes - before.memory_bytes
        node.launcher.release(environment.key)
        assert node.launcher.measured(worker) is None
