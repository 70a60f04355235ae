"""Serial crystallography: count bright spots on detector images, to see during a measurement if the crystal diffracts.

    python examples/stills.py --endpoint NAME

The frames are parts of the Hubble deep field that ships with scikit-image: faint and bright spots of all sizes on an
uneven background, 128 pixels square. They are stored at the endpoint, as at a beamline: one task per frame reads it and
returns a number. The machine that runs this program does not need the packages of the workers.
"""

# The scientific packages carry no types.
# mypy: disable-error-code="no-untyped-call, import-untyped"

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

FRAME_PIXELS = 128
ROWS, COLUMNS = 6, 7
FRAMES = ROWS * COLUMNS


def find_spots(frame: Any, *, sigmas: float = 10.0) -> list[tuple[float, float, float]]:
    """Row, column and summed intensity of each spot on a frame (a 2-D array), brightest first. Runs on a worker.

    A spot is a connected patch of at least three pixels that stand ``sigmas`` standard deviations above the local
    background; the noise is estimated robustly, so that the spots do not count towards it.
    """
    import numpy as np
    from scipy import ndimage

    image = np.asarray(frame, dtype=float)
    above = image - ndimage.median_filter(image, size=15)
    noise = 1.4826 * np.median(np.abs(above - np.median(above))) or 1.0
    patches, count = ndimage.label(above > sigmas * noise)
    if not count:
        return []
    labels = np.arange(1, count + 1)
    sizes = ndimage.sum_labels(np.ones_like(image), patches, labels)
    labels = labels[sizes >= 3]
    sums = ndimage.sum_labels(above, patches, labels)
    centres = ndimage.center_of_mass(above, patches, labels)
    spots = [(float(row), float(column), float(total)) for (row, column), total in zip(centres, sums, strict=True)]
    return sorted(spots, key=lambda spot: -spot[2])


def read_frame(number: int) -> Any:
    """A frame of the measurement: an 8-bit array of 128 x 128 pixels. Runs on a worker.

    :raises ValueError: if the number is too large or negative.
    """
    import imageio.v3 as iio
    import skimage

    row, column = divmod(number, COLUMNS)
    if not 0 <= number < FRAMES:
        raise ValueError(f"frame {number} does not exist: expected 0 to {FRAMES - 1}")
    sky = iio.imread(Path(skimage.__file__).parent / "data" / "hubble_deep_field.jpg")
    part = sky[row * FRAME_PIXELS :, column * FRAME_PIXELS :][:FRAME_PIXELS, :FRAME_PIXELS]
    return part.mean(axis=2).astype("uint8")


def count_spots(number: int) -> int:
    """The number of spots on a frame. Runs on a worker."""
    return len(find_spots(read_frame(number)))


def run(executor: Executor) -> list[int]:
    """Count the spots of every frame, in the order of the frames."""
    return list(executor.map(count_spots, range(FRAMES)))


def hits(counts: Sequence[int], *, at_least: int = 25) -> list[int]:
    """The numbers of the frames with enough spots to keep."""
    return [number for number, count in enumerate(counts) if count >= at_least]


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Count bright spots on detector images.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    with farcall.Executor(endpoint_id=parser.parse_args().endpoint) as executor:
        counts = run(executor)
    print(f"{sum(counts)} spots on {len(counts)} frames; {len(hits(counts))} frames are hits: {hits(counts)}")


if __name__ == "__main__":
    main()
