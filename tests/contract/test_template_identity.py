"""Identity provider in the template."""

from __future__ import annotations

from collections.abc import Callable

from tests.contract.templates import Templates


def test_an_oidc_issuer_in_the_profile_replaces_globus(synthesized: Callable[[str, str], Templates]) -> None:
    (template,) = (each for name, each in synthesized("options", "restored").items() if name.endswith("-api"))
    functions = [each for each in template["Resources"].values() if each["Type"] == "AWS::Lambda::Function"]
    environments = [each["Properties"].get("Environment", {}).get("Variables", {}) for each in functions]
    [authorizer] = [each for each in environments if "FARCALL_AUTH_PROVIDER" in each]
    known = {name: value for name, value in authorizer.items() if name.startswith(("FARCALL_AUTH", "FARCALL_OIDC"))}
    assert known == {
        "FARCALL_AUTH_PROVIDER": "oidc",
        "FARCALL_OIDC_ISSUER": "https://id.example.org",
        "FARCALL_OIDC_AUDIENCE": "farcall",
    }
    assert not any("Globus" in name for name in template.get("Parameters", {}))
