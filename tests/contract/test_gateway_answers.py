"""Answers of the gateway itself: those of the local API and of the templates are the same, and so are their limits."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from farcall_common.errors import LimitExceeded
from farcall_infra.profiles import load_profile
from farcall_lambdas.answers import error_response
from farcall_lambdas.local_gateway import LocalGateway
from tests.contract.templates import Templates, resources


@pytest.mark.parametrize("kind", ["THROTTLED", "DEFAULT_5XX"])
def test_the_local_api_answers_as_the_gateway(synthesized: Callable[[str, str], Templates], kind: str) -> None:
    """A function that takes too long gets the default answer for 5XX, whose status is that of all of them. Each 503 of
    the API says besides when to try again, which the gateway cannot know."""
    gateway = LocalGateway()
    error = LimitExceeded("Too Many Requests") if kind == "THROTTLED" else gateway.timed_out()
    response = error_response(error, request_id="r-1")
    local = json.loads(response.body or "")
    (answer,) = (
        each
        for _, each in resources(synthesized("aws", "lab"), "AWS::ApiGateway::GatewayResponse")
        if each["ResponseType"] == kind
    )
    template = answer["ResponseTemplates"]["application/json"]
    message = json.dumps(error.record.message)
    assert json.loads(template.replace("$context.error.messageString", message)) == {
        name: value for name, value in local.items() if name not in ("request_id", "retry_after_s")
    }
    assert answer["StatusCode"] == str(response.status_code)


def test_the_local_throttle_is_that_of_the_largest_profile() -> None:
    api, gateway = load_profile("facility").api, LocalGateway()
    assert (gateway.rate_per_s, gateway.burst) == (api.throttle_rate_per_s, api.throttle_burst)
    assert gateway.timeout_s == api.timeout_s
