"""Leak checks of every test: no thread or process outlives it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import hypothesis
import psutil
import pytest

GRACE_S = 5.0

# Whether inputs are generated quickly depends on what else the machine does.
hypothesis.settings.register_profile("farcall", suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None)
hypothesis.settings.load_profile("farcall")


def pytest_configure() -> None:
    """A background job inherits an ignored SIGINT and hands it on; the programs under test must hear Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    """A non-daemon thread that outlives its test keeps a user's interpreter from ending."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_S
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon and not isinstance(thread, threading._DummyThread):
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"leaked {thread}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Child processes that are left when all fixtures are torn down fail the run."""
    if hasattr(session.config, "workerinput"):
        left = psutil.Process().children(recursive=True)
    else:
        left = [child for child in psutil.Process().children(recursive=True) if not _is_test_worker(child)]
    _, alive = psutil.wait_procs(left, timeout=GRACE_S)
    names = [" ".join(child.cmdline())[:200] for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    if names:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nprocesses left running by the tests: {names}")


def _is_test_worker(process: psutil.Process) -> bool:
    """Whether this is one of pytest-xdist's own."""
    try:
        return any("execnet" in part or "from sys import" in part for part in process.cmdline())
    except psutil.Error:
        return False
