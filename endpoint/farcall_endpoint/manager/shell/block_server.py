"""Blocks of tasks in the memory of nodes: what tasks want of other nodes, and what other managers want of this one.

The address of a node has a proof that a manager of this agent has made it, so that no task makes a manager connect to
anything else. Threads and the server (:mod:`.file_server`) are started by the first request.

Blocks of this node are passed on as descriptors, and take no memory of the manager. Those of other nodes, and sealed
ones, are in its memory until they are sent.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from farcall_common.errors import FarcallError, ObjectGone, StoreUnavailable
from farcall_common.objects import block_files
from farcall_endpoint.contracts.agent_manager import BlocksWanted
from farcall_endpoint.contracts.manager_worker import INLINE_BYTES, BlocksAnswer
from farcall_endpoint.host.memory_directories import MemoryDirectories
from farcall_endpoint.host.shared_memory import Frame, MemoryFile, SharedBytes
from farcall_endpoint.manager.core.actions import ServeBlocks
from farcall_endpoint.manager.core.events import BlocksServed
from farcall_endpoint.manager.shell.event_queue import EventQueue
from farcall_endpoint.manager.shell.file_server import Answered, FileClient, FileServer, SourceFailed, Wanted, started
from farcall_endpoint.worker.directories import name_of

_logger = logging.getLogger(__name__)

_THREADS: Final = 4
_TRIES: Final = 2
_END_LIMIT_S: Final = 2.0
_PROOF_CHARACTERS: Final = 32
_ENDED: Final = "its worker has ended"
_NO_MEMORY: Final = "this node has no memory for blocks"


class Turns:
    """Requests that wait for a thread: that of the payer with the fewest ones under way is next. No payer has all
    threads, so that none waits for the nodes that another one asks.

    :param threads: how many there are.
    """

    def __init__(self, threads: int) -> None:
        self._most = max(1, threads - 1)
        self._waiting: dict[str, collections.deque[ServeBlocks]] = {}
        self._running: collections.Counter[str] = collections.Counter()
        self._taken: list[ServeBlocks] = []
        self._dropped: set[int] = set()  # workers
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, action: ServeBlocks) -> None:
        """Add a request."""
        with self._changed:
            self._waiting.setdefault(action.payer, collections.deque()).append(action)
            self._changed.notify()

    def take(self) -> ServeBlocks | None:
        """The next request; waits for it. None once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
            payer = self._next()
            if self._is_closed or payer is None:
                return None
            self._running[payer] += 1
            waiting = self._waiting[payer]
            action = waiting.popleft()
            if not waiting:
                del self._waiting[payer]
            self._taken.append(action)
            return action

    def end(self, action: ServeBlocks) -> None:
        """A request has its answer."""
        with self._changed:
            self._taken.remove(action)
            self._dropped &= {each.worker_id for each in self._taken}
            self._running[action.payer] -= 1
            if not self._running[action.payer]:
                del self._running[action.payer]
            self._changed.notify()

    def drop(self, worker_id: int) -> list[ServeBlocks]:
        """A worker has ended: return its requests that wait, and mark those under way."""
        dropped: list[ServeBlocks] = []
        with self._changed:
            for payer, waiting in list(self._waiting.items()):
                dropped += [each for each in waiting if each.worker_id == worker_id]
                left = collections.deque(each for each in waiting if each.worker_id != worker_id)
                if left:
                    self._waiting[payer] = left
                else:
                    del self._waiting[payer]
            self._dropped |= {each.worker_id for each in self._taken if each.worker_id == worker_id}
        return dropped

    def while_wanted(self, action: ServeBlocks, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield the pieces of an answer.

        :raises SourceFailed: when its worker has ended.
        """
        for piece in pieces:
            if action.worker_id in self._dropped:
                raise SourceFailed(_ENDED)
            yield piece

    def close(self) -> None:
        """Give nothing any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next(self) -> str | None:
        ready = [each for each in self._waiting if self._running[each] < self._most]
        return min(ready, key=lambda each: self._running[each], default=None)


class BlockServer:
    """The blocks of this node. Methods are called in one thread.

    :param memory: the directories of submitters; None: there are none.
    :param host: finds the address of this node at which other managers reach it; None: all nodes share their memory.
    """

    def __init__(self, memory: MemoryDirectories | None, *, host: Callable[[], str] | None) -> None:
        self._memory = memory
        self._host = host
        self._key = b""
        self._client = FileClient()
        self._server: FileServer | None = None
        self._starting = threading.Lock()  # of the server
        self._turns = Turns(_THREADS)
        self._events: EventQueue[BlocksServed] = EventQueue()
        self._threads: list[threading.Thread] = []

    def set_key(self, key: bytes) -> None:
        """Set the key of the agent."""
        self._key = key
        self._client.set_key(key)

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`events` has events."""
        return self._events.fileno()

    def events(self) -> list[BlocksServed]:
        """Return the events since the last call."""
        return self._events.take()

    def perform(self, action: ServeBlocks) -> None:
        """Perform a task's request in a thread."""
        while len(self._threads) < _THREADS:
            thread = started(self._serve_all, "farcall-blocks")
            if thread is None:
                break
            self._threads.append(thread)
        if self._threads:
            self._turns.put(action)
        else:
            self._report(action, error=_problem(action, "the node cannot start another thread"))

    def drop(self, worker_id: int) -> None:
        """A worker has ended: get nothing for its tasks any more."""
        for action in self._turns.drop(worker_id):
            self._report(action, error=_problem(action, _ENDED))

    def close(self) -> None:
        """End all threads."""
        self._client.close()
        if self._server is not None:
            self._server.close()
        self._turns.close()
        for thread in self._threads:
            thread.join(_END_LIMIT_S)
        if not any(thread.is_alive() for thread in self._threads):  # such a one may report yet
            self._events.close()

    # -- tasks of this node --------------------------------------------------------------------------------------------

    def _serve_all(self) -> None:
        while (action := self._turns.take()) is not None:
            try:
                address, body = self._serve(action)
            except KeyError:
                self._report(action, error=_problem(action, "they are not on their node any more"))
            except FarcallError as error:  # a seal does not fit
                self._report(action, error=error)
            except (SourceFailed, OSError, ValueError) as error:
                self._report(action, error=_problem(action, str(error)))
            else:
                self._report(action, address, body)
            finally:
                self._turns.end(action)

    def _serve(self, action: ServeBlocks) -> tuple[str, tuple[Frame, ...]]:
        packet = action.packet
        if not packet.parts and not packet.below:
            return self._own_address(), ()
        wanted = BlocksWanted(action.submitter, packet.parts, packet.below)
        is_here = not packet.node or (self._server is not None and packet.node == self._own_address())
        if is_here:
            if wanted.below:
                self._delete_below(wanted)
            if wanted.size_bytes > INLINE_BYTES and not self._block_key(wanted.submitter):
                return "", tuple(self._shared(wanted))
            return "", _body(self._turns.while_wanted(action, self._contents(wanted)), wanted.size_bytes)
        for tries_left in reversed(range(_TRIES)):
            try:
                pieces = self._client.read(wanted, self._checked(packet.node))
                return "", _body(self._turns.while_wanted(action, pieces), wanted.size_bytes)
            except SourceFailed:
                if not tries_left:
                    raise
        raise AssertionError

    def _report(
        self, action: ServeBlocks, address: str = "", body: tuple[Frame, ...] = (), *, error: FarcallError | None = None
    ) -> None:
        answer = BlocksAnswer(action.packet.number, address, None if error is None else error.record.to_json())
        self._events.put(BlocksServed(action.worker_id, action.packet.task_id, answer, body))

    # -- addresses -----------------------------------------------------------------------------------------------------

    def _own_address(self) -> str:
        """``host:port:proof`` of this node; empty if all nodes share their memory.

        :raises OSError: if there can be no server.
        """
        if self._host is None:
            return ""
        if self._memory is None:
            raise OSError(_NO_MEMORY)
        if not self._key:
            raise OSError("the agent has sent no key")
        with self._starting:
            if self._server is None:
                server = FileServer(self._host(), read=self._read)
                server.start(self._key)
                self._server = server
        return f"{self._server.address}:{self._proof(self._server.address)}"

    def _checked(self, node: str) -> str:
        """The ``host:port`` of a node.

        :raises ValueError: if no manager of this agent has made this address.
        """
        address, _, proof = node.rpartition(":")
        if not self._key or not hmac.compare_digest(proof.encode(), self._proof(address).encode()):
            raise ValueError("the address of their node was not issued by this endpoint")
        return address

    def _proof(self, address: str) -> str:
        return hmac.digest(self._key, b"blocks at " + address.encode(), "sha256").hex()[:_PROOF_CHARACTERS]

    # -- blocks of this node -------------------------------------------------------------------------------------------

    def _read(self, wanted: Wanted) -> Answered:
        """Blocks for another manager. Blocks below a prefix are deleted instead.

        :raises KeyError: if one is not there.
        :raises OSError: if it cannot be read.
        :raises ObjectDamaged: if its seal does not fit.
        """
        if not isinstance(wanted, BlocksWanted):
            raise KeyError(wanted)
        if wanted.below:
            self._delete_below(wanted)
        yield from self._contents(wanted)

    def _contents(self, wanted: BlocksWanted) -> Iterator[bytes | memoryview]:
        key = self._block_key(wanted.submitter)
        for name, start, end in wanted.parts:
            memory = self._opened(wanted.submitter, name, start, end)
            yield from block_files.read(memory.descriptor, start, end, name=name, key=key)

    def _shared(self, wanted: BlocksWanted) -> Iterator[Frame]:
        """The same as ranges of files, which the worker maps: a file that becomes shorter ends the worker alone."""
        for name, start, end in wanted.parts:
            yield SharedBytes(self._opened(wanted.submitter, name, start, end), start, end - start)

    def _delete_below(self, wanted: BlocksWanted) -> None:
        for directory in self._directories(wanted.submitter):
            block_files.delete_below(directory, wanted.below)

    def _block_key(self, submitter: str) -> bytes:
        return b"" if self._memory is None else self._memory.block_key(submitter).encode()

    def _opened(self, submitter: str, name: str, start: int, end: int) -> MemoryFile:
        """The file of a block that has these bytes.

        :raises KeyError: if there is none.
        """
        for directory in self._directories(submitter):
            with contextlib.suppress(FileNotFoundError):
                memory = MemoryFile(block_files.open_block(directory, name))
                key = self._block_key(submitter)
                if block_files.size_of(memory.descriptor, key=key) < end:
                    raise KeyError(name)
                # No writer of blocks leaves holes. To read them would take memory that their file does not.
                if not key and start < end > os.lseek(memory.descriptor, start, os.SEEK_HOLE):
                    raise KeyError(name)
                return memory
        raise KeyError(name)

    def _directories(self, submitter: str) -> Iterator[int]:
        """The directories of blocks of a submitter: of workers that serve it alone, and of those that serve several."""
        if self._memory is None:
            return
        paths: list[Path] = [self._memory.path(submitter)]
        if submitter:
            paths.append(self._memory.path("") / name_of(submitter))
        for path in paths:
            with contextlib.suppress(FileNotFoundError), block_files.opened(path / block_files.DIRECTORY) as directory:
                yield directory


def _problem(action: ServeBlocks, reason: str) -> FarcallError:
    parts = action.packet.parts
    if not parts:
        return StoreUnavailable(f"Blocks in the memory of nodes: {reason}.")
    return ObjectGone(f"{parts[0][0]} and {len(parts) - 1} other blocks cannot be read: {reason}.")


def _body(pieces: Iterator[bytes | memoryview], size: int) -> tuple[Frame, ...]:
    if size <= INLINE_BYTES:
        return (b"".join(pieces),)
    return (SharedBytes(MemoryFile.of(pieces), 0, size),)
