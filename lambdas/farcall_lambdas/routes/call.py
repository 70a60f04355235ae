"""Call context of every route: the caller, the services, and the form of answers that the client reads.

This and the modules of routes use no postponed annotations: Powertools would evaluate them for each request.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Final

from aws_lambda_powertools.event_handler import Request
from aws_lambda_powertools.event_handler.depends import Depends
from aws_lambda_powertools.event_handler.router import APIGatewayRouter

from farcall_common.errors import Unsupported
from farcall_lambdas.identity import Identity
from farcall_lambdas.services import Services
from farcall_lambdas.settings import ApiSettings

#: Key of the admitted identity in the resolver's context.
CALLER: Final = "caller"

#: A client that sends ``X-Farcall-Accept: blob-ref`` fetches big results itself.
ACCEPT_HEADER: Final = "x-farcall-accept"
#: globus-sdk sends this header. Its clients have no final states but success and failed.
GLOBUS_HEADER: Final = "x-globus-client-info"


@dataclasses.dataclass(frozen=True)
class Call:
    """One request, as far as routes need it."""

    services: Services
    settings: ApiSettings
    identity: Identity
    request_id: str
    takes_refs: bool
    is_globus_client: bool
    #: The workers of an endpoint, read once per request.
    workers_of: Callable[[str], Mapping[str, str]]

    def count(self, entries: int) -> None:
        """Count the entries that the request names, or gets, against the rate limit of the caller."""
        self.services.admission.count_entries(self.identity, entries)


def current_call(request: Request) -> Call:
    """The call context of the current request."""
    event = request.resolved_event
    headers = event.headers
    services: Services = request.context["services"]
    return Call(
        services=services,
        settings=request.context["settings"],
        identity=request.context[CALLER],
        request_id=str(event["requestContext"].get("requestId", "")),
        takes_refs="blob-ref" in headers.get(ACCEPT_HEADER, ""),
        is_globus_client=GLOBUS_HEADER in headers,
        workers_of=functools.cache(services.endpoints.workers),
    )


CurrentCall = Annotated[Call, Depends(current_call)]


def new_router() -> APIGatewayRouter:
    """A router for the routes of one resource."""
    return APIGatewayRouter()  # type: ignore[no-untyped-call]


def no_result_queue() -> Unsupported:
    """The error for a program that wants its results from a message broker."""
    return Unsupported(
        "There is no message broker, so results cannot come from a queue: use farcall.Executor instead of "
        "globus_compute_sdk.Executor.",
        hint="globus_compute_sdk.Client works, too: it polls for results.",
    )
