"""The provider ``oidc``, against an issuer over HTTP: what is let in, and above all what is not."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from farcall_common.errors import ConfigurationError, Unauthenticated, Unavailable, UserNotAllowed
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.auth import OidcProvider, provider_from_settings
from farcall_lambdas.auth.oidc import identity_id_of, verified_names
from farcall_lambdas.identity import IdentityProvider as Provider
from farcall_lambdas.settings import AuthSettings
from tests.integration.identity_provider import IdentityProvider, serving

EVERYONE = AllowedUsers.everyone()


@pytest.fixture
def issuer() -> Iterator[IdentityProvider]:
    with serving() as provider:
        yield provider


@pytest.fixture
def oidc(issuer: IdentityProvider) -> OidcProvider:
    return OidcProvider(issuer.issuer, audience=issuer.audience, allowed=EVERYONE, cooldown_s=0)


def test_a_token_of_the_issuer_names_its_subject(issuer: IdentityProvider) -> None:
    provider = _from_environment(issuer, FARCALL_ALLOWED_IDENTITIES="*", FARCALL_OIDC_CLIENTS="*")
    identity = provider.authenticate(issuer.token(aud=["other", "farcall"]))
    assert identity.identity_id == str(uuid.uuid5(uuid.uuid5(uuid.NAMESPACE_URL, issuer.issuer), "ada"))
    assert (identity.username, identity.provider) == ("ada@example.org", "oidc")
    assert identity.expires_at == pytest.approx(time.time() + 3600, abs=60)
    assert provider.authenticate(issuer.token(preferred_username=None)).username == "ada@example.org"
    assert provider.authenticate(issuer.token(preferred_username=None, email=None)).username == "ada"
    assert provider.authenticate(issuer.token(sub="bob")).identity_id != identity.identity_id
    assert issuer.asked == ["/.well-known/openid-configuration", "/jwks"], "keys are kept"


def test_no_one_may_use_a_deployment_that_names_no_users(issuer: IdentityProvider) -> None:
    provider = _from_environment(issuer, FARCALL_OIDC_CLIENTS=issuer.client_id)
    with pytest.raises(UserNotAllowed, match=rf"ada@example.org \(identity {identity_id_of(issuer.issuer, 'ada')}\)"):
        provider.authenticate(issuer.token())


@pytest.mark.parametrize(
    ("setting", "allowed", "refused"),
    [
        ({"IDENTITIES": "grace@example.org, ADA@Example.org"}, {}, {"email_verified": False}),
        ({"IDENTITIES": "ada@example.org"}, {"email_verified": "true"}, {"email_verified": "false"}),
        ({"IDENTITIES": "ada@example.org"}, {}, {"email": None}),
        ({"IDENTITIES": "ada"}, {"email": "ada"}, {}),
        ({"DOMAINS": "example.org"}, {}, {"email_verified": None}),
        ({"DOMAINS": "Example.ORG"}, {}, {"email": "ada@example.org.evil.example"}),
        ({"DOMAINS": "example.org"}, {}, {"email": "ada@evil-example.org"}),
        ({"DOMAINS": "example.org"}, {}, {"email": "ada@sub.example.org"}),
        ({"DOMAINS": "example.org"}, {}, {"email": "ada@example.org@evil.example"}),
        ({"DOMAINS": "example.org"}, {}, {"email": ["ada@example.org"]}),
        ({"DOMAINS": "lab.example"}, {"hd": "lab.example"}, {}),
        ({"GROUPS": "/physics/users"}, {"groups": ["/other", "/physics/users"]}, {"groups": ["/physics"]}),
        ({"GROUPS": "physics"}, {"groups": "physics"}, {"groups": {"physics": True}}),
        ({"GROUPS": "physics"}, {"groups": ["physics"]}, {"groups": "physics chemistry"}),
        ({"ADMINS": "ada@example.org"}, {}, {"email_verified": False}),
    ],
)
def test_only_what_the_issuer_has_verified_lets_a_user_in(
    issuer: IdentityProvider, setting: dict[str, str], allowed: dict[str, Any], refused: dict[str, Any]
) -> None:
    names = {
        ("FARCALL_ADMINS" if name == "ADMINS" else f"FARCALL_ALLOWED_{name}"): each for name, each in setting.items()
    }
    provider = _from_environment(issuer, FARCALL_OIDC_CLIENTS="*", **names)
    assert provider.authenticate(issuer.token(**allowed)).is_admin == ("ADMINS" in setting)
    with pytest.raises(UserNotAllowed):
        provider.authenticate(issuer.token(**refused))


def test_a_user_is_allowed_by_identity_id(issuer: IdentityProvider) -> None:
    own = identity_id_of(issuer.issuer, "ada")
    provider = _from_environment(issuer, FARCALL_OIDC_CLIENTS="*", FARCALL_ALLOWED_IDENTITIES=own.upper())
    assert provider.authenticate(issuer.token(email=None, preferred_username=None)).identity_id == own
    with pytest.raises(UserNotAllowed):
        provider.authenticate(issuer.token(sub="bob", preferred_username=own))


def test_google_vouches_only_for_its_own_addresses() -> None:
    google, claims = "https://accounts.google.com", {"email": "ada@example.org", "email_verified": True}
    assert verified_names("https://id.example.org", claims) == ["ada@example.org"]
    assert verified_names(google, claims) == []
    assert verified_names(google, claims | {"hd": "example.org"}) == ["ada@example.org"]
    assert verified_names(google, claims | {"email": "ada@gmail.com"}) == ["ada@gmail.com"]


@pytest.mark.parametrize(
    ("setting", "accepted", "refused"),
    [
        ({"CLIENTS": "a-client"}, [{}, {"azp": None, "client_id": "a-client"}, {"azp": None, "cid": "a-client"}],
         [{"azp": "another"}, {"azp": None}, {"azp": ["a-client"]}, {"client_id": "another"}]),
        ({"CLIENTS": "other, a-client"}, [{}], [{"azp": ""}]),
        ({"SCOPE": "farcall"}, [{"scope": "openid farcall"}, {"scp": ["farcall"]}, {"scp": "farcall"}],
         [{}, {"scope": "openid"}, {"scope": "farcalls"}, {"scope": {"farcall": 1}}]),
        ({"CLIENTS": "a-client", "SCOPE": "farcall"}, [{"scope": "farcall"}],
         [{}, {"scope": "farcall", "azp": "another"}]),
        ({"CLIENTS": "*"}, [{}, {"azp": None}], []),
    ],
)  # fmt: skip
def test_a_token_of_another_program_is_refused(
    issuer: IdentityProvider, setting: dict[str, str], accepted: list[dict[str, Any]], refused: list[dict[str, Any]]
) -> None:
    """An issuer makes id tokens for other programs, which may have the same audience."""
    names = {f"FARCALL_OIDC_{name}": each for name, each in setting.items()}
    provider = _from_environment(issuer, FARCALL_ALLOWED_DOMAINS="example.org", **names)
    for claims in accepted:
        assert provider.authenticate(issuer.token(**claims)).username == "ada@example.org"
    for claims in refused:
        with pytest.raises(Unauthenticated):
            provider.authenticate(issuer.token(**claims))


def test_access_tokens_of_cognito_are_accepted(issuer: IdentityProvider) -> None:
    """They have no audience but the client, and their groups in a claim of their own."""
    provider = _from_environment(
        issuer,
        FARCALL_OIDC_AUDIENCE="a-client",
        FARCALL_OIDC_CLIENTS="a-client",
        FARCALL_OIDC_GROUPS_CLAIM="cognito:groups",
        FARCALL_ALLOWED_GROUPS="users",
    )
    cognito: dict[str, Any] = {
        **dict.fromkeys(("aud", "azp", "email", "email_verified", "preferred_username")),
        "token_use": "access",
        "client_id": "a-client",
        "username": "ada-of-the-pool",
        "cognito:groups": ["users"],
    }
    assert provider.authenticate(issuer.token(**cognito)).username == "ada-of-the-pool"
    others: list[dict[str, Any]] = [
        {"token_use": "id"},
        {"token_use": None},
        {"client_id": "another"},
        {"client_id": ["a-client"]},
        {"aud": "another"},
    ]
    for refused in others:
        with pytest.raises(Unauthenticated):
            provider.authenticate(issuer.token(**cognito | refused))
    with pytest.raises(UserNotAllowed):
        provider.authenticate(issuer.token(**cognito | {"cognito:groups": ["guests"], "groups": ["users"]}))


def test_a_client_or_a_scope_must_be_named(issuer: IdentityProvider) -> None:
    with pytest.raises(ConfigurationError, match="FARCALL_OIDC_CLIENTS"):
        _from_environment(issuer, FARCALL_ALLOWED_IDENTITIES="*")


def test_an_identity_belongs_to_one_subject_of_one_issuer() -> None:
    assert identity_id_of("https://a.example", "x") == identity_id_of("https://a.example", "x")
    others = [
        ("https://a.example", "y"),
        ("https://b.example", "x"),
        ("https://a.examplex", ""),
        ("https://a.exampl", "ex"),
    ]
    ids = {identity_id_of(*each) for each in [("https://a.example", "x"), *others]}
    assert len(ids) == 5


def test_elliptic_keys(issuer: IdentityProvider, oidc: OidcProvider) -> None:
    issuer.rotate("curve", elliptic=True)
    assert oidc.authenticate(issuer.token()).username == "ada@example.org"


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": time.time() - 120},
        {"nbf": time.time() + 3600},
        {"aud": "another"},
        {"aud": None},
        {"iss": "https://elsewhere.example"},
        {"iss": None},
        {"exp": None},
        {"sub": None},
    ],
    ids=[
        "expired",
        "early",
        "for another",
        "without audience",
        "of another",
        "without issuer",
        "without end",
        "without subject",
    ],
)
def test_wrong_claims_are_refused(issuer: IdentityProvider, oidc: OidcProvider, claims: dict[str, Any]) -> None:
    with pytest.raises(Unauthenticated):
        oidc.authenticate(issuer.token(**claims))


def test_small_clock_differences_are_accepted(issuer: IdentityProvider, oidc: OidcProvider) -> None:
    now = time.time()
    assert oidc.authenticate(issuer.token(exp=now - 10, nbf=now + 20, iat=now + 20)).username == "ada@example.org"


def test_forged_tokens(issuer: IdentityProvider, oidc: OidcProvider) -> None:
    claims = jwt.decode(issuer.token(), options={"verify_signature": False})
    kid, key = issuer.keys[0]
    other_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    good = issuer.token()
    body = _part(claims | {"sub": "another user"})
    forged = {
        "another key": jwt.encode(claims, other_key, algorithm="RS256", headers={"kid": kid}),
        "another subject": ".".join((good.split(".")[0], body, good.split(".")[2])),
        "no signature": f"{_part({'alg': 'none', 'kid': kid})}.{body}.",
        "public key as secret": _hs256(claims, public, kid),
        "another algorithm": jwt.encode(claims, key, algorithm="PS256", headers={"kid": kid}),
        "no key id": jwt.encode(claims, key, algorithm="RS256"),
        "its own key": jwt.encode(
            claims, other_key, algorithm="RS256", headers={"kid": kid, "jku": "https://evil.example/jwks"}
        ),
        "no token": "x",
        "not text": "\ud800.x.y",
    }
    let_in = []
    for how, token in forged.items():
        try:
            oidc.authenticate(token)
        except Unauthenticated:
            continue
        let_in.append(how)
    assert let_in == []
    assert oidc.authenticate(good).username == "ada@example.org"


def test_a_published_symmetric_key_is_not_accepted(issuer: IdentityProvider, oidc: OidcProvider) -> None:
    secret = b"a secret of thirty-two bytes, all"
    octets = {"kty": "oct", "kid": "open", "alg": "HS256", "k": base64.urlsafe_b64encode(secret).decode().rstrip("=")}
    issuer.other_keys.append(octets)
    claims = jwt.decode(issuer.token(), options={"verify_signature": False})
    for header in ({"alg": "RS256", "kid": "open"}, {"alg": "HS256", "kid": "open"}):
        with pytest.raises(Unauthenticated):
            oidc.authenticate(_hs256(claims, secret, "open", header))


def test_keys_may_be_rotated(issuer: IdentityProvider, oidc: OidcProvider) -> None:
    before = issuer.token()
    oidc.authenticate(before)
    issuer.rotate("second")
    assert oidc.authenticate(issuer.token()).username == "ada@example.org"
    with pytest.raises(Unauthenticated):
        oidc.authenticate(before)


def test_unknown_keys_cause_few_requests_to_the_issuer(issuer: IdentityProvider) -> None:
    oidc = OidcProvider(issuer.issuer, audience=issuer.audience, allowed=EVERYONE, cooldown_s=60)
    oidc.authenticate(issuer.token())
    issuer.rotate("second")
    for _ in range(20):
        with pytest.raises(Unauthenticated):
            oidc.authenticate(issuer.token())
    assert issuer.asked.count("/jwks") == 1


def test_an_unreachable_issuer_is_unavailable_and_not_a_refusal(issuer: IdentityProvider, oidc: OidcProvider) -> None:
    issuer.broken = True
    with pytest.raises(Unavailable):
        oidc.authenticate(issuer.token())
    issuer.broken = False
    assert oidc.authenticate(issuer.token()).username == "ada@example.org"
    issuer.broken = True
    assert oidc.authenticate(issuer.token()).username == "ada@example.org", "its keys are known"


def test_an_issuer_with_another_name_is_refused(issuer: IdentityProvider) -> None:
    with pytest.raises(Unavailable, match="differs from the configured one"):
        OidcProvider(f"{issuer.issuer}/", audience="farcall", allowed=EVERYONE).authenticate(issuer.token())


@pytest.mark.parametrize("address", ["http://10.0.0.7/jwks", "file:///etc/passwd", "ftp://10.0.0.7/jwks", "/jwks", ""])
def test_keys_are_fetched_over_a_secure_connection_only(
    issuer: IdentityProvider, oidc: OidcProvider, address: str
) -> None:
    issuer.described["jwks_uri"] = address
    with pytest.raises(Unavailable, match="insecure address"):
        oidc.authenticate(issuer.token())


@pytest.mark.parametrize("path", ["/.well-known/openid-configuration", "/jwks"])
def test_redirects_are_not_followed(issuer: IdentityProvider, oidc: OidcProvider, path: str) -> None:
    with serving() as other:
        other.keys = issuer.keys
        issuer.redirects[path] = f"{other.issuer}{path}"
        with pytest.raises(Unavailable):
            oidc.authenticate(issuer.token())
        assert other.asked == []
    issuer.redirects.clear()
    assert oidc.authenticate(issuer.token()).username == "ada@example.org"


def _from_environment(issuer: IdentityProvider, **variables: str) -> Provider:
    named = {"FARCALL_AUTH_PROVIDER": "oidc", "FARCALL_OIDC_ISSUER": issuer.issuer, "FARCALL_OIDC_AUDIENCE": "farcall"}
    return provider_from_settings(AuthSettings.from_environment(named | variables))


def _part(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def _hs256(claims: dict[str, Any], secret: bytes, kid: str, header: dict[str, str] | None = None) -> str:
    """A token with an HMAC; PyJWT refuses to make one with a public key."""
    text = f"{_part(header or {'alg': 'HS256', 'kid': kid})}.{_part(claims)}"
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(text.encode(), secret)
    return f"{text}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
