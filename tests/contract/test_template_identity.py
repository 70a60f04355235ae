"""Identity provider in the template."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

import jwt
import pytest

from farcall_infra.profiles import Profile
from farcall_lambdas.identity import Identity
from farcall_lambdas.issued_credentials import IssuedCredentials
from farcall_lambdas.signed_caller import CallerKey
from tests.contract.templates import TARGETS, Templates, function_of


def test_an_oidc_issuer_in_the_profile_replaces_globus(synthesized: Callable[[str, str], Templates]) -> None:
    (template,) = (each for name, each in synthesized("options", "restored").items() if name.endswith("-api"))
    functions = [each for each in template["Resources"].values() if each["Type"] == "AWS::Lambda::Function"]
    environments = [each["Properties"].get("Environment", {}).get("Variables", {}) for each in functions]
    [authorizer] = [each for each in environments if "FARCALL_AUTH_PROVIDER" in each]
    ours = ("FARCALL_AUTH", "FARCALL_OIDC", "FARCALL_ALLOWED", "FARCALL_ADMINS", "FARCALL_READ_GROUPS")
    assert {name: value for name, value in authorizer.items() if name.startswith(ours)} == {
        "FARCALL_AUTH_PROVIDER": "oidc",
        "FARCALL_OIDC_ISSUER": "https://id.example.org",
        "FARCALL_OIDC_AUDIENCE": "farcall",
        "FARCALL_OIDC_CLIENTS": "farcall-cli,farcall-ci",
        "FARCALL_OIDC_SCOPE": "farcall",
        "FARCALL_OIDC_GROUPS_CLAIM": "groups",
        "FARCALL_ALLOWED_IDENTITIES": "ada@example.org,grace@example.org",
        "FARCALL_ALLOWED_DOMAINS": "lab.example.org",
        "FARCALL_ALLOWED_GROUPS": "/physics/users",
        "FARCALL_ADMINS": "ada@example.org",
        "FARCALL_READ_GROUPS": "true",
    }
    assert not any("Globus" in name for name in template.get("Parameters", {}))
    [gateway] = [each for each in template["Resources"].values() if each["Type"] == "AWS::ApiGateway::Authorizer"]
    admitted = re.compile(gateway["Properties"]["IdentityValidationExpression"])
    token = jwt.encode({"sub": "ada"}, "k" * 32, algorithm="HS256")
    assert admitted.fullmatch(f"Bearer {token}")
    _accepts_endpoint_credentials(admitted)
    for other in ("x" * 40, token.replace(".", "~"), f"{token}.x", f"{token}=", token.rpartition(".")[0]):
        assert not admitted.fullmatch(f"Bearer {other}"), "not a JWT, so the function is not called"


@pytest.mark.parametrize("target", TARGETS)
def test_the_gateway_accepts_credentials_of_endpoints(
    synthesized: Callable[[str, str], Templates], profile: str, target: str
) -> None:
    template = next(each for name, each in synthesized(target, profile).items() if name.endswith("api"))
    [gateway] = [each for each in template["Resources"].values() if each["Type"] == "AWS::ApiGateway::Authorizer"]
    _accepts_endpoint_credentials(re.compile(gateway["Properties"]["IdentityValidationExpression"]))


def _accepts_endpoint_credentials(admitted: re.Pattern[str]) -> None:
    owner = Identity(str(uuid.uuid4()), "é" * 100, frozenset(str(uuid.uuid4()) for _ in range(20)))
    credentials = IssuedCredentials(CallerKey(lambda: "k" * 32))
    credential = credentials.issue(owner, endpoint_id=str(uuid.uuid4()), credential_id=str(uuid.uuid4()))
    assert admitted.fullmatch(f"Bearer {credential}"), len(credential)
    account = Identity(str(uuid.uuid4()), "robot", creator=owner)
    token = credentials.issue_token(account, token_id=str(uuid.uuid4()), expires_at=2e9)
    assert admitted.fullmatch(f"Bearer {token}"), len(token)


def test_the_authorizer_has_a_concurrency_of_its_own(aws: Templates, size: Profile) -> None:
    """A flood of unknown tokens takes no capacity from the API, and asks the identity provider so often at once."""
    reserved = {
        name: function_of(aws, f"{name}.handle").get("ReservedConcurrentExecutions") for name in ("authorizer", "api")
    }
    assert reserved == {"authorizer": size.api.authorizer_concurrency, "api": size.api.concurrency}


@pytest.mark.parametrize("target", TARGETS)
def test_only_tokens_of_the_offline_tier_are_allowed(
    synthesized: Callable[[str, str], Templates], profile: str, target: str
) -> None:
    variables = function_of(synthesized(target, profile), "authorizer.handle")["Environment"]["Variables"]
    allowed = {name: value for name, value in variables.items() if name.startswith(("FARCALL_ALLOWED", "FARCALL_ADM"))}
    assert allowed == {
        "FARCALL_ALLOWED_IDENTITIES": "*" if target == "localstack" else "",
        "FARCALL_ALLOWED_DOMAINS": "",
        "FARCALL_ALLOWED_GROUPS": "",
        "FARCALL_ADMINS": "",
    }
