"""Where measured nodes run: as the user of this process, or as an ordinary user in a view of the machine of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from benchmarks.warm_starts import node
from benchmarks.warm_starts.node import MemoryUse, OneShots, Order, Sample, Specification, Starts, Times
from farcall_endpoint.host.process_reaper import kill_trees
from tests.support.container_user import REPOSITORY, ContainerUser
from tests.support.images import DIRECTORY

_END_LIMIT_S: Final = 60.0
_LEFT_OUT: Final = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
"""Fresh processes would compile all modules each time."""
_Answer = TypeVar("_Answer")
_encode: Final = msgspec.json.Encoder().encode


class NodeFailed(Exception):
    """A node does not run, or has ended; its last words."""


class Place(Protocol):
    """Starts nodes. ``images``: the directory of root file systems, as seen there."""

    images: Path

    def directory_of(self, name: str) -> Path:
        """A new directory that nodes there may write."""

    def start(self, arguments: Sequence[str], *, stderr: int) -> subprocess.Popen[bytes]:
        """Start this Python with arguments, and pipes as standard input and output."""


class OwnPlace:
    """As the user of this process.

    :param directory: for what nodes write.
    :param variables: besides those of this process.
    """

    def __init__(self, directory: Path, variables: Mapping[str, str] | None = None) -> None:
        self.images = DIRECTORY.resolve()
        self._directory = directory
        own = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        self._variables = {**own, **(variables or {})}

    def directory_of(self, name: str) -> Path:
        """A new directory."""
        path = self._directory / name
        path.mkdir()
        return path

    def start(self, arguments: Sequence[str], *, stderr: int) -> subprocess.Popen[bytes]:
        """Start this Python."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=self._variables,
            stdin=pipe,
            stdout=pipe,
            stderr=stderr,
        )


class UserPlace:
    """As an ordinary user."""

    def __init__(self, user: ContainerUser) -> None:
        self.images = user.images
        self._user = user

    def directory_of(self, name: str) -> Path:
        """A new directory of the user's."""
        return self._user.directory_of(name)

    def start(self, arguments: Sequence[str], *, stderr: int) -> subprocess.Popen[bytes]:
        """Start the user's Python."""
        pipe, variables = subprocess.PIPE, self._user.variables_of_project()
        return self._user.start([self._user.python, *arguments], variables, stdin=pipe, stdout=pipe, stderr=stderr)


def type_with_forks(place: Place) -> str:
    """The type of a directory tree's environment whose workers can be forks: as root, those of bubblewrap are fresh."""
    return "charliecloud" if isinstance(place, OwnPlace) and os.geteuid() == 0 else "bubblewrap"


class MeasuredNode:
    """A node in a process of its own, which answers one order at a time."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self._process = process
        self._errors = errors

    def starts(self, function: str, count: int = 1) -> list[Times]:
        """As of :meth:`~benchmarks.warm_starts.node.Node.starts`."""
        return self._ask(Starts(function, count), list[Times])

    def memory(self, function: str, count: int) -> MemoryUse:
        """As of :meth:`~benchmarks.warm_starts.node.Node.memory`."""
        return self._ask(node.Memory(function, count), MemoryUse)

    def one_shots(self, function: str, count: int, parts: int = 1) -> list[Sample]:
        """As of :meth:`~benchmarks.warm_starts.node.Node.one_shots`."""
        return self._ask(OneShots(function, count, parts), list[Sample])

    def _ask(self, order: Order, kind: type[_Answer]) -> _Answer:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer
            self._process.stdin.write(_encode(order) + b"\n")
            self._process.stdin.flush()
        return self.answer(kind)

    def answer(self, kind: type[_Answer]) -> _Answer:
        """The next answer.

        :raises NodeFailed: if there is none.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            words = self._errors.read_text().strip().splitlines() or ["it ended"]
            raise NodeFailed(words[-1])
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """End it, and wait until nothing is left of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_trees({self._process.pid})
            self._process.wait()
            raise
        self._process.stdout.close()


@contextlib.contextmanager
def running_node(place: Place, name: str, type_: str, image: str = "", **options: Any) -> Iterator[MeasuredNode]:
    """A node that is idle.

    :param image: a location, or the name of one of the images.
    :param options: of :class:`~benchmarks.warm_starts.node.Specification`.
    :raises NodeFailed: if it does not start.
    """
    directory = place.directory_of(name)
    location = str(place.images / image) if image and ":" not in image and not image.startswith("/") else image
    specification = Specification(type_, location, str(directory), **options)
    errors = directory / "errors"
    with errors.open("wb") as stderr:
        process = place.start(["-m", node.__name__, _encode(specification).decode()], stderr=stderr.fileno())
    found = MeasuredNode(process, errors)
    try:
        found.answer(list[Any])
        yield found
    finally:
        found.close()
