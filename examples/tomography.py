"""Tomography: project and reconstruct a slice, and write a preview of it.

    python examples/tomography.py --endpoint NAME [--preview slice.png]

The object is the Shepp-Logan head phantom that ships with scikit-image. Its projections are computed in parallel, one
task for each range of angles; another task reconstructs the slice by filtered back projection and returns a PNG.
"""

# The scientific packages carry no types.
# mypy: disable-error-code="no-untyped-call, import-untyped"

from __future__ import annotations

import argparse
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

SLICE_PIXELS = 160
ANGLES = 180
ANGLES_PER_TASK = 30


def project(angles: list[float], pixels: int) -> Any:
    """The sinogram (detector x angle) of the phantom, ``pixels`` wide, at angles in degrees. Runs on a worker."""
    import numpy as np
    from skimage.data import shepp_logan_phantom
    from skimage.transform import radon, resize

    phantom = resize(shepp_logan_phantom(), (pixels, pixels), anti_aliasing=True)
    return radon(phantom, theta=np.asarray(angles), circle=True)


def reconstruct(sinograms: list[Any], angles: list[float]) -> bytes:
    """A PNG of the slice with these parts of its sinogram, by filtered back projection. Runs on a worker."""
    import io

    import imageio.v3 as iio
    import numpy as np
    from skimage.transform import iradon

    sinogram = np.concatenate(sinograms, axis=1)
    slice_ = iradon(sinogram, theta=np.asarray(angles), filter_name="hann", circle=True)
    low, high = np.percentile(slice_, (0.5, 99.5))
    grey = (np.clip((slice_ - low) / (high - low), 0, 1) * 255).astype("uint8")
    png = io.BytesIO()
    iio.imwrite(png, grey, extension=".png")
    return png.getvalue()


def run(executor: Executor, preview: Path) -> Path:
    """Measure and reconstruct the slice, and write it to ``preview``."""
    angles = [180.0 * number / ANGLES for number in range(ANGLES)]
    ranges = [angles[start : start + ANGLES_PER_TASK] for start in range(0, ANGLES, ANGLES_PER_TASK)]
    sinograms = list(executor.map(project, ranges, [SLICE_PIXELS] * len(ranges)))
    preview.write_bytes(executor.submit(reconstruct, sinograms, angles).result())
    return preview


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Preview a tomographic slice.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    parser.add_argument("--preview", type=Path, default=Path("slice.png"), help="file to write")
    arguments = parser.parse_args()
    with farcall.Executor(endpoint_id=arguments.endpoint) as executor:
        print(f"wrote {run(executor, arguments.preview)}")


if __name__ == "__main__":
    main()
