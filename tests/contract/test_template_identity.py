"""Identity provider in the template."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.templates import TARGETS, Templates, function_of


def test_an_oidc_issuer_in_the_profile_replaces_globus(synthesized: Callable[[str, str], Templates]) -> None:
    (template,) = (each for name, each in synthesized("options", "restored").items() if name.endswith("-api"))
    functions = [each for each in template["Resources"].values() if each["Type"] == "AWS::Lambda::Function"]
    environments = [each["Properties"].get("Environment", {}).get("Variables", {}) for each in functions]
    [authorizer] = [each for each in environments if "FARCALL_AUTH_PROVIDER" in each]
    ours = ("FARCALL_AUTH", "FARCALL_OIDC", "FARCALL_ALLOWED", "FARCALL_ADMINS")
    assert {name: value for name, value in authorizer.items() if name.startswith(ours)} == {
        "FARCALL_AUTH_PROVIDER": "oidc",
        "FARCALL_OIDC_ISSUER": "https://id.example.org",
        "FARCALL_OIDC_AUDIENCE": "farcall",
        "FARCALL_OIDC_CLIENTS": "farcall-cli,farcall-ci",
        "FARCALL_OIDC_SCOPE": "farcall",
        "FARCALL_ALLOWED_IDENTITIES": "ada@example.org,grace@example.org",
        "FARCALL_ALLOWED_DOMAINS": "lab.example.org",
        "FARCALL_ALLOWED_GROUPS": "/physics/users",
        "FARCALL_ADMINS": "ada@example.org",
    }
    assert not any("Globus" in name for name in template.get("Parameters", {}))


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_is_allowed_but_those_who_have_a_token_of_the_offline_tier(
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
