"""Pool of templates: they are started, replaced and given up as their modules ask for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.contracts.manager_worker import channel_pair
from farcall_endpoint.environments.templates.preload import PreloadStore
from farcall_endpoint.environments.templates.template_pool import TemplateChange, TemplatePool, TemplateRoot
from farcall_endpoint.environments.templates.templates import start_template
from farcall_endpoint.worker.boot import Boot, Descriptors
from tests.support.endpoint import wait_gone
from tests.support.templates import ForkedWorker, unnamed_file
from tests.waiting import WAIT_S

THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"


class Pool:
    """A pool of templates in this Python, which may import from a directory. The test sets its clock.

    :param root: the name of the root of templates; empty: none is a branch.
    """

    def __init__(self, directory: Path, *, root: str = "", memory_bytes: int | None = None) -> None:
        store = PreloadStore(directory / "preload")
        self.pool = TemplatePool(store, spares=1, idle_s=600.0, memory_bytes=memory_bytes)
        self.directory = directory
        self.root = root
        self.now = 0.0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.changes: list[TemplateChange] = []
        self.start_s = 0.0  # how long starts take by the test's clock

    def learn(self, *names: str) -> None:
        self.pool.learn("e", names, now=self.now)

    def start(
        self,
        environment_key: str = "e",
        *,
        key: str = "k",
        preload: tuple[str, ...] | None = None,
        waits: bool = True,
        killed: bool = False,
    ) -> tuple[str, ...] | None:
        """Start a template if one is wanted, and wait for what becomes of it; its modules.

        :param preload: instead of what was learned.
        :param killed: before the pool has it.
        """
        environment = None if preload is None else Environment(type="venv", location="/opt/e", preload=preload)
        modules = self.pool.wanted(key, "e", environment, now=self.now)
        if modules is None:
            return None
        assert self.pool.wanted(key, "e", environment, now=self.now) is None  # once at a time
        count = len(self.changes)
        if not self.pool.branch(key, environment_key, modules, root=self.root, now=self.now, statistics_key="e"):
            variables = {**os.environ, "PYTHONPATH": str(self.directory)}
            process, connection = start_template(variables=variables)
            self.processes.append(process)
            if killed:
                process.kill()
                process.wait(WAIT_S)
            self.pool.add(
                key,
                environment_key,
                connection,
                modules,
                root=TemplateRoot(name=self.root, places=(str(self.directory),)),
                stop=process.kill,
                now=self.now,
                statistics_key="e",
            )
        self.now += self.start_s
        if waits:
            self.serve_until(lambda: any(change.key == key for change in self.changes[count:]))
        return modules

    def pid(self, key: str = "k") -> int:
        """The process of a template that serves."""
        pid = self.pool._serving[key].template.pid
        assert pid is not None
        return pid

    def serve_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            # As a launcher does it.
            if self.now >= self.pool.next_deadline() or select.select([self.pool], [], [], 0.05)[0]:
                self.changes += self.pool.serve(now=self.now)

    def fork(self, key: str = "k") -> ForkedWorker | None:
        channel, end, claims = channel_pair()
        output = (unnamed_file(), unnamed_file())
        descriptors = Descriptors(end.fileno(), claims.fileno(), *output)
        forked = self.pool.fork(key, Boot(variables=dict(os.environ), directory="/"), descriptors, now=self.now)
        end.close()
        claims.close()
        if forked is not None:
            return ForkedWorker(forked, channel, output).ready()
        channel.close()
        for descriptor in output:
            os.close(descriptor)
        return None

    def forked(self, key: str = "k") -> ForkedWorker:
        """A worker, however slow this machine is."""
        deadline = time.monotonic() + WAIT_S
        while (worker := self.fork(key)) is None:
            assert time.monotonic() < deadline
            self.changes += self.pool.serve(now=self.now)
        return worker

    def loaded(self, key: str = "k") -> list[str]:
        """The modules of a new worker."""
        worker = self.forked(key)
        found: list[str] = worker.run(lambda: sorted(__import__("sys").modules))
        worker.end()
        return found


@pytest.fixture
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pool]:
    found = Pool(tmp_path, **getattr(request, "param", {}))
    yield found
    found.pool.close()
    for process in found.processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)


def test_workers_are_fresh_until_a_template_serves(pool: Pool) -> None:
    assert pool.fork() is None
    assert pool.start() == ()
    assert pool.changes == [TemplateChange("k", "e")]
    assert pool.pool.is_forkable("k")
    assert "farcall_endpoint.worker.runner" in pool.loaded()
    assert pool.start() is None


def test_a_template_is_replaced_when_tasks_import_more(pool: Pool) -> None:
    pool.start()
    pool.learn("colorsys")
    assert pool.start() == ("colorsys",)
    before = pool.forked()
    pool.learn("colorsys", "wave")
    assert pool.start() is None  # it is too young
    pool.now = 60.0
    assert pool.start() == ("colorsys", "wave")
    assert {"colorsys", "wave"} <= set(pool.loaded())
    assert before.run(lambda: 7) == 7  # the former template stays for its workers
    before.end()
    pool.serve_until(lambda: len(pool.pool.pids) == 1)
    pool.now = 120.0
    assert pool.start() is None


def test_a_module_of_the_list_that_is_missing_is_logged_and_tried_again(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    assert pool.start(preload=("wave", "late")) == ("wave", "late")
    assert "late is not preloaded in e: " in caplog.text
    pool.pool.release("e")
    (pool.directory / "late.py").touch()  # such as by `pip install`
    assert pool.start(preload=("wave", "late")) == ("wave", "late")
    assert {"wave", "late"} <= set(pool.loaded())


def test_a_template_is_kept_for_four_times_its_start(pool: Pool) -> None:
    """No longer: until another one replaces it, each task of a new kind imports its modules itself."""
    pool.start_s = 2.0
    pool.learn("colorsys")
    assert pool.start() == ("colorsys",)  # ready at 2.0
    pool.learn("colorsys", "wave")
    pool.now = 9.9
    assert pool.start() is None
    pool.now = 10.0
    assert pool.start() == ("colorsys", "wave")


def test_modules_that_make_a_template_unfit_are_left_out(pool: Pool) -> None:
    (pool.directory / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    )
    (pool.directory / "crashes.py").write_text("import os\nos.abort()")
    (pool.directory / "raises.py").write_text("raise RuntimeError")
    pool.learn("colorsys", "threads", "crashes", "raises", "wave")
    assert pool.start() == ("colorsys", "threads", "crashes", "raises", "wave")
    assert "2 threads" in pool.pool.problem("k")
    assert pool.fork() is None
    assert pool.start() == ("colorsys", "crashes", "raises", "wave")
    assert pool.pool.problem("k") == "it ended in the import of crashes"
    assert pool.start() == ("colorsys", "raises", "wave")
    assert pool.pool.problem("k") == ""
    assert {"colorsys", "wave"} <= set(pool.loaded())
    pool.now = 60.0
    assert pool.start() is None
    assert set(PreloadStore(pool.directory / "preload").of("e").excluded) >= {"threads", "crashes"}


def test_after_a_kill_workers_are_fresh_for_a_while(pool: Pool) -> None:
    pool.start()
    [pid] = pool.pool.pids
    os.kill(pid, signal.SIGKILL)
    pool.serve_until(lambda: pool.changes[1:])
    assert pool.changes[1] == TemplateChange("k", "e", "it ended", is_forkable=False)
    assert pool.fork() is None
    assert pool.start() is None
    pool.now = 61.0
    assert pool.start() == ()
    assert "json" in pool.loaded()


def test_what_a_template_does_not_preload_is_logged_once(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.start(preload=("no_such_module",))
    pool.processes[0].kill()
    pool.serve_until(lambda: not pool.pool.is_forkable("k"))
    assert sum("no_such_module is not preloaded" in message for message in caplog.messages) == 1


def test_a_template_that_is_killed_before_the_pool_has_it_is_replaced(pool: Pool) -> None:
    assert pool.start(killed=True) == ()
    [change] = pool.changes
    assert change.problem
    assert pool.start() is None
    pool.now = 61.0
    assert pool.start() == ()
    assert "json" in pool.loaded()


def test_a_template_that_a_fork_finds_dead_is_replaced(pool: Pool) -> None:
    pool.start()
    [pid] = pool.pool.pids
    spares = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    pool.processes[0].wait(WAIT_S)
    wait_gone(spares)
    assert pool.fork() is None
    pool.serve_until(lambda: pool.changes[1:])
    assert pool.changes[1].problem
    pool.now = 61.0
    assert pool.start() == ()
    assert "json" in pool.loaded()


def test_pauses_double_until_a_template_was_fit_for_an_hour(pool: Pool) -> None:
    for lived_s, pause_s in ((10.0, 60.0), (10.0, 120.0), (3600.0, 60.0)):
        assert pool.start() == ()
        pool.now += lived_s
        pool.processes[-1].kill()
        pool.serve_until(lambda: not pool.pool.is_forkable("k"))
        pool.now += pause_s - 1.0
        assert pool.start() is None
        pool.now += 1.0
    assert pool.start() == ()


def test_a_released_template_ends_with_its_last_worker(pool: Pool) -> None:
    pool.start()
    worker = pool.forked()
    pool.pool.release("e")
    assert pool.fork() is None
    assert worker.run(lambda: 7) == 7
    worker.end()
    pool.serve_until(lambda: not pool.pool.pids)
    assert pool.start() == ()


def test_what_cannot_be_started_is_not_tried_at_once(pool: Pool) -> None:
    assert pool.pool.wanted("k", "e", None, now=0.0) == ()
    pool.pool.not_started("k", "no processes", now=0.0)
    assert pool.pool.problem("k") == "no processes"
    assert pool.pool.wanted("k", "e", None, now=1.0) is None
    assert pool.pool.wanted("k", "e", None, now=61.0) == ()
    pool.pool.not_started("k", "no processes", now=61.0)


def test_a_template_of_no_environment_ends_when_it_is_not_used(pool: Pool) -> None:
    pool.start("")
    pool.now = 500.0
    pool.forked().end()
    assert pool.pool.next_deadline() <= 1100.0
    pool.now = 1099.0
    assert pool.pool.serve(now=pool.now) == []
    assert pool.pool.is_forkable("k")
    pool.now = 1100.0
    pool.serve_until(lambda: not pool.pool.is_forkable("k"))
    pool.serve_until(lambda: not pool.pool.pids)
    assert pool.processes[0].wait(WAIT_S) is not None


# -- branches ----------------------------------------------------------------------------------------------------------

BRANCHES = pytest.mark.parametrize("pool", [{"root": "r"}], indirect=True)

COUNTED = """
import pathlib
with pathlib.Path(__file__).with_name("imports").open("a") as file:
    file.write(__name__ + " ")
"""


def imports(pool: Pool) -> list[str]:
    """What was imported, in order, by all templates."""
    return (pool.directory / "imports").read_text().split()


@pytest.fixture
def counted(pool: Pool) -> None:
    """Modules that note each import."""
    for name in ("one", "two", "three"):
        (pool.directory / f"{name}.py").write_text(COUNTED)


@BRANCHES
@pytest.mark.usefixtures("counted")
def test_a_replacement_is_a_branch_and_imports_what_is_missing(pool: Pool) -> None:
    pool.learn("one")
    assert pool.start() == ("one",)
    before = pool.forked()
    pool.learn("one", "two")
    pool.now = 60.0
    assert pool.start() == ("one", "two")
    assert imports(pool) == ["one", "two"]
    assert len(pool.processes) == 1
    assert {"one", "two"} <= set(pool.loaded())
    assert before.run(lambda: 7) == 7
    before.end()
    assert len(pool.pool.pids) == 2  # the former one stays for its branch
    pool.pool.release("e")
    pool.serve_until(lambda: not pool.pool.pids)
    assert pool.processes[0].wait(WAIT_S) is not None


@BRANCHES
@pytest.mark.usefixtures("counted")
def test_environments_in_the_same_root_share_a_tree(pool: Pool) -> None:
    pool.start("a", key="a", preload=("one",))
    pool.start("b", key="b", preload=("one", "two"))
    pool.start("c", key="c", preload=("three",))  # not a branch: it would have what it does not want
    assert imports(pool) == ["one", "two", "three"]
    assert len(pool.processes) == 2
    assert psutil.Process(pool.pid("b")).ppid() == pool.pid("a")
    worker = pool.forked("b")
    pool.pool.release("a")  # it stays for its branch
    pool.pool.serve(now=pool.now)
    assert pool.pool.is_forkable("b")
    assert worker.run(lambda: 7) == 7
    worker.end()
    pool.pool.release("b")
    pool.serve_until(lambda: len(pool.pool.pids) == 1)


@BRANCHES
@pytest.mark.usefixtures("counted")
def test_a_chain_of_branches_is_not_endless(pool: Pool) -> None:
    names = [f"m{number}" for number in range(5)]
    for count, name in enumerate(names):
        (pool.directory / f"{name}.py").write_text(COUNTED)
        pool.now += 60.0
        pool.start(preload=tuple(names[: count + 1]))
    assert imports(pool) == [*names[:4], *names]
    assert len(pool.processes) == 2
    pool.serve_until(lambda: len(pool.pool.pids) == 1)  # the whole chain ends with the last of it


@pytest.mark.parametrize("text", ["import os\nos.abort()", THREAD, "import signal\nsignal.pause()", "raise ValueError"])
@BRANCHES
@pytest.mark.usefixtures("counted")
def test_an_unfit_branch_harms_itself_alone(pool: Pool, text: str) -> None:
    (pool.directory / "bad.py").write_text(text)
    pool.learn("one")
    pool.start()
    pid, worker = pool.pid(), pool.forked()
    if "pause" in text:
        entry = pool.pool._serving["k"]
        entry.root = dataclasses.replace(entry.root, import_limit_s=3.0)
    pool.learn("one", "bad", "two")
    pool.now = 60.0
    assert pool.start() == ("one", "bad", "two")
    if "ValueError" not in text:
        assert pool.changes[-1].problem
        assert pool.changes[-1].is_forkable  # by the former one
        assert pool.pid() == pid
        pool.now = 120.0
        assert pool.start() == ("one", "two")
    assert worker.run(lambda: 7) == 7
    assert {"one", "two"} <= set(pool.loaded())
    assert imports(pool)[:2] == ["one", "two"]
    assert len(pool.processes) == 1
    worker.end()


@BRANCHES
def test_a_killed_template_takes_its_branches_and_all_their_workers_with_it(pool: Pool) -> None:
    pool.start("a", key="a", preload=("colorsys",))
    pool.start("b", key="b", preload=("colorsys", "wave"))
    workers = [pool.forked("a"), pool.forked("b")]
    os.kill(pool.pid("a"), signal.SIGKILL)
    pool.serve_until(lambda: not pool.pool.pids)
    assert [worker.ended() for worker in workers] == [-signal.SIGKILL] * 2
    assert {change.key for change in pool.changes if change.problem} == {"a", "b"}


@BRANCHES
def test_a_killed_branch_is_reaped_and_its_parent_goes_on(pool: Pool) -> None:
    pool.start("a", key="a", preload=("colorsys",))
    pool.start("b", key="b", preload=("colorsys", "wave"))
    pid, worker = pool.pid("b"), pool.forked("b")
    os.kill(pid, signal.SIGKILL)
    assert worker.ended() == -signal.SIGKILL
    pool.serve_until(lambda: not psutil.pid_exists(pid))
    assert "colorsys" in pool.loaded("a")
    assert not pool.pool.is_forkable("b")
    pool.pool.release("a")
    pool.serve_until(lambda: not pool.pool.pids)


@BRANCHES
def test_a_stopped_branch_is_ended_with_its_environment(pool: Pool) -> None:
    pool.start("a", key="a", preload=("colorsys",))
    pool.start("b", key="b", preload=("colorsys", "wave"))
    pid = pool.pid("b")
    os.kill(pid, signal.SIGSTOP)
    pool.pool._serving["b"].template._end("as after a minute")
    pool.serve_until(lambda: not psutil.pid_exists(pid))
    pool.pool.release("a")
    pool.serve_until(lambda: not pool.pool.pids)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look at a template")
@BRANCHES
def test_a_branch_shares_the_memory_of_its_template(pool: Pool) -> None:
    pool.start("a", key="a", preload=("numpy",))
    pool.start("b", key="b", preload=("numpy", "colorsys"))
    memory = psutil.Process(pool.pid("b")).memory_full_info()
    assert memory.uss < memory.rss / 3
    held = {key: entry.size_bytes for key, entry in pool.pool._serving.items()}
    assert 0 < held["b"] < held["a"] / 3
    assert pool.pool.held_bytes == sum(held.values())


@BRANCHES
def test_what_forks_must_not_share_differs_between_a_template_and_its_branch(pool: Pool) -> None:
    pool.start("a", key="a", preload=("numpy.random",))
    pool.start("b", key="b", preload=("numpy.random", "wave"))

    def draw() -> list[object]:
        import random

        import numpy

        return [random.random(), float(numpy.random.random())]

    workers = [pool.forked(key) for key in "aabb"]
    drawn = [worker.run(draw) for worker in workers]
    assert all(len(set(column)) == 4 for column in zip(*drawn, strict=True))
    for worker in workers:
        worker.end()


# -- memory ------------------------------------------------------------------------------------------------------------

ROOM_FOR_ONE = 100 * 2**20  # as long as nothing was measured
SMALL = pytest.mark.parametrize("pool", [{"memory_bytes": ROOM_FOR_ONE}], indirect=True)


@SMALL
def test_a_template_that_was_not_used_makes_room(pool: Pool) -> None:
    pool.start("a", key="a")
    assert pool.start("b", key="b") is None  # the first one has just been asked for
    pool.now = 20.0
    pool.forked("a").end()
    pool.serve_until(lambda: pool.pool._serving["a"].template.is_idle)
    pool.now = 40.0
    assert pool.start("b", key="b") is None
    pool.now = 50.0
    assert pool.start("b", key="b") == ()
    assert pool.pool.is_forkable("b")
    assert not pool.pool.is_forkable("a")
    [change] = [change for change in pool.changes if change.key == "a" and change.problem]
    assert not change.is_forkable  # the environment has no template
    pool.serve_until(lambda: len(pool.pool.pids) == 1)


@SMALL
def test_a_template_with_workers_makes_no_room(pool: Pool) -> None:
    pool.start("a", key="a")
    worker = pool.forked("a")
    pool.now = 1000.0
    assert pool.start("b", key="b") is None
    worker.end()
    pool.serve_until(lambda: pool.pool._serving["a"].template.is_idle)
    assert pool.start("b", key="b") == ()


@pytest.mark.parametrize("pool", [{"memory_bytes": 250 * 2**20, "root": "r"}], indirect=True)
def test_leaves_go_first(pool: Pool) -> None:
    """A template is not idle while it has branches."""
    pool.start("a", key="a", preload=("colorsys",))
    pool.start("b", key="b", preload=("colorsys", "wave"))
    for key in "ab":
        pool.pool._serving[key].size_bytes = 100 * 2**20
    pool.now = 1000.0
    pool.root = ""
    assert pool.start("c", key="c") == ()
    assert pool.pool.is_forkable("a")
    assert not pool.pool.is_forkable("b")


@SMALL
def test_two_that_alternate_do_not_take_turns(pool: Pool) -> None:
    """There is room for one of them, which is known only when both have been measured."""
    pool.pool._memory_bytes = None
    for key in "ab":
        pool.start(key, key=key)
        pool.pool._serving[key].size_bytes = pool.pool._sizes[key] = ROOM_FOR_ONE
    pool.pool._memory_bytes = ROOM_FOR_ONE
    pool.pool._serving["b"].exceeds = True
    starts = 0
    for _ in range(20):
        pool.now += 5.0
        for key in "ab":
            worker = pool.fork(key)
            if worker is None:
                starts += pool.start(key, key=key) is not None
            else:
                worker.end()
            pool.serve_until(lambda: all(each.template.is_idle for each in pool.pool._serving.values()))
        if pool.now >= pool.pool.next_deadline():
            pool.changes += pool.pool.serve(now=pool.now)
            assert pool.pool.next_deadline() > pool.now
    assert starts == 0
    assert pool.pool.is_forkable("a")
    assert not pool.pool.is_forkable("b")
    assert pool.pool.held_bytes <= ROOM_FOR_ONE


@pytest.mark.parametrize("pool", [{"memory_bytes": 2 * ROOM_FOR_ONE}], indirect=True)
def test_a_template_that_turns_out_too_large_is_ended(pool: Pool) -> None:
    (pool.directory / "large.py").write_text(f"KEPT = b'x' * {2 * ROOM_FOR_ONE}")
    pool.start("a", key="a")
    pool.start("b", key="b", preload=("large",))
    pool.now = 29.0
    pool.changes += pool.pool.serve(now=pool.now)
    assert pool.pool.is_forkable("b")
    assert pool.pool.next_deadline() == 30.0
    pool.now = 30.0
    pool.serve_until(lambda: not pool.pool.is_forkable("b"))
    assert pool.pool.is_forkable("a")
    assert pool.changes[-1] == TemplateChange("b", "b", "others need its memory", is_forkable=False)
    pool.now = 1000.0
    assert pool.start("b", key="b", preload=("large",)) is None  # it is known now
    assert pool.pool.is_forkable("a")  # and drives no other one out
