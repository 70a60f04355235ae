"""Protocol between a manager and its templates, in packets of a Unix socket.

The manager sends :class:`Preload` first, and gets :class:`Importing` for each module and then :class:`Serving` or
:class:`Refused`. From then on each :class:`Fork` comes with one descriptor: the child's own socket, from which it reads
its :class:`~farcall_endpoint.worker.boot.Boot`. So the template never reads what belongs to one submitter: its memory
is that of all its children.

A child answers with :class:`Forked` by itself. The kernel adds its process id as the manager sees it, which the child
does not know. The template does not reap a child before :class:`Reap`: until then no other process can get that id.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: Longest packet, in bytes.
MAX_PACKET: Final = 2**17


class _Packet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Preload(_Packet, frozen=True):
    """Import these, in this order. ``namespaces``: each child has namespaces of its own; ``writable``: the node's
    directories that it may write then; ``network``: whether it has the template's. ``places``: the only directories
    whose modules are imported, besides those of Python itself; ``private``: exceptions to both, for example where tasks
    write. ``import_limit_s``: a longer import kills the template, also without a manager."""

    modules: tuple[str, ...] = ()
    namespaces: bool = False
    places: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    import_limit_s: float = 60.0
    writable: tuple[str, ...] = ()
    network: bool = True


class Importing(_Packet, frozen=True):
    """Start of the import of a module. If no other packet follows, the import has crashed or hangs."""

    module: str


class Imported(_Packet, frozen=True):
    """Cost of an import, including the imports that it caused: seconds, and bytes of resident memory."""

    module: str
    seconds: float
    size_bytes: int


class Skipped(_Packet, frozen=True):
    """A module that was not imported, or whose import raised, and why; the template continues."""

    module: str
    reason: str


class Refused(_Packet, frozen=True):
    """This process cannot be a template any more, and ends. ``module``: after whose import; empty: without one."""

    module: str
    reason: str


class Serving(_Packet, frozen=True):
    """Ready for forks. ``private_bytes``: memory that it shares with no other process; 0 if that is not known."""

    python: str
    private_bytes: int = 0


class Fork(_Packet, frozen=True):
    """Fork a child, with the number that it has from then on; one descriptor comes along."""

    number: int


class Branch(_Packet, frozen=True):
    """Fork a further template, which has the same modules. Its number is one as of a child, and it answers with
    :class:`Forked`, too; the descriptor that comes along is its own connection to the manager, which sends
    :class:`Preload` there: what is not loaded yet is imported."""

    number: int


class Forked(_Packet, frozen=True):
    """A child exists."""

    number: int


class NotForked(_Packet, frozen=True):
    """There is no child with this number, and why."""

    number: int
    reason: str


class Exited(_Packet, frozen=True):
    """A child has ended, whose id the manager needs. ``code``: its exit code, or the negative number of the signal that
    killed it."""

    number: int
    code: int


class Reap(_Packet, frozen=True):
    """The manager has no use for the id of this child any more, which has ended or ends."""

    number: int


class Kill(_Packet, frozen=True):
    """Kill a child with all its descendants."""

    number: int


FromManager = Preload | Fork | Branch | Reap | Kill
FromTemplate = Importing | Imported | Skipped | Refused | Serving | Forked | NotForked | Exited

encode: Final = msgspec.msgpack.Encoder().encode
decode_from_manager: Final = msgspec.msgpack.Decoder(FromManager).decode
decode_from_template: Final = msgspec.msgpack.Decoder(FromTemplate).decode
