"""Channel between a manager and one worker: packets over a Unix socket, large bodies in shared memory.

A packet to the worker may contain many tasks, so that short ones do not cost a wake-up each. *Claims* decide which of
them start: the manager sends a byte for each task through a second socket, and the worker takes one before it starts a
task. The manager has a copy of the worker's end, and exactly one side gets a byte. So the manager can revoke tasks that
the worker has not started (:meth:`Channel.revoke`), also from a packet that the worker has already read: the last tasks
lose their claims. The worker skips them, up to the ``Sync`` that the manager sends after them, and answers with
``Synced``; only then new tasks may follow.

A task can do to the worker's ends what it likes. It cannot make claims, and the manager never waits: each of its calls
says so, whatever flags the shared end has.

A packet is a header in MessagePack behind its length; then the body, or, when that would be too large for a packet or
has parts in memory files (``memfd_create``), what :mod:`~farcall_endpoint.contracts.bodies` makes of it. A header that
is too large for a packet is the first part of the body, and its length 0.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec

from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts import bodies
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.host.shared_memory import (
    ALIGNMENT_BYTES,
    ANCILLARY_BYTES,
    Body,
    Bytes,
    Frame,
    FrameList,
    SharedBytes,
    ancillary,
    bytes_of,
    cut,
    descriptors_of,
    piece_of,
)

#: A packet must fit into the socket's send buffer together with a few others (Linux: 208 KiB unless changed).
_MAX_PACKET_BYTES: Final = 64 * 1024
INLINE_BYTES: Final = 32 * 1024
"""A larger value goes into a memory file. A packet must have room for a few smaller ones."""
_MAX_HEADER_BYTES: Final = 1024 * 1024
_LENGTH: Final = struct.Struct("<I")
_LARGE_HEADER: Final = struct.Struct("<II")
"""In place of the header: 0, and how long it is as the first part of the body."""
_MAX_LARGE_HEADER_BYTES: Final = 32 * 1024 * 1024
_MAX_HEADER_OF_WORKER_BYTES: Final = 8 * 1024 * 1024
"""Sizes of a million elements fit. A header that a task forges takes ten times its length in the manager's memory."""
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)  # a plain number: enums are slow to combine
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
_MOST_CLAIMS: Final = 4096


_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
MOST_ELEMENTS: Final = 1_000_000
"""Maximum number of elements of a value that is spread: as many as the calls of a graph."""
_Few = msgspec.Meta(max_length=1_000)
_Many = msgspec.Meta(max_length=10_000)
_Elements = msgspec.Meta(max_length=MOST_ELEMENTS)
"""Limits for the number of items in a worker's packet. The decoder checks the number first: empty items cost no bytes
in the packet and 8 bytes each in the manager's memory."""

MANAGER: Final = -1
ITSELF: Final = -2
"""Values in place of a connection's number: the worker's manager, and the worker itself."""


class InputOrder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An input of a call.

    :param path: place in the arguments, see :class:`farcall_common.graphs.Input`.
    :param parts: sizes of the input's buffers in the packet's body, after the order's payload and the inputs before.
    :param is_list: whether the input is the list of the values in these buffers, not the value in the only buffer.
    :param awaited: whether another worker sends the input (:class:`Delivery`); then it has no buffers here.
    :param missing: whether the call is made without the input.
    """

    path: tuple[int | str, ...]
    parts: tuple[int, ...] = ()
    is_list: bool = False
    awaited: bool = False
    missing: bool = False


class Delivery(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Additional destination of a value: input ``number`` of a call, in the worker at the connection ``peer``
    (:data:`ITSELF`: the same worker)."""

    peer: int
    task_id: str
    number: int


class CallOrder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Part of an order that only calls have: calls of a graph, or of a running task.

    :param inputs: inputs of the call, in the order of the stage.
    :param is_edge: whether the value goes to other calls, in separate binary buffers, and not to the submitter.
    :param spread: whether the elements of the value go to other calls one by one, each in a buffer.
    :param room_bytes: maximum bytes of the value in memory; the rest goes to a file on disk.
    :param most_bytes: maximum size of the value; a larger value is an error.
    :param deliver: the workers that get the value from this worker.
    :param is_nested: whether a running task in another worker has packed the arguments: they are read like the values
        of other calls.
    """

    inputs: tuple[InputOrder, ...] = ()
    is_edge: bool = False
    spread: bool = False
    room_bytes: int = 2**62
    most_bytes: int = 2**62
    deliver: tuple[Delivery, ...] = ()
    is_nested: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether the call is made before one that it gets a value of has ended."""
        return any(each.awaited for each in self.inputs)

    @property
    def input_bytes(self) -> int:
        """The size of all inputs, behind the payload of the order in the packet's body."""
        return sum([sum(each.parts) for each in self.inputs])


class Order(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A task to run. ``payload_bytes`` of the packet's body are its arguments, ``traceparent`` is the span above it.
    ``submitter``: whose working directory it gets; empty for the endpoint's owner. ``data_only``: its arguments must be
    data, which runs no code when it is read. ``retry``: how many runs before this one raised and were retried.
    ``call``: of a graph, or of a running task; ``function_hash`` is empty if it collects its inputs in a list.
    ``files_dir``: the directory of the task's files; empty if it has none. ``read_dir``: that of those that it reads,
    if that is another one: on this node."""

    task_id: str
    attempt: int
    function_hash: str
    payload_bytes: int
    options: TaskOptions = TaskOptions()
    traceparent: str = ""
    submitter: str = ""
    data_only: bool = False
    retry: int = 0
    call: CallOrder | None = None
    files_dir: str = ""
    read_dir: str = ""


class Run(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run tasks, one after the other. The body is the code of functions that the worker does not know yet (hash and
    length of each), and then the payloads. ``forget``: drop all functions that were sent before these."""

    orders: tuple[Order, ...]
    functions: tuple[tuple[str, int], ...] = ()
    forget: bool = False


class Sync(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer with Synced: nothing of what was sent before this will be started any more."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker has started and waits for its first task."""

    pid: int


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A task with a limit on its memory begins. ``resident_bytes``: what the worker and the processes below it hold
    already, by process id; ``file_bytes``: the same of files in memory. That is not the task's."""

    task_id: str
    resident_bytes: Annotated[dict[int, int], _Many]
    file_bytes: Annotated[dict[str, int], _Many] = {}


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A task ended. The body is the result; ``error`` (an ErrorRecord in its JSON form) says that there is none.
    ``details`` are additional data of a success. ``is_retried``: its function raised an exception that its options
    retry. With ``printed``, the tails of its output are behind the result. ``parts``: sizes of the buffers in the
    result, if it is for other calls: one, or one for each element if it is spread; it may be in a file on a disk then.
    ``undelivered``: which of the order's deliveries have failed, by their position. ``lent``: the number and the slot
    of the arena that the result is in, which the manager returns by its ledger.

    A task can forge this. Nothing in it is nested deeply: the agent reads it as a part of a larger message, for which
    the limit of recursion could be too low."""

    task_id: str
    started_at: float
    ended_at: float
    error: Annotated[dict[str, str | int | float | bool | Annotated[list[str], _Many] | None], _Few] | None = None
    details: Annotated[dict[str, str], _Few] | None = None
    printed: Printed | None = None
    is_retried: bool = False
    parts: Annotated[tuple[int, ...], _Elements] = ()
    undelivered: Annotated[tuple[int, ...], _Elements] = ()
    lent: tuple[_Number, _Number] | None = None


class Call(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call by the running task. ``number``: unique in its worker. ``payload_bytes`` of the packet's body are its
    arguments. ``options``: those in which it differs from its task. ``name`` is for people."""

    number: int
    function_hash: str
    payload_bytes: int
    name: str = ""
    options: TaskOptions | None = None


class Calls(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The running task calls functions. The body is the code of those that this worker has not sent before (hash and
    length of each), and then the payloads. Each call is answered by a CallEnded. A task can forge this."""

    task_id: str
    calls: Annotated[tuple[Call, ...], _Many]
    functions: Annotated[tuple[tuple[str, int], ...], _Many] = ()


class Waits(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The running task waits until a call of it has ended, or with ``over`` does no longer. A task can forge this."""

    task_id: str
    over: bool = False


class Progressed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The running task says how far it is. A task can forge this."""

    task_id: str
    done: int | float
    total: int | float | None = None
    text: Annotated[str, _Few] = ""


class DropCalls(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The running task does not need these calls any more. A task can forge this."""

    task_id: str
    numbers: Annotated[tuple[int, ...], _Few]


class ValkeyRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The running task asks for the Valkey of its submitter. Answered by a ValkeyAnswer with this number, which is
    unique in the worker. A task can forge this."""

    task_id: str
    number: int


class ValkeyAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a worker: the address of its submitter's Valkey, with the password; or there is an ``error``."""

    number: int
    url: str = ""
    error: dict[str, Any] | None = None


class BlocksRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The running task wants ``parts`` of its submitter's blocks in the memory of a node (name, start and end of each),
    or to delete those ``below`` a prefix there; with neither, the address of its own node. Answered by a BlocksAnswer
    with this number, which is unique in the worker. A task can forge this."""

    task_id: str
    number: int
    node: str = ""
    parts: Annotated[tuple[tuple[str, int, int], ...], _Few] = ()
    below: str = ""


class BlocksAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a worker: the parts, behind one another in the body, or the address of its node; or there is an
    ``error``."""

    number: int
    address: str = ""
    error: dict[str, Any] | None = None


class CallEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a worker: a call of its running task has ended. The body is the value's buffer; or there is an ``error``."""

    number: int
    error: dict[str, Any] | None = None


class Peer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a worker: a direct edge to another one (:mod:`farcall_endpoint.worker.edges`). The body is the descriptors of
    its socket and its ledger, each as a range of a memory file. ``first``: which end of the ledger this is. With the
    number :data:`MANAGER` it is the manager's ledger, without a socket."""

    number: int
    first: bool


class Synced(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to Sync."""


class NewModules(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Modules that the tasks of a worker have imported since its start, or since the last of these packets, in order. A
    task can forge this."""

    names: Annotated[tuple[str, ...], _Few]


FromWorker = (
    Ready | Begun | Done | Synced | NewModules | Calls | Waits | DropCalls | Progressed | ValkeyRequest | BlocksRequest
)
Packet = FromWorker | Run | Sync | CallEnded | Peer | ValkeyAnswer | BlocksAnswer

MALFORMED: Final = (msgspec.MsgspecError, struct.error, ValueError, OverflowError, RecursionError)
"""What :meth:`Channel.receive` raises for bytes that no packet has."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final[Callable[[Bytes], Packet]] = msgspec.msgpack.Decoder(Packet).decode
_decode_from_worker: Final[Callable[[Bytes], Packet]] = msgspec.msgpack.Decoder(FromWorker).decode


class Channel:
    """One end. Blocks or not as its socket does; owned by one thread.

    :param claims: the socket of claims: the manager sends them, the worker receives them.
    :param unclaimed: the manager's copy of the worker's.
    :param pause: waits a moment, in a worker.

    :ivar received_bytes: of all packets and their headers, without bodies in files.
    """

    def __init__(
        self,
        end: socket.socket,
        claims: socket.socket,
        unclaimed: socket.socket | None = None,
        *,
        pause: Callable[[], object] | None = None,
    ) -> None:
        self.socket = end
        self.received_bytes = 0
        self._pause = pause
        self._most_header_bytes = _MAX_LARGE_HEADER_BYTES if unclaimed is None else _MAX_HEADER_OF_WORKER_BYTES
        self._decode = _decode if unclaimed is None else _decode_from_worker
        self._claims = claims
        self._unclaimed = claims if unclaimed is None else unclaimed
        # Memory that takes no space before it is used: most packets fill one page of it.
        self._buffer = mmap.mmap(-1, _MAX_PACKET_BYTES + _LENGTH.size + _MAX_HEADER_BYTES)
        self._view = memoryview(self._buffer)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the channel; the other end notices."""
        for end in (self.socket, self._claims, self._unclaimed):
            end.close()

    # -- the manager's end ---------------------------------------------------------------------------------------------

    def order(self, packet: Run, body: Sequence[Frame]) -> None:
        """Send tasks, with a claim for each.

        :raises BlockingIOError: if the socket is full; the worker will start none of them.
        :raises OSError: if the worker is gone.
        """
        # First: a task without a claim would be passed over.
        if self._claims.send(bytes(len(packet.orders)), _DONTWAIT) < len(packet.orders):
            raise BlockingIOError
        self.send(packet, body)

    def revoke(self) -> int:
        """Take back all claims that the worker has not taken; returns their number."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while claims := self._unclaimed.recv(_MOST_CLAIMS, _DONTWAIT):
                count += len(claims)
        return count

    # -- the worker's end ----------------------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Take the claim of the next task; False if the manager has revoked it."""
        try:
            return bool(self._unclaimed.recv(1, _DONTWAIT))
        except BlockingIOError:
            return False

    # -- both ends -----------------------------------------------------------------------------------------------------

    def send(self, packet: Packet, body: Sequence[Frame] = ()) -> None:
        """Send a packet and the parts of its body. A part in a memory file stays there, and can be read as one part
        only; bytes next to each other are joined.

        :raises BlockingIOError: if the socket does not block and is full; nothing was sent then.
        :raises OSError: if the other end is gone.
        """
        header = _encode(packet)
        size = len(header)
        for part in body:
            if type(part) is SharedBytes:
                self._send_with_files(header, body)
                return
            size += len(part)
        if size <= _MAX_PACKET_BYTES:
            self.socket.send(b"".join((_LENGTH.pack(len(header)), header, *body)))  # type: ignore[arg-type]  # as seen
        else:
            self._send_with_files(header, body)

    def _send_with_files(self, header: bytes, body: Sequence[Frame]) -> None:
        if len(header) <= _MAX_PACKET_BYTES:
            own_bytes = len(header) + sum(len(part) for part in body if not isinstance(part, SharedBytes))
            packed, memories = bodies.pack(body, inline=own_bytes <= _MAX_PACKET_BYTES)
            packed = [_LENGTH.pack(len(header)), header, *packed]
        else:
            gap = bytes(-len(header) % ALIGNMENT_BYTES)
            packed, memories = bodies.pack((header + gap, *body), inline=False)
            packed = [_LARGE_HEADER.pack(0, len(header)), *packed]
        while True:
            try:
                self.socket.sendmsg(packed, ancillary(memories))
                return
            except OSError as error:
                # Too many descriptors of this account are on their way. A worker waits, as its result would be lost.
                if error.errno != errno.ETOOMANYREFS or self._pause is None:
                    raise
                self._pause()

    def receive(self) -> tuple[Packet, Bytes | FrameList] | None:
        """The next packet and its body, of which large parts are views of shared memory; None when the other end is
        gone.

        :raises BlockingIOError: if the socket does not block and is empty.
        """
        received = self.receive_shared()
        if received is None:
            return None
        packet, body = received
        if isinstance(body, bytes):
            return packet, body
        if type(packet) is Peer:  # a socket has no size
            return packet, body if isinstance(body, FrameList) else FrameList([body])
        for part in bodies.ranges_of(body):
            if not part.is_complete:
                raise ValueError(f"a body of {len(body)} bytes is incomplete")
        return packet, body if isinstance(body, FrameList) else bytes_of(body)

    def receive_shared(self) -> tuple[Packet, Body] | None:
        """Receive a packet, but leave large parts in their files, for a caller that passes them on."""
        try:
            size, received, flags, _ = self.socket.recvmsg_into([self._buffer], ANCILLARY_BYTES, _CLOEXEC)
        except ConnectionResetError:
            return None
        if size == 0:
            return None
        self.received_bytes += size
        view = self._view
        length = _LENGTH.unpack_from(view)[0]
        if not received and not flags & _TRUNCATED:
            body_at = _LENGTH.size + length
            return self._decode(view[_LENGTH.size : body_at]), bytes(view[body_at:size])
        memories = descriptors_of(received)
        if flags & _TRUNCATED:
            raise ValueError("this process has no room for the descriptors of a packet")
        body_at = _LENGTH.size + length if length else _LARGE_HEADER.size
        body = bodies.unpack(view[body_at:size], memories)
        for part in bodies.ranges_of(body):
            # Not of other files: to ask for the size of a file on a disk may take long, and it may shrink afterwards.
            if part.memory.is_sealed and not part.is_complete:
                raise ValueError(f"a body of {len(body)} bytes is incomplete")
        if length:
            return self._decode(view[_LENGTH.size : body_at]), body
        _, length = _LARGE_HEADER.unpack_from(view)
        if not 0 < length <= self._most_header_bytes:
            raise ValueError(f"a header of {length} bytes")
        self.received_bytes += length
        [header] = cut(body, [length])
        if isinstance(header, SharedBytes) and not header.memory.is_sealed:  # to read from others may take long
            raise ValueError("a header in a file that can shrink")
        return self._decode(piece_of(header, 0, length)), bodies.rest_of(body, length + -length % ALIGNMENT_BYTES)


def channel_pair() -> tuple[Channel, socket.socket, socket.socket]:
    """The manager's channel, which does not block, and what makes the worker's: its socket and that of its claims."""
    manager_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    manager_end.setblocking(False)
    claims, worker_claims = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(manager_end, claims, worker_claims.dup()), worker_end, worker_claims
