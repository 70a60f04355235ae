"""Reconnect storm: a simulation of endpoints that have all lost their forwarder at the same moment.

All endpoints are simulated, in steps of a fixed length. Each backs off with full jitter
(farcall_endpoint.agent.core.connection), requests a forwarder from the API, backs off again if the API refuses, and
queues for the forwarders' processors, which perform one handshake at a time. After a time-out in that queue it backs
off, too. Behind a load balancer the address is unchanged and tickets are valid for a day, so the API gets no requests.
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
    """The result. ``settled_s`` is when all endpoints were connected, ``most_s`` when 99 % were; ``refused`` counts
    requests that the API refused, ``timed_out`` handshakes that took too long."""

    most_s: float
    settled_s: float
    refused: int
    timed_out: int


def storm(endpoints: int, size: Deployment, inputs: Inputs, *, uses_api: bool, seed: int = 1) -> Storm:
    """Simulate a storm."""
    rng = np.random.default_rng(seed)
    policy, per = inputs.policy, inputs.per_endpoint
    per_database = size.database_vcpus * 1e6 / per["connect_postgres_us"]
    per_function = inputs.limits["lambda_concurrency"] * 1e6 / (per["connect_api_us"] + per["connect_postgres_us"])
    requests_per_step = min(size.requests_per_s, per_database, per_function) * _STEP_S if uses_api else np.inf
    handshakes_per_step = size.forwarders * size.forwarder_vcpus * 1e6 / inputs.forwarder["handshake_us"] * _STEP_S

    failures = np.ones(endpoints, dtype=np.int64)
    due_at = rng.uniform(0.0, 2 * policy["backoff_base_s"], endpoints)
    queued = np.empty(0, dtype=np.int64)  # endpoints that wait for their handshake, in order
    queued_at = np.full(endpoints, np.inf)
    refused = timed_out = connected = 0
    requests = handshakes = 0.0
    most_s = np.inf
    now = 0.0

    def back_off(retrying: np.ndarray) -> None:
        failures[retrying] += 1
        longest = np.minimum(
            policy["backoff_cap_s"], policy["backoff_base_s"] * 2.0 ** np.minimum(failures[retrying], 30)
        )
        due_at[retrying] = now + rng.uniform(0.0, 1.0, len(retrying)) * longest

    while connected < endpoints and now < _LIMIT_S:
        now += _STEP_S
        requests = (requests % 1 if uses_api else 0.0) + requests_per_step
        handshakes = handshakes % 1 + handshakes_per_step
        due = np.flatnonzero(due_at <= now)
        rng.shuffle(due)
        capacity = int(min(requests, len(due)))
        admitted, rejected = due[:capacity], due[capacity:]
        refused += len(rejected)
        back_off(rejected)
        due_at[admitted], queued_at[admitted] = np.inf, now
        queued = np.concatenate([queued, admitted])
        late = queued_at[queued] < now - policy["hello_timeout_s"]
        timed_out += int(late.sum())
        back_off(queued[late])
        queued = queued[~late]
        done = min(int(handshakes), len(queued))
        connected, queued = connected + done, queued[done:]
        if most_s == np.inf and connected >= 0.99 * endpoints:
            most_s = now
    return Storm(float(most_s), now, refused, timed_out)
