"""The database migrator as a CloudFormation custom resource: run it, then send CloudFormation the result.

An event without a request of CloudFormation also runs the migrator: a rotation of passwords sends one.

CloudFormation waits for an answer at a pre-signed URL, and waits long if none arrives; so every path through
:func:`handle` sends exactly one. Lambda kills a function at its timeout without notice: shortly before that, this
module reports a running migration as failed. Runs inside the ``lambdas`` bundle.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

from farcall_lambdas.handlers import migrator

_ANSWER_TIMEOUT_S = 10.0
# Seconds before the function's timeout at which a running migration is reported as failed.
_RESERVE_S = 15.0
_REASON_LIMIT = 1000  # characters; CloudFormation refuses answers above 4096 bytes


def handle(event: dict[str, Any], context: Any) -> dict[str, Any] | None:
    """Migrate on create and update; on delete do nothing. Only an event that is no request of CloudFormation has an
    answer: the migrator's."""
    if "RequestType" not in event:
        return migrator.handle(event, context)
    answer = _Answer(event, log=context.log_stream_name)
    timer = threading.Timer(
        max(0.0, context.get_remaining_time_in_millis() / 1000 - _RESERVE_S),
        answer.send,
        ["FAILED", "the migration did not finish within Lambda's time limit; see docs/operations/upgrades.md"],
    )
    timer.daemon = True
    timer.start()
    try:
        if event["RequestType"] != "Delete":
            migrator.handle({}, context)
    except Exception as error:
        answer.send("FAILED", f"{type(error).__name__}: {error}")
        raise
    else:
        answer.send("SUCCESS", "")
    finally:
        timer.cancel()
    return None


class _Answer:
    """The answer to one request. Only the first is sent, because CloudFormation accepts no second."""

    def __init__(self, event: dict[str, Any], *, log: str) -> None:
        self._event = event
        self._log = log
        self._lock = threading.Lock()
        self._sent = False

    def send(self, status: str, reason: str) -> None:
        with self._lock:
            if self._sent:
                return
            self._put(status, reason)
            self._sent = True

    def _put(self, status: str, reason: str) -> None:
        body = {
            "Status": status,
            "Reason": f"{reason[:_REASON_LIMIT]} (log stream {self._log})",
            "PhysicalResourceId": self._event.get("PhysicalResourceId", "farcall-migration"),
            "StackId": self._event["StackId"],
            "RequestId": self._event["RequestId"],
            "LogicalResourceId": self._event["LogicalResourceId"],
        }
        # The URL was signed without a content type.
        request = urllib.request.Request(  # noqa: S310 - CloudFormation gave it
            self._event["ResponseURL"], data=json.dumps(body).encode(), method="PUT", headers={"Content-Type": ""}
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S):  # noqa: S310
            pass
