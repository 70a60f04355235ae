"""Application: routes on a resolver, over services and stores."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from aws_lambda_powertools import Logger
from aws_lambda_powertools.event_handler import ApiGatewayResolver, APIGatewayRestResolver, Response
from aws_lambda_powertools.event_handler.api_gateway import ResponseBuilder, Route
from aws_lambda_powertools.utilities.data_classes.common import BaseProxyEvent
from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.errors import (
    AnswerTooLarge,
    ConfigurationError,
    FarcallError,
    Forbidden,
    InvalidRequest,
    QueueFull,
    QuotaExceeded,
    RateLimited,
    RequestTooLarge,
)
from farcall_common.http_errors import REQUEST_ID
from farcall_common.limits import MAX_LAMBDA_ANSWER_BYTES, MAX_NESTED_REQUEST_BYTES
from farcall_common.nested_json import nested_bytes
from farcall_common.store import Stores
from farcall_lambdas.answers import error_response
from farcall_lambdas.fleet import Fleet
from farcall_lambdas.identity import Identity
from farcall_lambdas.issued_credentials import IssuedCredentials
from farcall_lambdas.logs import SERVICE, log_ids
from farcall_lambdas.route_access import ROUTE_ACCESS
from farcall_lambdas.routes import ROUTERS
from farcall_lambdas.routes.call import CALLER
from farcall_lambdas.services import Services
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.signed_caller import CallerKeys

logger = Logger(service=SERVICE, child=True)

#: In the resolver's context.
_CALLER_KEYS: Final = "caller_keys"
#: Headers and status of an answer, beside its body.
_HEAD_BYTES: Final = 4_096
#: Characters of a request's path in the access log.
_PATH_CHARACTERS: Final = 200
#: Ids of requests that answers repeat.
_REQUEST_ID: Final = re.compile("[0-9A-Za-z-]{1,64}")


class AdmittingResolver(ApiGatewayResolver):
    """A resolver that admits the caller before it reads the request: Powertools validates the whole body before any
    code of a route, its dependencies included."""

    def _resolve(self) -> ResponseBuilder[Any]:
        event = self.current_event
        correlation_id = event.headers.get(REQUEST_ID, "")
        if not _REQUEST_ID.fullmatch(correlation_id):
            correlation_id = ""
        log_ids(
            request_id=str(event["requestContext"].get("requestId", "")),
            correlation_id=correlation_id,
            function_request_id=str(getattr(self.lambda_context, "aws_request_id", "")),
        )
        answer = self._admitted()
        if correlation_id:
            answer.response.headers[REQUEST_ID] = correlation_id
        return answer

    def _admitted(self) -> ResponseBuilder[Any]:
        event, services = self.current_event, self.context["services"]
        try:
            context = event["requestContext"]
            if keys := self.context.get(_CALLER_KEYS):
                keys.require(context.get("authorizer"))
            caller = services.admission.admit(context.get("authorizer"), source_ip=_source_ip(context))
            caller = self.context[CALLER] = services.tokens.admit(caller)
            if caller.endpoint_id and (event.http_method, event.path) != _connect_route(caller.endpoint_id):
                refused = Forbidden(
                    f"This is the credential of endpoint {caller.endpoint_id}, which can only connect that endpoint.",
                    hint="Use the token of the endpoint's owner.",
                ).of(caller.endpoint_id, owner_id=caller.identity_id)
                services.account.note_refusal(caller, refused, route=_route(event))
                raise refused
        except FarcallError as error:
            return self._refusal(error)
        return super()._resolve()

    def _call_route(self, route: Route, route_arguments: dict[str, str]) -> ResponseBuilder[Any]:
        services: Services = self.context["services"]
        caller: Identity = self.context[CALLER]
        try:
            # Every declared route is in the table; Powertools' answer to an unknown one is a route, too.
            if access := ROUTE_ACCESS.get((route.method, route.path)):
                access.check_token(caller)
        except Forbidden as error:
            services.account.note_refusal(caller, error, route=_route(self.current_event))
            return self._refusal(error)
        return super()._call_route(route, route_arguments)

    def _refusal(self, error: FarcallError) -> ResponseBuilder[Any]:
        return ResponseBuilder(_answer_to(error, self.current_event), serializer=self._serializer)

    def within_limit(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer, or an error if it is more than a Lambda function can send: API Gateway would answer 502."""
        body = answer["body"] or ""
        if 2 * len(body) <= (most := MAX_LAMBDA_ANSWER_BYTES - _HEAD_BYTES) or nested_bytes(body) <= most:
            return answer
        logger.error("answer too large", route=_route(self.current_event), size_bytes=nested_bytes(body))
        error = AnswerTooLarge(f"The answer has {nested_bytes(body)} bytes; {most} are allowed.")
        return self._refusal(error).build(self.current_event, self._cors)


class _RestResolver(AdmittingResolver, APIGatewayRestResolver):
    """The resolver for REST API (v1) proxy events."""


class JsonReader:
    """Strict JSON reader: no NaN, no overlong text, and one error for anything that is not JSON."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def __call__(self, text: str) -> Any:
        """:raises InvalidRequest: for text that is not JSON (RequestTooLarge: for too much of it)."""
        if len(text) > self._max_bytes:
            raise RequestTooLarge(f"The request has {len(text)} bytes; {self._max_bytes} are allowed.")
        # At API Gateway, such a request does not reach this code. Characters take six bytes at most.
        if 6 * len(text) > MAX_NESTED_REQUEST_BYTES and (size := nested_bytes(text)) > MAX_NESTED_REQUEST_BYTES:
            raise RequestTooLarge(
                f"The request has {size} bytes as text inside JSON; {MAX_NESTED_REQUEST_BYTES} are allowed."
            )
        try:
            return json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"The body is not JSON: {error}.", hint="Send a JSON object.") from error


def assemble(resolver: ApiGatewayResolver) -> None:
    """Add the routes and the error table to a resolver.

    :raises ConfigurationError: if the routes are not those of the table of rights.
    """

    def on_error(error: Exception) -> Response[str]:
        event = resolver.current_event
        if isinstance(error, UnicodeDecodeError) and error.object == _binary_body(event):
            # Powertools decodes the body before our code runs.
            error = InvalidRequest("The body is not UTF-8 text.", hint="Send a JSON object.")
        if isinstance(error, Forbidden):
            services: Services = resolver.context["services"]
            services.account.note_refusal(resolver.context[CALLER], error, route=_route(event))
        return _answer_to(error, event)

    for router in ROUTERS:
        resolver.include_router(router)
    declared = {(route.method, route.path) for route in resolver._static_routes + resolver._dynamic_routes}
    if differences := declared ^ ROUTE_ACCESS.keys():
        raise ConfigurationError(f"route_access.py and the routes of the API differ: {sorted(differences)}.")
    resolver.exception_handler(Exception)(on_error)


def rest_resolver(settings: ApiSettings) -> AdmittingResolver:
    """The resolver for REST API (v1) proxy events. Like a Lambda it answers one request at a time."""
    resolver = _RestResolver(enable_validation=True, json_body_deserializer=JsonReader(settings.max_request_bytes))
    assemble(resolver)
    return resolver


@dataclasses.dataclass(frozen=True)
class Application:
    """The API over one set of stores, as a Lambda runs it."""

    resolver: AdmittingResolver
    services: Services
    settings: ApiSettings
    caller_keys: CallerKeys | None = None

    @classmethod
    def over(
        cls,
        stores: Stores,
        settings: ApiSettings,
        *,
        clock: Callable[[], float] = time.time,
        fleet: Fleet | None = None,
        caller_keys: CallerKeys | None = None,
        credentials: IssuedCredentials | None = None,
    ) -> Application:
        """The API over stores. ``clock`` gives epoch seconds; ``fleet`` is for forwarders that may sleep. Only callers
        that are signed with one of ``caller_keys`` are admitted; without these, any caller that an event names.
        ``credentials`` signs those of endpoints."""
        services = Services.over(stores, settings, clock=clock, fleet=fleet, credentials=credentials)
        return cls(rest_resolver(settings), services, settings, caller_keys)

    def answer(self, event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:
        """Answer a proxy event."""
        context_of_request = {_CALLER_KEYS: self.caller_keys, "services": self.services, "settings": self.settings}
        self.resolver.context.update(context_of_request)
        answer = self.resolver.within_limit(self.resolver.resolve(event, context))
        request = event["requestContext"]
        code = _error_code(answer)
        found = {"code": code, "refused": _refused_by(answer["statusCode"], code)}
        noted: dict[str, Any] = {name: value for name, value in found.items() if value}
        # The access log: API Gateway writes none. The metric RequestsRefused is made of `refused`.
        logger.info(
            "request",
            method=event["httpMethod"],
            path=str(event["path"])[:_PATH_CHARACTERS],
            status=answer["statusCode"],
            identity_id=(request.get("authorizer") or {}).get("identity_id"),
            token_id=(request.get("authorizer") or {}).get("token_id"),
            source_ip=_source_ip(request),
            **noted,
        )
        return answer


def _connect_route(endpoint_id: str) -> tuple[str, str]:
    """The one route for the credential of an endpoint."""
    return "POST", f"/v3/endpoints/{endpoint_id}/connect"


def _answer_to(error: Exception, event: BaseProxyEvent) -> Response[str]:
    return error_response(error, request_id=str(event["requestContext"].get("requestId", "")), path=event.path)


def _error_code(answer: Mapping[str, Any]) -> str:
    """The code of an error; empty for other answers."""
    if answer["statusCode"] < 400:
        return ""
    body = json.loads(answer["body"])
    return str(body.get("error", body)["code"])  # the error of an action has ours in it


def _refused_by(status: int, code: str) -> str:
    """What refused a request, if it was a limit or a missing right."""
    if status == 403:
        return "right"
    return {RateLimited.code: "rate", QuotaExceeded.code: "quota", QueueFull.code: "quota"}.get(code, "")


def _route(event: BaseProxyEvent) -> str:
    return f"{event.http_method} {event.path[:_PATH_CHARACTERS]}"


def _source_ip(context: Mapping[str, Any]) -> str:
    """Return the IP address of the client."""
    return str((context.get("identity") or {}).get("sourceIp") or "")


def _binary_body(event: Mapping[str, Any]) -> bytes | None:
    """The body, if API Gateway sent it as binary because it is not text."""
    return base64.b64decode(event["body"]) if event.get("isBase64Encoded") and event.get("body") else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
