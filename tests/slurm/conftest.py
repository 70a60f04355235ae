"""A cluster for all tests here, and an engine's or endpoint's way to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, running_cluster
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    paths = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # where Debian has the daemons
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", paths)
        with running_cluster(tmp_path_factory.mktemp("slurm"), nodes=3, cores=2) as cluster:
            yield cluster


@pytest.fixture
def cluster(_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster with all its nodes idle, to which all commands of this process speak."""
    for name, value in _cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))
    wait_until(lambda: len(_cluster.idle_nodes()) == len(_cluster.nodes))
    yield _cluster
    wait_until(lambda: not _cluster.jobs())
