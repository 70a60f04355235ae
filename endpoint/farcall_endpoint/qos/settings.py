"""Settings of quality of service, from the section ``qos`` of an endpoint's configuration to its managers."""

from __future__ import annotations

from typing import Literal

import msgspec

from farcall_endpoint.qos.weights import DEFAULT_WEIGHT

PolicyName = Literal["pi", "threshold", "short-first", "static", "none"]
Admission = Literal["warn", "refuse"]
ActuatorName = Literal["auto", "cgroup2", "cgroup1", "autogroup", "none"]


class QosSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an endpoint holds latency targets.

    :param policy: source of weights: ``pi`` (by the latency of a window), ``threshold`` (the paper's steps), ``static``
        (those of ``weights``), ``none``; ``short-first`` starts the shortest task first, as many as there are
        processors.
    :param actuator: the backend that sets the weights; ``auto`` is the best that the machine permits.
    :param interval_s: seconds between two decisions.
    :param min_weight, max_weight: bounds of the weight of a function with a target; batch work has 100.
    :param max_weights: maximum sum of the weights of another submitter's targets, by identity. Targets of submitters
        that are not named are measured, and their calls run as batch work.
    :param batch_share: fraction of the processors that batch work keeps, as far as the least weights permit it.
    :param latency_workers: maximum number of concurrent calls with a target on a node, beyond its ordinary workers; by
        default, the number of ordinary workers.
    :param weights: weights of ``static``, by the name of the function; other functions have 100.
    :param ratio, delta: of ``threshold``: from which multiple of its baseline a call is too slow, and the step in
        shares; ``deltas``: the steps of other functions, by name.
    :param admission: treatment of a call whose target cannot be held now.
    """

    policy: PolicyName = "pi"
    actuator: ActuatorName = "auto"
    interval_s: float = 0.25
    min_weight: float = DEFAULT_WEIGHT
    max_weight: float = 2000.0
    max_weights: dict[str, float] = {}
    batch_share: float = 0.05
    latency_workers: int | None = None
    weights: dict[str, float] = {}
    ratio: float = 2.0
    delta: int = 20
    deltas: dict[str, int] = {}
    admission: Admission = "warn"
