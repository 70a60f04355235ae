"""The authorizer and its identity providers."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from typing import Any, cast

import boto3
import globus_sdk
import pytest
import requests
import responses
from globus_sdk.testing import RegisteredResponse, get_response_set
from moto import mock_aws

from farcall_common.errors import ConfigurationError, Unauthenticated, Unavailable, UserNotAllowed
from farcall_lambdas.allowed_users import SOME_GROUPS, AllowedUsers
from farcall_lambdas.auth import CachedProvider, DevProvider, GlobusProvider, provider_from_settings
from farcall_lambdas.handlers import authorizer as authorizer_handler
from farcall_lambdas.handlers.authorizer import policy
from farcall_lambdas.identity import Authorizer, Identity, IdentityProvider
from farcall_lambdas.settings import AuthSettings
from farcall_lambdas.signed_caller import CallerKey
from tests.support.memory_api import ALICE, Clock, invocation

PUBLISHED = cast(
    RegisteredResponse, get_response_set(globus_sdk.ConfidentialAppAuthClient.oauth2_token_introspect).lookup("default")
)
ANSWER = cast(dict[str, Any], PUBLISHED.json)
CLIENT_ID = str(PUBLISHED.metadata["client_id"])
SCOPE = "urn:globus:auth:scope:auth.globus.org:view_identity_set"
EVERYONE = AllowedUsers.everyone()
#: As globus-sdk publishes them: the token for Globus Groups, and the groups that it answers.
DEPENDENT = cast(
    RegisteredResponse,
    get_response_set(globus_sdk.ConfidentialAppAuthClient.oauth2_get_dependent_tokens).lookup("groups"),
)
GROUPS = cast(RegisteredResponse, get_response_set(globus_sdk.GroupsClient.get_my_groups).lookup("default"))
GROUP_ID = str(GROUPS.metadata["group_ids"][1])
KEY = CallerKey(lambda: "k" * 32)
METHOD_ARN = "arn:aws:execute-api:eu-central-1:123456789012:abcdef/v1/GET/v3/tasks"


class TestAuthorizer:
    def test_bearer_token_gives_its_identity(self) -> None:
        authorizer = Authorizer(DevProvider({"sesame": ALICE}, allowed=EVERYONE))

        assert authorizer.identify("Bearer sesame") == ALICE
        assert authorizer.identify(" bearer  sesame ") == ALICE

    @pytest.mark.parametrize(
        "header", [None, "", "sesame", "Bearer", "Bearer ", "Basic sesame", "Bearer wrong", "Bearer \ud800"]
    )
    def test_other_credentials_give_no_identity(self, header: str | None) -> None:
        with pytest.raises(Unauthenticated):
            Authorizer(DevProvider({"sesame": ALICE}, allowed=EVERYONE)).identify(header)

    def test_the_policy_allows_the_stage_because_it_is_cached_by_token(self) -> None:
        answer = policy(ALICE, METHOD_ARN, key=KEY)

        [statement] = answer["policyDocument"]["Statement"]
        stage = "arn:aws:execute-api:eu-central-1:123456789012:abcdef/v1"
        assert statement == {"Action": "execute-api:Invoke", "Effect": "Allow", "Resource": f"{stage}/*"}
        assert answer["principalId"] == ALICE.identity_id
        assert all(isinstance(value, str) for value in answer["context"].values())

    def test_the_context_survives_api_gateway(self) -> None:
        linked = Identity("id-1", "Älice 100%", frozenset({"id-2", "id-3"}), is_admin=True)

        context = json.loads(json.dumps(policy(linked, METHOD_ARN, key=KEY)["context"]))

        assert all(value.isascii() for value in context.values())
        assert Identity.from_context({"principalId": "id-1", "integrationLatency": 3, **context}) == linked

    @pytest.mark.parametrize("context", [None, {}, {"principalId": "x"}, {"identity_id": ""}])
    def test_missing_context_is_unauthenticated(self, context: dict[str, Any] | None) -> None:
        with pytest.raises(Unauthenticated):
            Identity.from_context(context)


class TestHandler:
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        authorizer_handler._authorizer.cache_clear()
        tokens = {"sesame": {"identity_id": ALICE.identity_id, "username": "alice"}}
        authorizer_handler._key.cache_clear()
        monkeypatch.setenv("FARCALL_CALLER_KEY", "k" * 32)
        monkeypatch.setenv("FARCALL_AUTH_PROVIDER", "dev")
        monkeypatch.setenv("FARCALL_DEV_TOKENS", json.dumps(tokens))
        monkeypatch.setenv("FARCALL_ALLOWED_IDENTITIES", "alice")

    def event(self, token: str) -> dict[str, str]:
        return {"type": "TOKEN", "authorizationToken": f"Bearer {token}", "methodArn": METHOD_ARN}

    def test_valid_token_gets_a_policy(self) -> None:
        answer = authorizer_handler.handle(self.event("sesame"), invocation())

        assert answer["context"]["identity_id"] == ALICE.identity_id
        assert KEY.has_signed(answer["context"])

    def test_invalid_token_is_refused_as_api_gateway_expects(self) -> None:
        with pytest.raises(PermissionError, match=r"^Unauthorized$"):
            authorizer_handler.handle(self.event("wrong"), invocation())

    def test_a_user_who_may_not_use_the_deployment_gets_a_deny_with_the_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = {"sesame": {"identity_id": ALICE.identity_id, "username": 'alice "\n' + "x" * 200}}
        monkeypatch.setenv("FARCALL_DEV_TOKENS", json.dumps(tokens))

        answer = authorizer_handler.handle(self.event("sesame"), invocation())

        [statement] = answer["policyDocument"]["Statement"]
        assert (statement["Effect"], statement["Resource"]) == ("Deny", f"{METHOD_ARN.split('/GET')[0]}/*")
        assert set(answer["context"]) == {"refusal"}, "no identity"
        message = json.loads(f'"{answer["context"]["refusal"]}"')  # as API Gateway puts it into its answer
        assert message.startswith('alice "x')
        assert message.endswith(f"x (identity {ALICE.identity_id}) may not use this deployment.")
        assert len(message) < 200


class TestSettings:
    def test_dev_tokens_are_read(self) -> None:
        environ = {
            "FARCALL_AUTH_PROVIDER": "dev",
            "FARCALL_DEV_TOKENS": json.dumps({"t": {"identity_id": ALICE.identity_id.upper(), "username": "a"}}),
        }

        assert AuthSettings.from_environment(environ).dev_identities == {
            "t": Identity(ALICE.identity_id, "a", provider="dev")
        }

    @pytest.mark.parametrize("tokens", ["{", "[]", '"t"', '{"sesame": {}}', '{"sesame": {"identity_id": "me"}}'])
    def test_malformed_dev_tokens_are_refused_and_not_shown(self, tokens: str) -> None:
        with pytest.raises(ConfigurationError, match="FARCALL_DEV_TOKENS") as caught:
            AuthSettings.from_environment({"FARCALL_AUTH_PROVIDER": "dev", "FARCALL_DEV_TOKENS": tokens})
        assert "sesame" not in str(caught.value)

    @pytest.mark.parametrize("environ", [{}, {"FARCALL_AUTH_PROVIDER": "okta"}])
    def test_a_provider_must_be_named(self, environ: dict[str, str]) -> None:
        with pytest.raises(ConfigurationError, match="FARCALL_AUTH_PROVIDER"):
            AuthSettings.from_environment(environ)

    def test_those_who_may_use_the_deployment_are_read(self) -> None:
        settings = AuthSettings.from_environment(
            {
                "FARCALL_AUTH_PROVIDER": "dev",
                "FARCALL_ALLOWED_IDENTITIES": "Ada@example.org, ,id-1",
                "FARCALL_ALLOWED_DOMAINS": "Example.org",
                "FARCALL_ALLOWED_GROUPS": "/Physics/Users,chemistry",
                "FARCALL_ADMINS": "grace@example.org",
            }
        )

        assert settings.allowed == AllowedUsers(
            {"ada@example.org", "id-1"}, {"example.org"}, {"/Physics/Users", "chemistry"}, {"grace@example.org"}
        )
        assert AuthSettings.from_environment({"FARCALL_AUTH_PROVIDER": "dev"}).allowed == AllowedUsers()

    @pytest.mark.parametrize("name", ["FARCALL_ALLOWED_DOMAINS", "FARCALL_ALLOWED_GROUPS", "FARCALL_ADMINS"])
    def test_everyone_is_possible_only_among_identities(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="only among the allowed identities"):
            AuthSettings.from_environment({"FARCALL_AUTH_PROVIDER": "dev", name: "a,*"})

    def test_globus_needs_its_credentials_and_hides_them(self) -> None:
        environ = {"FARCALL_AUTH_PROVIDER": "globus", "FARCALL_GLOBUS_CLIENT_ID": "id", "FARCALL_GLOBUS_SCOPE": "s"}
        with pytest.raises(ConfigurationError, match="FARCALL_GLOBUS_CLIENT_SECRET"):
            AuthSettings.from_environment(environ)

        settings = AuthSettings.from_environment({**environ, "FARCALL_GLOBUS_CLIENT_SECRET": "hush"})

        assert "hush" not in repr(settings)


class TestGlobus:
    """Against the answer that globus-sdk publishes for tests, and what can be wrong with it."""

    @pytest.fixture
    def mocked(self) -> Any:
        with responses.RequestsMock(assert_all_requests_are_fired=False) as mock:
            yield mock

    def provider(
        self,
        *,
        scope: str = SCOPE,
        client_id: str = CLIENT_ID,
        clock: Clock | None = None,
        allowed: AllowedUsers = EVERYONE,
    ) -> GlobusProvider:
        # One attempt: the library's own retries sleep.
        client = globus_sdk.ConfidentialAppAuthClient(
            CLIENT_ID, "secret", transport=globus_sdk.transport.RequestsTransport(),
            retry_config=globus_sdk.transport.RetryConfig(max_retries=0),
        )  # fmt: skip
        clock = clock or Clock(float(ANSWER["exp"]) - 3600)
        return GlobusProvider(lambda: client, client_id=client_id, scope=scope, allowed=allowed, clock=clock)

    def answer(self, mocked: responses.RequestsMock, **changes: Any) -> None:
        mocked.post(
            "https://auth.globus.org/v2/oauth2/token/introspect",
            json={**ANSWER, **changes},
        )

    def test_documented_introspection_answer_gives_its_identity(self, mocked: responses.RequestsMock) -> None:
        self.answer(mocked, identity_set=[PUBLISHED.metadata["id"], "id-2"])

        identity = self.provider().authenticate("token")

        assert (identity.identity_id, identity.username) == (PUBLISHED.metadata["id"], PUBLISHED.metadata["username"])
        assert identity.owns("id-2")
        assert identity.expires_at == ANSWER["exp"]
        sent = str(mocked.calls[0].request.body)
        assert "token=token" in sent
        assert "include=identity_set" in sent

    def test_missing_identity_set_gives_the_primary_identity(self, mocked: responses.RequestsMock) -> None:
        self.answer(mocked)

        identity = self.provider().authenticate("token")

        assert identity.identity_set == {PUBLISHED.metadata["id"]}

    @pytest.mark.parametrize(
        "changes",
        [{"active": False}, {"aud": ["auth.globus.org"]}, {"scope": "openid"}, {"exp": 1}, {"scope": f"x{SCOPE}"}],
    )
    def test_token_for_another_audience_is_refused(
        self, mocked: responses.RequestsMock, changes: dict[str, Any]
    ) -> None:
        self.answer(mocked, **changes)

        with pytest.raises(Unauthenticated):
            self.provider().authenticate("token")

    def test_inactive_token_is_refused(self, mocked: responses.RequestsMock) -> None:
        mocked.post("https://auth.globus.org/v2/oauth2/token/introspect", json={"active": False})

        with pytest.raises(Unauthenticated):
            self.provider().authenticate("token")

    def groups(self, mocked: responses.RequestsMock, **membership: str) -> None:
        mocked.post("https://auth.globus.org/v2/oauth2/token", json=DEPENDENT.json)
        groups = [dict(group) for group in cast(list[dict[str, Any]], GROUPS.json)]
        for group in groups:
            group["my_memberships"] = [{**each, **membership} for each in group["my_memberships"]]
        mocked.get("https://groups.api.globus.org/v2/groups/my_groups", json=groups)

    @pytest.mark.parametrize(
        "allowed",
        [
            AllowedUsers(identities={"Kingfish@Globus.org"}),
            AllowedUsers(identities={str(PUBLISHED.metadata["id"])}),
            AllowedUsers(identities={"id-2"}),
            AllowedUsers(domains={"Globus.org"}),
            AllowedUsers(admins={"id-2"}),
        ],
    )
    def test_users_are_allowed_by_identity_and_domain(
        self, mocked: responses.RequestsMock, allowed: AllowedUsers
    ) -> None:
        self.answer(mocked, identity_set=[PUBLISHED.metadata["id"], "id-2"])

        identity = self.provider(allowed=allowed).authenticate("token")

        assert (identity.username, identity.is_admin) == ("kingfish@globus.org", bool(allowed.admins))
        assert len(mocked.calls) == 1, "Globus Groups is not asked"

    @pytest.mark.parametrize(
        "changes",
        [
            {"username": "kingfish@globus.org@accounts.google.com"},
            {"username": "kingfish@globusid.org"},
            {"username": "globus.org"},
            {"username": None, "email": "kingfish@globus.org"},  # users choose the address
            {"name": "kingfish@globus.org", "username": "x@y.example"},
        ],
    )
    def test_a_domain_is_that_of_the_verified_name(
        self, mocked: responses.RequestsMock, changes: dict[str, Any]
    ) -> None:
        self.answer(mocked, **changes)

        with pytest.raises(UserNotAllowed):
            self.provider(allowed=AllowedUsers(domains={"globus.org"})).authenticate("token")

    def test_no_one_is_allowed_by_default(self, mocked: responses.RequestsMock) -> None:
        self.answer(mocked)

        with pytest.raises(UserNotAllowed, match=r"kingfish@globus.org \(identity .* may not use this deployment"):
            self.provider(allowed=AllowedUsers()).authenticate("token")

    def test_groups_that_decide_nothing_are_read_to_share_with_them(self, mocked: responses.RequestsMock) -> None:
        self.answer(mocked)
        self.groups(mocked)
        allowed = AllowedUsers(domains={"globus.org"}, reads_groups=True)

        identity = self.provider(allowed=allowed).authenticate("token")

        assert f"group {GROUP_ID}" in identity.verified
        assert SOME_GROUPS not in identity.verified

    def test_an_outage_of_groups_is_no_proof_that_someone_left_them(self, mocked: responses.RequestsMock) -> None:
        self.answer(mocked)
        mocked.post("https://auth.globus.org/v2/oauth2/token", status=503)
        allowed = AllowedUsers(domains={"globus.org"}, reads_groups=True)

        assert SOME_GROUPS in self.provider(allowed=allowed).authenticate("token").verified

    def test_active_members_of_a_group_are_allowed(self, mocked: responses.RequestsMock) -> None:
        self.answer(mocked)
        self.groups(mocked)
        provider = self.provider(allowed=AllowedUsers(groups={GROUP_ID}))

        assert provider.authenticate("token").username == "kingfish@globus.org"
        asked = {call.request.url: call.request for call in mocked.calls}
        assert "token=token" in str(asked["https://auth.globus.org/v2/oauth2/token"].body)
        used = asked["https://groups.api.globus.org/v2/groups/my_groups"].headers["Authorization"]
        assert used == "Bearer groupsToken"
        with pytest.raises(UserNotAllowed):
            self.provider(allowed=AllowedUsers(groups={"7c580b9a-0000-11e3-a2a0-12313d2d6e7f"})).authenticate("token")

    @pytest.mark.parametrize("status", ["invited", "pending", "left", "removed"])
    def test_others_in_a_group_are_not_allowed(self, mocked: responses.RequestsMock, status: str) -> None:
        self.answer(mocked)
        self.groups(mocked, status=status)

        with pytest.raises(UserNotAllowed):
            self.provider(allowed=AllowedUsers(groups={GROUP_ID})).authenticate("token")

    @pytest.mark.parametrize(
        ("status", "answer", "error"),
        [
            (403, {"error": "dependent_consent_required"}, Unauthenticated),
            (401, {"error": "invalid_client"}, Unavailable),
            (503, {}, Unavailable),
            (200, [], Unavailable),
        ],
    )
    def test_unknown_groups_are_no_refusal(
        self, mocked: responses.RequestsMock, status: int, answer: Any, error: type[Exception]
    ) -> None:
        self.answer(mocked)
        mocked.post("https://auth.globus.org/v2/oauth2/token", json=answer, status=status)

        with pytest.raises(error):
            self.provider(allowed=AllowedUsers(groups={GROUP_ID})).authenticate("token")

    def test_an_outage_of_globus_groups_is_no_refusal(self, mocked: responses.RequestsMock) -> None:
        self.answer(mocked)
        mocked.post("https://auth.globus.org/v2/oauth2/token", json=DEPENDENT.json)
        mocked.get("https://groups.api.globus.org/v2/groups/my_groups", json={}, status=503)

        with pytest.raises(Unavailable):
            self.provider(allowed=AllowedUsers(groups={GROUP_ID})).authenticate("token")

    @pytest.mark.parametrize("status", [401, 429, 500, 503])
    def test_provider_outage_is_not_a_refusal(self, mocked: responses.RequestsMock, status: int) -> None:
        mocked.post("https://auth.globus.org/v2/oauth2/token/introspect", json={}, status=status)

        with pytest.raises(Unavailable):
            self.provider().authenticate("token")

    @pytest.mark.parametrize(
        ("header", "pause_s"), [({"Retry-After": "30"}, 30), ({"Retry-After": "9999"}, 60), ({}, 10)]
    )
    def test_globus_is_not_asked_again_while_it_limits_us(
        self, mocked: responses.RequestsMock, header: dict[str, str], pause_s: int
    ) -> None:
        clock = Clock(float(ANSWER["exp"]) - 3600)
        provider = self.provider(clock=clock)
        mocked.post("https://auth.globus.org/v2/oauth2/token/introspect", json={}, status=429, headers=header)
        for asked_after_s in (0.0, pause_s / 2, pause_s / 4):
            clock.now += asked_after_s
            with pytest.raises(Unavailable) as caught:
                provider.authenticate("token")
            assert 0 < (caught.value.record.retry_after_s or 0) <= pause_s
        assert len(mocked.calls) == 1

        clock.now += pause_s / 4
        mocked.replace(responses.POST, "https://auth.globus.org/v2/oauth2/token/introspect", json=ANSWER)
        assert provider.authenticate("token").username == "kingfish@globus.org"

    def test_network_failure_is_not_a_refusal(self, mocked: responses.RequestsMock) -> None:
        mocked.post("https://auth.globus.org/v2/oauth2/token/introspect", body=requests.ConnectionError("no route"))

        with pytest.raises(Unavailable):
            self.provider().authenticate("token")


class TestGlobusSecret:
    """The client's secret, in Secrets Manager."""

    @pytest.fixture
    def secrets(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with mock_aws():
            yield boto3.client("secretsmanager")

    def provider(self, arn: str, **options: Any) -> IdentityProvider:
        settings = AuthSettings.from_environment(
            {
                "FARCALL_AUTH_PROVIDER": "globus",
                "FARCALL_GLOBUS_CLIENT_ID": CLIENT_ID,
                "FARCALL_GLOBUS_SCOPE": SCOPE,
                "FARCALL_GLOBUS_SECRET_ARN": arn,
                "FARCALL_ALLOWED_IDENTITIES": "*",
            }
        )
        return provider_from_settings(settings, clock=Clock(float(ANSWER["exp"]) - 3600), **options)

    @pytest.mark.parametrize(("max_age_s", "used"), [(300, ["first", "first"]), (0, ["first", "second"])])
    def test_rotated_secret_is_read_after_its_cache_time(self, secrets: Any, max_age_s: int, used: list[str]) -> None:
        arn = secrets.create_secret(Name="globus", SecretString='{"client_secret": "first"}')["ARN"]
        provider = self.provider(arn, secret_max_age_s=max_age_s)
        with responses.RequestsMock() as mocked:
            asked = mocked.post("https://auth.globus.org/v2/oauth2/token/introspect", json=ANSWER)
            provider.authenticate("one")
            secrets.put_secret_value(SecretId=arn, SecretString='{"client_secret": "second"}')
            provider.authenticate("two")
        sent = [base64.b64decode(call.request.headers["Authorization"].split()[1]).decode() for call in asked.calls]
        assert sent == [f"{CLIENT_ID}:{secret}" for secret in used]

    def test_unreadable_secret_is_an_outage(self, secrets: Any) -> None:
        with pytest.raises(Unavailable, match="globus-missing cannot be read"):
            self.provider("globus-missing").authenticate("token")

    @pytest.mark.parametrize(("text", "error"), [("hush", Unavailable), ('{"secret": "hush"}', ConfigurationError)])
    def test_a_malformed_secret_is_not_shown(self, secrets: Any, text: str, error: type[Exception]) -> None:
        arn = secrets.create_secret(Name="globus", SecretString=text)["ARN"]
        with pytest.raises(error) as caught:
            self.provider(arn).authenticate("token")
        assert "hush" not in str(caught.value)


class Counting:
    """A provider that counts how often it is asked."""

    def __init__(self, decide: Callable[[str], Identity]) -> None:
        self.decide = decide
        self.asked = 0

    def authenticate(self, token: str) -> Identity:
        self.asked += 1
        return self.decide(token)


def refuse(token: str) -> Identity:
    raise Unauthenticated("no")


def disallow(token: str) -> Identity:
    raise UserNotAllowed("not you")


def fail(token: str) -> Identity:
    raise Unavailable("away")


class TestCache:
    def cached(self, decide: Callable[[str], Identity], **options: Any) -> tuple[CachedProvider, Counting, Clock]:
        provider, clock = Counting(decide), Clock()
        return CachedProvider(provider, clock=clock, **options), provider, clock

    def test_accepted_token_is_cached(self) -> None:
        cached, provider, clock = self.cached(lambda _: ALICE, ttl_s=300)
        for _ in range(3):
            assert cached.authenticate("t") == ALICE
        assert provider.asked == 1

        clock.now += 300
        cached.authenticate("t")
        assert provider.asked == 2

    def test_cached_token_expires_with_the_token(self) -> None:
        cached, provider, clock = self.cached(lambda _: Identity("id", "name", expires_at=clock.now + 20), ttl_s=300)
        cached.authenticate("t")

        clock.now += 20
        cached.authenticate("t")

        assert provider.asked == 2

    @pytest.mark.parametrize(
        ("decide", "error"), [(refuse, r"\[UNAUTHENTICATED\] no"), (disallow, r"\[USER_NOT_ALLOWED\] not you")]
    )
    def test_refusal_is_cached_for_a_short_time(self, decide: Callable[[str], Identity], error: str) -> None:
        cached, provider, clock = self.cached(decide, refusal_ttl_s=10)
        for seconds in (0, 9, 2):
            clock.now += seconds
            with pytest.raises((Unauthenticated, UserNotAllowed), match=error):
                cached.authenticate("t")
        assert provider.asked == 2

    def test_cached_tokens_survive_an_outage_until_they_expire(self) -> None:
        cached, provider, clock = self.cached(lambda _: ALICE, ttl_s=300)
        cached.authenticate("known")
        provider.decide = fail

        assert cached.authenticate("known") == ALICE
        for _ in range(2):
            with pytest.raises(Unavailable):
                cached.authenticate("new")
        clock.now += 301
        with pytest.raises(Unavailable):
            cached.authenticate("known")
        assert provider.asked == 4

    def test_least_recently_used_token_is_evicted_first(self) -> None:
        cached, provider, _ = self.cached(lambda _: ALICE, size=2)
        for token in ("a", "b", "a", "c", "a"):
            cached.authenticate(token)
        assert provider.asked == 3

        cached.authenticate("b")
        assert provider.asked == 4

    def test_a_flood_of_refused_tokens_displaces_no_accepted_one(self) -> None:
        cached, provider, _ = self.cached(lambda token: ALICE if token == "good" else refuse(token), size=2)
        cached.authenticate("good")
        for number in range(10):
            with pytest.raises(Unauthenticated):
                cached.authenticate(f"bad {number}")
        cached.authenticate("good")

        assert provider.asked == 11

    def test_cache_holds_no_tokens(self) -> None:
        cached, _, _ = self.cached(lambda _: ALICE)
        cached.authenticate("sesame-open")

        assert "sesame" not in repr(vars(cached))

    def test_threads_share_the_cache(self) -> None:
        cached, _, _ = self.cached(lambda _: ALICE, size=8)
        failures: list[BaseException] = []

        def use() -> None:
            try:
                for number in range(500):
                    assert cached.authenticate(f"t{number % 20}") == ALICE
            except BaseException as error:  # noqa: BLE001  # reported below, from the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert failures == []
