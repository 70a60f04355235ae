"""A Docker daemon of a test's own, without a network; its directory and its control group end with it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import wait_until


@dataclasses.dataclass(frozen=True)
class DockerDaemon:
    """``environment``: variables of commands that ask it."""

    environment: dict[str, str]

    def start(
        self, command: Sequence[str], *, stdout: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start a command."""
        return subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command; ``stdout`` has both streams."""
        return subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


@contextlib.contextmanager
def docker_daemon() -> Iterator[DockerDaemon]:
    """A running daemon; the test is skipped, with the daemon's own words, where none starts."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None or shutil.which("docker") is None:
        pytest.skip("docker.io is not installed, or this is not root")
    group = f"farcall-test-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="farcall-docker-") as directory:
        place = Path(directory)
        options = [
            "--bridge=none",
            "--iptables=false",
            "--ip-forward=false",
            "--ip-masq=false",
            "--cgroup-parent",
            group,
        ]
        places = ["--data-root", f"{place}/data", "--exec-root", f"{place}/exec", "--pidfile", f"{place}/pid"]
        address = f"unix://{place}/d.sock"
        # its mounts are its own
        command = ["unshare", "--mount", "--propagation", "private", "dockerd", "--host", address, *options, *places]
        with (place / "log").open("wb") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        found = DockerDaemon({**os.environ, "DOCKER_HOST": address, "HOME": directory})
        try:
            wait_until(lambda: daemon.poll() is not None or found.run(["docker", "version"]).returncode == 0)
            if daemon.poll() is not None:
                pytest.skip(f"dockerd does not start: {(place / 'log').read_text().splitlines()[-1]}")
            yield found
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
            for path in Path("/sys/fs/cgroup").glob(f"*/{group}"):
                with contextlib.suppress(OSError):
                    path.rmdir()
