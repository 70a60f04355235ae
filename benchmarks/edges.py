"""Direct edges between two worker processes, compared with other ways from one process to another.

    python -m benchmarks.edges [--rounds 400]

Each figure is the time from the end of the producing function to the beginning of the consuming function, which gets
the value: an array of bytes. The consumer sleeps before each call. Both are processes of their own, in Python, on one
clock. The first call, which maps memory, is apart.

What a graph adds to an edge, in its workers and its manager, is not in these figures: ``benchmarks.graphs`` measures
whole edges.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import multiprocessing
import pickle
import socket
import statistics
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Final

import numpy as np

from benchmarks.graphs.measuring import SIZES
from benchmarks.report import Report, heading, new_report, page, table
from farcall_common.payload import Serializer
from farcall_endpoint.contracts.manager_worker import Delivery
from farcall_endpoint.worker.edges import Edge, Edges, Key, edge_pair

_KEY: Final[Key] = ("0190f3c2-8f14-7e45-a0e6-9b2d5c1f3a77/1", 0)
_PAUSE_S: Final = 0.001
"""Between a call and the next, so that the consumer sleeps."""
_LENGTH: Final = struct.Struct("<Q")

Value = np.ndarray[Any, np.dtype[np.uint8]]
Consume = Callable[[Value], object]


class _Edge:
    """Ours, as a worker uses it. ``in_place``: whether the function writes the value where it stays."""

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._ends = edge_pair()
        self._serializer = Serializer()
        self._manager = socket.socketpair()

    def _open(self, *, first: bool) -> Edges:
        edges = Edges(self._manager[0].fileno())
        edges.add(0, Edge(*self._ends[0 if first else 1], first=first))
        return edges

    def start(self) -> None:
        self._edges = self._open(first=True)

    def memory(self, size: int) -> Value:
        return np.frombuffer(self._edges.arenas.buffer(size), np.uint8) if self._in_place else np.empty(size, np.uint8)

    def send(self, values: list[Value]) -> None:
        edges = self._edges
        value = edges.outgoing(self._serializer.edge_pieces(values.pop()))
        if not isinstance(value, bytes):
            value = edges.arenas.settle(value)
        assert not edges.deliver(value, [Delivery(0, *_KEY)])
        edges.arenas.end_task()

    def consume(self, function: Consume) -> None:
        edges = self._open(first=False)
        while (found := edges.wait([_KEY])) is not None:
            function(self._serializer.deserialize(found.pop()))  # type: ignore[arg-type]


class _UnixSocket:
    """A stream, and pickle with its length."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()

    def start(self) -> None:
        pass

    def memory(self, size: int) -> Value:
        return np.empty(size, np.uint8)

    def send(self, values: list[Value]) -> None:
        pickled = pickle.dumps(values[0], 5)
        self._here.sendall(_LENGTH.pack(len(pickled)) + pickled)

    def consume(self, function: Consume) -> None:
        while True:
            size = _LENGTH.unpack(self._there.recv(_LENGTH.size, socket.MSG_WAITALL))[0]
            buffer = bytearray(size)
            at = 0
            while at < size:
                at += self._there.recv_into(memoryview(buffer)[at:])
            function(pickle.loads(buffer))


class _Pipe(_UnixSocket):
    """The connection of the standard library."""

    def __init__(self) -> None:
        self._receiver, self._sender = multiprocessing.Pipe(duplex=False)

    def send(self, values: list[Value]) -> None:
        self._sender.send(values[0])

    def consume(self, function: Consume) -> None:
        while True:
            function(self._receiver.recv())


class _SharedMemory(_Pipe):
    """A block that both have mapped, into which the value is copied; its size goes through a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self._block = SharedMemory(create=True, size=max(SIZES.values()))
        assert self._block.buf is not None
        self._memory = self._block.buf
        self._memory[:] = bytes(self._block.size)

    def send(self, values: list[Value]) -> None:
        [value] = values
        np.frombuffer(self._memory, np.uint8, value.size)[:] = value
        self._sender.send(value.size)

    def consume(self, function: Consume) -> None:
        while True:
            size = self._receiver.recv()
            function(np.frombuffer(self._memory, np.uint8, size))

    def close(self) -> None:
        self._memory.release()
        self._block.close()
        self._block.unlink()


class _Http(_UnixSocket):
    """A POST of pickle on a connection that stays open, on loopback."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))

    def start(self) -> None:
        self._connection = http.client.HTTPConnection(*self._listener.getsockname())
        self._connection.connect()
        assert self._connection.sock is not None
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, values: list[Value]) -> None:
        self._connection.request("POST", "/", pickle.dumps(values[0], 5))
        self._connection.getresponse().read()

    def consume(self, function: Consume) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                function(pickle.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = self._listener
        while True:
            server.handle_request()


_System = _Edge | _UnixSocket
SYSTEMS: Final[dict[str, Callable[[], _System]]] = {
    "edge, written in place": lambda: _Edge(in_place=True),
    "edge, returned": lambda: _Edge(in_place=False),
    "Unix socket, pickle": _UnixSocket,
    "multiprocessing.Pipe": _Pipe,
    "shared memory, pipe": _SharedMemory,
    "HTTP, kept alive": _Http,
}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    report = new_report(rounds=rounds)
    report["systems"] = {
        name: {size: measure(make, bytes_, rounds) for size, bytes_ in SIZES.items()} for name, make in SYSTEMS.items()
    }
    print(as_table(report))


def measure(make: Callable[[], _System], size: int, rounds: int) -> dict[str, float]:
    """Microseconds of the first call, and the percentiles of the others."""
    system = make()
    reports, reporting = multiprocessing.Pipe(duplex=False)
    consumer = multiprocessing.get_context("fork").Process(target=_consume, args=(system, reporting), daemon=True)
    consumer.start()
    took: list[float] = []
    try:
        system.start()
        for number in range(rounds + 1):
            values = [system.memory(size)]
            values[0][:] = number % 251
            ended = time.perf_counter_ns()
            system.send(values)
            values.clear()
            began, *bytes_ = reports.recv()
            assert bytes_ == [size, number % 251, number % 251]
            took.append((began - ended) / 1000)
            time.sleep(_PAUSE_S)
    finally:
        consumer.kill()
        consumer.join()
        if isinstance(system, _SharedMemory):
            system.close()
    first, *others = took
    parts = statistics.quantiles(others, n=100, method="inclusive")
    return {"first": first, "p50": parts[49], "p90": parts[89], "p99": parts[98]}


def _consume(system: _System, reporting: Connection) -> None:
    def function(value: Value) -> None:
        began = time.perf_counter_ns()
        reporting.send((began, value.size, int(value[0]), int(value[-1])))

    system.consume(function)


def as_table(report: Report) -> str:
    """The times as Markdown."""
    rows = [
        [name, size, *(f"{times[each]:,.0f}" for each in ("p50", "p90", "p99", "first"))]
        for name, sizes in report["systems"].items()
        for size, times in sizes.items()
    ]
    columns = ["us from function to function", "value", "p50", "p90", "p99", "first call"]
    return page(heading(report, f"{report['rounds']} calls each"), table(columns, rows))


if __name__ == "__main__":
    main()
