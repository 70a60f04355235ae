"""Starts by technology: which there are, where each runs, and how long a worker takes until it is ready."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.warm_starts.images import make_venv
from benchmarks.warm_starts.node import RUNC
from benchmarks.warm_starts.places import (
    MeasuredNode,
    NodeFailed,
    OwnPlace,
    UserPlace,
    running_node,
    type_with_forks,
)
from tests.support.container_user import apptainer_user, podman_user
from tests.support.docker_daemon import docker_daemon
from tests.support.image_archive import write_archive
from tests.support.images import DEBIAN, DIRECTORY

_TAG: Final = "farcall/benchmark:1"

Node = contextlib.AbstractContextManager[MeasuredNode]


def measure(directory: Path, count: int) -> list[dict[str, Any]]:
    """A row for each technology: its name, and milliseconds from the request to a worker that is ready; or why it is
    not here. Technologies take turns.
    """
    archive = directory / "image.tar"
    write_archive(archive, DIRECTORY / DEBIAN, tag=_TAG)
    rows: list[dict[str, Any]] = []
    nodes: list[MeasuredNode | None] = []
    with contextlib.ExitStack() as stack:
        for name, node in _technologies(OwnPlace(directory), directory, archive):
            row: dict[str, Any] = {"technology": name, "ms": [], "missing": ""}
            rows.append(row)
            nodes.append(_started(stack, node, row))
        for _ in range(count + 1):
            for row, each in zip(rows, nodes, strict=True):
                if each is not None and not row["missing"]:
                    with _noted(row):
                        (times,) = each.starts("nothing")
                        row["ms"].append(round(1000 * (times.ready_at - times.requested_at), 3))
    for row in rows:
        del row["ms"][:1]  # the first start reads files that are in memory afterwards
    return rows


def _started(stack: contextlib.ExitStack, node: Node, row: dict[str, Any]) -> MeasuredNode | None:
    found: MeasuredNode | None = None
    with _noted(row):
        found = stack.enter_context(node)
    return found  # noqa: RET504 - it may have failed


@contextlib.contextmanager
def _noted(row: dict[str, Any]) -> Iterator[None]:
    """A failure becomes the reason in the row."""
    try:
        yield
    except (NodeFailed, pytest.skip.Exception) as error:
        row["missing"] = str(error)
        print(f"{row['technology']}: {error}", file=sys.stderr)


def _technologies(place: OwnPlace, directory: Path, archive: Path) -> Iterator[tuple[str, Node]]:
    yield "Docker", _in_docker(directory, archive)
    for name, options in (
        ("Podman", ("podman", podman_user, archive)),
        ("Apptainer, SIF", ("apptainer", apptainer_user, archive)),
        ("Apptainer, directory", ("apptainer", apptainer_user, None)),
    ):
        yield f"{name} (ordinary user)", _of_user(*options)
    yield "runc, bare", running_node(place, "tech-runc", RUNC, DEBIAN)
    yield "Charliecloud", running_node(place, "tech-charliecloud", "charliecloud", DEBIAN)
    yield "bubblewrap", running_node(place, "tech-bubblewrap", "bubblewrap", DEBIAN)
    yield "venv", running_node(place, "tech-venv", "venv", str(make_venv(())))
    yield "fresh process", running_node(place, "tech-process", "")
    forked = type_with_forks(place)
    for spares, title in ((0, "begun after the request"), (1, "in advance")):
        yield (
            f"fork {title}, {forked}",
            running_node(place, f"tech-fork-{spares}", forked, DEBIAN, fork=True, spares=spares),
        )


@contextlib.contextmanager
def _in_docker(directory: Path, archive: Path) -> Iterator[MeasuredNode]:
    with docker_daemon() as daemon:
        done = daemon.run(["docker", "load", "--quiet", "--input", str(archive)])
        if done.returncode:
            raise NodeFailed(done.stdout)
        place = OwnPlace(directory, daemon.environment)
        with running_node(place, "tech-docker", "docker", _TAG) as node:
            yield node


@contextlib.contextmanager
def _of_user(
    type_: str, user_of: Callable[[], contextlib.AbstractContextManager[Any]], archive: Path | None
) -> Iterator[MeasuredNode]:
    """:param archive: None: the directory tree is the image."""
    with user_of() as user:
        image = DEBIAN
        if archive is not None:
            shutil.copy(archive, user.directory / archive.name)
            image = f"docker-archive:{user.directory / archive.name}"
        with running_node(UserPlace(user), "node", type_, image) as node:
            yield node


def present(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with measurements."""
    return [row for row in rows if row["ms"] and not row["missing"]]
