"""Proxy events: requests as API Gateway sends them to a function."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from farcall_lambdas.identity import Identity
from farcall_lambdas.signed_caller import CallerKey


def proxy_event(
    method: str,
    path: str,
    body: str | bytes | None = None,
    *,
    caller: Identity | None,
    key: CallerKey | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A REST API (v1) proxy event as API Gateway sends it, after its authorizer let ``caller`` through; ``key``
    is what the authorizer signs with.

    A body of bytes is sent as binary.
    """
    bare_path, _, query = path.partition("?")
    queries = parse_qs(query, keep_blank_values=True)
    sent = {"Content-Type": "application/json", "Host": "api.example.org", **(headers or {})}
    context: dict[str, Any] = {
        "stage": "v1",
        "path": f"/v1{bare_path}",
        "requestId": str(uuid.uuid4()),
        "httpMethod": method,
        "resourcePath": "/{proxy+}",
    }
    if caller is not None:
        identity = key.sign(caller.to_context()) if key else caller.to_context()
        context["authorizer"] = {"principalId": caller.identity_id, **identity}
    return {
        "resource": "/{proxy+}",
        "path": bare_path,
        "httpMethod": method,
        "headers": sent,
        "multiValueHeaders": {name: [value] for name, value in sent.items()},
        "queryStringParameters": {name: values[-1] for name, values in queries.items()} or None,
        "multiValueQueryStringParameters": queries or None,
        "pathParameters": {"proxy": bare_path.lstrip("/")},
        "requestContext": context,
        "body": base64.b64encode(body).decode() if isinstance(body, bytes) else body,
        "isBase64Encoded": isinstance(body, bytes),
    }
