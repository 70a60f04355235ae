"""Profiles of endpoints: kept in files, and what is assumed of storages and workers that were not measured."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from farcall_analytics.curves import constant
from farcall_analytics.prices import S3_2026, S3_EXPRESS_2026, VALKEY_SERVERLESS_2026
from farcall_analytics.profiles import Codec, Profile, Tier, Workers
from farcall_common.credentials import find_home
from farcall_common.files import write_whole

STALE_S: Final = 7 * 86_400.0
"""After which a profile should be measured again."""
GB, MB = 1e9, 1e6

_S3: Final = Tier(
    "S3",
    reads_per_s=constant(5_500.0),
    writes_per_s=constant(3_500.0),
    read_bytes_per_s=constant(90 * MB),
    write_bytes_per_s=constant(90 * MB),
    latency_s=0.02,
    price=S3_2026,
)
_EXPRESS: Final = dataclasses.replace(
    _S3,
    name="S3 Express",
    reads_per_s=constant(2e6),
    writes_per_s=constant(2e5),
    latency_s=0.005,
    price=S3_EXPRESS_2026,
)
_VALKEY: Final = Tier(
    "Valkey",
    reads_per_s=constant(50_000.0),
    writes_per_s=constant(50_000.0),
    read_bytes_per_s=constant(200 * MB),
    write_bytes_per_s=constant(200 * MB),
    total_bytes_per_s=1 * GB,
    latency_s=0.001,
    is_fast=True,
    price=VALKEY_SERVERLESS_2026,
)
_FILES: Final = Tier(
    "shared files",
    reads_per_s=constant(5_000.0),
    writes_per_s=constant(2_000.0),
    read_bytes_per_s=constant(300 * MB),
    write_bytes_per_s=constant(300 * MB),
    total_bytes_per_s=1 * GB,
    latency_s=0.001,
)
NODES: Final = "memory of nodes"
_NODES: Final = dataclasses.replace(
    _FILES, name=NODES, reads_per_s=constant(20_000.0), writes_per_s=constant(10_000.0), total_bytes_per_s=math.inf
)
_WORKERS: Final = Workers(
    memories=(2 * GB,),
    most=8,
    call_s=0.02,
    partition_bytes_per_s=150 * MB,
    combine_bytes_per_s=100 * MB,
    data_part=0.25,
)
ASSUMED_CODECS: Final = (
    Codec("none"),
    Codec("lz4", 0.6, 500 * MB, 1_500 * MB),
    Codec("zstd", 0.45, 200 * MB, 600 * MB),
)
_ASSUMED_ERROR: Final = 0.5
"""Of predictions from what is assumed."""


class Measured(msgspec.Struct, frozen=True):
    """A profile in a file. ``at``: seconds since 1970."""

    at: float
    profile: Profile

    def age_s(self, now: float) -> float:
        """Since then."""
        return now - self.at


def tier_name(url: str) -> str:
    """The name of a storage in profiles and plans."""
    scheme, _, rest = url.partition(":")
    if scheme == "node":
        return NODES
    if scheme == "shaped":
        return Path(rest).stem
    if scheme == "s3":
        return "S3 Express" if rest.partition("?")[0].strip("/").partition("/")[0].endswith("--x-s3") else "S3"
    return "shared files" if scheme == "file" else scheme.capitalize().removesuffix("s")


def profile_of(executor: Any, *urls: str) -> Profile:
    """What was measured of an endpoint and its storages; else what is assumed."""
    found = load(profile_path(executor, *urls))
    if found is not None:
        age_s = found.age_s(time.time())
        if age_s < STALE_S:
            return found.profile
        note = f"The profile was measured {age_s / 86_400:.0f} days ago: run `farcall analytics profile` again."
        return dataclasses.replace(found.profile, note=note)
    return assumed(*urls)


def assumed(*urls: str) -> Profile:
    """What is assumed of storages that were not measured, and of 8 workers with 2 GB each."""
    tiers = {tier_name(url): assumed_tier(url) for url in urls if url}
    note = "Nothing was measured here; these are assumptions: run `farcall analytics profile`."
    return Profile(_WORKERS, tiers, ASSUMED_CODECS, error=_ASSUMED_ERROR, note=note)


def assumed_tier(url: str) -> Tier:
    """What is assumed of a storage."""
    name = tier_name(url)
    found = next((each for each in (_S3, _EXPRESS, _VALKEY, _NODES) if each.name == name), _FILES)
    return dataclasses.replace(found, name=name)


def profile_path(executor: Any, *urls: str) -> Path:
    """The file of an endpoint, or of an executor without one, with these storages."""
    endpoint = str(getattr(executor, "endpoint_id", None) or "here")
    digest = hashlib.sha256("\n".join((endpoint, *urls)).encode()).hexdigest()[:24]
    return find_home(os.environ) / "analytics" / f"{digest}.profile"


def load(path: Path) -> Measured | None:
    """What is in a file; None if there is none, or another version has written it."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Measured)
    except (FileNotFoundError, msgspec.MsgspecError, ValueError):
        return None


def save(path: Path, profile: Profile) -> Measured:
    """Keep a profile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = Measured(time.time(), profile)
    write_whole(path, msgspec.msgpack.encode(found))
    return found
