"""Credentials of endpoints: they connect one endpoint and do nothing else, until they are revoked."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Final

import pytest

from farcall_common.errors import Fenced, Unauthenticated, Unavailable, UserNotAllowed
from farcall_common.store.model import ForwarderInfo
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.auth import DevProvider
from farcall_lambdas.handlers import authorizer as authorizer_handler
from farcall_lambdas.identity import Identity
from farcall_lambdas.issued_credentials import IssuedCredentials, ProviderWithCredentials
from farcall_lambdas.openapi import document
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.signed_caller import CallerKey
from tests.support.memory_api import ALICE, BOB, CREDENTIALS, Answer, MemoryApi, admitted, invocation
from tests.support.stores import single

KEY: Final = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
FORWARDER: Final = ForwarderInfo("fwd-1", "tcp://10.0.0.1:443", "1" * 40)
METHOD_ARN: Final = "arn:aws:execute-api:eu-central-1:123456789012:abcdef/v1/GET/v3/whoami"


@dataclasses.dataclass(frozen=True)
class Lab:
    """An API with one endpoint of Alice."""

    api: MemoryApi
    endpoint_id: str

    def credential(self, method: str = "POST", *, endpoint_id: str = "", caller: Identity = ALICE) -> Answer:
        return self.api.call(method, f"/v3/endpoints/{endpoint_id or self.endpoint_id}/credential", caller=caller)

    def new_credential(self, **fields: Any) -> str:
        answer = self.credential(**fields)
        assert answer.status == 200, answer.body
        return str(answer.body["credential"])

    def connect(self, credential: str, *, endpoint_id: str = "", allowed: AllowedUsers | None = None) -> Answer:
        path = f"/v3/endpoints/{endpoint_id or self.endpoint_id}/connect"
        return self.api.call("POST", path, {"public_key": KEY}, caller=self.agent(credential, allowed))

    def agent(self, credential: str, allowed: AllowedUsers | None = None) -> Identity:
        return admitted(credential, allowed)


@pytest.fixture
def lab() -> Lab:
    api = MemoryApi()
    api.stores.queue.announce(FORWARDER, ttl_s=15)
    return Lab(api, api.endpoint())


def test_the_agent_connects_with_the_credential(lab: Lab) -> None:
    answer = lab.connect(lab.new_credential())

    assert answer.status == 200, answer.body
    assert answer.body["owner_id"] == ALICE.identity_id
    actions = [entry["action"] for entry in lab.api.call("GET", "/v3/audit").body["entries"]]
    assert actions == ["endpoint.register", "endpoint.credential", "endpoint.key"]


def test_it_is_of_the_endpoints_owner_also_if_another_identity_of_the_owner_makes_it(lab: Lab) -> None:
    linked = Identity("id-2", "alice@elsewhere.org", frozenset({ALICE.identity_id}))

    agent = lab.agent(lab.new_credential(caller=linked))

    assert (agent.identity_id, agent.endpoint_id) == (ALICE.identity_id, lab.endpoint_id)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_only_the_owner_makes_and_revokes_it(lab: Lab, method: str) -> None:
    credential = lab.new_credential()

    refused = lab.credential(method, caller=BOB)

    assert (refused.status, refused.body["code"]) == (403, "FORBIDDEN")
    assert lab.connect(credential).status == 200


def test_a_new_one_replaces_the_former(lab: Lab) -> None:
    former, new = lab.new_credential(), lab.new_credential()

    refused = lab.connect(former)

    assert (refused.status, refused.body["code"]) == (401, "UNAUTHENTICATED")
    assert "revoked or replaced" in refused.body["message"]
    assert lab.connect(new).status == 200


def test_a_revoked_one_is_refused_and_the_session_ends(lab: Lab) -> None:
    credential = lab.new_credential()
    lab.connect(credential)
    queue = lab.api.stores.queue
    fence = single.claim(queue, lab.endpoint_id, "fwd-1", spool_id="spool", ttl_s=60)

    assert lab.credential("DELETE").status == 200

    assert lab.connect(credential).status == 401
    assert not queue.find_peers([KEY])
    with pytest.raises(Fenced):
        single.lease(queue, lab.endpoint_id, fence, limit=1, lease_s=9)
    assert lab.credential("DELETE").status == 200, "again"


def test_it_ends_with_the_endpoint(lab: Lab) -> None:
    credential = lab.new_credential()
    lab.api.call("DELETE", f"/v2/endpoints/{lab.endpoint_id}")

    answer = lab.connect(credential)

    assert (answer.status, answer.body["code"]) == (404, "ENDPOINT_UNKNOWN")


def test_every_other_route_refuses_it(lab: Lab) -> None:
    agent, own = lab.agent(lab.new_credential()), f"/v3/endpoints/{lab.endpoint_id}/connect"
    other = lab.api.endpoint()
    tried = [("POST", f"/v3/endpoints/{other}/connect"), ("GET", own), ("POST", f"{own}/"), ("POST", "/v3/unknown")]
    for path, methods in json.loads(document())["paths"].items():
        there = re.sub(r"{(\w+)}", lab.endpoint_id, path)
        tried += [(method.upper(), there) for method in methods if (method, there) != ("post", own)]

    for method, path in tried:
        answer = lab.api.call(method, path, None if method == "GET" else {}, caller=agent)
        refused = answer.body["error"] if path.startswith("/actions") else answer.body
        assert (answer.status, refused["code"]) == (403, "FORBIDDEN"), (method, path, answer.body)
        assert lab.endpoint_id in refused["message"]
    assert len(tried) > 40
    routes = [
        entry["detail"]["route"]
        for entry in lab.api.call("GET", "/v3/audit").body["entries"]
        if entry["action"] == "request.forbidden"
    ]
    assert routes[0] == f"POST /v3/endpoints/{other}/connect", "the owner reads of it"


def test_its_requests_do_not_use_up_the_owners_rate_limit() -> None:
    api = MemoryApi(settings=ApiSettings(rate_per_s=1, rate_burst=4))
    lab = Lab(api, api.endpoint())
    agent = lab.agent(lab.new_credential())

    statuses = [api.call("GET", "/v3/whoami", caller=agent).status for _ in range(6)]

    assert statuses == [403] * 4 + [429] * 2
    assert api.call("GET", "/v3/whoami").status == 200


class TestAuthorizer:
    OWNER = Identity("id-1", "ada@example.org", frozenset({"id-2"}))

    def credential(self, made_with: AllowedUsers, **known: Any) -> str:
        owner = made_with.require(self.OWNER, **known)
        return CREDENTIALS.issue(Identity.from_context(owner.to_context()), endpoint_id="e", credential_id="c")

    @pytest.mark.parametrize(
        ("known", "still"),
        [
            ({}, AllowedUsers.everyone()),
            ({}, AllowedUsers(identities={"id-2"})),
            ({"names": ["ada@example.org"]}, AllowedUsers(identities={"ada@example.org"})),
            ({"names": ["ada@example.org"]}, AllowedUsers(domains={"example.org"})),
            ({"domains": ["example.org"]}, AllowedUsers(domains={"example.org"})),
        ],
    )
    def test_an_owner_who_may_use_the_deployment_is_admitted_and_another_is_not(
        self, known: dict[str, Any], still: AllowedUsers
    ) -> None:
        credential = self.credential(AllowedUsers.everyone(), **known)

        def admit(allowed: AllowedUsers) -> Identity:
            provider = ProviderWithCredentials(DevProvider({}, allowed=allowed), CREDENTIALS, allowed=allowed)
            return provider.authenticate(credential)

        assert (admit(still).identity_id, admit(still).endpoint_id) == ("id-1", "e")
        for others in (AllowedUsers(), AllowedUsers(identities={"bob"}, domains={"elsewhere.org"}, groups={"g"})):
            with pytest.raises(UserNotAllowed):
                admit(others)

    def test_a_member_of_a_group_is_admitted_while_the_group_is(self) -> None:
        allowed = AllowedUsers(groups={"physics lab", "chemistry"})
        credential = self.credential(allowed, groups=lambda: ["physics lab"])

        def admit(allowed: AllowedUsers) -> Identity:
            return allowed.require_again(CREDENTIALS.read(credential))

        assert admit(AllowedUsers(groups={"physics lab"})).identity_id == "id-1"
        for others in ("chess", "chemistry"):
            with pytest.raises(UserNotAllowed):
                admit(AllowedUsers(groups={others}))

    def test_it_has_all_groups_of_its_owner(self) -> None:
        """The lists of the deployment may change after the credential was made."""
        allowed = AllowedUsers(identities={"id-1"}, groups={"physics lab"})
        credential = self.credential(allowed, groups=lambda: ["physics lab", "chess"])

        for group in ("physics lab", "chess"):
            assert AllowedUsers(groups={group}).require_again(CREDENTIALS.read(credential)).identity_id == "id-1"

    @pytest.mark.parametrize(
        "name", ["{}", "a group with a long name, of the kind that a federation writes, {}", "ü{}"]
    )
    def test_with_very_many_groups_it_fits_in_a_header(self, name: str) -> None:
        groups = [name.format(number) for number in range(2000)]
        credential = self.credential(AllowedUsers(groups={groups[1234]}), groups=lambda: groups)

        assert len(credential) < 8000, "API Gateway takes 10,240 bytes of headers"
        assert AllowedUsers(groups={groups[1234]}).require_again(CREDENTIALS.read(credential)).identity_id == "id-1"

    def test_groups_that_cannot_be_read_matter_only_if_they_decide(self) -> None:
        def unavailable() -> list[str]:
            raise Unavailable("Globus is unavailable.")

        AllowedUsers(identities={"id-1"}, groups={"g"}).require(self.OWNER, groups=unavailable)
        with pytest.raises(Unavailable):
            AllowedUsers(groups={"g"}).require(self.OWNER, groups=unavailable)

    def test_a_credential_has_no_rights_of_an_administrator(self) -> None:
        allowed = AllowedUsers(admins={"id-1"})
        provider = ProviderWithCredentials(DevProvider({}, allowed=allowed), CREDENTIALS, allowed=allowed)

        assert not provider.authenticate(self.credential(allowed)).is_admin

    def test_changed_and_foreign_credentials_are_refused(self) -> None:
        credential = self.credential(AllowedUsers.everyone())
        prefix, claims, signature = credential.split(".")
        key = CallerKey(lambda: "c" * 32)
        foreign = IssuedCredentials(CallerKey(lambda: "d" * 32)).issue(self.OWNER, endpoint_id="e", credential_id="c")
        for changed in (
            f"{prefix}.{claims[:-8]}{'A' * 8}.{signature}",
            f"{prefix}.{claims}.{signature[:-1]}",
            f"{prefix}.{claims}.",
            f"{prefix}.{claims}",
            f"{prefix}..{signature}",
            f"{prefix}.é.{signature}",
            f"{prefix}.{claims}.é",
            f"{prefix}.W10.{signature}",
            f"{prefix}.{claims}.{key.sign(self.OWNER.to_context())['signature']}",
            foreign,
        ):
            with pytest.raises(Unauthenticated):
                CREDENTIALS.read(changed)

    def test_what_signs_credentials_signs_no_callers(self) -> None:
        key = CallerKey(lambda: "c" * 32)
        context = self.OWNER.to_context()

        assert not key.has_signed(key.derived("endpoint credential").sign(context))
        assert not key.derived("endpoint credential").has_signed(key.sign(context))

    def test_the_authorizer_of_aws_accepts_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        authorizer_handler._authorizer.cache_clear()
        authorizer_handler._key.cache_clear()
        monkeypatch.setenv("FARCALL_CALLER_KEY", "c" * 32)
        monkeypatch.setenv("FARCALL_AUTH_PROVIDER", "dev")
        monkeypatch.setenv("FARCALL_ALLOWED_IDENTITIES", "id-2")
        credential = self.credential(AllowedUsers.everyone())
        event = {"type": "TOKEN", "authorizationToken": f"Bearer {credential}", "methodArn": METHOD_ARN}

        context = authorizer_handler.handle(event, invocation())["context"]

        agent = Identity.from_context(json.loads(json.dumps(context)))
        assert (agent.identity_id, agent.endpoint_id, agent.credential_id) == ("id-1", "e", "c")
        with pytest.raises(PermissionError, match=r"^Unauthorized$"):
            authorizer_handler.handle({**event, "authorizationToken": f"Bearer {credential}0"}, invocation())
