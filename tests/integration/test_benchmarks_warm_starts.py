"""Nodes of the benchmark of starts, for real and small."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

from benchmarks.warm_starts.node import RUNC
from benchmarks.warm_starts.places import NodeFailed, OwnPlace, running_node
from benchmarks.warm_starts.plot import draw
from benchmarks.warm_starts.workloads import ARMS
from tests.support.images import DEBIAN, image


def left(directory: Path) -> list[str]:
    """Processes that were started in a directory."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(directory) in line]


def test_forks_of_the_own_python_run_tasks_and_leave_nothing(tmp_path: Path) -> None:
    with running_node(OwnPlace(tmp_path), "own", "", fork=True, spares=1) as node:
        (times,) = node.starts("nothing")
        assert times.requested_at < times.ready_at < times.result_at
        assert len(node.starts("nothing", 3)) == 3
        before, _, after = node.one_shots("nothing", 12, 2)
        assert (after.done, after.seconds > 0) == (12, True)
        assert (after.processes, after.descriptors, after.files) == (
            before.processes,
            before.descriptors,
            before.files,
        )
        assert node.memory("nothing", 2).heap > 0
    assert left(tmp_path) == []


def test_a_warm_worker_runs_all_tasks(tmp_path: Path) -> None:
    with running_node(OwnPlace(tmp_path), "own", "", keeps=True) as node:
        first, second = (node.starts("nothing")[0] for _ in range(2))
        assert first.ready_at - first.requested_at < first.result_at - first.requested_at
        assert second.result == 0.0
    assert left(tmp_path) == []


def test_why_a_node_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(NodeFailed, match="missing"),
        running_node(OwnPlace(tmp_path), "none", "venv", f"{tmp_path}/missing"),
    ):
        pass
    assert left(tmp_path) == []


def test_containers_of_bare_runc(tmp_path: Path) -> None:
    """They have the image as their root, and end with their worker."""
    if os.geteuid() != 0 or shutil.which("runc", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("runc is not installed, or this is not root")
    image(DEBIAN)
    with running_node(OwnPlace(tmp_path), "runc", RUNC, DEBIAN) as node:
        for _ in range(2):
            (times,) = node.starts("nothing")
            assert times.requested_at < times.ready_at < times.result_at
        assert list((tmp_path / "runc" / "runc").iterdir()) == []
        assert list((tmp_path / "runc" / "tmp").iterdir()) == []
    assert left(tmp_path) == []
    assert not list(Path("/sys/fs/cgroup").glob("*/farcall-bench-*"))


def test_picture(tmp_path: Path) -> None:
    technologies = [
        {"technology": "Docker", "ms": [], "missing": "not installed"},
        {"technology": "fork in advance, bubblewrap", "ms": [1.0, 2.0], "missing": ""},
    ]
    arms = {arm: [10.0, 20.0] for arm in ARMS if arm != RUNC}
    report = {
        "measured_at": "now",
        "machine": {"cores": 2},
        "technologies": technologies,
        "functions": [{"function": "linpack", "arms": arms}],
    }
    draw(report, tmp_path / "starts.png")
    assert (tmp_path / "starts.png").read_bytes().startswith(b"\x89PNG")
