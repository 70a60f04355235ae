"""An OpenID Connect provider over HTTP, which also answers at Globus Auth's addresses. Everybody who asks is let in."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

Json = dict[str, Any]


@dataclasses.dataclass
class IdentityProvider:
    """What it knows, and what became of it."""

    issuer: str = ""
    audience: str = "farcall"
    client_id: str = "a-client"
    client_secret: str = "a-secret"
    subject: str = "ada"
    lifetime_s: float | None = 3600.0
    #: Answers "not yet" to so many questions of a device.
    pending: int = 0
    has_devices: bool = True
    lets_in: bool = True
    broken: bool = False
    #: The status of all answers, with the body of a refusal; 0 for none.
    limited: int = 0
    keys: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    #: Published with the keys that sign.
    other_keys: list[Json] = dataclasses.field(default_factory=list)
    #: Changes of the discovery document.
    described: Json = dataclasses.field(default_factory=dict)
    #: Paths that answer with a redirect, with its target.
    redirects: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Requests by path.
    asked: list[str] = dataclasses.field(default_factory=list)
    grants: list[str] = dataclasses.field(default_factory=list)
    revoked: list[str] = dataclasses.field(default_factory=list)
    codes: dict[str, Json] = dataclasses.field(default_factory=dict)
    refresh_tokens: set[str] = dataclasses.field(default_factory=set)
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.rotate("first")

    def rotate(self, kid: str, *, elliptic: bool = False) -> None:
        """Sign with another key from now on, and publish no other."""
        if elliptic:
            self.keys = [(kid, ec.generate_private_key(ec.SECP256R1()))]
        else:
            self.keys = [(kid, rsa.generate_private_key(public_exponent=65537, key_size=2048))]

    def token(self, **changes: Any) -> str:
        """A token, signed with the newest key. Claims that are None are left out."""
        now = time.time()
        claims = {
            "iss": self.issuer,
            "sub": self.subject,
            "aud": self.audience,
            "iat": now,
            "exp": now + (self.lifetime_s or 3600.0),
            "jti": secrets.token_hex(4),
            "azp": self.client_id,
            "preferred_username": f"{self.subject}@example.org",
            "email": f"{self.subject}@example.org",
            "email_verified": True,
        } | changes
        kid, key = self.keys[-1]
        algorithm = "ES256" if isinstance(key, ec.EllipticCurvePrivateKey) else "RS256"
        present = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(present, key, algorithm=algorithm, headers={"kid": kid})

    # -- answers -------------------------------------------------------------------------------------------------------

    def discovery(self) -> Json:
        addresses = {
            "authorization_endpoint": "/v2/oauth2/authorize",
            "token_endpoint": "/v2/oauth2/token",
            "revocation_endpoint": "/v2/oauth2/token/revoke",
            "jwks_uri": "/jwks",
        } | ({"device_authorization_endpoint": "/device"} if self.has_devices else {})
        return {"issuer": self.issuer} | {name: self.issuer + path for name, path in addresses.items()} | self.described

    def jwks(self) -> Json:
        found = []
        for kid, key in self.keys:
            is_elliptic = isinstance(key, ec.EllipticCurvePrivateKey)
            algorithm: Any = jwt.algorithms.ECAlgorithm if is_elliptic else jwt.algorithms.RSAAlgorithm
            public = algorithm.to_jwk(key.public_key(), as_dict=True)
            found.append(public | {"kid": kid, "use": "sig", "alg": "ES256" if is_elliptic else "RS256"})
        return {"keys": found + self.other_keys}

    def authorize(self, query: dict[str, str]) -> tuple[str, str | None]:
        """A code, and where to send the browser with it, if it has to go anywhere."""
        assert query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        code = secrets.token_hex(8)
        self.codes[code] = query
        redirect = query["redirect_uri"]
        if urlsplit(redirect).hostname not in ("localhost", "127.0.0.1") or redirect.startswith(self.issuer):
            return code, None
        answer = {"code": code} if self.lets_in else {"error": "access_denied"}
        return code, f"{redirect}?{urlencode(answer | {'state': query.get('state', '')})}"

    def devices(self) -> Json:
        code = secrets.token_hex(8)
        self.codes[code] = {"device": "yes"}
        address = f"{self.issuer}/activate"
        codes = {"device_code": code, "user_code": "BDWP-HQPK", "verification_uri": address}
        return codes | {
            "verification_uri_complete": f"{address}?user_code=BDWP-HQPK",
            "expires_in": 60,
            "interval": 0.01,
        }

    def grant(self, form: dict[str, str], basic: tuple[str, str] | None) -> tuple[int, Json]:
        """The answer of the token endpoint."""
        client = basic[0] if basic else form.get("client_id")
        if client != self.client_id or (basic and basic[1] != self.client_secret):
            return 401, {"error": "invalid_client"}
        kind = form["grant_type"].rpartition(":")[2]
        self.grants.append(kind)
        match kind:
            case "authorization_code":
                asked = self.codes.pop(form["code"], None)
                if asked is None or not _proves(asked["code_challenge"], form["code_verifier"]):
                    return 400, {"error": "invalid_grant", "error_description": "no such code"}
                assert form["redirect_uri"] == asked["redirect_uri"]
            case "device_code":
                if form["device_code"] not in self.codes:
                    return 400, {"error": "invalid_grant"}
                if self.pending:
                    self.pending -= 1
                    return 400, {"error": "authorization_pending" if self.pending else "slow_down"}
                if not self.lets_in:
                    return 400, {"error": "access_denied"}
            case "refresh_token":
                if form["refresh_token"] not in self.refresh_tokens:
                    return 400, {"error": "invalid_grant", "error_description": "that refresh token is no good"}
                self.refresh_tokens.discard(form["refresh_token"])
            case "client_credentials":
                if not basic:
                    return 401, {"error": "invalid_client"}
        answer: Json = {
            "access_token": self.token(),
            "token_type": "Bearer",
            "resource_server": "farcall",
            "scope": form.get("scope", "farcall"),
            "other_tokens": [],
            "expires_in": self.lifetime_s,
        }
        if kind != "client_credentials":
            answer["refresh_token"] = secrets.token_hex(8)
            self.refresh_tokens.add(answer["refresh_token"])
        return 200, answer

    def introspect(self, token: str) -> Json:
        try:
            claims = jwt.decode(token, options={"verify_signature": False})
        except jwt.PyJWTError:
            return {"active": False}
        scope = {"aud": [self.audience], "scope": "farcall", "username": claims["preferred_username"]}
        return claims | scope | {"active": token not in self.revoked, "identity_set": [claims["sub"]]}


@contextlib.contextmanager
def serving() -> Iterator[IdentityProvider]:
    """A provider on a port of this machine."""
    provider = IdentityProvider()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            with provider.lock:
                provider.asked.append(path)
                match path:
                    case _ if provider.broken:
                        self._answer(503, {})
                    case _ if path in provider.redirects:
                        self._answer(302, {}, location=provider.redirects[path])
                    case "/.well-known/openid-configuration":
                        self._answer(200, provider.discovery())
                    case "/jwks":
                        self._answer(200, provider.jwks())
                    case "/v2/oauth2/authorize":
                        code, redirect = provider.authorize(_flat(query))
                        self._answer(302 if redirect else 200, {"code": code}, location=redirect)
                    case _:
                        self._answer(404, {})

        def do_POST(self) -> None:
            form = _flat(self.rfile.read(int(self.headers.get("content-length", 0))).decode())
            basic = self.headers.get("authorization", "")
            known = None
            if basic.startswith("Basic "):
                user, _, password = base64.b64decode(basic.removeprefix("Basic ")).decode().partition(":")
                known = user, password
            with provider.lock:
                provider.asked.append(self.path)
                match self.path:
                    case _ if provider.broken:
                        self._answer(503, {})
                    case _ if provider.limited:
                        self._answer(provider.limited, {"error": "slow_down"})
                    case "/device":
                        self._answer(200, provider.devices())
                    case "/v2/oauth2/token":
                        self._answer(*provider.grant(form, known))
                    case "/v2/oauth2/token/revoke":
                        provider.revoked.append(form["token"])
                        self._answer(200, {"active": False})
                    case "/v2/oauth2/token/introspect":
                        self._answer(200, provider.introspect(form["token"]))
                    case _:
                        self._answer(404, {})

        def _answer(self, status: int, body: Json, *, location: str | None = None) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            if location:
                self.send_header("location", location)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        provider.issuer = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="identity-provider")
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()


def _flat(query: str) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(query).items()}


def _proves(challenge: str, verifier: str) -> bool:
    digest = hashlib.sha256(verifier.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == challenge
