"""Latency targets of the fake cloud: targets of tasks, and the endpoint's report about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.errors import InvalidRequest, TargetInfeasible
from farcall_common.qos import QoS
from farcall_common.qos_report import REFUSE, QosReport, infeasible_of, infeasible_targets, read_report

Json = dict[str, Any]

#: Key in a function's metadata.
TARGET: Final = "task_qos"


class Targets:
    """Report of the endpoint about latency targets, and its API route."""

    def __init__(self, *, check: Callable[[str], object]) -> None:
        self._check = check
        self._report = QosReport()

    @property
    def routes(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """Method, pattern of the path, and handler."""
        return (("GET", "/v3/endpoints/([^/]+)/qos", self._get),)

    def set(self, report: Mapping[str, Any]) -> None:
        """Set what the endpoint reports.

        :raises ValueError: for what would be left out of a report.
        """
        found = read_report(report, now=time.time())
        if found is None or len(found.functions) != len(report.get("functions", ())):
            raise ValueError("the report has functions that cannot be read")
        self._report = found

    def check(self, functions: Mapping[str, tuple[str, QoS | None]]) -> list[Json]:
        """Warnings of targets that the endpoint cannot hold; of functions and targets by reference.

        :raises TargetInfeasible: if it refuses such tasks.
        """
        found = []
        for reference, (function_id, qos) in functions.items():
            target = infeasible_of(infeasible_targets(self._report), function_id, [""], qos)
            if target is None:
                continue
            if self._report.admission == REFUSE:
                raise TargetInfeasible(
                    f"Endpoint fake cannot hold the target of function {function_id}: {target.reason}",
                    hint=target.fix or None,
                    retry_after_s=60.0,
                )
            about = {"function_id": reference, "message": target.reason, "hint": target.fix}
            found.append({"code": TargetInfeasible.code, **about})
        return found

    def why(self, function_id: str, qos: QoS | None) -> Json:
        """Return the fields about the latency target in the explanation of a task that has not ended."""
        target = infeasible_of(infeasible_targets(self._report), function_id, [""], qos)
        shown = shown_target(qos)
        return shown | ({"infeasible": {"reason": target.reason, "fix": target.fix}} if target else {})

    def _get(self, _: Json, endpoint_id: str) -> Json:
        self._check(endpoint_id)
        report: Json = {"endpoint_id": endpoint_id, **msgspec.to_builtins(self._report)}
        return report | {"reported_at": self._report.reported_at or None}


def read_target(given: Any) -> QoS | None:
    """The target of a request; None if it has none.

    :raises InvalidRequest: for one that makes no sense.
    """
    try:
        return None if given is None else msgspec.convert(given, QoS)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(str(error)) from None


def kept_target(body: Mapping[str, Any]) -> Json:
    """The target of a function, as its metadata has it."""
    qos = read_target(body.get("qos"))
    if qos is None:
        qos = read_target((body.get("former") or {}).get(TARGET))
    if qos is None or not qos.has_target:
        return {}
    return {TARGET: qos.to_json()}


def shown_target(qos: QoS | None) -> Json:
    """The target in an answer about a task."""
    return {"qos": msgspec.structs.asdict(qos)} if qos is not None and qos.has_target else {}
