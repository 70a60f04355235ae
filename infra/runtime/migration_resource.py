"""The migrator as a CloudFormation custom resource: run it, then tell CloudFormation how it went.

CloudFormation waits for an answer at a pre-signed address, and waits for long if none comes; so every way out of
:func:`handle` sends one. Runs inside the ``lambdas`` bundle.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from farcall_lambdas.handlers import migrator

__all__ = ["handle"]

_ANSWER_TIMEOUT_S = 30.0
_REASON_LIMIT = 1000  # characters; CloudFormation refuses answers above 4096 bytes


def handle(event: dict[str, Any], context: Any) -> None:
    """Migrate on create and update; on delete leave the database as it is."""
    try:
        if event["RequestType"] != "Delete":
            migrator.handle({}, context)
    except Exception as error:
        _answer(event, status="FAILED", reason=f"{type(error).__name__}: {error}", log=context.log_stream_name)
        raise
    _answer(event, status="SUCCESS", reason="", log=context.log_stream_name)


def _answer(event: dict[str, Any], *, status: str, reason: str, log: str) -> None:
    body = {
        "Status": status,
        "Reason": f"{reason[:_REASON_LIMIT]} (log stream {log})",
        "PhysicalResourceId": event.get("PhysicalResourceId", "farcall-migration"),
        "StackId": event["StackId"],
        "RequestId": event["RequestId"],
        "LogicalResourceId": event["LogicalResourceId"],
    }
    # The address was signed without a content type.
    request = urllib.request.Request(  # noqa: S310 - CloudFormation gave it
        event["ResponseURL"], data=json.dumps(body).encode(), method="PUT", headers={"Content-Type": ""}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S):  # noqa: S310
        pass
