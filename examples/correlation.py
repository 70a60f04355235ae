"""X-ray photon correlation spectroscopy: correlate speckle patterns in time, to measure how fast a sample moves.

    python examples/correlation.py --endpoint NAME

A coherent beam on a rough surface makes speckles, which change as the surface moves through the beam. The surface is
the photograph of gravel that ships with scikit-image; its grey values are phases, and it drifts by a known amount from
frame to frame. Each ring of the detector is one task: its intensities, a few megabytes, travel to a worker as an array,
and the correlation ``g2`` at each lag comes back. All rings should find the time that follows from the drift and the
width of the beam.
"""

# The scientific packages carry no types.
# mypy: disable-error-code="no-untyped-call, import-untyped"

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

FRAMES = 190
RINGS = 8
DETECTOR_PIXELS = 128
BEAM_PIXELS = 16.0
"""Distance from the centre at which the amplitude is exp(-1/2)."""
DRIFT_PIXELS = 2
"""Movement of the surface from frame to frame."""
PHASE_RADIANS = 8 * math.pi
"""Between black and white: the surface is rougher than the wavelength."""
RELAXATION_FRAMES = math.sqrt(2) * BEAM_PIXELS / DRIFT_PIXELS
"""Frames after which g2 has fallen to 1/e, for a surface whose grains are small compared with the beam."""


def measure() -> Any:
    """The series: frames x rows x columns of 32-bit intensities. Needs numpy and scikit-image."""
    import numpy as np
    from skimage.data import gravel

    surface = np.exp(1j * PHASE_RADIANS * gravel()[200 : 200 + DETECTOR_PIXELS] / 255.0)
    axis = np.arange(DETECTOR_PIXELS) - DETECTOR_PIXELS / 2
    beam = np.exp(-(axis[:, None] ** 2 + axis[None, :] ** 2) / (2 * BEAM_PIXELS**2))
    starts = range(0, FRAMES * DRIFT_PIXELS, DRIFT_PIXELS)
    waves = [np.fft.fftshift(np.fft.fft2(beam * surface[:, start : start + DETECTOR_PIXELS])) for start in starts]
    return np.asarray([np.abs(wave) ** 2 for wave in waves], dtype=np.float32)


def rings_of(series: Any) -> list[Any]:
    """The pixels of each ring, from the inside out: arrays of frames x pixels, without centre and corners."""
    import numpy as np

    axis = np.arange(DETECTOR_PIXELS) - DETECTOR_PIXELS / 2
    radius = np.hypot(axis[:, None], axis[None, :])
    edges = np.linspace(DETECTOR_PIXELS / 16, DETECTOR_PIXELS / 2, RINGS + 1)
    return [series[:, (inner <= radius) & (radius < outer)] for inner, outer in itertools.pairwise(edges)]


def correlate(intensities: Any, lags: Sequence[int]) -> list[float]:
    """``g2`` of an array of frames x pixels at these lags in frames, averaged over pixels. Runs on a worker."""
    import numpy as np

    series = np.asarray(intensities, dtype=float)
    pairs = ((series[: len(series) - lag], series[lag:]) for lag in lags)
    return [float(np.mean((a * b).mean(axis=0) / (a.mean(axis=0) * b.mean(axis=0)))) for a, b in pairs]


def relaxation(g2: Sequence[float]) -> float:
    """The lag, in frames, at which g2 (at lags 0, 1, 2 ...) has fallen to 1/e of its way down to its last values.

    :raises ValueError: if it does not fall.
    """
    plateau = sum(g2[-5:]) / 5
    level = plateau + (g2[0] - plateau) / math.e
    for lag, (value, next_value) in enumerate(itertools.pairwise(g2)):
        if next_value <= level < value:
            return lag + (value - level) / (value - next_value)
    raise ValueError("the speckles are the same in all frames")


def run(executor: Executor) -> list[float]:
    """The relaxation time of each ring in frames, from the inside out."""
    lags = range(FRAMES // 4)
    return [relaxation(g2) for g2 in executor.map(correlate, rings_of(measure()), [lags] * RINGS)]


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Correlate speckle patterns in time.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    arguments = parser.parse_args()
    with farcall.Executor(endpoint_id=arguments.endpoint) as executor:
        times = run(executor)
    for number, frames in enumerate(times, start=1):
        print(f"ring {number}: g2 falls to 1/e in {frames:.1f} frames")
    print(f"expected: {RELAXATION_FRAMES:.1f} frames")


if __name__ == "__main__":
    main()
