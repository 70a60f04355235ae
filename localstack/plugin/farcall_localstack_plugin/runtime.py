"""Lambda execution environment as a process: AWS's own runtime client (awslambdaric) with a loopback Runtime API.

The protocol is Lambda's Runtime API 2018-06-01: the client requests the next invocation, runs the handler and posts the
answer; one invocation at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from farcall_localstack_plugin import children
from farcall_localstack_plugin.children import Child
from farcall_localstack_plugin.limits import MAX_ANSWER_BYTES, answer_too_large


class RuntimeFailed(Exception):
    """The handler could not be initialised; ``payload`` is the error as JSON."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(payload.decode(errors="replace"))
        self.payload = payload


@dataclasses.dataclass(frozen=True)
class Invocation:
    """One event for the handler."""

    request_id: str
    payload: bytes
    function_arn: str
    trace_id: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of an invocation: the answer, or the error as JSON."""

    payload: bytes
    is_error: bool


class RuntimeProcess:
    """One environment. After a crash or a time-out the next invocation restarts the process, as in Lambda."""

    def __init__(
        self,
        name: str,
        *,
        python: Path,
        code: Path,
        handler: str,
        environment: Mapping[str, str],
        timeout_s: float,
        init_timeout_s: float,
        log: Path,
    ) -> None:
        self._name = name
        self._command = [str(python), "-m", "awslambdaric", handler]
        self._code = code
        self._timeout_s = timeout_s
        self._init_timeout_s = init_timeout_s
        self._log = log
        self._child: Child | None = None
        self._next: queue.SimpleQueue[Invocation | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[str, Outcome]] = queue.SimpleQueue()
        self._init: Future[bytes | None] = Future()
        self._server = _RuntimeApi(self)
        self._environment = {
            "PATH": os.environ["PATH"],
            "LANG": "en_US.UTF-8",
            "TZ": "UTC",
            **environment,
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{self._server.server_port}",
            "LAMBDA_TASK_ROOT": str(code),
            "PYTHONPATH": str(code),
            "_HANDLER": handler,
        }

    def start(self) -> None:
        """Start the process and wait until it requests its first invocation.

        :raises RuntimeFailed: if the handler cannot be imported, or takes longer than the init time-out.
        """
        init: Future[bytes | None] = Future()
        self._init = init
        self._next = queue.SimpleQueue()
        self._child = child = children.start(
            self._name, self._command, log=self._log, environment=self._environment, cwd=self._code
        )
        threading.Thread(target=self._reap, args=(child, init), name=f"reap-{self._name}", daemon=True).start()
        try:
            error = init.result(timeout=self._init_timeout_s)
        except TimeoutError:
            child.stop()
            raise RuntimeFailed(_error("Sandbox.Timedout", "init did not finish in time")) from None
        if error is not None:
            child.stop()
            raise RuntimeFailed(error)

    def invoke(self, invocation: Invocation) -> Outcome:
        """Run the handler on one event."""
        if self._child is None or not self._child.alive:
            self.start()
        self._outcomes = queue.SimpleQueue()
        self._next.put(invocation)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                request_id, outcome = self._outcomes.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                assert self._child is not None
                self._child.stop()
                message = f"{invocation.request_id} Task timed out after {self._timeout_s:.2f} seconds"
                return Outcome(_error("Sandbox.Timedout", message), is_error=True)
            if request_id in (invocation.request_id, ""):
                size = len(outcome.payload)
                return outcome if size <= MAX_ANSWER_BYTES else Outcome(answer_too_large(size), is_error=True)

    def log_text(self, *, since: int = 0) -> str:
        """The output of the process, from byte ``since`` on."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def log_size(self) -> int:
        """The size of the process's output in bytes."""
        return self._log.stat().st_size if self._log.exists() else 0

    def stop(self) -> None:
        """End the process and its Runtime API."""
        self._next.put(None)
        if self._child is not None:
            self._child.stop()
        self._server.shutdown()
        self._server.server_close()

    # The Runtime API's threads call these.

    def next_invocation(self) -> tuple[Invocation, float] | None:
        """Block until there is an event; returns it with its time limit in seconds, or None if the environment
        stops."""
        _settle(self._init, None)
        invocation = self._next.get()
        return None if invocation is None else (invocation, self._timeout_s)

    def init_failed(self, error: bytes) -> None:
        _settle(self._init, error)

    def finished(self, request_id: str, outcome: Outcome) -> None:
        self._outcomes.put((request_id, outcome))

    def _reap(self, child: Child, init: Future[bytes | None]) -> None:
        """Wait until the process has ended, and report that to callers waiting for it."""
        status = child.wait()
        error = _error("Runtime.ExitError", f"the runtime exited with status {status}")
        _settle(init, error)
        if self._child is child:
            self._next.put(None)
            self._outcomes.put(("", Outcome(error, is_error=True)))


class _RuntimeApi(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, runtime: RuntimeProcess) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runtime = runtime
        threading.Thread(target=self.serve_forever, args=(0.05,), name="runtime-api", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _RuntimeApi

    def do_GET(self) -> None:
        upcoming = self.server.runtime.next_invocation()
        if upcoming is None:
            self.close_connection = True
            return
        invocation, timeout_s = upcoming
        self._answer(
            200,
            invocation.payload,
            {
                "Lambda-Runtime-Aws-Request-Id": invocation.request_id,
                "Lambda-Runtime-Deadline-Ms": str(int((time.time() + timeout_s) * 1000)),
                "Lambda-Runtime-Invoked-Function-Arn": invocation.function_arn,
                "Lambda-Runtime-Trace-Id": invocation.trace_id,
            },
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        *_, request_id, kind = self.path.split("/")
        if request_id == "init":
            self.server.runtime.init_failed(body)
        else:
            self.server.runtime.finished(request_id, Outcome(body, is_error=kind == "error"))
        self._answer(202, b'{"status":"OK"}', {})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """No log: LocalStack logs invocations already."""

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _settle(future: Future[bytes | None], value: bytes | None) -> None:
    """Set the result of an init, unless it has one already."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(value)


def _error(kind: str, message: str) -> bytes:
    return json.dumps({"errorType": kind, "errorMessage": message}).encode()
