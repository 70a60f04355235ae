"""User program of the chaos test: submits tasks on request, and records the result of each.

Each line of its input is a number of tasks to submit; when the input ends, it waits for all of them. Its files (see
:class:`Orders`): a line for each start of a task, written by the task itself, and a line for each end.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
import threading
from typing import Any, NamedTuple

import farcall


class Orders(NamedTuple):
    """What a submitter does.

    ``once_of``: of so many tasks, the last ``once`` may be started once only. ``busy``: the main thread keeps the
    interpreter lock most of the time, as one long C call after the other does. ``target_ms``: the latency target of
    those that may be started once only; 0: they have none.
    """

    name: str
    endpoint_ids: list[str]
    starts: str
    ends: str
    once: int = 1
    once_of: int = 2
    task_s: float = 0.005
    result_bytes: int = 0
    busy: bool = False
    within_s: float = 300.0
    target_ms: float = 0.0
    argument_bytes: int = 0


def work(starts: str, key: str, task_s: float, result_bytes: int, argument: bytes) -> bytes:
    """Note the start, work, and return something. The task of nearly all phases."""
    import os
    import time

    descriptor = os.open(starts, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(descriptor, f"{key}\n".encode())
    os.close(descriptor)
    time.sleep(task_s)
    return b"r" * result_bytes


class Submitter:
    """Executors for both kinds of tasks at each endpoint, and the file of ends."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._client = farcall.Client()
        self._executors = {
            (endpoint_id, once): farcall.Executor(
                endpoint_id,
                client=self._client,
                idempotent=not once,
                max_attempts=1 if once else 50,
                qos=farcall.QoS(target_ms=orders.target_ms) if once and orders.target_ms else None,
            )
            for endpoint_id in orders.endpoint_ids
            for once in (False, True)
        }
        self._ends = os.open(orders.ends, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for executor in self._executors.values():
            self._write("group", str(executor.task_group_id))
        self._open: dict[str, farcall.ComputeFuture[bytes]] = {}
        self._changed = threading.Condition()
        self._count = 0

    def submit(self, count: int) -> None:
        orders = self._orders
        for _ in range(count):
            number = self._count
            self._count += 1
            once = number % orders.once_of >= orders.once_of - orders.once
            key = f"{orders.name}.{number}"
            executor = self._executors[orders.endpoint_ids[number % len(orders.endpoint_ids)], once]
            argument = os.urandom(orders.argument_bytes)  # equal ones would be uploaded once
            future = executor.submit(work, orders.starts, key, orders.task_s, orders.result_bytes, argument)
            with self._changed:
                self._open[key] = future
            future.add_done_callback(lambda done, key=key, once=once: self._ended(key, once, done))  # type: ignore[misc]

    def wait(self) -> None:
        """Wait for all results; tasks without one after a long pause are recorded as open."""
        with self._changed:
            while self._open:
                count = len(self._open)
                if not self._changed.wait_for(lambda: len(self._open) < count, self._orders.within_s):  # noqa: B023
                    break
            for key, future in self._open.items():
                self._write("end", key, future.task_id, "?", "open")
        self._write("done")

    def _ended(self, key: str, once: bool, future: farcall.ComputeFuture[bytes]) -> None:
        if future.cancelled():
            outcome = "cancelled"
        elif (error := future.exception()) is None:
            outcome = "success" if len(future.result()) == self._orders.result_bytes else "WRONG_RESULT"
        else:
            record: Any = getattr(error, "record", None)
            outcome = getattr(record, "code", None) or type(error).__name__
        self._write("end", key, future.task_id, "once" if once else "many", outcome)
        with self._changed:
            self._open.pop(key, None)
            self._changed.notify_all()

    def _write(self, *words: str) -> None:
        os.write(self._ends, f"{' '.join(words)}\n".encode())


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    keep_the_lock = ctypes.PyDLL(None).usleep  # unlike CDLL, it does not release the lock
    submitter = Submitter(orders)
    submitter._write("ready")
    while True:
        while orders.busy and not select.select([0], [], [], 0.05)[0]:
            keep_the_lock(300_000)
        line = sys.stdin.readline()
        if not line:
            break
        submitter.submit(int(line))
    submitter.wait()
    os._exit(0)  # without waiting for what is still open


if __name__ == "__main__":
    main()
