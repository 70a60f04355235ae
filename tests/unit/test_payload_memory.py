"""Memory of payloads: a written value is freed with its last reference, before the garbage collector runs."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest

from farcall._functions import pack_call
from farcall_common.errors import SerializationError
from farcall_common.payload import BINARY_DATA, DEFAULT_DATA, PORTABLE_DATA, STRATEGIES, Serializer, Strategy
from farcall_common.payload.native import dump_call, dump_native


class Large(bytearray):
    """A value that can be watched."""


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def is_freed_after(write: Callable[[Large], object]) -> bool:
    value = Large(100_000)
    watched = weakref.ref(value)
    with contextlib.suppress(SerializationError):
        write(value)
    del value
    return watched() is None


@pytest.mark.parametrize("strategies", [DEFAULT_DATA, BINARY_DATA, PORTABLE_DATA], ids=["text", "binary", "portable"])
def test_a_result_is_freed_when_it_was_written(strategies: Sequence[Strategy]) -> None:
    assert is_freed_after(lambda value: Serializer(data=strategies).pieces(value))


@pytest.mark.parametrize("strategies", [DEFAULT_DATA, BINARY_DATA, PORTABLE_DATA], ids=["text", "binary", "portable"])
def test_arguments_are_freed_when_they_were_written(strategies: Sequence[Strategy]) -> None:
    assert is_freed_after(lambda value: Serializer(data=strategies).pack_call((value,), {"named": value}))


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=lambda strategy: type(strategy).__name__)
def test_no_strategy_keeps_a_value_that_it_wrote_or_refused(strategy: Strategy) -> None:
    assert is_freed_after(lambda value: Serializer().serialize(value, strategies=[strategy]))


@pytest.mark.parametrize("reads_binary", [True, False])
def test_the_sdk_keeps_no_arguments(reads_binary: bool) -> None:
    assert is_freed_after(lambda value: pack_call((value,), {}, function_name="f", reads_binary=lambda: reads_binary))


@pytest.mark.parametrize("write", [Serializer().pack_call, lambda args: dump_call(args, {})], ids=["cloud", "engine"])
def test_arguments_that_cannot_be_sent_are_freed_with_the_error(write: Callable[[tuple[object, ...]], bytes]) -> None:
    assert is_freed_after(lambda value: write((value, threading.Condition())))


def test_an_engine_keeps_neither_arguments_nor_results() -> None:
    assert is_freed_after(lambda value: dump_call((value,), {}))
    assert is_freed_after(dump_native)
