"""Files of an endpoint for tasks at other endpoints: whose requests are read first."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import zmq

from farcall_common.wire import FileWanted, Message
from farcall_endpoint.agent.shell.files_for_others import FilesForOthers
from farcall_endpoint.files.reading import ReadPiece
from tests.waiting import wait_until


class HangingFiles:
    """Files whose reading takes until ``go_on`` is set."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()

    def read(self, submitter: str, path: str, **_: int) -> ReadPiece:
        self.begun.append(submitter)
        self.go_on.wait()
        return ReadPiece(1, "v", b"", "")


@pytest.mark.parametrize("payer", ["", "mallory"])
def test_requests_of_service_accounts_count_for_their_payer(payer: str) -> None:
    files, sent = HangingFiles(), list[Message]()
    readable: Any = files
    blobs: Any = None
    others = FilesForOthers(
        readable, blobs=blobs, send=sent.append, owner_or=lambda submitter: submitter, poller=zmq.Poller()
    )
    try:
        for number in range(4):
            others.requested(FileWanted(request_id=f"m{number}", submitter=f"robot-{number}", path="/", payer=payer))
        others.requested(FileWanted(request_id="b", submitter="bob", path="/"))
        expected = {"robot-0", "robot-1", "bob"} if payer else {f"robot-{number}" for number in range(4)}
        wait_until(lambda: set(files.begun) == expected)
    finally:
        files.go_on.set()
        others.close()
