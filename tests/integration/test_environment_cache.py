"""Two endpoints, or two managers, with one cache: real processes of preparations."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.prepare import preparation_process
from farcall_endpoint.environments.prepare.preparation import (
    Alive,
    Crowded,
    Located,
    PreparationReport,
    PreparationSettings,
    Prepare,
    Prepared,
    Progressed,
    Report,
)
from farcall_endpoint.host import process_reaper
from tests.waiting import wait_until

# It "converts" an image when it may, and starts programs of the node. $DIRECTORY is the test's.
_APPTAINER = """#!/bin/sh
case "$1" in
build)
    while test $# -gt 2; do shift; done
    echo "$2" >> "$DIRECTORY/built"
    case "$2" in *slow*) read -r _ < "$DIRECTORY/gate";; esac
    head -c 1000000 /dev/zero > "$1";;
buildcfg) exit 1;;
*)
    while test "$1" != true -a "$1" != python3; do shift; done
    exec "$@";;
esac
"""


class Preparing:
    """A process of preparations, as a manager starts it."""

    def __init__(self, directory: Path, *, cache_bytes: int = 10**9) -> None:
        environments = EnvironmentSettings(cache_bytes=cache_bytes)
        settings = PreparationSettings(environments=environments, cache=str(directory / "cache"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", preparation_process.__name__, msgspec.json.encode(settings).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "DIRECTORY": str(directory)},
            start_new_session=True,
        )

    def order(self, environment: Environment) -> None:
        """Prepare an environment."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(Prepare(environment, trusted=True)) + b"\n")
        self.process.stdin.flush()

    def report(self) -> PreparationReport:
        """The next report of a preparation."""
        assert self.process.stdout is not None
        while True:
            report: Report = msgspec.json.decode(self.process.stdout.readline(), type=Report)
            if not isinstance(report, Alive | Located):
                return report

    def until(self, text: str) -> None:
        """Wait for a report of progress."""
        while True:
            report = self.report()
            assert isinstance(report, Progressed), report
            if text in report.text:
                return

    def answer(self) -> Prepared:
        """How the preparation ended."""
        while isinstance(report := self.report(), Progressed | Crowded):
            pass
        assert isinstance(report, Prepared), report
        return report

    def prepared(self, environment: Environment) -> Path:
        """The image of an environment, when it is prepared."""
        self.order(environment)
        return Path(self.answer().image)

    def kill(self) -> None:
        """As the kernel does when memory is short: nothing is cleaned up."""
        process_reaper.kill_trees({self.process.pid})
        self.process.wait()


def of(name: str) -> Environment:
    return Environment(type="apptainer", location=f"docker://{name}")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    program = tmp_path / "apptainer"
    program.write_text(_APPTAINER)
    program.chmod(0o755)
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "built").touch()
    return tmp_path


@contextlib.contextmanager
def running(directory: Path, *, cache_bytes: int = 10**9) -> Iterator[Preparing]:
    preparing = Preparing(directory, cache_bytes=cache_bytes)
    try:
        yield preparing
    finally:
        assert preparing.process.stdin is not None
        assert preparing.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            preparing.process.stdin.close()
        preparing.process.wait()
        preparing.process.stdout.close()


def test_an_image_is_converted_once_for_two_and_again_if_the_first_is_killed(directory: Path) -> None:
    def built() -> list[str]:
        return (directory / "built").read_text().splitlines()

    with running(directory) as first, running(directory) as second:
        for preparing in (first, second):
            preparing.order(of("slow"))
            preparing.until("converting" if preparing is first else "another manager prepares the same image")
        wait_until(lambda: built() == ["docker://slow"])
        (directory / "gate").write_text("go\n")
        assert first.answer().image == second.answer().image
        assert built() == ["docker://slow"]

        for preparing in (first, second):
            preparing.order(of("slower"))
            preparing.until("converting" if preparing is first else "another manager prepares the same image")
        wait_until(lambda: built()[1:] == ["docker://slower"])
        first.kill()
        wait_until(lambda: built()[1:] == ["docker://slower"] * 2)
        (directory / "gate").write_text("go\n")
        image = Path(second.answer().image)
        assert [each.name.partition(".")[0] for each in (directory / "cache").glob("*.part-*")] == [image.name]
        with running(directory):
            wait_until(lambda: not list((directory / "cache").glob("*.part-*")))
        assert image.exists()


def test_what_another_process_uses_stays_until_that_is_killed(directory: Path) -> None:
    with running(directory) as first, running(directory, cache_bytes=1) as second:
        used = first.prepared(of("one"))
        own = second.prepared(of("two"))
        assert used.exists()
        assert own.exists()
        first.kill()
        third = second.prepared(of("three"))
        assert [path.exists() for path in (used, own, third)] == [False, True, True]
        assert not (used.parent / f".{used.name}.use").exists()
