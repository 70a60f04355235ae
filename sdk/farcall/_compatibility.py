"""Compatibility checks: whether an endpoint can read and run a call, found out before it is submitted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from farcall._api import Api
from farcall._functions import FunctionHandle, Needs, Runtime
from farcall_common.errors import EndpointIncompatible, FarcallError
from farcall_common.payload import DEFAULT_CODE, PickleOutOfBand, PureSourceDill, Serializer
from farcall_common.task_options import TaskOptions

#: How long what an endpoint said of itself is believed, and how long the API is left alone after it did not answer.
_BELIEVED_S: Final = 300.0
_LEFT_ALONE_S: Final = 30.0

#: Ways for a function, text first: what dill finds are functions that were typed into an interpreter.
_WAYS: Final = (DEFAULT_CODE[0], PureSourceDill(self_contained=True), *DEFAULT_CODE[1:])
_serializer: Final = Serializer()
#: The strategy that is no text, and what a worker is asked for that may use it.
_BINARY: Final = PickleOutOfBand().id


class Judge:
    """Compares what calls need with what endpoints said when they connected. May be used from any thread."""

    def __init__(self, api: Api, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Runtime]] = {}

    def check(self, endpoint_id: str, needs: Needs | None, *, what: str) -> None:
        """Make sure that an endpoint can read something.

        :raises EndpointIncompatible: if it is known that it cannot.
        """
        if needs is not None:
            runtime = self._runtime(endpoint_id)
            missing = needs.missing_in(runtime)
            if missing:
                raise EndpointIncompatible(f"{what} {missing}", hint=_hint(needs, runtime))

    def reads_binary(self, endpoint_id: str) -> bool:
        """Whether an endpoint is known to read and write large values as bytes. Asks the API every few minutes."""
        return _BINARY in (self._runtime(endpoint_id).strategies or ())

    def asking(self, endpoint_id: str, options: TaskOptions) -> TaskOptions:
        """The terms as they are sent: with a word that we read results in any strategy, if the endpoint knows them all
        and nobody said otherwise."""
        if options.result_serializers or not self.reads_binary(endpoint_id):
            return options
        return msgspec.structs.replace(options, result_serializers=(_BINARY,))

    def readable(self, endpoint_id: str, handle: FunctionHandle) -> FunctionHandle:
        """The function as the endpoint can read it: as it is, or written in another way, source text above all.

        :raises EndpointIncompatible: if there is no way.
        """
        if handle.needs is None:
            return handle
        runtime = self._runtime(endpoint_id)
        if not handle.needs.missing_in(runtime):
            return handle
        for other in handle.others:
            if other.needs is None or not other.needs.missing_in(runtime):
                return other
        other = _rewritten(handle, handle.needs, runtime)
        handle.others.append(other)
        return other

    def _runtime(self, endpoint_id: str) -> Runtime:
        with self._lock:
            until, runtime = self._known.get(endpoint_id, (0.0, Runtime()))
        if self._clock() < until:
            return runtime
        try:
            runtime, valid_s = _read(self._api.get_endpoint(endpoint_id, patience_s=0)), _BELIEVED_S
        except FarcallError:
            valid_s = _LEFT_ALONE_S  # nothing is known against it; the submit will say what is wrong
        with self._lock:
            self._known[endpoint_id] = self._clock() + valid_s, runtime
        return runtime


def _read(endpoint: Mapping[str, Any]) -> Runtime:
    said: Mapping[str, Any] = endpoint.get("runtime") or {}
    strategies = said.get("serializers")
    version = ".".join(str(said.get("python_version") or "").split(".")[:2])
    return Runtime(version, frozenset(strategies) if strategies else None)


def _rewritten(handle: FunctionHandle, needs: Needs, runtime: Runtime) -> FunctionHandle:
    """:raises EndpointIncompatible: if no way of writing the function is one that the endpoint reads."""
    reasons: list[str] = []
    for strategy in _WAYS if handle.function is not None else ():
        try:
            body = _serializer.pack([strategy.prefix + strategy.dump(handle.function)])
        except Exception as error:  # noqa: BLE001 - a strategy may fail in any way; the next one may not
            reasons.append(str(error))
            continue
        other = FunctionHandle(handle.name, body=body)
        if other.needs is None or not other.needs.missing_in(runtime):
            return other
    because = reasons[0] if reasons else "it is no plain function"
    raise EndpointIncompatible(
        f"function {handle.name} {needs.missing_in(runtime)}; its source text alone would not do: {because}",
        hint=_hint(needs, runtime),
    )


def _hint(needs: Needs, runtime: Runtime) -> str:
    if needs.strategies - (runtime.strategies or needs.strategies):
        return "Upgrade the endpoint, or choose a strategy that it reads."
    return (
        f"Run this program with Python {runtime.python}, or let what you send stand alone: no closures, decorators or "
        "classes of the script, imports inside the function."
    )
