"""Where users come from, in the template."""

from __future__ import annotations

from pathlib import Path

from tests.contract.templates import read_templates, synthesize_apart


def test_an_issuer_of_the_profile_takes_the_place_of_globus(tmp_path: Path) -> None:
    chosen = {"identity.oidc_issuer": "https://id.example.org", "identity.oidc_audience": "farcall"}
    synthesize_apart(tmp_path, {"profile": "lab", **chosen})
    template = read_templates(tmp_path)["farcall-api"]
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
