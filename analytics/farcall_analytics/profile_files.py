"""Profiles of endpoints: measured ones in files, and assumptions about other storages and workers."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from farcall_analytics.curves import constant
from farcall_analytics.prices import S3_2026, S3_EXPRESS_2026, VALKEY_SERVERLESS_2026
from farcall_analytics.profiles import Codec, Profile, Tier, Workers
from farcall_common.credentials import find_home
from farcall_common.errors import ConfigurationError
from farcall_common.files import write_whole
from farcall_common.objects.node_blocks import SCHEME, is_on_nodes

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
"""Relative error of predictions from assumptions."""


class Measured(msgspec.Struct, frozen=True):
    """Measurements of an endpoint, in a file. ``at``: seconds since 1970. ``tiers``: storages by a digest of their
    addresses, which may have passwords."""

    at: float
    workers: Workers
    codecs: tuple[Codec, ...]
    error: float
    tiers: dict[str, Tier]

    def age_s(self, now: float) -> float:
        """Since then; infinite if the clock was wrong then."""
        return now - self.at if now >= self.at else math.inf

    def has(self, urls: Sequence[str]) -> bool:
        """Whether these storages were measured."""
        return all(_digest(url) in self.tiers for url in urls)


def tier_name(url: str) -> str:
    """The name of a storage in profiles and plans."""
    scheme, _, rest = url.partition(":")
    if scheme == "node":
        return NODES
    if scheme == "s3":
        return "S3 Express" if rest.partition("?")[0].strip("/").partition("/")[0].endswith("--x-s3") else "S3"
    if scheme == "file":
        return "files in memory" if rest.startswith("///dev/shm") else "shared files"
    return scheme.capitalize().removesuffix("s")


def fast_tier_name(storage: str, fast_storage: str) -> str:
    """The name of the fast storage, which differs from that of the other one."""
    name = tier_name(fast_storage)
    return f"fast {name}" if name == tier_name(storage) else name


def profile_of(executor: Any, storage: str, fast_storage: str = "") -> Profile:
    """Return the measured profile of an endpoint and its storages, or an assumed one."""
    names = {storage: tier_name(storage)}
    if fast_storage and not is_on_nodes(fast_storage):
        names[fast_storage] = fast_tier_name(storage, fast_storage)
    found = load(profile_path(executor))
    if found is None or not found.has(list(names)):
        tiers = {name: dataclasses.replace(assumed_tier(url), name=name) for url, name in names.items()}
        note = "Nothing was measured here; these are assumptions: run `farcall analytics profile`."
        return Profile(_WORKERS, tiers, ASSUMED_CODECS, error=_ASSUMED_ERROR, note=note, is_measured=False)
    if (nodes := found.tiers.get(_digest(SCHEME))) is not None:
        names[SCHEME] = nodes.name
    tiers = {name: dataclasses.replace(found.tiers[_digest(url)], name=name) for url, name in names.items()}
    age_s = found.age_s(time.time())
    age = f"{age_s / 86_400:.0f} days ago" if age_s < math.inf else "by a clock that is ahead"
    note = f"The profile was measured {age}: run `farcall analytics profile` again."
    return Profile(found.workers, tiers, found.codecs, error=found.error, note=note if age_s >= STALE_S else "")


def assumed_tier(url: str) -> Tier:
    """Return the assumed properties of a storage."""
    name = tier_name(url)
    found = next((each for each in (_S3, _EXPRESS, _VALKEY, _NODES) if each.name == name), _FILES)
    return dataclasses.replace(found, name=name)


def profile_path(executor: Any) -> Path:
    """The file of an endpoint, or of an executor without one."""
    endpoint = str(getattr(executor, "endpoint_id", None) or "here")
    return find_home(os.environ) / "analytics" / f"{_digest(endpoint)}.profile"


def load(path: Path) -> Measured | None:
    """Read a file of measurements; None if it is missing or from another version."""
    try:
        found = msgspec.msgpack.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    return found if found.workers.most > 0 and all(each > 0 for each in found.workers.memories) else None


def save(path: Path, profile: Profile, urls: Sequence[str]) -> Measured:
    """Keep a profile, beside what was measured of other storages of the endpoint.

    :param urls: of its tiers, in their order.
    """
    before = load(path)
    own = {_digest(url): tier for url, tier in zip(urls, profile.tiers.values(), strict=True)}
    others = before.tiers if before is not None and before.age_s(time.time()) < STALE_S else {}
    found = Measured(time.time(), profile.workers, profile.codecs, profile.error, {**others, **own})
    check_place(path)
    write_whole(path, msgspec.msgpack.encode(found))
    return found


def check_place(path: Path) -> None:
    """:raises ConfigurationError: if no file can be written there."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"{path.parent} cannot be written to: {error.strerror}.", hint="Set FARCALL_HOME to another directory."
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
