"""Compatibility checks: whether an endpoint can read and run a call, found out before it is submitted."""

from __future__ import annotations

import dataclasses
from typing import Final

import msgspec

from farcall._endpoints import EndpointCache, EndpointRuntime
from farcall._functions import FunctionHandle, PackedFunction, Requirements
from farcall_common.errors import EndpointIncompatible
from farcall_common.payload import DEFAULT_CODE, DillCode, PickleOutOfBand, PureSourceDill
from farcall_common.payload.data import WITHOUT_BYTE_CODE
from farcall_common.task_options import TaskOptions

#: Strategies for a function, text first: dill finds the source of functions that were typed into an interpreter. The
#: byte code of dill is for endpoints that read no other.
_REWRITING: Final = (DEFAULT_CODE[0], PureSourceDill(self_contained=True), *DEFAULT_CODE[1:], DillCode())
#: The only strategy that is not text.
_BINARY: Final = PickleOutOfBand().id


class CompatibilityChecker:
    """Compares the requirements of calls with the runtimes of endpoints. May be used from any thread."""

    def __init__(self, endpoints: EndpointCache) -> None:
        self._endpoints = endpoints

    def check(self, endpoint_id: str, requirements: Requirements | None, *, what: str, options: TaskOptions) -> None:
        """Make sure that an endpoint can read something, in tasks with these options.

        :raises EndpointIncompatible: if it is known that it cannot.
        """
        if requirements is not None:
            runtime = self._runtime(endpoint_id, options)
            reason = unmet(requirements, runtime)
            if reason:
                raise EndpointIncompatible(f"{what} {reason}", hint=_hint(requirements, runtime))

    def reads_binary(self, endpoint_id: str) -> bool:
        """Whether an endpoint is known to read and write large values as bytes. Calls the API every few minutes."""
        return _BINARY in (self._endpoints.runtime(endpoint_id).strategies or ())

    def with_binary_results(self, endpoint_id: str, options: TaskOptions) -> TaskOptions:
        """The options as they are sent: with binary results, if the endpoint writes them and no strategy is chosen."""
        if options.result_serializers or not self.reads_binary(endpoint_id):
            return options
        return msgspec.structs.replace(options, result_serializers=(_BINARY,))

    def _runtime(self, endpoint_id: str, options: TaskOptions) -> EndpointRuntime:
        """Runtime of tasks with these options. In a container or environment, its version of Python is unknown."""
        runtime = self._endpoints.runtime(endpoint_id)
        is_own = options.container is None and options.environment is None
        return runtime if is_own else dataclasses.replace(runtime, python="")

    def readable(self, endpoint_id: str, handle: FunctionHandle, options: TaskOptions) -> FunctionHandle:
        """The function as the endpoint can read it: as it is, or rewritten, preferably as source text.

        :raises EndpointIncompatible: if no strategy works.
        """
        if handle.requirements is None:
            return handle
        runtime = self._runtime(endpoint_id, options)
        for known in (handle, *handle.rewritten):
            if not unmet(known.requirements, runtime):
                return known
        rewritten = _rewritten(handle, handle.requirements, runtime)
        handle.rewritten.append(rewritten)
        return rewritten


def unmet(requirements: Requirements | None, runtime: EndpointRuntime) -> str:
    """Why an endpoint cannot read something, as the end of a sentence; empty if it can, or if that is unknown."""
    if requirements is None:
        return ""
    unread = sorted(requirements.strategies - (runtime.strategies or requirements.strategies))
    if unread:
        return f"is written with strategy {unread[0]}, which the endpoint does not read"
    if requirements.python and runtime.python and runtime.python != requirements.python:
        code = f"byte code of Python {requirements.python}{requirements.classes}"
        return f"holds {code}, and the endpoint runs Python {runtime.python}"
    return ""


def _rewritten(handle: FunctionHandle, requirements: Requirements, runtime: EndpointRuntime) -> FunctionHandle:
    """:raises EndpointIncompatible: if the endpoint reads the function in no strategy that can write it."""
    reasons: list[str] = []
    for strategy in _REWRITING if handle.function is not None else ():
        try:
            packed = PackedFunction.of(strategy.prefix + strategy.dump(handle.function))
        except Exception as error:  # noqa: BLE001 - a strategy may fail in any way; the next one may not
            reasons.append(str(error))
            continue
        if handle.snapshot is not None and not handle.snapshot.is_current():
            reasons.insert(0, "something that it uses has changed since the call was submitted")
            break
        if not unmet(packed.requirements, runtime):
            return FunctionHandle(handle.name, packed=packed)
    reason = reasons[0] if reasons else "it is not a plain function"
    raise EndpointIncompatible(
        f"function {handle.name} {unmet(requirements, runtime)}; its source text alone is not enough: {reason}",
        hint=_hint(requirements, runtime),
    )


def _hint(requirements: Requirements, runtime: EndpointRuntime) -> str:
    if requirements.strategies - (runtime.strategies or requirements.strategies):
        return "Upgrade the endpoint, or choose a strategy that it reads."
    return f"Run this program with Python {runtime.python}. Or {WITHOUT_BYTE_CODE}."
