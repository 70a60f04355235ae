"""Environment of a task: the variables that change with every task, and the trace context of its submitter."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_MIN_BLOCK_BYTES: Final = 128
_ATTEMPT: Final = "FARCALL_ATTEMPT"
_ATTEMPT_KEY: Final = _ATTEMPT.encode()
_ENCODING: Final = sys.getfilesystemencoding()
_ERRORS: Final = sys.getfilesystemencodeerrors()
#: The name that OpenTelemetry's specification gives for child programs.
_TRACEPARENT: Final = "TRACEPARENT"
_libc: Final = ctypes.CDLL(None)
"""Without errno: to read it takes as long as a call, of which there are some for every task."""
_environ: Final = ctypes.c_void_p.in_dll(_libc, "environ")
_blocks: Final[list[Any]] = []
"""What C has as its environment, or still refers to."""
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)


class Variables:
    """Environment variables in memory that is reused. :data:`os.environ`, C code and child programs see them.

    ``os.environ[...] = ...`` calls ``setenv``, and glibc never frees a value given to it: a worker would grow with each
    task. ``putenv`` takes the caller's memory instead, so each variable gets one block, which is overwritten.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[bytes, Any]] = {}  # "NAME=", and memory as an array of characters
        self._attempt = (0, b"")  # the last number, and its value in os.environ

    def set_attempt(self, attempt: int) -> None:
        """Set the number of the attempt, which most tasks share, unless the variable has that value."""
        last, value = self._attempt
        if attempt != last or os.environ._data.get(_ATTEMPT_KEY) is not value:  # type: ignore[attr-defined]
            self.set(_ATTEMPT, str(attempt))
            self._attempt = attempt, os.environ._data[_ATTEMPT_KEY]  # type: ignore[attr-defined]

    def set(self, name: str, value: str) -> None:
        """Set a variable. A value ends at its first NUL, as C would read it."""
        encoded = value.encode(_ENCODING, _ERRORS)
        if 0 in encoded:
            encoded = encoded.partition(b"\0")[0]
        start, block = self._blocks.get(name, (b"", b""))
        if len(start) + len(encoded) >= len(block):
            start, block = self._allocate(name, len(encoded))
        block.value = start + encoded
        # Each time: user code may have removed the variable, or replaced its block.
        if _libc.putenv(block) != 0:
            raise MemoryError
        os.environ._data[start[:-1]] = encoded  # type: ignore[attr-defined]

    def _allocate(self, name: str, value_bytes: int) -> tuple[bytes, Any]:
        """Memory for a longer value. The former block stays: C code may hold the result of getenv. Sizes double, so
        these are few."""
        start = os.fsencode(f"{name}=")
        size = max(_MIN_BLOCK_BYTES, 2 * (len(start) + value_bytes + 1))
        address = _libc.malloc(size)
        if not address:
            raise MemoryError
        block = (ctypes.c_char * size).from_address(address)
        self._blocks[name] = start, block
        return start, block


def set_all(variables: Mapping[str, str], *, merged: bool) -> None:
    """Make these the environment variables of this process; ``merged``: with those that it has and that are not named.

    In a fork of a template this takes a tenth of the time of :data:`os.environ`: each ``setenv`` writes to memory that
    the template shares.
    """
    data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    if not merged:
        data.clear()
    data.update((os.fsencode(name), os.fsencode(value)) for name, value in variables.items())
    block = _block_type(len(data) // 64 + 1)(*(b"%b=%b" % each for each in data.items()))
    _blocks.append(block)
    _environ.value = ctypes.addressof(block)


@functools.cache
def _block_type(number: int) -> type[ctypes.Array[ctypes.c_char_p]]:
    """Return an array type with room for 64 x ``number`` variables, less the null at the end."""
    return ctypes.c_char_p * (64 * number)


@contextlib.contextmanager
def trace_context(traceparent: str, variables: Variables) -> Iterator[None]:
    """Make the submitter's span the parent of the spans that a task creates.

    A worker creates and exports no spans; what a function does with the context is up to the function. Without
    OpenTelemetry in the worker's environment only the variable is set, which child programs may read.
    """
    former = os.environ.get(_TRACEPARENT)  # from the environment in which the endpoint was started
    variables.set(_TRACEPARENT, traceparent)
    attach, detach = _context_functions()
    token = attach(traceparent)
    try:
        yield
    finally:
        detach(token)
        if former is None:
            os.environ.pop(_TRACEPARENT, None)
        else:
            variables.set(_TRACEPARENT, former)


@functools.cache
def _context_functions() -> tuple[Callable[[str], Any], Callable[[Any], None]]:
    """Attach and detach of OpenTelemetry, loaded by the first traced task only."""
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return lambda _: None, lambda _: None
    extract = TraceContextTextMapPropagator().extract
    return lambda traceparent: context.attach(extract({"traceparent": traceparent})), context.detach
