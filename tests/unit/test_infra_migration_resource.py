"""The custom resource that migrates the database: CloudFormation receives one answer, whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import runpy
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from farcall_common.errors import Unavailable
from farcall_infra.bundles import RUNTIME
from tests.waiting import WAIT_S

handle = runpy.run_path(str(RUNTIME / "migration_resource.py"))["handle"]


@dataclasses.dataclass
class _CloudFormation:
    """The server that receives answers."""

    url: str
    answers: queue.SimpleQueue[dict[str, Any]] = dataclasses.field(default_factory=queue.SimpleQueue)

    def request(self, kind: str) -> dict[str, Any]:
        return {
            "RequestType": kind,
            "ResponseURL": self.url,
            "StackId": "stack",
            "RequestId": "request",
            "LogicalResourceId": "Run",
        }


@dataclasses.dataclass
class _Context:
    remaining_ms: int
    log_stream_name: str = "stream"
    aws_request_id: str = "an-invocation"

    def get_remaining_time_in_millis(self) -> int:
        return self.remaining_ms


@pytest.fixture
def cloudformation() -> Iterator[_CloudFormation]:
    class Bucket(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            found.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    found = _CloudFormation(f"http://127.0.0.1:{server.server_address[1]}/answer")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_migration_near_lambdas_timeout_is_reported_as_failed(
    cloudformation: _CloudFormation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database accepts a connection and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as database:
        monkeypatch.setenv("FARCALL_DATABASE_URL", f"postgresql://u@127.0.0.1:{database.getsockname()[1]}/d")
        ended = list[Exception]()

        def run() -> None:
            try:
                handle(cloudformation.request("Create"), _Context(remaining_ms=15_000))
            except Unavailable as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        connection, _ = database.accept()
        answer = cloudformation.answers.get(timeout=WAIT_S)
        assert (answer["Status"], answer["LogicalResourceId"]) == ("FAILED", "Run")
        assert "did not finish" in answer["Reason"]
        assert thread.is_alive()
        connection.close()
        thread.join(WAIT_S)
    assert len(ended) == 1
    assert cloudformation.answers.empty()  # CloudFormation accepts no second one


@pytest.mark.parametrize(("kind", "status"), [("Create", "FAILED"), ("Update", "FAILED"), ("Delete", "SUCCESS")])
def test_each_request_gets_exactly_one_answer(
    cloudformation: _CloudFormation, monkeypatch: pytest.MonkeyPatch, kind: str, status: str
) -> None:
    monkeypatch.setenv("FARCALL_DATABASE_URL", "postgresql://u@127.0.0.1:1/d")  # where there is no database
    with contextlib.suppress(Unavailable):
        handle(cloudformation.request(kind), _Context(remaining_ms=840_000))
    assert cloudformation.answers.get_nowait()["Status"] == status
    assert cloudformation.answers.empty()
