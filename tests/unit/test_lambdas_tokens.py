"""Tokens and service accounts: what they permit, until when, and attacks with them. test_lambdas_route_access has all
routes by callers with tokens."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

import pytest

from farcall_common.errors import Unauthenticated, UserNotAllowed
from farcall_common.store.model import ForwarderInfo
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.handlers import authorizer as authorizer_handler
from farcall_lambdas.identity import Identity
from farcall_lambdas.issued_credentials import IssuedCredentials
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.signed_caller import CallerKey
from tests.support.memory_api import ALICE, BOB, CREDENTIALS, Answer, MemoryApi, admitted, invocation

PAYLOAD: Final = "4\n00\nx"
DAY_S: Final = 86_400
METHOD_ARN: Final = "arn:aws:execute-api:eu-central-1:123456789012:abcdef/v1/GET/v3/whoami"


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


def create(api: MemoryApi, *, caller: Identity = ALICE, **fields: Any) -> Answer:
    return api.call("POST", "/v3/tokens", {"name": "ci", "scopes": ["tasks:read"], **fields}, caller=caller)


def new_account(api: MemoryApi, name: str = "robot", *, caller: Identity = ALICE) -> str:
    answer = api.call("POST", "/v3/accounts", {"name": name}, caller=caller)
    assert answer.status == 200, answer.body
    return str(answer.body["account_id"])


def audit(api: MemoryApi, caller: Identity = ALICE) -> list[dict[str, Any]]:
    return list(api.call("GET", "/v3/audit", caller=caller).body["entries"])


class TestTokens:
    def test_the_secret_is_shown_once_and_the_list_has_the_rest(self, api: MemoryApi) -> None:
        endpoint_id = api.endpoint()

        made = create(api, endpoints=[endpoint_id.upper()]).body

        assert made["token"].startswith("farcall-token.")
        [listed] = api.call("GET", "/v3/tokens").body["tokens"]
        assert listed == {name: value for name, value in made.items() if name != "token"}
        assert listed["endpoints"] == [endpoint_id]
        assert listed["expires_at"] - listed["created_at"] == 90 * DAY_S
        assert api.call("GET", "/v3/tokens", caller=BOB).body == {"tokens": []}
        assert made["token"] not in json.dumps(audit(api))

    @pytest.mark.parametrize(
        "fields",
        [
            {"scopes": []},
            {"scopes": ["tokens:manage"]},
            {"scopes": ["everything"]},
            {"endpoints": []},
            {"endpoints": ["x"]},
            {"expires_in_s": 367 * DAY_S},
            {"expires_in_s": 0},
            {"name": ""},
            {"name": "a\0"},
        ],
    )
    def test_a_malformed_request_is_refused(self, api: MemoryApi, fields: dict[str, Any]) -> None:
        assert create(api, **fields).status == 422

    def test_limits_name_what_exists(self, api: MemoryApi) -> None:
        unknown = "00000000-0000-4000-8000-000000000000"

        assert create(api, endpoints=[unknown]).body["code"] == "ENDPOINT_UNKNOWN"
        assert create(api, functions=[unknown]).body["code"] == "FUNCTION_UNKNOWN"

    def test_it_acts_for_its_owner_and_the_audit_names_it(self, api: MemoryApi) -> None:
        endpoint_id, function_id = api.endpoint(), api.function()
        service = admitted(api.token(name="portal", scopes=["tasks:submit", "tasks:read"], endpoints=[endpoint_id]))

        path, body = f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: [PAYLOAD]}}
        [[task_id]] = api.call("POST", path, body, caller=service).body["tasks"].values()

        assert api.call("GET", f"/v2/tasks/{task_id}").status == 200, "it is Alice's task"
        assert api.call("GET", f"/v2/tasks/{task_id}", caller=service).status == 200
        [submitted] = [entry for entry in audit(api) if entry["action"] == "tasks.submit"]
        assert submitted["identity_id"] == ALICE.identity_id
        assert (submitted["detail"]["token_id"], submitted["detail"]["token"]) == (service.token_id, "portal")

    def test_cancelling_at_an_endpoint_is_audited_with_the_token(self, api: MemoryApi) -> None:
        endpoint_id, function_id = api.endpoint(public=True), api.function(public=True)
        path, body = f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: [PAYLOAD]}}
        [task_ids] = api.call("POST", path, body, caller=BOB).body["tasks"].values()
        operator = admitted(api.token(name="operator", scopes=["endpoints:manage"]))

        api.call("POST", f"/v3/endpoints/{endpoint_id}/tasks/cancel", {"task_ids": task_ids}, caller=operator)

        [cancelled] = [entry for entry in audit(api, BOB) if entry["action"] == "tasks.cancel"]
        assert cancelled["detail"]["token"] == "operator"

    def test_dead_letters_of_others_need_the_scope_of_the_endpoint(self, api: MemoryApi) -> None:
        path = f"/v3/tasks?state=dead-lettered&endpoint_id={api.endpoint()}"
        asked: list[str | None] = []
        found = api.stores.tasks.list_tasks

        def list_tasks(owner_id: str | None = None, **filters: Any) -> Any:
            asked.append(owner_id)
            return found(owner_id, **filters)

        api.stores.tasks.list_tasks = list_tasks  # type: ignore[method-assign]

        for scopes in (["tasks:read"], ["tasks:read", "endpoints:manage"]):
            assert api.call("GET", path, caller=admitted(api.token(scopes=scopes))).status == 200

        assert asked == [ALICE.identity_id, None]

    def test_it_never_has_more_than_its_owners_rights_at_that_time(self, api: MemoryApi) -> None:
        endpoint_id = api.endpoint(caller=BOB, public=True)
        caller = admitted(api.token())
        assert api.call("GET", f"/v2/endpoints/{endpoint_id}", caller=caller).status == 200

        api.call("PUT", f"/v3/endpoints/{endpoint_id}", {"public": False}, caller=BOB)

        assert api.call("GET", f"/v2/endpoints/{endpoint_id}", caller=caller).status == 403

    def test_a_revoked_one_is_refused_within_ten_seconds_elsewhere(self, api: MemoryApi) -> None:
        caller = admitted(api.token())
        assert api.call("GET", "/v3/whoami", caller=caller).status == 200

        assert api.call("DELETE", f"/v3/tokens/{caller.token_id}").status == 200
        assert api.call("DELETE", f"/v3/tokens/{caller.token_id}").status == 200, "again"
        api.clock.now += 10
        refused = api.call("GET", "/v3/whoami", caller=caller)

        assert (refused.status, refused.body["code"]) == (401, "UNAUTHENTICATED")
        assert "revoked" in refused.body["message"]
        actions = [entry["action"] for entry in audit(api)]
        assert actions == ["token.create", "token.revoke"]
        assert "revoked_at" in api.call("GET", "/v3/tokens").body["tokens"][0]

    def test_an_expired_one_is_refused(self, api: MemoryApi) -> None:
        caller = admitted(api.token(expires_in_s=60))
        statuses = []
        for wait_s in (59, 1, 40):
            api.clock.now += wait_s
            statuses.append(api.call("GET", "/v3/whoami", caller=caller).status)
        assert statuses == [200, 401, 401]
        # Also if its record were lost and its signed time were changed.
        assert api.call("GET", "/v3/whoami", caller=dataclasses.replace(caller, expires_at=None)).status == 401

    def test_only_its_owner_and_administrators_revoke_it(self, api: MemoryApi) -> None:
        path = f"/v3/tokens/{create(api).body['token_id']}"

        assert api.call("DELETE", path, caller=BOB).status == 404
        assert api.call("DELETE", path, caller=dataclasses.replace(BOB, is_admin=True)).status == 200
        assert audit(api)[-1]["action"] == "token.revoke"

    def test_its_use_is_noted_once_an_hour(self, api: MemoryApi) -> None:
        caller = admitted(api.token())
        noted = []
        for wait_s in (0, 3500, 200):
            api.clock.now += wait_s
            api.call("GET", "/v3/whoami", caller=caller)
            [token] = api.call("GET", "/v3/tokens").body["tokens"]
            noted.append(token["last_used_at"] - token["created_at"])
        assert noted == [0, 0, 3700]

    def test_quota(self) -> None:
        api = MemoryApi(settings=ApiSettings(max_tokens=2, max_accounts=1))
        first = create(api).body["token_id"]
        create(api)
        assert create(api).body["code"] == "QUOTA_EXCEEDED"
        api.call("DELETE", f"/v3/tokens/{first}")
        assert create(api).status == 200
        account_id = new_account(api)
        assert api.call("POST", "/v3/accounts", {"name": "other"}).body["code"] == "QUOTA_EXCEEDED"
        assert create(api, account_id=account_id).body["code"] == "QUOTA_EXCEEDED", "they count for the person"

    def test_it_lasts_for_30_days_if_a_group_admits_its_owner(self, api: MemoryApi) -> None:
        member = AllowedUsers(groups={"lab"}).require(ALICE, groups=lambda: ["lab"])

        made = create(api, caller=member).body

        assert made["expires_at"] - made["created_at"] == 30 * DAY_S
        assert create(api, caller=member, expires_in_s=31 * DAY_S).status == 400

    def test_whoami_names_the_token(self, api: MemoryApi) -> None:
        caller = admitted(api.token(scopes=["tasks:read"]))

        assert api.call("GET", "/v3/whoami", caller=caller).body["token"] == {
            "token_id": caller.token_id,
            "name": "ci",
            "scopes": ["tasks:read"],
        }
        assert "token" not in api.call("GET", "/v3/whoami").body

    def test_its_result_stream_is_open_for_minutes_at_once(self, api: MemoryApi) -> None:
        api.stores.queue.announce(ForwarderInfo("f", "tcp://10.0.0.1:443", "1" * 40), ttl_s=60)
        lasts = [
            api.call("POST", "/v3/stream", {"public_key": key * 40}, caller=caller).body["ticket_expires_at"]
            - api.clock.now
            for key, caller in (("a", ALICE), ("b", admitted(api.token())))
        ]
        assert lasts == [DAY_S, 300]


class TestAccounts:
    def test_its_token_acts_as_the_account_with_rights_of_its_own(self, api: MemoryApi) -> None:
        account_id, private, shared = new_account(api), api.endpoint(), api.endpoint()
        api.share(f"endpoints/{shared}", f"identity {account_id}")

        robot = admitted(api.token(account_id=account_id))

        assert (robot.identity_id, robot.username) == (account_id, "robot")
        assert api.call("GET", f"/v2/endpoints/{private}", caller=robot).status == 403
        assert api.call("GET", f"/v2/endpoints/{shared}", caller=robot).status == 200
        function_id = api.function(caller=robot)
        assert api.call("GET", f"/v2/functions/{function_id}").status == 403, "not its creator's either"
        [entry] = [each for each in audit(api) if each["action"] == "function.register"]
        assert (entry["identity_id"], entry["detail"]["token"]) == (account_id, "ci"), "its creator reads of it"

    def test_only_its_creator_makes_tokens_of_it(self, api: MemoryApi) -> None:
        account_id = new_account(api)

        assert create(api, account_id=account_id, caller=BOB).status == 404
        admin = dataclasses.replace(BOB, is_admin=True)
        assert create(api, account_id=account_id, caller=admin).status == 404, "an administrator cannot act as it"

    def test_names_are_unique_for_their_owner(self, api: MemoryApi) -> None:
        account_id = new_account(api)

        refused = api.call("POST", "/v3/accounts", {"name": "robot"})

        assert (refused.status, refused.body["code"]) == (409, "CONFLICT")
        new_account(api, caller=BOB)
        [mine] = api.call("GET", "/v3/accounts").body["accounts"]
        assert (mine["account_id"], mine["owner_id"]) == (account_id, ALICE.identity_id)

    @pytest.mark.parametrize("by", [ALICE, dataclasses.replace(BOB, is_admin=True)])
    def test_a_deleted_one_leaves_no_access(self, api: MemoryApi, by: Identity) -> None:
        api.stores.queue.announce(ForwarderInfo("f", "tcp://10.0.0.1:443", "1" * 40), ttl_s=60)
        account_id = new_account(api)
        robot = admitted(api.token(account_id=account_id))
        endpoint_id = api.endpoint(caller=robot)
        made = api.call("POST", f"/v3/endpoints/{endpoint_id}/credential", caller=robot)
        agent = admitted(made.body["credential"])
        path = f"/v3/endpoints/{endpoint_id}/connect"
        assert api.call("POST", path, {"public_key": "k" * 40}, caller=agent).status == 200

        assert api.call("DELETE", f"/v3/accounts/{account_id}", caller=BOB).status == 404
        assert api.call("DELETE", f"/v3/accounts/{account_id}", caller=by).status == 200
        api.clock.now += 10

        assert api.call("GET", "/v3/whoami", caller=robot).status == 401
        assert api.call("POST", path, {"public_key": "k" * 40}, caller=agent).status == 401
        assert api.stores.endpoints.get_endpoint(endpoint_id) is None
        assert audit(api)[-1]["action"] == "account.delete"
        assert api.call("GET", "/v3/tokens").body == {"tokens": []}

    def test_a_token_made_while_the_account_was_deleted_is_refused(self, api: MemoryApi) -> None:
        account_id = new_account(api)
        robot = admitted(api.token(account_id=account_id))
        record = api.stores.tokens.get_token(robot.token_id)
        assert record is not None
        api.call("DELETE", f"/v3/accounts/{account_id}")
        api.stores.tokens.add_token(record)

        assert api.call("GET", "/v3/whoami", caller=robot).status == 401


class TestAuthorizer:
    @pytest.mark.parametrize("of_account", [False, True])
    def test_it_ends_with_the_persons_right_to_use_the_deployment(self, api: MemoryApi, of_account: bool) -> None:
        person = AllowedUsers(domains={"example.org"}).require(ALICE, names=[ALICE.username])
        account = {"account_id": new_account(api, caller=person)} if of_account else {}
        token = api.token(caller=person, **account)

        for still in (AllowedUsers(domains={"example.org"}), AllowedUsers(identities={ALICE.identity_id})):
            assert admitted(token, still).token_id
        accounts = AllowedUsers(identities={*account.values(), "robot"})
        for others in (AllowedUsers(), AllowedUsers(domains={"elsewhere.org"}), accounts):
            with pytest.raises(UserNotAllowed):
                admitted(token, others)

    @pytest.mark.parametrize("of_account", [False, True])
    def test_it_has_no_rights_of_an_administrator(self, api: MemoryApi, of_account: bool) -> None:
        allowed = AllowedUsers(admins={ALICE.identity_id})
        admin = allowed.require(ALICE)
        account = {"account_id": new_account(api, caller=admin)} if of_account else {}

        assert admin.is_admin
        assert not admitted(api.token(caller=admin, **account), allowed).is_admin

    def test_forged_and_mixed_ones_are_refused(self, api: MemoryApi) -> None:
        token = api.token()
        endpoint_id = api.endpoint()
        credential = api.call("POST", f"/v3/endpoints/{endpoint_id}/credential").body["credential"]
        prefix, claims, signature = token.split(".")
        _, others_claims, others_signature = credential.split(".")
        foreign = IssuedCredentials(CallerKey(lambda: "d" * 32))
        for forged in (
            f"{prefix}.{claims}.{signature[:-1]}",
            f"{prefix}.{claims}.",
            f"{prefix}..{signature}",
            f"{prefix}.{others_claims}.{signature}",
            f"{prefix}.{others_claims}.{others_signature}",
            f"farcall-endpoint.{claims}.{signature}",
            f"farcall-endpoint.{token}",
            f"farcall-token.{credential}",
            f"farcall-token.farcall-token.{claims}.{signature}",
            foreign.issue_token(ALICE, token_id="t", expires_at=9e9),
        ):
            with pytest.raises(Unauthenticated):
                admitted(forged)

    def test_a_signed_token_without_a_record_is_refused(self, api: MemoryApi) -> None:
        """Such as that of another deployment with a copy of the key, or after the database was restored."""
        caller = admitted(CREDENTIALS.issue_token(ALICE, token_id="unknown", expires_at=9e9))

        assert api.call("GET", "/v3/whoami", caller=caller).status == 401

    def test_the_record_of_another_identity_is_refused(self, api: MemoryApi) -> None:
        token_id = create(api).body["token_id"]
        caller = admitted(CREDENTIALS.issue_token(BOB, token_id=token_id, expires_at=9e9))

        assert api.call("GET", "/v3/whoami", caller=caller).status == 401

    def test_an_api_without_tokens_refuses_its_context(self, api: MemoryApi) -> None:
        """API Gateway keeps contexts after a rollback."""
        context = admitted(api.token()).to_context()
        former = {name: value for name, value in context.items() if name not in ("token_id", "creator")}

        assert api.call("GET", "/v3/whoami", caller=Identity.from_context(former)).status == 403

    def test_the_authorizer_of_aws_accepts_it(self, api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
        authorizer_handler._authorizer.cache_clear()
        authorizer_handler._key.cache_clear()
        monkeypatch.setenv("FARCALL_CALLER_KEY", "c" * 32)
        monkeypatch.setenv("FARCALL_AUTH_PROVIDER", "dev")
        monkeypatch.setenv("FARCALL_ALLOWED_IDENTITIES", ALICE.identity_id)
        token = api.token(account_id=new_account(api))
        event = {"type": "TOKEN", "authorizationToken": f"Bearer {token}", "methodArn": METHOD_ARN}

        caller = Identity.from_context(authorizer_handler.handle(event, invocation())["context"])

        assert caller == admitted(token)
        assert api.call("GET", "/v3/whoami", caller=caller).status == 200
