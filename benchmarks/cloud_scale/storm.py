"""A reconnect storm: every endpoint has lost its forwarder at the same moment, and asks its way in anew.

All endpoints are simulated, in steps of a fixed length. Each waits by full jitter (farcall_endpoint.agent.connection),
asks the API for a forwarder, is turned away if the API has no room, and stands in line for the forwarders' processors,
which do a handshake at a time. Who stands there for longer than the greeting may take goes back to waiting. Behind a
load balancer the address stays what it was and tickets are good for a day: the API is not asked.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from benchmarks.cloud_scale.inputs import Deployment, Inputs

_STEP_S: Final = 0.25
_LIMIT_S: Final = 7200.0


@dataclasses.dataclass(frozen=True)
class Storm:
    """How one went. ``settled_s`` is when the last endpoint was back, ``most_s`` when 99 in 100 were; ``turned_away``
    counts requests that the API refused, ``timed_out`` greetings that took too long."""

    most_s: float
    settled_s: float
    turned_away: int
    timed_out: int


def storm(endpoints: int, size: Deployment, inputs: Inputs, *, asks_api: bool, seed: int = 1) -> Storm:
    """Simulate one."""
    rng = np.random.default_rng(seed)
    policy, per = inputs.policy, inputs.per_endpoint
    per_database = size.database_vcpus * 1e6 / per["connect_postgres_us"]
    per_function = inputs.limits["lambda_concurrency"] * 1e6 / (per["connect_api_us"] + per["connect_postgres_us"])
    asks_per_step = min(size.requests_per_s, per_database, per_function) * _STEP_S if asks_api else np.inf
    handshakes_per_step = size.forwarders * size.forwarder_vcpus * 1e6 / inputs.forwarder["handshake_us"] * _STEP_S

    failures = np.ones(endpoints, dtype=np.int64)
    due_at = rng.uniform(0.0, 2 * policy["backoff_base_s"], endpoints)
    in_line = np.empty(0, dtype=np.int64)  # who has a way in and waits for the handshake, in order
    came_at = np.full(endpoints, np.inf)
    turned_away = timed_out = back = 0
    asks = handshakes = 0.0
    most_s = np.inf
    now = 0.0

    def wait_again(who: np.ndarray) -> None:
        failures[who] += 1
        longest = np.minimum(policy["backoff_cap_s"], policy["backoff_base_s"] * 2.0 ** np.minimum(failures[who], 30))
        due_at[who] = now + rng.uniform(0.0, 1.0, len(who)) * longest

    while back < endpoints and now < _LIMIT_S:
        now += _STEP_S
        asks, handshakes = (asks % 1 if asks_api else 0.0) + asks_per_step, handshakes % 1 + handshakes_per_step
        asking = np.flatnonzero(due_at <= now)
        rng.shuffle(asking)
        room = int(min(asks, len(asking)))
        let_in, refused = asking[:room], asking[room:]
        turned_away += len(refused)
        wait_again(refused)
        due_at[let_in], came_at[let_in] = np.inf, now
        in_line = np.concatenate([in_line, let_in])
        late = came_at[in_line] < now - policy["greeting_limit_s"]
        timed_out += int(late.sum())
        wait_again(in_line[late])
        in_line = in_line[~late]
        done = min(int(handshakes), len(in_line))
        back, in_line = back + done, in_line[done:]
        if most_s == np.inf and back >= 0.99 * endpoints:
            most_s = now
    return Storm(float(most_s), now, turned_away, timed_out)
