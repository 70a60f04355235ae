"""Pool of templates: they are started, replaced and given up as their modules ask for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farcall_endpoint.environments.preload import PreloadStore
from farcall_endpoint.environments.template_pool import TemplateChange, TemplatePool
from farcall_endpoint.environments.templates import start_template
from farcall_endpoint.worker.boot import Boot, Descriptors
from farcall_endpoint.worker.channel import channel_pair
from tests.support.templates import ForkedWorker, unnamed_file
from tests.waiting import WAIT_S


class Pool:
    """A pool of templates in this Python, which may import from a directory. The test sets its clock."""

    def __init__(self, directory: Path) -> None:
        self.pool = TemplatePool(PreloadStore(directory / "preload"), spares=1, idle_s=600.0)
        self.directory = directory
        self.now = 0.0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.changes: list[TemplateChange] = []
        self.start_s = 0.0  # how long starts take by the test's clock

    def learn(self, *names: str) -> None:
        self.pool.learn("e", names, now=self.now)

    def start(self, environment_key: str = "e", *, killed: bool = False) -> tuple[str, ...] | None:
        """Start a template if one is wanted, and wait for what becomes of it; its modules.

        :param killed: before the pool has it.
        """
        modules = self.pool.wanted("k", "e", None, now=self.now)
        if modules is None:
            return None
        assert self.pool.wanted("k", "e", None, now=self.now) is None  # once at a time
        variables = {**os.environ, "PYTHONPATH": str(self.directory)}
        process, connection = start_template(variables=variables)
        self.processes.append(process)
        if killed:
            process.kill()
            process.wait(WAIT_S)
        self.pool.add(
            "k",
            environment_key,
            connection,
            modules,
            stop=process.kill,
            now=self.now,
            places=[str(self.directory)],
            statistics_key="e",
        )
        count = len(self.changes)
        self.now += self.start_s
        self.serve_until(lambda: len(self.changes) > count)
        return modules

    def serve_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            # As a launcher does it.
            if self.now >= self.pool.next_deadline() or select.select([self.pool], [], [], 0.05)[0]:
                self.changes += self.pool.serve(now=self.now)

    def fork(self) -> ForkedWorker | None:
        channel, end, claims = channel_pair()
        output = (unnamed_file(), unnamed_file())
        descriptors = Descriptors(end.fileno(), claims.fileno(), *output)
        forked = self.pool.fork("k", Boot(variables=dict(os.environ), directory="/"), descriptors, now=self.now)
        end.close()
        claims.close()
        if forked is not None:
            return ForkedWorker(forked, channel, output).ready()
        channel.close()
        for descriptor in output:
            os.close(descriptor)
        return None

    def loaded(self) -> list[str]:
        """The modules of a new worker."""
        worker = self.fork()
        assert worker is not None
        found: list[str] = worker.run(lambda: sorted(__import__("sys").modules))
        worker.end()
        return found


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    found = Pool(tmp_path)
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
    before = pool.fork()
    assert before is not None
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
    assert pool.changes[1] == TemplateChange("k", "e", "it ended")
    assert pool.fork() is None
    assert pool.start() is None
    pool.now = 61.0
    assert pool.start() == ()
    assert "json" in pool.loaded()


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
    os.kill(pid, signal.SIGKILL)
    pool.processes[0].wait(WAIT_S)
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
    worker = pool.fork()
    pool.pool.release("e")
    assert pool.fork() is None
    assert worker is not None
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
    worker = pool.fork()
    assert worker is not None
    worker.end()
    assert pool.pool.next_deadline() <= 1100.0
    pool.now = 1099.0
    assert pool.pool.serve(now=pool.now) == []
    assert pool.pool.is_forkable("k")
    pool.now = 1100.0
    pool.serve_until(lambda: not pool.pool.is_forkable("k"))
    pool.serve_until(lambda: not pool.pool.pids)
    assert pool.processes[0].wait(WAIT_S) is not None
