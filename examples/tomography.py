"""Tomography: project and reconstruct a slice, and write a preview of it.

    python examples/tomography.py --endpoint NAME [--preview slice.png]
    python examples/tomography.py --endpoint NAME --storage s3://lab/scan7

The object is the Shepp-Logan head phantom that ships with scikit-image. Its projections are computed in parallel, one
task for each range of angles; another task reconstructs the slice by filtered back projection and returns a PNG.

With ``--storage``, the parts of the sinogram and the picture are files there: the endpoint stores what the first tasks
write, and copies it for the last one.
"""

# The scientific packages carry no types.
# mypy: disable-error-code="no-untyped-call, import-untyped"

from __future__ import annotations

import argparse
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farcall import File

SLICE_PIXELS = 160
ANGLES = 180
ANGLES_PER_TASK = 30


def project(angles: list[float], pixels: int, out: File | None = None) -> Any:
    """The sinogram (detector x angle) of the phantom, ``pixels`` wide, at angles in degrees; as a file if there is
    ``out``. Runs on a worker."""
    import numpy as np
    from skimage.data import shepp_logan_phantom
    from skimage.transform import radon, resize

    phantom = resize(shepp_logan_phantom(), (pixels, pixels), anti_aliasing=True)
    sinogram = radon(phantom, theta=np.asarray(angles), circle=True)
    if out is None:
        return sinogram
    np.save(out, sinogram)
    return out


def reconstruct(sinograms: list[Any], angles: list[float], out: File | None = None) -> Any:
    """A PNG of the slice with these parts of its sinogram, which may be files, by filtered back projection; as a file
    if there is ``out``. Runs on a worker."""
    import io
    import os

    import imageio.v3 as iio
    import numpy as np
    from skimage.transform import iradon

    parts = [np.load(each) if isinstance(each, os.PathLike) else each for each in sinograms]
    sinogram = np.concatenate(parts, axis=1)
    slice_ = iradon(sinogram, theta=np.asarray(angles), filter_name="hann", circle=True)
    low, high = np.percentile(slice_, (0.5, 99.5))
    grey = (np.clip((slice_ - low) / (high - low), 0, 1) * 255).astype("uint8")
    png = io.BytesIO()
    iio.imwrite(png, grey, extension=".png")
    if out is None:
        return png.getvalue()
    out.path.write_bytes(png.getvalue())
    return out


def ranges_of_angles() -> tuple[list[float], list[list[float]]]:
    """All angles, and those of each task."""
    angles = [180.0 * number / ANGLES for number in range(ANGLES)]
    return angles, [angles[start : start + ANGLES_PER_TASK] for start in range(0, ANGLES, ANGLES_PER_TASK)]


def run(executor: Executor, preview: Path) -> Path:
    """Measure and reconstruct the slice, and write it to ``preview``."""
    angles, ranges = ranges_of_angles()
    sinograms = list(executor.map(project, ranges, [SLICE_PIXELS] * len(ranges)))
    preview.write_bytes(executor.submit(reconstruct, sinograms, angles).result())
    return preview


def run_with_files(executor: Executor, storage: str) -> str:
    """The same with files below the URL ``storage``; the URL of the picture."""
    from farcall import File

    angles, ranges = ranges_of_angles()
    futures = [
        executor.submit(project, part, SLICE_PIXELS, out=File(f"{storage}/sinogram-{number}.npy"))
        for number, part in enumerate(ranges)
    ]
    sinograms = [future.result() for future in futures]  # files: each is read where it was written
    picture: File = executor.submit(reconstruct, sinograms, angles, out=File(f"{storage}/slice.png")).result()
    return picture.url


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Preview a tomographic slice.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    parser.add_argument("--preview", type=Path, default=Path("slice.png"), help="file to write")
    parser.add_argument("--storage", help="URL that the endpoint can write to, for files instead of arguments")
    arguments = parser.parse_args()
    with farcall.Executor(endpoint_id=arguments.endpoint) as executor:
        if arguments.storage:
            print(f"stored {run_with_files(executor, arguments.storage)}")
        else:
            print(f"wrote {run(executor, arguments.preview)}")


if __name__ == "__main__":
    main()
