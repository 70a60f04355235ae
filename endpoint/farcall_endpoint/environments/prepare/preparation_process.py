"""Process of preparations: one for each manager, so that no manager ever waits for a runner or for a file system.

``python -m farcall_endpoint.environments.prepare.preparation_process SETTINGS``: reads orders from standard input and
writes reports to standard output, one in each line. It prepares environments, looks up what they name on the node, and
ends containers of which only their runner's daemon knows. The thread that reads orders does nothing else, so it answers
while others work or hang.

When its manager is gone, for whatever reason, its input ends: then it kills what it started, ends the containers that
are left, and ends itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import msgspec

from farcall_common.environments import Environment
from farcall_endpoint.environments.prepare.commands import CommandError, Commands
from farcall_endpoint.environments.prepare.image_preparation import STOP_LIMIT_S, Preparation
from farcall_endpoint.environments.prepare.preparation import (
    Alive,
    Ended,
    Failed,
    Locate,
    Located,
    Order,
    Ping,
    PreparationSettings,
    Prepare,
    Prepared,
    Release,
    Report,
    Started,
)
from farcall_endpoint.environments.runners.registry import runners_of

_STOPS_AT_ONCE: Final = 8
_MOST_THREADS: Final = 200
_END_LIMIT_S: Final = 2.0
"""What hangs at the end is left alone after so long; what it leaves in the cache is removed at the next start."""


class _Threads:
    """A thread for each piece of work: in a file system that hangs, it may never end.

    If too much of it hangs, this process ends; its manager starts another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Hashable, threading.Thread] = {}

    def start(self, name: Hashable, work: Callable[[], None]) -> None:
        """Begin work, unless that of this name is not done yet: its report is the answer to both orders."""
        with self._lock:
            if name in self._running:
                return
            if len(self._running) >= _MOST_THREADS:
                sys.stderr.write(f"{_MOST_THREADS} preparations hang\n")
                os._exit(1)
            thread = self._running[name] = threading.Thread(target=self._perform, args=(work,), daemon=True)
        thread.start()

    def _perform(self, work: Callable[[], None]) -> None:
        work()
        self.done()

    def done(self) -> None:
        """The work of this thread is done, but for its report: an order after that begins it again."""
        with self._lock:
            this = threading.current_thread()
            self._running = {name: thread for name, thread in self._running.items() if thread is not this}

    def join(self) -> None:
        """Wait for the end of what does not hang."""
        deadline = time.monotonic() + _END_LIMIT_S
        for thread in list(self._running.values()):
            thread.join(max(0.0, deadline - time.monotonic()))


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """End this process, as work failed in an unforeseen way; then its manager tries it again."""
    traceback.print_exception(failure.exc_value)
    os._exit(1)


def main() -> None:
    """Serve a manager until it is gone."""
    threading.excepthook = _end_process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the manager gets them too, and ends this process
    settings = msgspec.json.decode(sys.argv[1], type=PreparationSettings)
    lock = threading.Lock()

    threads = _Threads()

    def report(message: Report) -> None:
        if isinstance(message, Prepared | Failed | Located):
            threads.done()
        with lock, contextlib.suppress(BrokenPipeError):
            os.write(1, msgspec.json.encode(message) + b"\n")

    report(Alive())
    runners = runners_of(settings.environments, readable=settings.readable if settings.confined else ())
    preparation = Preparation(settings, report=report, runners=runners)
    stops: dict[str, tuple[str, ...]] = {}
    stopping = Commands()

    def locate(environment: Environment) -> None:
        report(preparation.locate(environment))

    def stop(command: Sequence[str]) -> None:
        with contextlib.suppress(CommandError, OSError):
            stopping.run(command, limit_s=STOP_LIMIT_S)

    with concurrent.futures.ThreadPoolExecutor(_STOPS_AT_ONCE) as ends:
        threads.start("tidy", preparation.tidy)
        for line in sys.stdin.buffer:
            match order := msgspec.json.decode(line, type=Order):
                case Prepare(environment=environment, trusted=trusted):
                    prepare = functools.partial(preparation.prepare, environment, trusted=trusted)
                    threads.start((environment.key, trusted), prepare)
                case Locate(environment=environment):
                    threads.start(order, functools.partial(locate, environment))
                case Ping():
                    report(Alive())
                case Release(key=key):
                    threads.start(order, functools.partial(preparation.release, key))
                case Started(name=name, stop=command):
                    stops[name] = command
                case Ended(name=name, stops=True):
                    ends.submit(stop, stops.pop(name))
                case Ended(name=name):
                    del stops[name]
        preparation.commands.close()
        threads.join()
        for command in stops.values():
            ends.submit(stop, command)
    if settings.run_dir:
        shutil.rmtree(settings.run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
