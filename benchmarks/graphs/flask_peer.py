"""The applications as functions behind HTTP: a Flask server each, which calls the next one on connections that stay."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from benchmarks.graphs import functions
from benchmarks.graphs.measuring import PIECES, Counts, Results, application_figures, text, words_result

_local: Final = threading.local()
_pool: Final = concurrent.futures.ThreadPoolExecutor(PIECES)
Ports = Mapping[str, int]


def measure(results: Results, counts: Counts) -> None:
    """Both applications."""
    context = multiprocessing.get_context("spawn")
    ports: dict[str, int] = {}
    processes = []
    try:
        for name in reversed(list(_THEN)):  # whose next ones have their ports
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(name, dict(ports), there), daemon=True)
            process.start()
            processes.append(process)
            ports[name] = here.recv()
        given = text()
        for name, first, value, wanted in (
            ("alexa", "frontend", functions.REQUEST, functions.ALEXA_RESULT),
            ("words", "split", given, words_result()),
        ):
            run = functools.partial(_call, ports, first, value)
            results.add(name, functools.partial(application_figures, name, run, counts.applications, wanted))
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve(name: str, ports: Ports, ready: Connection) -> None:
    """Serve a function until the process is ended."""
    import logging

    from flask import Flask, Response, request
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = Flask(name)
    then = _THEN[name]

    @server.post("/")
    def call() -> Response:
        return Response(
            pickle.dumps(then(pickle.loads(request.get_data()), ports)), mimetype="application/octet-stream"
        )

    listening = make_server("127.0.0.1", 0, server, threaded=True, request_handler=Handler)
    ready.send(listening.server_port)
    listening.serve_forever()


def _call(ports: Ports, name: str, value: Any) -> Any:
    """A function on its server. Each thread has its own connections."""
    import requests

    session = getattr(_local, "session", None)
    if session is None:
        session = _local.session = requests.Session()
        session.trust_env = False
    answer = session.post(f"http://127.0.0.1:{ports[name]}/", data=pickle.dumps(value))
    answer.raise_for_status()
    return pickle.loads(answer.content)


def _call_each(ports: Ports, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """Several at once."""
    return list(_pool.map(lambda name, value: _call(ports, name, value), names, values))


def _devices(envelope: Any, ports: Ports) -> list[Any]:
    commands = functions.smarthome(envelope)
    return _call_each(ports, ("door", "light"), (commands, commands))


def _pieces(given: str, ports: Ports) -> Any:
    pieces = functions.split(given, PIECES)
    return _call(ports, "merge", _call_each(ports, ["count_words"] * len(pieces), pieces))


#: By the name of its server: a function, and what its server calls with the value.
_THEN: Final[Mapping[str, Callable[[Any, Ports], Any]]] = {
    "frontend": lambda given, ports: _call(ports, "interact", functions.frontend(given)),
    "interact": lambda given, ports: _call(ports, "smarthome", functions.interact(given)),
    "smarthome": _devices,
    "door": lambda given, _: functions.door(given),
    "light": lambda given, _: functions.light(given),
    "split": _pieces,
    "count_words": lambda given, _: functions.count_words(given),
    "merge": lambda given, _: functions.merge(given),
}
