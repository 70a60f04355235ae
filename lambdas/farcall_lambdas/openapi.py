"""OpenAPI document of the API: ``python -m farcall_lambdas.openapi [PATH]`` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aws_lambda_powertools.event_handler.openapi.models import HTTPBearer

from farcall_lambdas.answers import ActionErrorAnswer, ErrorAnswer, is_of_actions
from farcall_lambdas.app import rest_resolver
from farcall_lambdas.field_meanings import meaning
from farcall_lambdas.route_access import ROUTE_ACCESS
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.version import API_VERSION

_DESCRIPTION: Final = (
    "Globus Compute's /v2 and /v3 routes and shapes, with Farcall's additions, and under /actions Globus Flows' "
    "interface for action providers. Every error answer has the shape ErrorAnswer; under /actions, ActionErrorAnswer, "
    "which has it in it. An answer repeats the request's header X-Farcall-Request-Id: one with another id is the "
    "answer to another request."
)

_SCHEMAS: Final = "#/components/schemas/"

#: Failures of any operation, of one with parameters, of one with a path, of one with a body.
_FAILURES: Final = {
    "401": "No token, or an invalid one",
    "429": "Too many requests: wait for Retry-After",
    "500": "Internal error",
    "503": "A part of the service is unavailable; Retry-After may say when to try again",
}
_FAILURES_WITH_PARAMETERS: Final = {"422": "A parameter or field is wrong; the message names it"}
_FAILURES_WITH_PATH: Final = {"403": "It belongs to another user", "404": "It does not exist"}
_FAILURES_WITH_OF: Final = {"403": "Only administrators see all"}
_FAILURES_OF_ACTIONS: Final = {"409": "Its state does not allow this"}
_FAILURES_OF_REFUSALS: Final = {"400": "Not supported; the message names the alternative"}
_FAILURES_WITH_BODY: Final = {
    "400": "The request contradicts itself, or is not JSON",
    "403": "It refers to something that belongs to another user",
    "404": "It refers to something that does not exist",
    "409": "It contradicts what is stored",
    "413": "It is over a limit on bytes",
    "415": "Its content type is not application/json",
    "422": "A parameter or field is wrong; the message names it",
}


def document() -> str:
    """The document as JSON text; the same code always gives the same text."""
    text = rest_resolver(ApiSettings()).get_openapi_json_schema(
        title="Farcall",
        version=API_VERSION,
        description=_DESCRIPTION,
        security_schemes={"bearer": HTTPBearer()},
        security=[{"bearer": []}],
    )
    return json.dumps(_with_meanings(_with_rights(_with_our_errors(json.loads(text)))), indent=1, sort_keys=True) + "\n"


def _with_our_errors(spec: dict[str, Any]) -> dict[str, Any]:
    """Powertools describes its own error answers; the API sends those of the error table."""
    schemas = spec["components"]["schemas"]
    for name in ("HTTPValidationError", "ResponseValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["ErrorAnswer"] = ErrorAnswer.model_json_schema(mode="serialization")
    of_actions = ActionErrorAnswer.model_json_schema(mode="serialization", ref_template=f"{_SCHEMAS}{{model}}")
    schemas["ActionErrorAnswer"] = {name: value for name, value in of_actions.items() if name != "$defs"}
    for path, operations in spec["paths"].items():
        name = "ActionErrorAnswer" if is_of_actions(path) else "ErrorAnswer"
        content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{name}"}}}
        for method, operation in operations.items():
            failures = _failures(operation, changes=method == "post" or is_of_actions(path))
            answers = {status: {"description": text, "content": content} for status, text in failures}
            done = {status: answer for status, answer in operation["responses"].items() if status.startswith("2")}
            operation["responses"] = {**done, **answers}
    return spec


def _with_rights(spec: dict[str, Any]) -> dict[str, Any]:
    """Add the rights that each operation requires, from the table of rights."""
    for path, operations in spec["paths"].items():
        declared = path.replace("{", "<").replace("}", ">")
        for method, operation in operations.items():
            operation["x-farcall-access"] = ROUTE_ACCESS[method.upper(), declared].to_json()
    return spec


def _with_meanings(spec: dict[str, Any]) -> dict[str, Any]:
    """What each field and parameter means."""
    for name, schema in spec["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            _describe(described, meaning(field, shape=name.partition("-")[0]))
    for operations in spec["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                _describe(parameter, meaning(parameter["name"]))
    return spec


def _describe(described: dict[str, Any], text: str | None) -> None:
    if text:
        described.setdefault("description", text)


def _failures(operation: Mapping[str, Any], *, changes: bool) -> list[tuple[str, str]]:
    """The statuses of an operation's errors with their descriptions. ``changes``: a state may not allow it."""
    parameters = operation.get("parameters", ())
    in_path = any(parameter["in"] == "path" for parameter in parameters)
    failures = (
        _FAILURES
        | (_FAILURES_WITH_PARAMETERS if parameters else {})
        | (_FAILURES_WITH_PATH if in_path else {})
        | (_FAILURES_WITH_OF if any(parameter["name"] == "of" for parameter in parameters) else {})
        | (_FAILURES_OF_ACTIONS if in_path and changes else {})
        | (_FAILURES_OF_REFUSALS if operation["summary"].startswith("Refused") else {})
        | (_FAILURES_WITH_BODY if "requestBody" in operation else {})
    )
    return sorted(failures.items())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(document())
    else:
        sys.stdout.write(document())
