"""Weight of an empty call in the engine, as JSON. Runs in the root of a tree, also of old ones, with its interpreter.

python benchmarks/weight/driver.py engine | yardstick | hop
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Final

WORKERS: Final = 4
CALLS: Final = 20_000
_SINGLE: Final = 500
_ROLES: Final = ("manager", "worker")


def nothing() -> None:
    """A no-op."""


def engine() -> dict[str, float]:
    """Processor time of each of many calls at once, by role of the process, and the wait for one call, in µs."""
    import psutil

    from farcall_endpoint import Engine

    def used_s() -> Iterator[tuple[str, float]]:
        root = psutil.Process()
        yield "client", sum(root.cpu_times()[:2])
        for process in root.children(recursive=True):
            words = " ".join(process.cmdline())
            role = next((role for role in _ROLES if f".{role}" in words), "other")
            yield role, sum(process.cpu_times()[:2])

    with Engine(max_workers=WORKERS) as pool:
        for calls in (CALLS // 10, CALLS):  # the first ones warm up
            spent = dict.fromkeys(("client", *_ROLES, "other"), 0.0)
            for role, used in used_s():
                spent[role] -= used
            for future in [pool.submit(nothing) for _ in range(calls)]:
                future.result()
            for role, used in used_s():
                spent[role] += used
        waits = []
        for _ in range(_SINGLE):
            began = time.perf_counter()
            pool.submit(nothing).result()
            waits.append(time.perf_counter() - began)
    cpu_us = {f"{role}_us": used * 1e6 / CALLS for role, used in spent.items()}
    return cpu_us | {"cpu_us": sum(cpu_us.values()), "wait_us": statistics.median(waits) * 1e6}


def yardstick() -> dict[str, float]:
    """Processor time in µs of what no design leaves out for a call: both directions in one process, without a hop."""
    import msgspec

    pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
    began = time.process_time()
    for each in range(CALLS):
        _, blob = unpack(pack((each, pickle.dumps((nothing, (), {}), 5))))
        function, args, kwargs = pickle.loads(blob)
        _, blob = unpack(pack((each, pickle.dumps(function(*args, **kwargs), 5))))
        pickle.loads(blob)
    return {"cpu_us": (time.process_time() - began) * 1e6 / CALLS}


def hop() -> dict[str, float]:
    """Median time in µs of a message to another process and back, by ZeroMQ."""
    import zmq

    with tempfile.TemporaryDirectory(prefix="hop-") as directory:
        url = f"ipc://{directory}/socket"
        child = os.fork()
        if child == 0:
            echo = zmq.Context().socket(zmq.PAIR)
            echo.bind(url)
            while True:
                echo.send(echo.recv())
        socket = zmq.Context().socket(zmq.PAIR)
        socket.reconnect_ivl = 5
        socket.connect(url)
        waits = []
        for _ in range(_SINGLE):
            began = time.perf_counter()
            socket.send(bytes(100))
            socket.recv()
            waits.append(time.perf_counter() - began)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {"wait_us": statistics.median(waits[_SINGLE // 10 :]) * 1e6}


if __name__ == "__main__":
    print(json.dumps({"engine": engine, "yardstick": yardstick, "hop": hop}[sys.argv[1]]()))
