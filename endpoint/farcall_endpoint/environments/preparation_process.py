"""Process of preparations: one for each manager, so that no manager ever waits for a runner.

``python -m farcall_endpoint.environments.preparation_process SETTINGS``: reads orders from standard input and writes
reports to standard output, one in each line. It prepares environments, and ends containers of which only their runner's
daemon knows.

When its manager is gone, for whatever reason, its input ends: then it kills what it started, ends the containers that
are left, and ends itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Final

import msgspec

from farcall_endpoint.environments.commands import CommandError, Commands
from farcall_endpoint.environments.image_preparation import STOP_LIMIT_S, Preparation
from farcall_endpoint.environments.preparation import (
    Ended,
    Order,
    PreparationReport,
    PreparationSettings,
    Prepare,
    Release,
    Started,
)
from farcall_endpoint.environments.runners import runners_of

_AT_ONCE: Final = 8
"""Environments that are prepared at once, as many as managers want: one that waited would lose its time."""
_STOPS_AT_ONCE: Final = 8


def _end_if_failed(future: concurrent.futures.Future[None]) -> None:
    """End this process if a preparation failed in an unforeseen way; then its manager tries it again."""
    if not future.cancelled() and (error := future.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def main() -> None:
    """Serve a manager until it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the manager gets them too, and ends this process
    settings = msgspec.json.decode(sys.argv[1], type=PreparationSettings)
    lock = threading.Lock()

    def report(message: PreparationReport) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            os.write(1, msgspec.json.encode(message) + b"\n")

    runners = runners_of(settings.environments, readable=(settings.confined and settings.readable) or ())
    preparation = Preparation(settings, report=report, runners=runners)
    stops: dict[str, tuple[str, ...]] = {}
    stopping = Commands()

    def stop(command: Sequence[str]) -> None:
        with contextlib.suppress(CommandError, OSError):
            stopping.run(command, limit_s=STOP_LIMIT_S)

    with (
        concurrent.futures.ThreadPoolExecutor(_STOPS_AT_ONCE) as ends,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as preparations,
    ):
        ends.submit(preparation.tidy)
        for line in sys.stdin.buffer:
            match msgspec.json.decode(line, type=Order):
                case Prepare(environment=environment, trusted=trusted):
                    submitted = preparations.submit(preparation.prepare, environment, trusted=trusted)
                    submitted.add_done_callback(_end_if_failed)
                case Release(key=key):
                    preparation.release(key)
                case Started(name=name, stop=command):
                    stops[name] = command
                case Ended(name=name, stops=True):
                    ends.submit(stop, stops.pop(name))
                case Ended(name=name):
                    del stops[name]
        preparations.shutdown(wait=False, cancel_futures=True)
        preparation.commands.close()
        for command in stops.values():
            ends.submit(stop, command)
    if settings.run_dir:
        shutil.rmtree(settings.run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
