"""The API as a local process: its ASGI side, in memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from farcall_common.errors import Unavailable
from farcall_common.store import Stores
from farcall_common.store.model import Task
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.auth import DevProvider
from farcall_lambdas.identity import Authorizer, Identity, IdentityProvider
from farcall_lambdas.local import THREADS, LocalResolver
from farcall_lambdas.local_gateway import LocalGateway
from farcall_lambdas.services import Services
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB
from tests.support.stores import FakeDatabase, fake_stores
from tests.waiting import WAIT_S

BEARER = {"Authorization": "Bearer alice-token"}
EVE = Identity("e7e00000-0000-4000-8000-000000000005", "eve@elsewhere.example")
DEV = DevProvider(
    {"alice-token": ALICE, "bob-token": BOB, "eve-token": EVE},
    allowed=AllowedUsers(identities={ALICE.identity_id, BOB.identity_id}),
)


@pytest.fixture
def stores() -> Stores:
    return fake_stores()


@pytest.fixture
def make(stores: Stores) -> Iterator[Callable[..., LocalResolver]]:
    made = []

    def build(
        provider: IdentityProvider = DEV,
        settings: ApiSettings | None = None,
        stores: Stores = stores,
        gateway: LocalGateway | None = None,
    ) -> LocalResolver:
        settings = settings or ApiSettings()
        made.append(LocalResolver(Services.over(stores, settings), settings, Authorizer(provider), gateway))
        return made[-1]

    yield build
    for resolver in made:
        resolver.close()


def ask(resolver: LocalResolver, method: str, path: str, **options: Any) -> httpx.Response:
    async def request(client: httpx.AsyncClient) -> httpx.Response:
        return await client.request(method, path, **{"headers": BEARER, **options})

    return run(resolver, request)


def run(resolver: LocalResolver, work: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]) -> httpx.Response:
    async def within() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=resolver), base_url="http://farcall"
        ) as client:  # fmt: skip
            return await work(client)

    return asyncio.run(within())


def test_local_server_answers_as_the_lambda(make: Callable[..., LocalResolver], stores: Stores) -> None:
    resolver = make()
    body = {"function_name": "é", "function_code": "c"}

    function_id = ask(resolver, "POST", "/v3/functions", json=body).json()["function_uuid"]
    found = ask(resolver, "GET", "/v3/functions?search=%C3%A9", headers={**BEARER, "X-Farcall-Request-Id": "a-1"})

    assert [each["function_uuid"] for each in found.json()["functions"]] == [function_id]
    assert (found.headers["content-type"], found.headers["x-farcall-request-id"]) == ("application/json", "a-1")
    stored = stores.functions.get_functions([function_id]).get(function_id)
    assert stored is not None
    assert stored.owner_id == ALICE.identity_id


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "alice-token"}])
def test_invalid_token_is_refused(make: Callable[..., LocalResolver], headers: dict[str, str]) -> None:
    answer = ask(make(), "GET", "/v3/tasks", headers=headers)

    assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHENTICATED")


def test_a_user_who_may_not_use_the_deployment_is_refused(make: Callable[..., LocalResolver]) -> None:
    answer = ask(make(), "GET", "/v3/whoami", headers={"Authorization": "Bearer eve-token"})

    assert (answer.status_code, answer.json()["code"]) == (403, "USER_NOT_ALLOWED")
    assert (
        answer.json()["message"] == f"eve@elsewhere.example (identity {EVE.identity_id}) may not use this deployment."
    )
    assert "administrator" in answer.json()["hint"]


def test_the_caller_cannot_bring_its_own_identity(make: Callable[..., LocalResolver]) -> None:
    headers = {"identity_id": ALICE.identity_id, "x-identity-id": ALICE.identity_id}

    assert ask(make(), "GET", "/v3/tasks", headers=headers).status_code == 401


def test_an_outage_of_the_identity_provider_can_be_retried(make: Callable[..., LocalResolver]) -> None:
    class Away:
        def authenticate(self, token: str) -> Identity:
            raise Unavailable("Globus Auth cannot be asked.", retry_after_s=5)

    answer = ask(make(Away()), "GET", "/v3/tasks")

    assert (answer.status_code, answer.json()["retryable"], answer.headers["retry-after"]) == (503, True, "5")


def test_a_bug_in_the_authorizer_answers_in_the_same_shape(make: Callable[..., LocalResolver]) -> None:
    class Broken:
        def authenticate(self, token: str) -> Identity:
            raise ZeroDivisionError

    answer = ask(make(Broken()), "GET", "/v3/tasks")

    assert (answer.status_code, answer.json()["code"]) == (500, "INTERNAL")


def test_oversized_body_is_read_to_its_end_and_refused(make: Callable[..., LocalResolver]) -> None:
    sent = []

    async def body() -> AsyncIterator[bytes]:
        for _ in range(10):
            sent.append(1)
            yield b"x" * 100

    resolver = make(settings=ApiSettings(max_request_bytes=500))
    answer = ask(resolver, "POST", "/v3/functions", content=body())

    assert (answer.status_code, answer.json()["code"], len(sent)) == (413, "REQUEST_TOO_LARGE", 10)
    assert ask(resolver, "POST", "/v3/functions", content=b" " * 500).status_code == 400


@pytest.mark.parametrize("body", [b"\xff\xfe", b"\x80{}", b"{"])
def test_bytes_that_are_no_json_text_are_refused(make: Callable[..., LocalResolver], body: bytes) -> None:
    answer = ask(make(), "POST", "/v3/functions", content=body)

    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST")


def test_a_header_that_is_no_text_is_refused(make: Callable[..., LocalResolver]) -> None:
    answer = ask(make(), "GET", "/v3/tasks", headers={**BEARER, "X-Odd": b"\xff"})

    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST")


def test_an_unknown_route_answers_in_our_shape(make: Callable[..., LocalResolver]) -> None:
    answer = ask(make(), "GET", "/nothing")

    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")


def test_disconnected_client_is_not_answered(make: Callable[..., LocalResolver], stores: Stores) -> None:
    resolver = make()
    answers: list[object] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v3/functions", "headers": [], "query_string": b""}
    asyncio.run(resolver(scope, receive, send))

    assert answers == []


def test_slow_stores_do_not_hold_up_other_requests(make: Callable[..., LocalResolver]) -> None:
    go_on, stuck = threading.Event(), threading.Semaphore(0)

    class SlowDatabase(FakeDatabase):
        def list_tasks(self, *_: object, **__: object) -> Sequence[Task]:
            stuck.release()
            assert go_on.wait(WAIT_S)
            return []

    resolver = make(stores=fake_stores(database=SlowDatabase()))

    async def work(client: httpx.AsyncClient) -> httpx.Response:
        waiting = [asyncio.create_task(client.get("/v3/tasks", headers=BEARER)) for _ in range(THREADS - 1)]
        for _ in waiting:
            await asyncio.to_thread(stuck.acquire)
        try:
            answer = await asyncio.wait_for(client.get("/v3/functions", headers=BEARER), 60)
        finally:
            go_on.set()
        assert {each.status_code for each in await asyncio.gather(*waiting)} == {200}
        return answer

    assert run(resolver, work).status_code == 200


def test_concurrent_requests_are_not_mixed_up(make: Callable[..., LocalResolver], stores: Stores) -> None:
    resolver = make()
    tokens = {"alice-token": ALICE, "bob-token": BOB}

    async def register(client: httpx.AsyncClient, number: int) -> tuple[str, str, int]:
        token = list(tokens)[number % 2]
        body = {"function_name": f"f{number}", "function_code": f"code {number}"}
        answer = await client.post("/v3/functions", json=body, headers={"Authorization": f"Bearer {token}"})
        return answer.json()["function_uuid"], token, number

    async def work(client: httpx.AsyncClient) -> httpx.Response:
        for function_id, token, number in await asyncio.gather(*(register(client, number) for number in range(200))):
            stored = stores.functions.get_functions([function_id]).get(function_id)
            assert stored is not None
            expected = (tokens[token].identity_id, f"f{number}", f"code {number}")
            assert (stored.owner_id, stored.name, stored.body.decode()) == expected
        return httpx.Response(200)

    run(resolver, work)


def test_every_request_has_a_unique_id(make: Callable[..., LocalResolver]) -> None:
    resolver = make()

    ids = {json.loads(ask(resolver, "GET", "/nothing").content)["request_id"] for _ in range(3)}

    assert len(ids) == 3


def test_requests_over_the_throttle_are_refused_before_the_token_is_read(make: Callable[..., LocalResolver]) -> None:
    now = [0.0]
    resolver = make(gateway=LocalGateway(rate_per_s=2, burst=3, clock=lambda: now[0]))
    answers = []
    for at in (0, 0, 0, 0, 0.25, 0.5, 100, 100, 100, 100):
        now[0] = at
        answers.append(ask(resolver, "GET", "/v3/tasks", headers={}))
    assert [each.status_code for each in answers] == [401, 401, 401, 429, 429, 401, 401, 401, 401, 429]
    assert (answers[-1].json()["code"], answers[-1].json()["retryable"]) == ("LIMIT_EXCEEDED", True)


def test_a_request_is_answered_within_the_gateways_time(make: Callable[..., LocalResolver]) -> None:
    go_on = threading.Event()

    class SlowDatabase(FakeDatabase):
        def list_tasks(self, *_: object, **__: object) -> Sequence[Task]:
            assert go_on.wait(WAIT_S)
            return []

    resolver = make(stores=fake_stores(database=SlowDatabase()), gateway=LocalGateway(timeout_s=0.1))
    answer = ask(resolver, "GET", "/v3/tasks")
    go_on.set()
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (503, "UNAVAILABLE", True)
