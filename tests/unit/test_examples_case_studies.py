"""The case studies' own computations, without a tier: any executor will do."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest

from examples import digits, hello, metadata, stills, tomography


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:  # CPython 3.11 loses count when two threads make syntax trees (gh-106905)
        yield executor


def background(rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    slope = np.linspace(20, 60, 128)[None, :] * np.ones((128, 1))
    return slope + rng.normal(0, 2, (128, 128))


def test_every_planted_spot_is_found_where_it_was_planted() -> None:
    frame = background(np.random.default_rng(5))
    rows, columns = np.mgrid[:128, :128]
    planted = [(20, 30), (64, 64), (90, 110), (110, 15)]
    for row, column in planted:
        frame += 120 * np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / 4)

    spots = stills.find_spots(frame)

    assert sorted((round(row), round(column)) for row, column, _ in spots) == sorted(planted)
    assert [total for *_, total in spots] == sorted((total for *_, total in spots), reverse=True)


def test_noise_on_a_slope_is_not_a_spot() -> None:
    assert stills.find_spots(background(np.random.default_rng(6))) == []


def test_stills_count_the_sky(threads: Executor) -> None:
    counts = stills.run(threads)
    assert len(counts) == 42
    assert 800 < sum(counts) < 1300
    assert 5 < len(stills.hits(counts)) < 30


def test_metadata_of_a_tree_with_every_kind(tmp_path: Path, threads: Executor) -> None:
    (tmp_path / "code.py").write_text('import os\nfrom json import loads\ndef f():\n    """Lattice lattice."""\n')
    (tmp_path / "table.csv").write_text("name,mass\ncarbon,12.0\niron,55.8\n")
    (tmp_path / "tree.json").write_text(json.dumps({"a": {"b": [1, 2]}}))
    (tmp_path / "note.txt").write_text("beam beam beam crystal\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "unknown.bin").write_bytes(b"\x00\x01")
    iio.imwrite(tmp_path / "dot.png", np.zeros((3, 5), dtype=np.uint8))

    catalogue = metadata.run(threads, tmp_path)

    found = {Path(path).name: dict(record) for path, record in catalogue.records.items()}
    assert found["code.py"]["imports"] == ["json", "os"]
    assert found["code.py"]["functions"] == 1
    assert found["code.py"]["keywords"] == ["lattice"]
    assert found["table.csv"] | {"path": ""} == {
        "path": "",
        "kind": "table",
        "size_bytes": 32,
        "rows": 3,
        "columns": 2,
        "numeric_columns": 1,
        "head": ["name", "mass"],
    }
    assert found["tree.json"]["depth"] == 3
    assert found["note.txt"]["keywords"][0] == "beam"
    assert (found["dot.png"]["width"], found["dot.png"]["height"]) == (5, 3)
    assert found["broken.py"]["kind"] == "unreadable"
    assert "SyntaxError" in found["broken.py"]["reason"]
    assert found["unknown.bin"]["kind"] == "other"


def test_metadata_of_the_installed_data_sets(threads: Executor) -> None:
    catalogue = metadata.run(threads)
    iris = next(record for path, record in catalogue.records.items() if path.endswith("data/iris.csv"))
    assert (iris["rows"], iris["columns"], iris["numeric_columns"]) == (151, 5, 5)
    assert catalogue.kinds["unreadable"] == 0
    assert catalogue.kinds["python"] > 20
    assert "dataset" in catalogue.topics()


def test_digits_are_read_correctly(threads: Executor) -> None:
    reading = digits.run(threads)
    assert reading.images == 899
    assert reading.accuracy > 0.97


def test_the_preview_shows_the_phantom(tmp_path: Path, threads: Executor) -> None:
    from skimage.data import shepp_logan_phantom  # type: ignore[import-untyped, unused-ignore]
    from skimage.transform import resize  # type: ignore[import-untyped, unused-ignore]

    preview = tomography.run(threads, tmp_path / "slice.png")

    image = iio.imread(io.BytesIO(preview.read_bytes()))
    assert image.shape == (tomography.SLICE_PIXELS, tomography.SLICE_PIXELS)
    truth = resize(shepp_logan_phantom(), image.shape, anti_aliasing=True)  # type: ignore[no-untyped-call]
    assert np.corrcoef(image.ravel(), truth.ravel())[0, 1] > 0.95


def test_hello_returns_its_host() -> None:
    assert hello.hello("world") == f"hello, world, from {socket.gethostname()}"
