"""What the model says of the CloudSorts of the Locus paper, at its prices and at those of today."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from farcall_analytics.curves import Curve, constant
from farcall_analytics.model import Method, Plan, Shuffle, estimate
from farcall_analytics.planner import choose, name_of, why_slower
from farcall_analytics.prices import (
    LAMBDA_2018,
    LAMBDA_2026,
    REDIS_2018,
    S3_2018,
    S3_2026,
    S3_EXPRESS_2026,
    VALKEY_SERVERLESS_2026,
    WorkerPrice,
)
from farcall_analytics.profiles import Profile, Tier, Workers

MB, GB, TB = 1e6, 1e9, 1e12
PRINTED: Final = ((1 * TB, 39.0, 2.6), (10 * TB, 379.0, 29.0), (100 * TB, 2945.0, 163.0))
"""Bytes, seconds and dollars in table 6 of the paper."""
_WORKERS: Final = 3_000
_BANDWIDTH: Final = Curve(
    ((0.25 * GB, 14 * MB), (0.5 * GB, 22 * MB), (1 * GB, 40 * MB), (1.25 * GB, 40 * MB), (1.5 * GB, 42 * MB))
)
_REQUESTS: Final = Curve(((62e3, 5000.0), (0.27 * MB, 4250.0), (1.1 * MB, 3550.0), (2.25 * MB, 3200.0)))
"""Back from the paper's table of times."""
_S3: Final = Tier("S3", _REQUESTS, _REQUESTS, _BANDWIDTH, _BANDWIDTH, price=S3_2018)
_REDIS: Final = Tier(
    "Redis",
    constant(1e6),
    constant(1e6),
    _BANDWIDTH,
    _BANDWIDTH,
    capacity=5 * TB,
    bytes_per_s_of_byte=1.25 / 61,  # a network of 10 Gbit/s for 61 GB
    is_fast=True,
    price=REDIS_2018,
)
_TODAY: Final = {
    "S3": dataclasses.replace(_S3, reads_per_s=constant(5_500.0), writes_per_s=constant(3_500.0), price=S3_2026),
    "S3 Express": dataclasses.replace(
        _S3, name="S3 Express", reads_per_s=constant(2e6), writes_per_s=constant(2e5), price=S3_EXPRESS_2026
    ),
    "Valkey": dataclasses.replace(
        _REDIS, name="Valkey", capacity=5 * TB, bytes_per_s_of_byte=float("inf"), price=VALKEY_SERVERLESS_2026
    ),
}


def predictions() -> list[dict[str, Any]]:
    """Seconds and dollars of the fastest plan with 3,000 workers and 5 TB of memory, beside those of the paper; and the
    cheapest plan of today."""
    found = []
    for size, printed_s, printed in PRINTED:
        shuffle = Shuffle(size, size, size)
        then = choose(shuffle, _profile({"S3": _S3, "Redis": _REDIS}, LAMBDA_2018), objective="fastest").best
        now = choose(shuffle, _profile(_TODAY, LAMBDA_2026)).best
        found.append(
            {
                "size": size,
                "printed_s": printed_s,
                "then": name_of(then.plan),
                "then_s": then.estimate.seconds,
                "printed_dollars": printed,
                "then_dollars": then.estimate.dollars,
                "now": name_of(now.plan),
                "now_s": now.estimate.seconds,
                "now_dollars_per_tb": now.estimate.dollars / (size / TB),
            }
        )
    return found


def wider() -> list[dict[str, Any]]:
    """What more workers do without and with a memory (section 6 of the paper): bytes, few and many workers, method,
    seconds, and why many are refused."""
    found = []
    wide = dataclasses.replace(_REDIS, bytes_per_s_of_byte=float("inf"))
    profile = _profile({"S3": _S3, "Redis": wide}, LAMBDA_2018)
    for size, counts in ((10 * GB, (10, 40)), (100 * GB, (200, 400))):
        for method, tier in ((Method.SLOW, "S3"), (Method.FAST, "Redis")):
            few, many = (estimate(Shuffle(size), Plan(method, tier, 2.5 * GB, count), profile) for count in counts)
            found.append(
                {
                    "size": size,
                    "workers": counts,
                    "method": str(method),
                    "seconds": (few.seconds, many.seconds),
                    "refused": why_slower(few, many),
                }
            )
    return found


def _profile(tiers: dict[str, Tier], price: WorkerPrice) -> Profile:
    own = Workers((1 * GB, 3 * GB), most=_WORKERS, data_part=1.0, overlaps=True, price=price)
    return Profile(own, tiers, error=0.0)
