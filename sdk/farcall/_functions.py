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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from farcall._shell import MPIFunction, ShellFunction
from farcall._version import __version__
from farcall_common.errors import ConfigurationError, PayloadTooLarge, SerializationError
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.payload import BINARY_DATA, Piece, Serializer, Strategy, is_binary, packed, strategy_named

THIS_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"

#: What every endpoint reads, whatever its Python: text, JSON, and combinations that have text in them.
_UNIVERSAL: Final = frozenset({b"st", b"sd", b"11", b"12", b"13"})
#: A line of JSON stands in front, and says of which Python the byte code in it is, if there is any.
_WITH_HEAD: Final = frozenset({b"f1", b"f2", b"f3"})
_BYTE_CODE: Final = b"01"


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What an endpoint said of itself when it connected. ``python`` is "3.12", empty when it did not say; None for
    ``strategies`` means that nothing is known against any."""

    python: str = ""
    strategies: frozenset[str] | None = None


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a packed buffer asks of its reader. ``python`` is the only version that can run what is in it, or None."""

    strategies: frozenset[str]
    python: str | None

    def missing_in(self, runtime: Runtime) -> str:
        """Why an endpoint cannot read it, as the end of a sentence; empty if nothing is known against it."""
        unread = sorted(self.strategies - (runtime.strategies or self.strategies))
        if unread:
            return f"is written with strategy {unread[0]}, which the endpoint does not read"
        if self.python and runtime.python and runtime.python != self.python:
            return f"holds byte code of Python {self.python}, and the endpoint runs Python {runtime.python}"
        return ""


def needs_of(packed: bytes) -> Needs | None:
    """The needs of a packed function or call; None when every endpoint reads it."""
    if packed[:1].isdigit() and packed.count(b"\n11\n") == 2:
        return None  # JSON has no newline of its own: a call of which both halves are JSON, as most are
    # Here, not at the top: it would make the import of the package half as slow again.
    from farcall_common.payload.framing import first_line, unpack

    ids: set[bytes] = set()
    python: str | None = None
    for buffer in unpack(packed):
        strategy = bytes(buffer[:2])
        if strategy in _WITH_HEAD:
            python = json.loads(first_line(buffer[3:])).get("python") or python
        elif strategy == _BYTE_CODE:
            python = THIS_PYTHON
        ids.add(strategy)
    if ids <= _UNIVERSAL:
        return None
    return Needs(frozenset(strategy.decode() for strategy in ids), python)


DEFAULT_SERIALIZER: Final = Serializer(own_classes=True)
_NO_KWARGS: Final = DEFAULT_SERIALIZER.serialize({})
_EMPTY_CALL: Final = DEFAULT_SERIALIZER.pack((DEFAULT_SERIALIZER.serialize([]), _NO_KWARGS))
#: Functions that an executor remembers by identity.
_REMEMBERED: Final = 1024

unpack_result: Final = DEFAULT_SERIALIZER.deserialize


def pack_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    function_name: str,
    serializer: Serializer = DEFAULT_SERIALIZER,
    reads_binary: Callable[[], bool] | None = None,
) -> bytes:
    """The payload of a call.

    :param reads_binary: says whether the endpoint reads large arguments as bytes; asked when there are some. None: they
        are written as text.
    :raises SerializationError: if an argument cannot be serialised; it says which.
    :raises PayloadTooLarge: if the arguments take more than 10 MiB; it says which is the largest.
    """
    is_default = serializer is DEFAULT_SERIALIZER
    if is_default and not args and not kwargs:
        return _EMPTY_CALL

    def pieces(strategies: Sequence[Strategy] | None) -> list[Sequence[Piece]]:
        # As a list: unlike a tuple it may be JSON, which is quicker to write and bound to no version of Python.
        named = (_NO_KWARGS,) if is_default and not kwargs else serializer.pieces(kwargs, strategies=strategies)
        return [serializer.pieces(list(args), strategies=strategies), named]

    strategies = BINARY_DATA if is_default and reads_binary is not None else None
    try:
        buffers = pieces(strategies)
        if reads_binary is not None and strategies and any(map(is_binary, buffers)) and not reads_binary():
            strategies = None
            buffers = pieces(strategies)
        payload = packed(buffers)
    except SerializationError:
        payload = serializer.pack_call(args, kwargs)  # finds out which argument it is
    if len(payload) > MAX_PAYLOAD_BYTES:
        sizes = {
            name: sum(map(len, serializer.pieces(value, strategies=strategies))) for name, value in _named(args, kwargs)
        }
        raise _too_large(function_name, len(payload), sizes)
    return payload


def checked_call(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of a registered function, as a tuple and a dictionary.

    :raises TypeError: if they are of another kind: text would be taken apart into letters, a dictionary into its keys.
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


def in_order(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments by name, so that a call that is to be remembered has one payload however it was written."""
    return {name: kwargs[name] for name in sorted(kwargs)}


def display_name(function: Callable[..., Any]) -> str:
    """What to call a function; those without a name (a partial, an instance) are called after their class."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def registration(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    public: bool = False,
    memoize: bool = False,
    serializer: Serializer = DEFAULT_SERIALIZER,
) -> dict[str, Any]:
    """The body of a request that registers a function.

    :raises SerializationError: if the function cannot be sent.
    :raises PayloadTooLarge: if it takes more than 10 MiB.
    """
    body = _pack_function(function, serializer)
    documentation = getattr(function, "__doc__", None) if isinstance(function, types.FunctionType) else None
    body_of_request = _registration_of(
        body, name or display_name(function), description=description or documentation, metadata=metadata, public=public
    )
    return body_of_request | ({"memoize": True} if memoize else {})


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
    :raises PayloadTooLarge: if the text takes more than 10 MiB.
    """
    if not function_name.isidentifier():
        raise SerializationError(f"no function can be named {function_name!r}", hint="Give the name that is defined.")
    body = _bounded(_pack_source(function_name, source), function_name)
    return _registration_of(body, function_name, description=description, metadata=metadata, public=public)


class FunctionHandle:
    """A function on its way to being registered: its body until then, its id from then on."""

    __slots__ = ("body", "function", "function_id", "key", "name", "needs", "others")

    def __init__(
        self,
        name: str,
        *,
        body: bytes | None = None,
        function_id: str | None = None,
        function: types.FunctionType | None = None,
    ) -> None:
        self.name: str = name
        self.body: bytes | None = body
        self.function_id: str | None = function_id
        #: What its reader must be; None when every endpoint reads it, or when nothing is known.
        self.needs: Needs | None = needs_of(body) if body else None
        #: To write it in another way. What carries state is not kept: each use of it is another function.
        self.function: types.FunctionType | None = function if self.needs else None
        #: The same function, written in other ways.
        self.others: list[FunctionHandle] = []
        #: What makes two handles the same function.
        self.key: str = function_id or hashlib.sha256(body or b"").hexdigest()

    def registration(self) -> dict[str, Any]:
        """The body of the request that registers it."""
        assert self.body is not None
        return _registration_of(self.body, self.name, description=None, metadata=None, public=False)


class FunctionTable:
    """Handles of functions, so that a function is serialised once and registered once.

    A plain function is known by its identity: what it closes over is taken at its first use. Anything that carries
    state (a partial, a bound method, an instance) is serialised at each use, and known by its bytes.
    """

    def __init__(self, serializer: Serializer = DEFAULT_SERIALIZER) -> None:
        self._serializer = serializer
        self._by_identity: dict[int, tuple[Callable[..., Any], FunctionHandle]] = {}
        self._by_key: dict[str, FunctionHandle] = {}

    def handle(self, function: Callable[..., Any]) -> FunctionHandle:
        """The handle of a function.

        :raises SerializationError: if the function cannot be sent.
        :raises PayloadTooLarge: if it takes more than 10 MiB.
        """
        known = self._by_identity.get(id(function))
        if known is not None and known[0] is function:
            return known[1]
        fresh = FunctionHandle(
            display_name(function),
            body=_pack_function(function, self._serializer),
            function=function if isinstance(function, types.FunctionType) else None,
        )
        handle = self._by_key.setdefault(fresh.key, fresh)
        if isinstance(function, types.FunctionType | types.BuiltinFunctionType):
            self._remember(function, handle)
        return handle

    def registered(self, function_id: str, function: Callable[..., Any] | None = None) -> FunctionHandle:
        """The handle of a function that is registered already; ``function`` will be known by it from now on."""
        name = function_id if function is None else display_name(function)
        handle = self._by_key.setdefault(function_id, FunctionHandle(name, function_id=function_id))
        if function is not None:
            self._remember(function, handle)
        return handle

    def _remember(self, function: Callable[..., Any], handle: FunctionHandle) -> None:
        while len(self._by_identity) >= _REMEMBERED:
            self._by_identity.pop(next(iter(self._by_identity)), None)
        self._by_identity[id(function)] = (function, handle)  # holding the function keeps its identity its own


def _pack_function(function: Callable[..., Any], serializer: Serializer) -> bytes:
    if not callable(function):
        raise SerializationError(f"a {type(function).__name__} cannot be called", hint="Pass the function itself.")
    # Of a subclass nobody knows what it does otherwise.
    if isinstance(function, ShellFunction) and type(function) in (ShellFunction, MPIFunction):
        body = _pack_source(*function.source())
    else:
        body = serializer.pack_function(function)
    return _bounded(body, display_name(function))


def _pack_source(name: str, source: str) -> bytes:
    return DEFAULT_SERIALIZER.pack([f"st\n{name}:{source}".encode()])


def _bounded(body: bytes, name: str) -> bytes:
    if len(body) > MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(
            f"function {name} takes {_mib(len(body))}; the limit is {_mib(MAX_PAYLOAD_BYTES)}",
            hint="It closes over large data: pass the data as an argument, or load it inside the function.",
        )
    return body


def _registration_of(
    body: bytes, name: str, *, description: str | None, metadata: Mapping[str, Any] | None, public: bool
) -> dict[str, Any]:
    meta = {
        "python_version": platform.python_version(),
        "sdk_version": __version__,
        "serde_identifier": _strategy(body),
    }
    needs = needs_of(body)
    if needs is not None and needs.python is not None:
        meta["byte_code_of_python"] = needs.python  # the API refuses it for endpoints that run another one
    return {
        "function_name": name,
        "function_code": body.decode(),
        "description": description,
        "meta": meta | dict(metadata or {}),
        "public": public,
    }


def _strategy(packed: bytes) -> str:
    """The id of the strategy that wrote a packed function: the two characters behind its length."""
    return packed.partition(b"\n")[2][:2].decode()


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"argument {number}", value) for number, value in enumerate(args, start=1))
    yield from ((f"argument {name!r}", value) for name, value in kwargs.items())


def _too_large(function_name: str, size_bytes: int, sizes: Mapping[str, int]) -> PayloadTooLarge:
    largest = max(sizes, key=lambda name: sizes[name])
    return PayloadTooLarge(
        f"the arguments of {function_name} take {_mib(size_bytes)} on their way, "
        f"{_mib(sizes[largest])} of it {largest}; the limit is {_mib(MAX_PAYLOAD_BYTES)}"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1024 * 1024):.1f} MiB"


def as_strategy(like: object) -> Strategy:
    """The strategy that is meant. Globus Compute's own classes and objects are known by their ``identifier``.

    :raises ConfigurationError: if there is none like it.
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
        f"{like!r} is no serialisation strategy",
        hint="Give a strategy of farcall_common.payload, or its name, like 'JSONData'.",
    )


def strategy_names(likes: Iterable[object] | None) -> tuple[str, ...]:
    """The class names of strategies, which every endpoint understands.

    :raises ConfigurationError: if one of them is none.
    """
    return tuple(type(as_strategy(like)).__name__ for like in likes or ())


def as_serializer(like: object = None, *, code: object = None, data: object = None) -> Serializer:
    """The serializer that is meant: one of ours, or Globus Compute's (by its two strategies), or made of ``code`` and
    ``data``, where None means the strategies that Farcall would try.

    :raises ConfigurationError: if it is none.
    """
    if isinstance(like, Serializer):
        return like
    if like is not None:
        code, data = getattr(like, "code_serializer", None), getattr(like, "data_serializer", None)
        if code is None or data is None:
            raise ConfigurationError(
                f"a {type(like).__name__} is no serializer", hint="Give a farcall_common.payload.Serializer."
            )
    if code is None and data is None:
        return DEFAULT_SERIALIZER
    return Serializer(
        code=DEFAULT_SERIALIZER.code if code is None else (_for_code(code, wanted=True),),
        data=DEFAULT_SERIALIZER.data if data is None else (_for_code(data, wanted=False),),
        own_classes=True,
    )


def _for_code(like: object, *, wanted: bool) -> Strategy:
    strategy = as_strategy(like)
    if strategy.for_code is not wanted:
        kind, other = ("functions", "data") if wanted else ("data", "functions")
        raise ConfigurationError(f"{type(strategy).__name__} is a strategy for {other}, and is wanted for {kind}")
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
