"""The project: two functions that run on an endpoint."""

from __future__ import annotations


def smooth(counts: list[float], width: int = 3) -> list[float]:
    """The moving average of a spectrum over ``width`` channels (odd); fewer at both ends."""
    half = width // 2
    windows = [counts[max(0, place - half) : place + half + 1] for place in range(len(counts))]
    return [sum(window) / len(window) for window in windows]


def peak(energies: list[float], counts: list[float]) -> float:
    """The energy of the channel with the most counts.

    :raises ValueError: if the spectrum has no channels, or lists of different lengths.
    """
    if not counts or len(energies) != len(counts):
        raise ValueError(f"{len(energies)} energies, {len(counts)} counts")
    return max(zip(counts, energies, strict=True))[1]
