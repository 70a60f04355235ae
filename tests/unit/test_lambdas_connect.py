"""The way in for agents and result streams."""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import quote

import pytest

from farcall_common.errors import Fenced
from farcall_common.sealing import SealingSecrets
from farcall_common.store.model import ForwarderInfo, PeerKey, PeerKind
from farcall_common.worker_share import WorkerShare
from farcall_lambdas.services.connect import rank
from tests.support.memory_api import ALICE, BOB, Answer, MemoryApi
from tests.support.stores import FakeQueue, single

KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
OTHER_KEY = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"


def forwarder(number: int, *, draining: bool = False) -> ForwarderInfo:
    return ForwarderInfo(f"fwd-{number}", f"tcp://10.0.0.{number}:443", f"{number}" * 40, draining=draining)


class Lab:
    """An API with one endpoint."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        assert isinstance(self.api.stores.queue, FakeQueue)
        self.queue = self.api.stores.queue
        self.endpoint_id = self.endpoint()

    def endpoint(self, **fields: Any) -> str:
        return self.api.endpoint(**fields)

    def announce(self, *forwarders: ForwarderInfo) -> None:
        for each in forwarders:
            self.queue.announce(each, ttl_s=15)

    def connect(self, endpoint_id: str | None = None, **fields: object) -> Answer:
        path = f"/v3/endpoints/{endpoint_id or self.endpoint_id}/connect"
        caller = BOB if fields.pop("by_bob", False) else ALICE
        return self.api.call("POST", path, {"public_key": KEY, **fields}, caller=caller)

    def stream(self, **fields: object) -> Answer:
        return self.api.call("POST", "/v3/stream", {"public_key": KEY, **fields})


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_agent_is_admitted_with_its_key(lab: Lab) -> None:
    lab.announce(forwarder(1))

    answer = lab.connect()

    assert answer.status == 200
    assert answer.body["forwarders"] == [{"address": "tcp://10.0.0.1:443", "server_key": "1" * 40}]
    assert (answer.body["endpoint_id"], answer.body["heartbeat_s"]) == (lab.endpoint_id, 30.0)
    assert answer.body["owner_id"] == ALICE.identity_id
    assert answer.body["ticket_expires_at"] == lab.api.clock.now + 86_400
    assert lab.queue.find_peers([KEY])[KEY] == PeerKey(KEY, PeerKind.AGENT, lab.endpoint_id)
    assert lab.api.stores.endpoints.find_endpoints_by_key([KEY]).get(KEY) == lab.endpoint_id
    shown = lab.api.stores.tickets.verify(answer.body["ticket"], now=lab.api.clock.now)
    assert shown.peer == PeerKey(KEY, PeerKind.AGENT, lab.endpoint_id)


def test_client_is_admitted_for_its_own_results(lab: Lab) -> None:
    lab.announce(forwarder(1))

    answer = lab.stream()

    assert answer.body.keys() == {"forwarders", "ticket", "ticket_expires_at", "heartbeat_s"}
    assert lab.queue.find_peers([KEY])[KEY] == PeerKey(KEY, PeerKind.CLIENT, ALICE.identity_id)
    shown = lab.api.stores.tickets.verify(answer.body["ticket"], now=lab.api.clock.now)
    assert shown.peer == PeerKey(KEY, PeerKind.CLIENT, ALICE.identity_id)


def test_missing_forwarder_gives_retry_after(lab: Lab) -> None:
    lab.announce(forwarder(1, draining=True), forwarder(2))
    lab.api.clock.now += 16

    for answer in (lab.connect(), lab.stream(public_key=OTHER_KEY)):
        assert (answer.status, answer.body["code"], answer.body["retryable"]) == (503, "NO_FORWARDER", True)
        assert answer.body["retry_after_s"] == 2.0
        assert answer.headers["Retry-After"] == "2"


def test_forwarder_order_is_stable_per_endpoint_and_spreads_endpoints(lab: Lab) -> None:
    forwarders = [forwarder(number) for number in range(1, 6)]
    lab.announce(*forwarders)

    addresses = [each["address"] for each in lab.connect().body["forwarders"]]

    assert addresses == [each["address"] for each in lab.connect().body["forwarders"]]
    assert len(addresses) == 3
    assert {rank(forwarders, f"endpoint {number}")[0] for number in range(100)} == set(forwarders)
    without = [each for each in forwarders if each.address != addresses[0]]
    assert [each.address for each in rank(without, lab.endpoint_id)][:2] == addresses[1:]


def test_endpoint_is_connected_by_its_owner_only(lab: Lab) -> None:
    lab.announce(forwarder(1))
    public = lab.endpoint(public=True)

    for endpoint_id in (lab.endpoint_id, public):
        answer = lab.connect(endpoint_id, by_bob=True)
        assert (answer.status, answer.body["code"]) == (403, "FORBIDDEN")
    assert lab.queue.find_peers([KEY]) == {}


def test_key_belongs_to_one_endpoint(lab: Lab) -> None:
    lab.announce(forwarder(1))
    lab.connect()

    answers = [lab.connect(lab.endpoint()), lab.stream()]

    assert {(answer.status, answer.body["code"]) for answer in answers} == {(403, "FORBIDDEN")}
    assert lab.queue.find_peers([KEY])[KEY] == PeerKey(KEY, PeerKind.AGENT, lab.endpoint_id)


def test_an_endpoint_may_change_its_key(lab: Lab) -> None:
    lab.announce(forwarder(1))
    lab.connect()

    assert lab.connect(public_key=OTHER_KEY).status == 200
    assert lab.api.stores.endpoints.find_endpoints_by_key([OTHER_KEY]).get(OTHER_KEY) == lab.endpoint_id


def test_runtime_of_the_agent_is_stored(lab: Lab) -> None:
    lab.announce(forwarder(1))

    said: dict[str, Any] = {"python_version": "3.12.1", "packages": {"dill": "0.4.1"}, "platform": "Linux-6.1-x86_64"}
    lab.connect(**said, spool_id=lab.endpoint_id)

    endpoint = lab.api.stores.endpoints.get_endpoint(lab.endpoint_id)
    assert endpoint is not None
    assert endpoint.metadata["runtime"] == said
    assert lab.api.call("GET", f"/v2/endpoints/{lab.endpoint_id}").body["runtime"] == said


def test_share_of_a_worker_is_stored_and_replaced(lab: Lab) -> None:
    lab.announce(forwarder(1))

    share = {"cores": 4.0, "gpus": 1.0, "node_cores": 64.0, "node_gpus": 4.0, "account": "phys-7"}
    reported: tuple[Any, ...] = (share, None)
    for share in reported:
        assert lab.connect(worker_share=share).status == 200
        endpoint = lab.api.stores.endpoints.get_endpoint(lab.endpoint_id)
        assert endpoint is not None
        assert endpoint.worker_share == WorkerShare(**(share or {}))


@pytest.mark.parametrize("share", [{"cores": -1}, {"gpus": 1e7}, {"account": "a" * 201}, {"account": "nul \0"}])
def test_impossible_share_of_a_worker_is_refused(lab: Lab, share: dict[str, Any]) -> None:
    lab.announce(forwarder(1))
    assert lab.connect(worker_share=share).status == 422


@pytest.mark.parametrize("key", ["", KEY[:-1], KEY + "0", " " * 40, KEY[:-1] + "~", KEY[:-1] + "\n", 40])
def test_invalid_key_is_refused(lab: Lab, key: object) -> None:
    assert lab.connect(public_key=key).status == 422
    assert lab.stream(public_key=key).status == 422


def test_connect_can_be_retried_while_the_queue_is_unavailable(lab: Lab) -> None:
    lab.queue.reachable = False

    answer = lab.connect()

    assert (answer.status, answer.body["code"]) == (503, "UNAVAILABLE")


class Fleet:
    """Counts its calls."""

    idle_s = 900.0

    def __init__(self) -> None:
        self.woken = 0
        self.on_demand = 0
        self.slept = 0

    def wake(self, *, on_demand: bool = False) -> None:
        self.woken += 1
        self.on_demand += on_demand

    def sleep(self) -> None:
        self.slept += 1


def test_connect_wakes_sleeping_forwarders_and_returns_retry_after(lab: Lab) -> None:
    fleet = Fleet()
    lab.api = MemoryApi(stores=lab.api.stores, fleet=fleet)

    for answer in (lab.connect(), lab.stream(public_key=OTHER_KEY)):
        assert (answer.status, answer.body["code"], answer.body["retryable"]) == (503, "FORWARDER_WAKING", True)
        assert answer.headers["Retry-After"] == "10"
    assert fleet.woken == 1  # the second found them getting up

    lab.api.clock.now += 10
    assert lab.connect().body["code"] == "FORWARDER_WAKING"
    assert fleet.woken == 2  # in case the first call was lost
    lab.announce(forwarder(1))
    assert lab.connect().status == 200


def test_a_wake_without_spot_capacity_ends_with_other_capacity(lab: Lab) -> None:
    """AWS does not replace missing Spot capacity: without another capacity provider, a wake may wait for hours."""
    fleet = Fleet()
    lab.api = MemoryApi(stores=lab.api.stores, fleet=fleet)
    began = lab.api.clock.now
    provided: list[float] = []
    while lab.api.clock.now <= began + 400:
        assert lab.connect().body["code"] == "FORWARDER_WAKING"
        if len(provided) < fleet.on_demand:
            provided.append(lab.api.clock.now - began)
        lab.api.clock.now += 10
    assert provided == [300.0], "once: each change of the strategy replaces all tasks"
    lab.api.clock.now += 3600  # they ran and sleep again
    assert lab.connect().body["code"] == "FORWARDER_WAKING"
    assert fleet.on_demand == 1, "the next wake tries Spot first"


def test_forwarders_sleep_after_a_time_without_connections(lab: Lab) -> None:
    fleet = Fleet()
    lab.api = MemoryApi(stores=lab.api.stores, fleet=fleet)
    watch = lab.api.application.services.idle

    def announce(*idle_s: float | None) -> None:
        for number, each_s in enumerate(idle_s):
            lab.announce(dataclasses.replace(forwarder(number), idle_s=each_s))

    assert watch.run() == 0  # no forwarder is awake
    for awake in ([None], [899.0], [900.0, None], [900.0, 10.0]):
        announce(*awake)
        for hours in (0, 1, -1, 0):  # whatever the clock here says
            lab.api.clock.now += hours * 3600
            assert watch.run() == 0
    assert fleet.slept == 0
    announce(900.0, 2000.0)
    assert watch.run() == 2
    assert fleet.slept == 1


def test_forwarders_never_sleep_without_a_fleet(lab: Lab) -> None:
    lab.announce(dataclasses.replace(forwarder(1), idle_s=10_000.0))
    assert lab.api.application.services.idle.run() == 0


def test_a_key_that_two_users_ask_for_at_once_belongs_to_one(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.announce(forwarder(1))
    monkeypatch.setattr(lab.queue, "find_peers", lambda _: {})  # as both see it before either is admitted

    first = lab.stream()
    second = lab.api.call("POST", "/v3/stream", {"public_key": KEY}, caller=BOB)
    agent = lab.connect()
    monkeypatch.undo()

    assert first.status == 200
    assert {(answer.status, answer.body["code"]) for answer in (second, agent)} == {(403, "FORBIDDEN")}
    assert second.body["hint"] == "Make a new key pair."
    assert lab.queue.find_peers([KEY])[KEY] == PeerKey(KEY, PeerKind.CLIENT, ALICE.identity_id)


THIRD_KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def keys_of(lab: Lab, **options: Any) -> Answer:
    return lab.api.call("GET", f"/v3/endpoints/{lab.endpoint_id}/keys", **options)


def revoke(lab: Lab, public_key: str, **options: Any) -> Answer:
    path = f"/v3/endpoints/{lab.endpoint_id}/keys?public_key={quote(public_key, safe='')}"
    return lab.api.call("DELETE", path, **options)


def test_keys_of_an_endpoint_are_listed_and_revoked(lab: Lab) -> None:
    lab.announce(forwarder(1))
    lab.connect()
    lab.api.clock.now += 10
    lab.connect(public_key=OTHER_KEY)
    fence = single.claim(lab.queue, lab.endpoint_id, "fwd-1", spool_id="spool", ttl_s=60)

    listed = keys_of(lab)
    assert listed.body == {
        "endpoint_id": lab.endpoint_id,
        "keys": [
            {"public_key": KEY, "added_at": lab.api.clock.now - 10},
            {"public_key": OTHER_KEY, "added_at": lab.api.clock.now},
        ],
    }
    assert revoke(lab, KEY).status == 200

    assert [each["public_key"] for each in keys_of(lab).body["keys"]] == [OTHER_KEY]
    assert lab.queue.find_peers([KEY, OTHER_KEY]).keys() == {OTHER_KEY}
    with pytest.raises(Fenced):  # its session ends
        single.lease(lab.queue, lab.endpoint_id, fence, limit=1, lease_s=9)
    refused = lab.connect()
    assert (refused.status, refused.body["code"]) == (403, "FORBIDDEN")
    assert "curve.secret" in refused.body["hint"]
    assert lab.connect(public_key=OTHER_KEY).status == 200
    missing = revoke(lab, KEY)
    assert (missing.status, missing.body["code"]) == (404, "NOT_FOUND")
    actions = [entry["action"] for entry in lab.api.call("GET", "/v3/audit").body["entries"]]
    assert actions == ["endpoint.register", "endpoint.key", "endpoint.key", "endpoint.key.revoke"]


def test_keys_are_the_owners_alone(lab: Lab) -> None:
    lab.endpoint_id = lab.endpoint(public=True)
    lab.announce(forwarder(1))
    lab.connect()

    answers = [keys_of(lab, caller=BOB), revoke(lab, KEY, caller=BOB)]

    assert {(answer.status, answer.body["code"]) for answer in answers} == {(403, "FORBIDDEN")}
    assert revoke(lab, "short").status == 422
    assert len(keys_of(lab).body["keys"]) == 1


def test_a_third_key_replaces_the_oldest(lab: Lab) -> None:
    lab.announce(forwarder(1))
    for key in (KEY, OTHER_KEY, THIRD_KEY):
        assert lab.connect(public_key=key).status == 200
        lab.api.clock.now += 1

    assert [each["public_key"] for each in keys_of(lab).body["keys"]] == [OTHER_KEY, THIRD_KEY]
    assert KEY not in lab.queue.find_peers([KEY])
    assert lab.connect().status == 200, "an agent that still has it connects again"


def test_the_sealing_key_of_an_endpoint_is_shown_until_its_agent_offers_none(lab: Lab) -> None:
    lab.announce(forwarder(1))
    key = SealingSecrets.new(now=1.0).public(endpoint_id=lab.endpoint_id).to_json()
    shown = f"/v2/endpoints/{lab.endpoint_id}"
    for field in key:
        assert lab.connect(sealing={**key, field: "?"}).status == 422
    assert lab.connect(python_version="3.12", sealing=key).status == 200
    assert lab.api.call("GET", shown).body["sealing"] == key
    assert lab.connect(python_version="3.12").status == 200
    assert "sealing" not in lab.api.call("GET", shown).body
