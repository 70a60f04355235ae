"""Writes the OpenAPI document of the API: ``python -m farcall_lambdas.openapi [PATH]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from aws_lambda_powertools.event_handler.openapi.models import HTTPBearer

from farcall_lambdas.app import rest_resolver
from farcall_lambdas.models.errors import ErrorAnswer
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.version import API_VERSION

__all__ = ["document"]

_DESCRIPTION: Final = (
    "Globus Compute's /v2 and /v3 routes and shapes, and beside them what Farcall adds. Every error answers in the "
    "shape ErrorAnswer."
)


def document() -> str:
    """The document as JSON text; the same code always gives the same text."""
    text = rest_resolver(ApiSettings()).get_openapi_json_schema(
        title="Farcall",
        version=API_VERSION,
        description=_DESCRIPTION,
        security_schemes={"bearer": HTTPBearer()},
        security=[{"bearer": []}],
    )
    return json.dumps(_with_our_errors(json.loads(text)), indent=1, sort_keys=True) + "\n"


def _with_our_errors(spec: dict[str, Any]) -> dict[str, Any]:
    """Powertools describes its own error answers; what is sent is what the error table makes."""
    schemas = spec["components"]["schemas"]
    for name in ("HTTPValidationError", "ResponseValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["ErrorAnswer"] = ErrorAnswer.model_json_schema(mode="serialization")
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
    for path in spec["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "What went wrong", "content": content}
    return spec


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(document())
    else:
        sys.stdout.write(document())
