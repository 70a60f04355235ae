"""Ends that have no room for further descriptors on their way: they wait, and lose nothing."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

import pytest

from farcall_endpoint.contracts.manager_worker import Channel, Done, channel_pair
from farcall_endpoint.host.pipe import Pipe, pipe_pair
from farcall_endpoint.host.shared_memory import MemoryFile, SharedBytes


class Crowded:
    """A socket whose account has too many descriptors on their way, for a number of tries."""

    def __init__(self, end: socket.socket, tries: int) -> None:
        self._end = end
        self.tries = tries

    def sendmsg(self, buffers: Any, rights: Any = ()) -> int:
        if rights and self.tries:
            self.tries -= 1
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return self._end.sendmsg(buffers, rights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


def large() -> SharedBytes:
    return SharedBytes(MemoryFile.of([b"x" * 100_000]), 0, 100_000)


def test_a_worker_waits_with_its_result_and_a_manager_does_not_wait_for_a_worker() -> None:
    manager, end, claims = channel_pair()
    worker = Channel(end, claims, pause=lambda: None)
    worker.socket = crowded = Crowded(end, 3)  # type: ignore[assignment]
    worker.send(Done("t", 1.0, 2.0), [large()])
    received = manager.receive_shared()
    assert received is not None
    assert (received[0], len(received[1]), crowded.tries) == (Done("t", 1.0, 2.0), 100_000, 0)
    manager.socket = Crowded(manager.socket, 1)  # type: ignore[assignment]
    with pytest.raises(OSError, match="Too many references"):
        manager.send(Done("t", 1.0, 2.0), [large()])
    worker.close()
    manager.close()


def test_a_pipe_keeps_what_it_cannot_send_yet() -> None:
    here, there = pipe_pair()
    other = Pipe(there)
    here._socket = Crowded(here._socket, 2)  # type: ignore[assignment]
    here.send([b"head", large()])
    assert here.is_congested
    thread = threading.Thread(target=here.close, kwargs={"linger_s": 60.0})
    thread.start()
    thread.join()
    received = other.receive()
    assert received is not None
    assert [len(frame) for frame in received] == [4, 100_000]
    other.close()
