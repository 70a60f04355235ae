"""Image pipeline: images are read, made small, and searched for bright objects; a contact sheet of all comes back.

    python examples/images.py --endpoint NAME [--sheet sheet.png]

The pictures are those that ship with scikit-image at the endpoint. Each passes through the stages on its own, and none
waits for another until all of them are put on one sheet: one task, in which pixels go from worker to worker in memory.
"""

# The scientific packages carry no types.
# mypy: disable-error-code="no-untyped-call, import-untyped"

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farcall import Graph, chain

if TYPE_CHECKING:
    import farcall

IMAGES = ("astronaut.png", "camera.png", "cell.png", "coffee.png", "coins.png", "moon.png", "page.png", "rocket.jpg")
SIDE_PIXELS = 128
COLUMNS = 4


def load(name: str) -> Any:
    """An image in grey: an array of floats from 0 to 1. Runs on a worker."""
    import imageio.v3 as iio
    import skimage

    image = iio.imread(Path(skimage.__file__).parent / "data" / name)
    return (image[..., :3].mean(axis=-1) if image.ndim == 3 else image) / 255.0


def shrink(image: Any) -> Any:
    """The middle of an image, square, with :data:`SIDE_PIXELS` on a side. Runs on a worker."""
    from skimage.transform import resize

    side = min(image.shape)
    top, left = ((length - side) // 2 for length in image.shape)
    return resize(image[top : top + side, left : left + side], (SIDE_PIXELS, SIDE_PIXELS), anti_aliasing=True)


def detect(image: Any) -> tuple[Any, int]:
    """The image with a frame around each bright object, and how many there are. Runs on a worker.

    An object is a connected patch of at least 30 pixels above the threshold of Otsu (IEEE Trans. SMC 9, 1979).
    """
    from scipy import ndimage
    from skimage.filters import threshold_otsu

    patches, _ = ndimage.label(image > threshold_otsu(image))
    framed, count = image.copy(), 0
    for number, (rows, columns) in enumerate(ndimage.find_objects(patches), start=1):
        if (patches[rows, columns] == number).sum() >= 30:
            count += 1
            framed[[rows.start, rows.stop - 1], columns] = framed[rows, [columns.start, columns.stop - 1]] = 1.0
    return framed, count


def contact_sheet(found: list[tuple[Any, int]]) -> tuple[bytes, list[int]]:
    """All images on one sheet, as the bytes of a PNG, and the counts. Runs on a worker."""
    import io

    import imageio.v3 as iio
    import numpy as np

    tiles = [image for image, _ in found]
    tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % COLUMNS)
    rows = [np.hstack(tiles[at : at + COLUMNS]) for at in range(0, len(tiles), COLUMNS)]
    file = io.BytesIO()
    iio.imwrite(file, (np.vstack(rows) * 255).clip(0, 255).astype("uint8"), extension=".png")
    return file.getvalue(), [count for _, count in found]


def run(executor: farcall.Executor, sheet: Path, images: tuple[str, ...] = IMAGES) -> dict[str, int]:
    """How many bright objects each image has; the contact sheet is written to a file.

    :raises RuntimeError: if the sheet is no picture of all images.
    """
    graph = Graph()
    found = graph.map(chain(load, shrink, detect), images)
    data, counts = executor.submit(graph, graph.call(contact_sheet, found)).result()
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))  # of a PNG
    rows = -(-len(images) // COLUMNS)
    if (width, height) != (COLUMNS * SIDE_PIXELS, rows * SIDE_PIXELS):
        raise RuntimeError(f"the sheet has {width} x {height} pixels")
    sheet.write_bytes(data)
    return dict(zip(images, counts, strict=True))


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Search images for bright objects.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    parser.add_argument("--sheet", type=Path, default=Path("sheet.png"), help="where to write the contact sheet")
    arguments = parser.parse_args()
    with farcall.Executor(endpoint_id=arguments.endpoint) as executor:
        counts = run(executor, arguments.sheet)
    print(f"{sum(counts.values())} objects on {len(counts)} images, see {arguments.sheet}: {counts}")


if __name__ == "__main__":
    main()
