"""Callers of the API's function: signed by the authorizer, or by the canary for itself, and otherwise refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.errors import ConfigurationError, Unauthenticated, Unavailable
from farcall_lambdas.app import Application
from farcall_lambdas.identity import Identity
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.signed_caller import CANARY_ID, CallerKey, CallerKeys
from tests.support.memory_api import ALICE, BOB
from tests.support.stores import fake_stores

AUTHORIZER, CANARY, ANOTHER = (CallerKey(lambda key=name * 32: key) for name in "abc")  # type: ignore[misc]
SIGNED = AUTHORIZER.sign(ALICE.to_context())
CANARY_IDENTITY = Identity(CANARY_ID, "farcall-canary")


def call(context: Mapping[str, Any] | None, *, keys: CallerKeys) -> tuple[int, Any]:
    application = Application.over(fake_stores(), ApiSettings(), caller_keys=keys)
    event = proxy_event("GET", "/v3/whoami", caller=None)
    if context is not None:
        event["requestContext"]["authorizer"] = context
    answer = application.answer(event, LambdaContext())
    return answer["statusCode"], json.loads(answer["body"])


@pytest.mark.parametrize("added", [{}, {"principalId": "x"}, {"principalId": "x", "integrationLatency": 12}])
def test_a_caller_that_the_authorizer_signed_is_admitted(added: dict[str, Any]) -> None:
    status, body = call({**added, **SIGNED}, keys=CallerKeys(AUTHORIZER))
    assert (status, body["identity_id"]) == (200, ALICE.identity_id)


@pytest.mark.parametrize(
    "context",
    [
        None,
        {},
        {**ALICE.to_context(), "signature": ""},
        {**ALICE.to_context(), "signature": 7},
        {**ALICE.to_context(), "signature": "\udc80"},
        ANOTHER.sign(ALICE.to_context()),
        {**SIGNED, "identity_id": BOB.identity_id},
        {**SIGNED, "identity_set": f"{ALICE.identity_id} {BOB.identity_id}"},
        {**SIGNED, "is_admin": "true"},
        {**SIGNED, "expires_at": "99999999999"},
        {**SIGNED, "username": "root"},
        {**SIGNED, "more": "x"},
        {name: value for name, value in SIGNED.items() if name != "provider"},
        CANARY.sign(ALICE.to_context()),
        CANARY.sign({**ALICE.to_context(), "principalId": CANARY_ID}),
    ],
)
def test_another_caller_is_refused(context: dict[str, Any] | None) -> None:
    status, body = call(context, keys=CallerKeys(AUTHORIZER, CANARY))
    assert (status, body["code"]) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize("context", [ALICE.to_context(), CANARY_IDENTITY.to_context()])
def test_a_caller_of_a_release_that_did_not_sign_tries_again(context: dict[str, Any]) -> None:
    """API Gateway keeps what its authorizer said for minutes: an agent must not give up meanwhile."""
    status, body = call(context, keys=CallerKeys(AUTHORIZER, CANARY))
    assert (status, body["code"]) == (503, "UNAVAILABLE")


def test_the_canary_signs_only_for_itself() -> None:
    signed = CANARY.sign(CANARY_IDENTITY.to_context())
    assert call(signed, keys=CallerKeys(AUTHORIZER, CANARY))[0] == 200
    assert call(signed, keys=CallerKeys(AUTHORIZER))[0] == 401


def test_a_key_that_cannot_be_read_is_an_outage() -> None:
    def away() -> str:
        raise Unavailable("away")

    assert call(SIGNED, keys=CallerKeys(CallerKey(away)))[0] == 503


def test_the_keys_come_from_the_environment() -> None:
    keys = CallerKeys.from_environment({"FARCALL_CALLER_KEY": "a" * 32})
    keys.require(SIGNED)
    with pytest.raises(Unauthenticated):
        keys.require(ANOTHER.sign(ALICE.to_context()))
    with pytest.raises(ConfigurationError, match="FARCALL_CALLER_SECRET_ARN"):
        CallerKeys.from_environment({})
    with pytest.raises(ConfigurationError, match="less than 32"):
        CallerKeys.from_environment({"FARCALL_CALLER_KEY": "short"}).require(SIGNED)
