"""Functions of the experiments: each does an amount of work, so that it takes longer where it shares a CPU."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Final

_BLOCK: Final = bytes(1 << 16)
_GROUPS: Final = Path("/sys/fs/cgroup")
_ORDINARY_SHARES: Final = 1024
_CALIBRATION_ROUNDS: Final = 400
_CALIBRATIONS: Final = 9

Done = tuple[float | None, float]
"""What a function returns: the weight of its process at the end, and the instant of its beginning."""


def resize(rounds: int) -> Done:
    """Resize an image."""
    return work(rounds)


def name_generation(rounds: int) -> Done:
    """Generate names by a recurrent network."""
    return work(rounds)


def pyaes(rounds: int) -> Done:
    """Encrypt in plain Python."""
    return work(rounds)


def training(rounds: int) -> Done:
    """Train a small model."""
    return work(rounds)


def batch(rounds: int) -> Done:
    """Batch work, without a target."""
    return work(rounds)


def short(rounds: int) -> Done:
    """The function of the part about reaction."""
    return work(rounds)


def noop() -> None:
    """A no-op."""


def work(rounds: int) -> Done:
    """Hash so many blocks."""
    began_at = time.monotonic()
    digest = b""
    for _ in range(rounds):
        digest = hashlib.sha256(_BLOCK + digest).digest()
    return own_weight(), began_at


def own_weight() -> float | None:
    """The CPU weight of the cgroup of this process, in which 100 is the ordinary one; None if none can be read."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        place = path.lstrip("/")
        if "cpu" in controllers.split(","):
            shares = _number_in(_GROUPS / "cpu" / place / "cpu.shares")
            return None if shares is None else 100 * shares / _ORDINARY_SHARES
        if not controllers and (weight := _number_in(_GROUPS / place / "cpu.weight")) is not None:
            return weight
    return None


def rounds_per_ms() -> float:
    """Rounds of :func:`work` in a millisecond of CPU time: the median, as the speed of a shared core varies."""
    found = []
    for _ in range(_CALIBRATIONS):
        before = time.thread_time()
        work(_CALIBRATION_ROUNDS)
        found.append(_CALIBRATION_ROUNDS / (time.thread_time() - before) / 1000)
    return sorted(found)[len(found) // 2]


def _number_in(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
