"""What packages run outside of tasks: processes of a ``.pth`` file, their memory, and templates that compute."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.environments.launcher import RunningTemplate
from farcall_endpoint.host.isolation import bubblewrap, landlock
from farcall_endpoint.host.process_reaper import children, kill_trees
from farcall_endpoint.manager.shell import templates_watch
from farcall_endpoint.manager.shell.templates_watch import TemplateWatch
from tests.support.endpoint import running_endpoint
from tests.support.environments import SUBMITTER
from tests.support.packages import make_wheel
from tests.waiting import WAIT_S, wait_until

DAEMON = (
    "import os, sys; os.fork() == 0 and (os.setsid(), os.execv(sys.executable, [sys.executable, '-S', '-c', '{}']))\n"
)
THREADS = """
import threading, time
for _ in range(30):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
time.sleep(600)
"""


def python(code: str) -> subprocess.Popen[str]:
    """A process that has said that it is ready."""
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@contextlib.contextmanager
def running(code: str) -> Iterator[int]:
    process = python(code)
    try:
        yield process.pid
    finally:
        kill_trees({process.pid})
        process.communicate()


def reasons(watch: TemplateWatch, *templates: RunningTemplate, memory_bytes: int | None = None) -> list[str]:
    """Why templates end, at the next turn that says so."""
    found: list[str] = []

    def is_found() -> bool:
        found.extend(watch.turn(templates, memory_bytes=memory_bytes, processes=0).ended.values())
        return bool(found)

    wait_until(is_found)
    return found


def test_memory_of_a_template_counts_without_its_workers() -> None:
    child = "p = os.fork(); x = b'' if p else b'x' * 90_000_000; p or print('ready', flush=True)"
    code = f"import os, time; {child}; time.sleep(600)"
    with running(code) as template:
        [worker] = children(template)
        watch = TemplateWatch()
        alone = RunningTemplate("farcall-1", template, [template], {worker}, forked=1)
        for _ in range(3):
            assert not watch.turn([alone], memory_bytes=70_000_000, processes=0).ended
        [reason] = reasons(TemplateWatch(), alone._replace(workers=set()), memory_bytes=70_000_000)
        assert "MB of memory" in reason


def test_a_template_that_computes_while_nothing_is_forked_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates_watch, "_LOOK_PERIOD_S", 0.01)
    monkeypatch.setattr(templates_watch, "_COMPUTING_PERIOD_S", 0.2)
    with running("print('ready', flush=True)\nwhile True: pass") as template:
        spinning = RunningTemplate("farcall-1", template, [template], set())
        assert reasons(TemplateWatch(), spinning) == ["a package computes while no task runs"]


def test_a_template_that_answers_no_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates_watch, "_LOOK_PERIOD_S", 0.01)
    monkeypatch.setattr(templates_watch, "_ANSWER_S", 0.1)
    with running("import time; print('ready', flush=True); time.sleep(600)") as template:
        silent = RunningTemplate("farcall-1", template, [template], set(), unanswered=1)
        assert reasons(TemplateWatch(), silent) == ["it has not forked a process for 0.1 s"]


def processes_with(text: str) -> list[int]:
    """The processes, of whatever namespace, that were started with a text in an argument."""
    return [each.pid for each in psutil.process_iter(["cmdline"]) if text in " ".join(each.info["cmdline"] or ())]


def use_stone() -> str:
    import stone  # type: ignore[import-not-found]

    return str(stone.version)


@pytest.mark.parametrize("level", [bubblewrap, landlock])
def test_processes_that_a_package_starts_end_with_the_task_or_soon_after(tmp_path: Path, level: ModuleType) -> None:
    if missing := level.missing():
        pytest.skip(missing)
    index, mark = tmp_path / "index", f"import time; time.sleep(600) #{tmp_path.name}"
    index.mkdir()
    make_wheel(index, "stone", "1.0", files={"stone.pth": DAEMON.format(mark)})
    engine = {
        "isolation": level.__name__.rpartition(".")[2],
        "environments": {"index_url": str(index), "cache_dir": "cache"},
        "max_tasks_per_worker": 1,
    }
    with running_endpoint(tmp_path / "home", engine=engine, reachable=[tmp_path, index]) as endpoint:
        environment = Environment.of({"type": "uv", "requirements": ["stone"]})
        for _ in range(2):
            task = endpoint.cloud.submit(use_stone, environment=environment, submitter=SUBMITTER)
            ended = endpoint.cloud.end(task, timeout_s=WAIT_S)
            assert ended.value == "1.0", ended.error
            wait_until(lambda: not processes_with(mark), timeout_s=WAIT_S)


def test_a_start_with_too_many_threads_fails_in_words(tmp_path: Path) -> None:
    if missing := bubblewrap.missing():
        pytest.skip(missing)
    index = tmp_path / "index"
    index.mkdir()
    make_wheel(index, "stone", "1.0", files={"many.py": THREADS, "many.pth": "import many\n"})
    engine = {
        "isolation": "bubblewrap",
        "environments": {"index_url": str(index), "cache_dir": "cache"},
        "limits": {"processes": 20},
    }
    with running_endpoint(tmp_path / "home", workers=4, engine=engine, reachable=[tmp_path, index]) as endpoint:
        environment = Environment.of({"type": "uv", "requirements": ["stone"]})
        task = endpoint.cloud.submit(use_stone, environment=environment, submitter=SUBMITTER)
        error = endpoint.cloud.end(task, timeout_s=WAIT_S).error
        assert error["code"] == "PROCESSES_EXCEEDED", error


def leave_a_thread() -> int:
    import os
    import threading

    def compute() -> None:
        while True:
            pass

    threading.Thread(target=compute, daemon=True).start()
    return os.getpid()


def test_a_thread_that_computes_after_its_task_ends_its_worker(tmp_path: Path) -> None:
    with running_endpoint(tmp_path / "home", workers=1, engine={"isolation": "process"}) as endpoint:
        worker = endpoint.cloud.end(endpoint.cloud.submit(leave_a_thread, submitter=SUBMITTER)).value
        assert isinstance(worker, int)
        wait_until(lambda: not psutil.pid_exists(worker))


def test_a_thread_that_computes_between_tasks_that_follow_each_other_ends_its_worker(tmp_path: Path) -> None:
    with running_endpoint(tmp_path / "home", workers=1, engine={"isolation": "process"}) as endpoint:
        worker = endpoint.cloud.end(endpoint.cloud.submit(leave_a_thread, submitter=SUBMITTER)).value
        assert isinstance(worker, int)
        while psutil.pid_exists(worker):  # a pause is half a second
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: not psutil.pid_exists(worker), timeout_s=0.5)
            endpoint.cloud.end(endpoint.cloud.submit(abs, -1, submitter=SUBMITTER))
        later = [endpoint.cloud.end(endpoint.cloud.submit(os.getpid, submitter=SUBMITTER)).value for _ in range(3)]
        assert len(set(later)) == 3, "its workers run one task each now"
