"""Function and call serialization. What cannot be sent is refused before anything is sent.

The parameter ``serializer`` defaults to one that picks the fastest strategy that works.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import platform
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from farcall._binding import Accepts, accepts_of
from farcall._decorated import Decorated
from farcall._shell import MPIFunction, ShellFunction
from farcall._version import __version__
from farcall_common import file_arguments
from farcall_common.errors import ConfigurationError, PayloadTooLarge, SerializationError
from farcall_common.limits import MAX_FUNCTION_BYTES, MAX_PAYLOAD_BYTES
from farcall_common.nested_json import sent_bytes
from farcall_common.payload import (
    BINARY_DATA,
    Piece,
    Serializer,
    Strategy,
    is_binary,
    packed,
    parse_allowed,
    strategy_named,
)
from farcall_common.payload.data import named_classes
from farcall_common.payload.functions import function_buffer
from farcall_common.payload.include import included, with_modules
from farcall_common.payload.parts import largest_part, named_arguments
from farcall_common.payload.snapshot import Snapshot
from farcall_common.qos import QoS
from farcall_common.staged_files import FileUse, pack_files, source_files, sources, uses
from farcall_common.task_options import TaskOptions

THIS_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
DEFAULT_SERIALIZER: Final = Serializer(own_classes=True)

#: Strategies that every endpoint reads, whatever its Python: text, JSON, and combinations that contain text.
_UNIVERSAL: Final = frozenset({b"st", b"sd", b"11", b"12", b"13"})
#: Strategies whose first line is JSON, with the version of Python if there is byte code behind it.
_WITH_HEAD: Final = frozenset({b"f1", b"f2", b"f3"})
_BYTE_CODE: Final = b"01"
#: Functions that an executor remembers, with what they used.
_REMEMBERED: Final = 1024
_COMPARED: Final = (types.FunctionType, types.BuiltinFunctionType)


@dataclasses.dataclass(frozen=True)
class Requirements:
    """Strategies that the reader of a function or call must know. ``python`` is the only version that can run it, or
    None. ``classes``: classes whose byte code is in it, in brackets. ``files``: files that a call reads or writes."""

    strategies: frozenset[str]
    python: str | None
    classes: str = dataclasses.field(default="", compare=False)
    files: tuple[FileUse, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The endpoints that have some of the files."""
        return sources(self.files) if self.files else ()

    @property
    def source_files(self) -> tuple[str, ...]:
        """The files of other endpoints, in the form that options of tasks have."""
        return source_files(self.files) if self.files else ()


def requirements_of(buffers: Iterable[Sequence[Piece]]) -> Requirements | None:
    """The requirements of buffers in pieces (see :meth:`Serializer.pieces`); None when every endpoint reads them."""
    ids: set[bytes] = set()
    python: str | None = None
    classes = ""
    for pieces in buffers:
        strategy = bytes(pieces[0][:2])
        ids.add(strategy)
        if strategy in _WITH_HEAD:
            text = bytes(pieces[0][3:] or pieces[1])
            end = text.find(b"\n")
            head = json.loads(text if end < 0 else text[:end])
            python, classes = head.get("python") or python, named_classes(head) or classes
        elif strategy == _BYTE_CODE:
            python = THIS_PYTHON
    if ids <= _UNIVERSAL:
        return None
    return Requirements(frozenset(strategy.decode() for strategy in ids), python, classes)


class PackedCall(NamedTuple):
    """The arguments of a call as bytes. ``requirements`` is None when every endpoint reads them."""

    payload: bytes
    requirements: Requirements | None


_NO_KWARGS: Final = DEFAULT_SERIALIZER.serialize({})
_EMPTY_CALL: Final = PackedCall(DEFAULT_SERIALIZER.pack((DEFAULT_SERIALIZER.serialize([]), _NO_KWARGS)), None)


def pack_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    function_name: str,
    serializer: Serializer = DEFAULT_SERIALIZER,
    reads_binary: Callable[[], bool] | None = None,
    endpoint_id: Callable[[str], str] | None = None,
    target: str = "",
) -> PackedCall:
    """The payload of a call, and its requirements. See :func:`pack_arguments`.

    :raises PayloadTooLarge: if it takes more than 10 MiB, too.
    :raises InvalidRequest: for too many files.
    """
    packed = pack_arguments(
        args,
        kwargs,
        function_name=function_name,
        serializer=serializer,
        reads_binary=reads_binary,
        endpoint_id=endpoint_id,
        target=target,
    )
    return with_files(packed, function_name)


def with_files(packed: PackedCall, name: str) -> PackedCall:
    """A payload with the list of its files.

    :param name: of the function or graph, for messages.
    :raises PayloadTooLarge: if it is too large with the list.
    :raises InvalidRequest: for too many files.
    """
    if packed.requirements is None or not packed.requirements.files:
        return packed
    listed = packed.requirements.files
    payload = pack_files(listed, packed.payload)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _too_large(name, len(payload), {f"the list of {len(listed):,} files": len(payload) - len(packed.payload)})
    return PackedCall(payload, packed.requirements)


def pack_arguments(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    function_name: str,
    serializer: Serializer = DEFAULT_SERIALIZER,
    reads_binary: Callable[[], bool] | None = None,
    endpoint_id: Callable[[str], str] | None = None,
    target: str = "",
) -> PackedCall:
    """The arguments of a call, and their requirements, among them its files; without the list of those.

    :param reads_binary: whether the endpoint reads large arguments as bytes; called when there are any. None: they are
        written as text.
    :param endpoint_id: returns the id of an endpoint by its name, for files of endpoints. None: they keep the names.
    :param target: the endpoint that reads them, if it is known: it needs no copies of its own objects.
    :raises SerializationError: if an argument cannot be serialized; the message names it.
    :raises PayloadTooLarge: if the arguments take more than 10 MiB; the message names the largest.
    :raises FarcallError: of ``endpoint_id``.
    :raises InvalidRequest: for files of too many endpoints, or one that another endpoint has named in a result.
    """
    if file_arguments.in_use():
        with file_arguments.collecting(endpoint_id=endpoint_id, target=target) as found:
            packed = _pack(args, file_arguments.with_outputs(kwargs), function_name, serializer, reads_binary)
        if not found:
            return packed
        needed = packed.requirements or Requirements(frozenset(), None)
        return PackedCall(packed.payload, dataclasses.replace(needed, files=uses(found)))
    return _pack(args, kwargs, function_name, serializer, reads_binary)


def _pack(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    function_name: str,
    serializer: Serializer,
    reads_binary: Callable[[], bool] | None,
) -> PackedCall:
    is_default = serializer is DEFAULT_SERIALIZER
    if is_default and not args and not kwargs:
        return _EMPTY_CALL

    def pieces(strategies: Sequence[Strategy] | None) -> list[Sequence[Piece]]:
        # As a list: unlike a tuple it may be JSON, which is quicker to write and bound to no version of Python.
        if is_default and not kwargs:
            return [serializer.pieces(list(args), strategies=strategies), (_NO_KWARGS,)]
        return serializer.call_pieces(list(args), kwargs, strategies=strategies)

    strategies = BINARY_DATA if is_default and reads_binary is not None else None
    try:
        buffers = pieces(strategies)
        if reads_binary is not None and strategies and any(map(is_binary, buffers)) and not reads_binary():
            strategies = None
            buffers = pieces(strategies)
        payload = packed(buffers)
    except SerializationError:
        payload = serializer.pack_call(args, kwargs)  # finds out which argument it is
        buffers = [(buffer,) for buffer in serializer.unpack(payload)]
    if len(payload) > MAX_PAYLOAD_BYTES:
        sizes = {
            name: sum(map(len, serializer.pieces(value, strategies=strategies)))
            for name, value in named_arguments(args, kwargs)
        }
        raise _too_large(function_name, len(payload), sizes)
    return PackedCall(payload, requirements_of(buffers))


def checked_call(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of a registered function, as a tuple and a dictionary.

    :raises TypeError: if they have another type: text would be taken apart into letters, a dictionary into its keys.
    """
    if args is not None and (not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray | memoryview)):
        raise TypeError(f"args: expected a tuple or a list, got {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs: expected a dict, got {type(kwargs).__name__}")
    named = dict(kwargs or {})
    for name in named:
        if not isinstance(name, str):
            raise TypeError(f"kwargs: expected str keys, got {type(name).__name__}")
    return tuple(args or ()), named


def sorted_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments sorted by name, so that equal calls have equal payloads: memoization compares those."""
    return {name: kwargs[name] for name in sorted(kwargs)}


def display_name(function: Callable[..., Any]) -> str:
    """The name of a function; of one without a name (a partial, an instance), that of its class."""
    name = (isinstance(function, Decorated) and function.registered_name) or getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def registration(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    public: bool = False,
    memoize: bool = False,
    qos: QoS | Mapping[str, Any] | None = None,
    serializer: Serializer = DEFAULT_SERIALIZER,
    container: str | None = None,
    environment: Mapping[str, Any] | None = None,
    requirements: Iterable[str] | None = None,
) -> dict[str, Any]:
    """The body of a request that registers a function.

    :raises ValueError: for an environment that there cannot be, for two, and for a target that makes no sense.
    :raises SerializationError: if the function cannot be sent.
    :raises PayloadTooLarge: if it takes more than 3.5 MiB; the message names the largest variable.
    """
    body = _pack_function(function, serializer, is_stage=True)  # it may become one
    documentation = getattr(function, "__doc__", None) if isinstance(function, types.FunctionType | Decorated) else None
    if isinstance(function, Decorated):
        documentation = function.registered_description or documentation
    request = body.registration(
        name or display_name(function), description=description or documentation, metadata=metadata, public=public
    )
    fields = environment_fields(container=container, environment=environment, requirements=requirements)
    return request | ({"memoize": True} if memoize else {}) | fields | qos_fields(qos)


def qos_fields(qos: QoS | Mapping[str, Any] | None) -> dict[str, Any]:
    """The latency target of a function as a field of the request that registers it; none for None.

    :raises TypeError, ValueError: for a target that makes no sense.
    """
    target = TaskOptions.of(qos=qos).qos
    if target is not None and target.is_baseline:
        raise ValueError("qos: is_baseline is for calls, not for functions")
    return {} if target is None else {"qos": msgspec.to_builtins(target)}


def environment_fields(
    *,
    container: str | None,
    environment: Mapping[str, Any] | None,
    requirements: Iterable[str] | None,
) -> dict[str, Any]:
    """The environment of a function as fields of the request that registers it; none if it has none.

    :raises TypeError, ValueError: for an environment that there cannot be, and for two.
    """
    options = TaskOptions.of(container=container, environment=environment, requirements=requirements)
    if options.environment is not None:
        return {"environment": options.environment.to_json()}
    return {} if container is None else {"container": container}


def source_registration(
    source: str,
    function_name: str,
    *,
    description: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    public: bool = False,
) -> dict[str, Any]:
    """The body of a request that registers source text, which defines ``function_name``.

    :raises SerializationError: if no function can have that name.
    :raises PayloadTooLarge: if the text takes more than 3.5 MiB.
    """
    if not function_name.isidentifier():
        raise SerializationError(
            f"{function_name!r} is not a function name", hint="Give the name that the text defines."
        )
    body = _bounded(_pack_source(function_name, source), function_name)
    return body.registration(function_name, description=description, metadata=metadata, public=public)


class PackedFunction(NamedTuple):
    """A function as bytes, written with ``strategy``. ``requirements`` is None when every endpoint reads it."""

    code: bytes
    strategy: str
    requirements: Requirements | None

    @classmethod
    def of(cls, buffer: bytes) -> PackedFunction:
        """Pack the buffer of a function, with the modules that travel with it."""
        code = DEFAULT_SERIALIZER.pack([with_modules(buffer)])
        return cls(code, buffer[:2].decode(), requirements_of([(buffer,)]))

    def registration(
        self,
        name: str,
        *,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool = False,
    ) -> dict[str, Any]:
        """The body of the request that registers it."""
        meta = {
            "python_version": platform.python_version(),
            "sdk_version": __version__,
            "serde_identifier": self.strategy,
        }
        if self.requirements is not None and self.requirements.python is not None:
            # The API refuses it for endpoints with another version.
            meta["byte_code_of_python"] = self.requirements.python
        return {
            "function_name": name,
            "function_code": self.code.decode(),
            "description": description,
            "meta": meta | dict(metadata or {}),
            "public": public,
        }


class FunctionHandle:
    """A function to register: packed until then, known by its id from then on."""

    __slots__ = (
        "accepts",
        "description",
        "function",
        "function_id",
        "is_given",
        "key",
        "name",
        "packed",
        "requirements",
        "rewritten",
        "snapshot",
    )

    def __init__(
        self,
        name: str,
        *,
        packed: PackedFunction | None = None,
        function_id: str | None = None,
        function: Callable[..., Any] | None = None,
        accepts: Accepts | None = None,
        snapshot: Snapshot | None = None,
    ) -> None:
        self.name: str = name
        self.description: str | None = function.registered_description if isinstance(function, Decorated) else None
        #: Raises a TypeError for arguments that the function does not take; None if that is unknown.
        self.accepts: Accepts | None = accepts
        self.packed: PackedFunction | None = packed
        self.function_id: str | None = function_id
        #: Whether the id was there first: it stays, whatever travels with functions.
        self.is_given: bool = function_id is not None
        #: None when every endpoint reads the function, or when nothing is known.
        self.requirements: Requirements | None = packed.requirements if packed else None
        #: For writing it with another strategy. A function with state is not kept: each use of it is another function.
        self.function: Callable[..., Any] | None = function if self.requirements else None
        #: What the function used when it was packed; None if that is not compared.
        self.snapshot: Snapshot | None = snapshot
        #: The same function, written with other strategies.
        self.rewritten: list[FunctionHandle] = []
        #: Two handles with the same key are the same function.
        self.key: str = function_id or hashlib.sha256(packed.code if packed else b"").hexdigest()

    def registration(self) -> dict[str, Any]:
        """The body of the request that registers it."""
        assert self.packed is not None
        return self.packed.registration(self.name, description=self.description)


class FunctionTable:
    """Handles of functions, so that a function is serialised once and registered once.

    A plain function is serialised again when something that it uses has changed (see :class:`Snapshot`); if the bytes
    are new, it is another function. Anything with state (a partial, a bound method, an instance) is serialised at each
    use, and known by its bytes.
    """

    def __init__(self, serializer: Serializer = DEFAULT_SERIALIZER) -> None:
        self._serializer = serializer
        self._by_identity: dict[int, tuple[Callable[..., Any], FunctionHandle, Snapshot | None]] = {}
        self._by_key: dict[str, FunctionHandle] = {}
        self._included = included()

    def handle(self, function: Callable[..., Any], *, is_stage: bool = False) -> FunctionHandle:
        """The handle of a function.

        :param is_stage: whether the function is a stage of a graph, whose value may be a generator.
        :raises SerializationError: if the function cannot be sent.
        :raises PayloadTooLarge: if it takes more than 3.5 MiB; the message names the largest variable.
        """
        if self._included is not (now := included()):  # other modules travel: their functions are other functions
            self._included = now
            for number, (_, handle, _) in [*self._by_identity.items()]:
                if not handle.is_given:
                    self._by_identity.pop(number, None)
        known = self._by_identity.get(id(function))
        if known is not None and known[0] is function and (known[2] is None or known[2].is_current()):
            return known[1]
        snapshot = Snapshot(function) if type(function) in _COMPARED or isinstance(function, Decorated) else None
        fresh = FunctionHandle(
            display_name(function),
            packed=_pack_function(function, self._serializer, is_stage=is_stage),
            function=None if snapshot is None else function,
            accepts=accepts_of(function),
            snapshot=snapshot,
        )
        handle = self._by_key.setdefault(fresh.key, fresh)
        if snapshot is not None:
            handle.function, handle.snapshot = fresh.function, snapshot
            self._remember(function, handle, snapshot)
        return handle

    def registered(
        self, function_id: str, function: Callable[..., Any] | None = None, *, accepts: Accepts | None = None
    ) -> FunctionHandle:
        """The handle of a registered function; calls of ``function`` use it from now on."""
        name = function_id if function is None else display_name(function)
        handle = self._by_key.setdefault(function_id, FunctionHandle(name, function_id=function_id, accepts=accepts))
        if function is not None:
            self._remember(function, handle, None)
        return handle

    def _remember(self, function: Callable[..., Any], handle: FunctionHandle, snapshot: Snapshot | None) -> None:
        while len(self._by_identity) >= _REMEMBERED:
            self._by_identity.pop(next(iter(self._by_identity)), None)
        self._by_identity[id(function)] = (function, handle, snapshot)  # while the function is held, its id() is unique


def _pack_function(function: Callable[..., Any], serializer: Serializer, *, is_stage: bool = False) -> PackedFunction:
    # A subclass may override anything.
    if isinstance(function, ShellFunction) and type(function) in (ShellFunction, MPIFunction):
        found = _pack_source(*function.source())
    else:
        found = PackedFunction.of(function_buffer(function, serializer, is_stage=is_stage))
    return _bounded(found, display_name(function), function)


def _pack_source(name: str, source: str) -> PackedFunction:
    return PackedFunction.of(f"st\n{name}:{source}".encode())


def _bounded(packed: PackedFunction, name: str, function: object = None) -> PackedFunction:
    size_bytes = len(packed.code)
    if size_bytes > MAX_FUNCTION_BYTES // 8:
        # JSON writes some characters with several bytes. AWS Lambda sends JSON as text inside JSON, and has room for a
        # third more bytes than a request may have.
        text = packed.code.decode()
        size_bytes = max(len(msgspec.json.encode(text)), 3 * sent_bytes(text) // 4)
    if size_bytes > MAX_FUNCTION_BYTES:
        largest = largest_part(function, _size_of)
        raise PayloadTooLarge(
            f"function {name} takes {_mib(size_bytes)}{largest and ', most of it '}{largest}; "
            f"the limit is {_mib(MAX_FUNCTION_BYTES)}",
            hint="It uses large data: pass the data as an argument, or load it inside the function.",
        )
    return packed


def _size_of(value: object) -> int:
    try:
        return len(DEFAULT_SERIALIZER.serialize(value))
    except Exception:  # noqa: BLE001 - a part alone may be anything
        return 0


def _too_large(function_name: str, size_bytes: int, sizes: Mapping[str, int]) -> PayloadTooLarge:
    largest = max(sizes, key=lambda name: sizes[name])
    return PayloadTooLarge(
        f"the arguments of {function_name} take {_mib(size_bytes)} when serialised, "
        f"{_mib(sizes[largest])} of it {largest}; the limit is {_mib(MAX_PAYLOAD_BYTES)}"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1024 * 1024):.1f} MiB"


def as_strategy(like: object) -> Strategy:
    """A strategy by object, class, id or name. Globus Compute's own classes and objects have an ``identifier``.

    :raises ConfigurationError: if there is no such strategy.
    """
    if isinstance(like, Strategy):
        return like
    if isinstance(like, type) and issubclass(like, Strategy):
        return like()
    if isinstance(like, str):
        return strategy_named(like)
    identifier = getattr(like, "identifier", None)
    if isinstance(identifier, str):
        return strategy_named(identifier.strip())
    raise ConfigurationError(
        f"{like!r} is not a serialization strategy",
        hint="Give a strategy of farcall_common.payload, or its name, like 'JSONData'.",
    )


def strategy_names(likes: Iterable[object] | None) -> tuple[str, ...]:
    """The class names of strategies, which every endpoint understands.

    :raises ConfigurationError: if one of them is not a strategy.
    """
    return tuple(type(as_strategy(like)).__name__ for like in likes or ())


def as_serializer(like: object = None, *, code: object = None, data: object = None) -> Serializer:
    """A serializer: ours as it is, Globus Compute's by its two strategies, or one made of ``code`` and ``data``, where
    None means the default strategies.

    :raises ConfigurationError: if it is not a serializer.
    """
    if isinstance(like, Serializer):
        return like
    if like is not None:
        code, data = getattr(like, "code_serializer", None), getattr(like, "data_serializer", None)
        if code is None or data is None:
            raise ConfigurationError(
                f"expected a Serializer, got {type(like).__name__}", hint="Pass a farcall_common.payload.Serializer."
            )
    types = getattr(like, "allowed_deserializer_types", None)
    allowed = parse_allowed((type(as_strategy(each)).__name__ for each in types), needs_code=False) if types else None
    if code is None and data is None:
        return DEFAULT_SERIALIZER
    return Serializer(
        code=DEFAULT_SERIALIZER.code if code is None else (_for_code(code, for_code=True),),
        data=DEFAULT_SERIALIZER.data if data is None else (_for_code(data, for_code=False),),
        allowed=allowed,
        own_classes=True,
    )


def _for_code(like: object, *, for_code: bool) -> Strategy:
    strategy = as_strategy(like)
    if strategy.for_code is not for_code:
        kind, other = ("functions", "data") if for_code else ("data", "functions")
        raise ConfigurationError(f"{type(strategy).__name__} is a strategy for {other}, not for {kind}")
    return strategy


def hardware_report() -> str:
    import os
    import platform
    import shutil
    import socket
    import subprocess
    import sys

    lines = {
        "host": socket.gethostname(),
        "python": sys.version.replace("\n", " "),
        "interpreter": sys.executable,
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": f"{os.cpu_count()}, of which {len(os.sched_getaffinity(0))} are for this process"
        if hasattr(os, "sched_getaffinity")
        else str(os.cpu_count()),
        "disk": f"{shutil.disk_usage('.').free / 1e9:.1f} GB free here",
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        lines["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        lines["accelerators"] = listed.stdout.strip().replace("\n", "; ")
    return "\n".join(f"{name:>12}: {value}" for name, value in lines.items())


def hardware_source() -> tuple[str, str]:
    """The text of a function that describes the machine of a worker, and its name: workers need no package of ours."""
    return inspect.getsource(hardware_report), hardware_report.__name__
