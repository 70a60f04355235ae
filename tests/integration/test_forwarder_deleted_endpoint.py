"""An endpoint that is deleted while its agent is connected, on stores in memory and on the real ones."""

from __future__ import annotations

import datetime as dt
import time

from farcall_common import wire
from farcall_common.store.settings import Stores
from farcall_forwarder.adapters.zap import find_peers
from farcall_lambdas.identity import Identity
from tests.integration.forwarder_peers import (
    HEARTBEAT_S,
    Agent,
    Cloud,
    RunningForwarder,
    cloud,
    endpoint_id,
    forwarder,
    stores,
)
from tests.support.memory_api import MemoryApi

__all__ = ["cloud", "endpoint_id", "forwarder", "stores"]


def test_an_agent_of_a_deleted_endpoint_is_refused_and_not_admitted_again(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        public_key = agent.key.public_key
        # As the API does when it issues a ticket.
        stores.endpoints.add_endpoint_key(endpoint_id, public_key, at=dt.datetime.now(dt.UTC))
        stores.queue.admit(agent.key, ttl_s=3600)
        agent.greet(credit=10)
        owner = Identity(cloud.owner_id, "owner")

        assert MemoryApi(stores=stores).call("DELETE", f"/v2/endpoints/{endpoint_id}", caller=owner).status == 200

        agent.hear(wire.Redirect)
        # It could keep its connection, with a ticket that is valid for a day.
        for code in ("PROTOCOL_ERROR", "ENDPOINT_UNKNOWN"):  # the first ends the refused session
            agent.session = wire.Session(agent.role, heartbeat_s=HEARTBEAT_S, now=time.monotonic())
            agent.say(agent.hello())
            refused, _ = agent.hear(wire.Refused)
            assert refused.error["code"] == code
        assert find_peers(stores.queue, stores.endpoints, [public_key]).get(public_key) is None
