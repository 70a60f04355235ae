"""The version of the service."""

import json
from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_lambdas.models.tasks import VersionAnswer
from farcall_lambdas.routes.call import new_router
from farcall_lambdas.version import API_VERSION, MIN_ENDPOINT_VERSION, MIN_SDK_VERSION

router = new_router()


@router.get("/v2/version", summary="The version of the API, and with service=all of everything", tags=["service"])
def get_version(service: Annotated[str, Query()] = "") -> str | VersionAnswer:
    if service != "all":
        # A text body is taken for serialised already, so the JSON string is made here.
        return json.dumps(API_VERSION)
    return VersionAnswer(
        api=API_VERSION,
        min_sdk_version=MIN_SDK_VERSION,
        min_ep_version=MIN_ENDPOINT_VERSION,
        min_endpoint_version=MIN_ENDPOINT_VERSION,
    )
