"""The case studies and the demo, run as a user runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

import farcall
from examples import (
    alexa,
    correlation,
    digits,
    images,
    latency,
    metadata,
    revenue,
    steering,
    stills,
    tomography,
    word_count,
)
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.support.analytics_data import oracle
from tests.waiting import WAIT_S

REPOSITORY = Path(__file__).parents[2]


def test_stills(executor: farcall.Executor) -> None:
    counts = stills.run(executor)
    assert counts == [stills.count_spots(number) for number in range(stills.FRAMES)]


def test_metadata(executor: farcall.Executor) -> None:
    catalogue = metadata.run(executor)
    assert len(catalogue.records) == len(metadata.files_below(None))
    assert catalogue.kinds["table"] >= 5


def test_digits(executor: farcall.Executor) -> None:
    assert digits.run(executor).accuracy > 0.97


def test_tomography(executor: farcall.Executor, tmp_path: Path) -> None:
    preview = iio.imread(tomography.run(executor, tmp_path / "slice.png"))
    from skimage.data import shepp_logan_phantom
    from skimage.transform import resize

    phantom = resize(shepp_logan_phantom(), preview.shape, anti_aliasing=True)  # type: ignore[no-untyped-call]
    assert np.corrcoef(preview.ravel(), phantom.ravel())[0, 1] > 0.95


def test_correlation(executor: farcall.Executor) -> None:
    times = correlation.run(executor)
    assert times == pytest.approx([correlation.RELAXATION_FRAMES] * correlation.RINGS, rel=0.1)


def test_latency(client: farcall.Client, endpoint: LocalEndpoint) -> None:
    measured = latency.measure(client, endpoint.endpoint_id, calls=20, warm_up=3)
    assert len(measured) == 20
    assert all(each.total > each.service > 0 for each in measured)


def test_alexa(executor: farcall.Executor) -> None:
    assert tuple(alexa.run(executor)) == alexa.ANSWERS


def test_word_count(executor: farcall.Executor) -> None:
    words = word_count.run(executor, parts=5)
    assert dict(words.most_frequent)["self"] > 1_000
    assert [each.calls for each in words.stages if each.name == "count_words"] == [5]


def test_revenue(executor: farcall.Executor, tmp_path: Path) -> None:
    best = revenue.run(executor, tmp_path, visits=20_000)
    own = {name: pq.read_table(tmp_path / name) for name in ("rankings", "visits")}
    assert vars(best) == pytest.approx(oracle(revenue.QUERY, **own).to_pylist()[0])


def test_images(executor: farcall.Executor, tmp_path: Path) -> None:
    counts = images.run(executor, tmp_path / "sheet.png", ("coins.png", "moon.png", "rocket.jpg"))
    assert counts["coins.png"] > counts["moon.png"]
    assert iio.imread(tmp_path / "sheet.png").shape == (128, 512)


def test_steering(executor: farcall.Executor) -> None:
    found = steering.run(executor, tasks=60)
    assert found.moved_bytes == 2 * 60 * 2**20
    assert found.energy < found.first / 10


def test_an_example_is_a_program(cloud: Deployment, endpoint: LocalEndpoint) -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "examples" / "digits.py", "--endpoint", endpoint.endpoint_id],
        env={**os.environ, **cloud.environment("ada")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    assert "899 digits read" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_cleans_up_when_it_is_interrupted(tier_name: str, tmp_path: Path, number: signal.Signals) -> None:
    if tier_name != "local":
        pytest.skip("the demo brings its own tier")
    with subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--pictures", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        seen = ""
        while "cancel a long task" not in seen:
            seen = demo.stdout.readline()
            assert seen, "the demo ended too early"
        family = psutil.Process(demo.pid).children(recursive=True)
        family += [process for process in psutil.process_iter() if str(tmp_path) in " ".join(command_line(process))]
        demo.send_signal(number)
        assert demo.wait(timeout=WAIT_S) == 130
    _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not list(tmp_path.glob("farcall-demo-*"))


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
