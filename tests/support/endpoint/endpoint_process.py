"""Endpoint processes as a user runs them, for tests that kill them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil
import yaml

from farcall_endpoint.config.schema import Config, EngineConfig
from farcall_endpoint.config.template import write_config
from farcall_endpoint.services.directory import EndpointDirectory
from tests.support.endpoint.fake_cloud import FakeCloud
from tests.support.ordinary_user import USER, as_ordinary_user
from tests.waiting import WAIT_S, wait_until

_CHECKOUT = Path(__file__).parents[3]


class EndpointProcess:
    """The endpoint "test" in a home directory, against a fake cloud.

    :param engine: further fields of the ``engine`` section of its configuration.
    :param python: the Python that runs it.
    :param may_be_root: whether root runs it if root runs the test. By default an ordinary user does if the test names
        a level of isolation: an endpoint of root refuses tasks of others.
    :param reachable: further directories that an ordinary user needs; they are opened for all.
    """

    def __init__(
        self,
        home: Path,
        cloud: FakeCloud,
        *,
        workers: int = 2,
        engine: Mapping[str, object] | None = None,
        python: str = sys.executable,
        may_be_root: bool = False,
        reachable: Iterable[Path] = (),
    ) -> None:
        self.home = home
        self.cloud = cloud
        self.directory = EndpointDirectory.of(home, "test")
        if not self.directory.exists:
            self.directory.create()
            write_config(self.directory.config_file, Config(engine=EngineConfig(max_workers_per_node=workers)))
            self._configure({"isolation": "auto"} | dict(engine or {}))
        self.agent: subprocess.Popen[bytes] | None = None
        self._ordinary = not may_be_root and "isolation" in (engine or {})
        self._python = python
        self._reachable = reachable

    @property
    def environment(self) -> dict[str, str]:
        """For commands that belong to this endpoint."""
        return {
            **os.environ,
            "FARCALL_HOME": str(self.home),
            "FARCALL_API_URL": self.cloud.http.url,
            "FARCALL_TOKEN": "test",
        }

    def start(self, *, connected: bool = True) -> None:
        """Start the agent, and wait for its session by default."""
        greeted = len(self.cloud.hellos)
        command = [self._python, "-m", "farcall_endpoint.agent", "test", "--home", str(self.home)]
        if self._ordinary and os.geteuid() == 0:
            for path in (self.home, *self.home.rglob("*")):
                os.chown(path, USER, USER, follow_symlinks=False)
            for path in self._reachable:
                path.chmod(0o755)
            command = as_ordinary_user(
                command, reachable=[self.home, _CHECKOUT, Path(self._python).parents[1], *self._reachable]
            )
        self.agent = subprocess.Popen(command, env=self.environment, start_new_session=True)
        if connected:
            self.cloud.wait_for(lambda: len(self.cloud.hellos) > greeted)
            self.cloud.wait_connected()

    def wait(self, *, timeout_s: float = WAIT_S) -> int:
        """Wait for the agent's end; its exit code."""
        assert self.agent is not None
        return self.agent.wait(timeout_s)

    def stop(self) -> int:
        """An orderly end; returns the exit code."""
        assert self.agent is not None
        if self.agent.poll() is None:
            self.agent.terminate()
        return self.wait()

    def kill_agent(self) -> None:
        """Kill -9, and wait until nothing of the endpoint is left."""
        assert self.agent is not None
        family = self.family()
        self.agent.kill()
        self.agent.wait()
        wait_gone(family)

    def family(self) -> list[psutil.Process]:
        """Everything that the agent has started, and what that has started."""
        assert self.agent is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.agent.pid).children(recursive=True)
        return []

    def managers(self) -> list[psutil.Process]:
        """The live managers, without what these have forked a moment ago."""
        found = [process for process in self.family() if _runs(process, "farcall_endpoint.manager")]
        pids = {process.pid for process in found}
        return [process for process in found if _parent(process) not in pids]

    def workers(self) -> list[psutil.Process]:
        """The live workers."""
        return [process for process in self.family() if _runs(process, "farcall_endpoint.worker")]

    def process_reapers(self) -> list[psutil.Process]:
        """The running process reapers of managers."""
        return [process for process in self.family() if _runs(process, "process_reaper.py")]

    def _configure(self, engine: Mapping[str, object]) -> None:
        file = self.directory.config_file
        config = yaml.safe_load(file.read_text())
        config["engine"].update(engine)
        file.write_text(yaml.safe_dump(config))

    def log(self) -> str:
        """What agent and managers have written."""
        files = [self.directory.log_file, *sorted(self.directory.log_dir.glob("*.log"))]
        return "".join(file.read_text() for file in files)


def _runs(process: psutil.Process, module: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(part.endswith(module) for part in process.cmdline())
    return False


def _parent(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return 0


@contextlib.contextmanager
def running_endpoint(
    home: Path,
    *,
    workers: int = 2,
    start: bool = True,
    engine: Mapping[str, object] | None = None,
    heartbeat_s: float = 5.0,
    python: str = sys.executable,
    may_be_root: bool = False,
    reachable: Iterable[Path] = (),
) -> Iterator[EndpointProcess]:
    """An endpoint with its own fake cloud; both are gone afterwards, and no process is left."""
    cloud = FakeCloud(heartbeat_s=heartbeat_s)
    try:
        endpoint = EndpointProcess(
            home, cloud, workers=workers, engine=engine, python=python, may_be_root=may_be_root, reachable=reachable
        )
        try:
            if start:
                endpoint.start()
            yield endpoint
        finally:
            family = endpoint.family() if endpoint.agent else []
            if endpoint.agent is not None:
                endpoint.stop()
            wait_gone(family)
    finally:
        cloud.close()


def wait_gone(processes: Iterable[psutil.Process], *, timeout_s: float = WAIT_S) -> None:
    """Wait for the end of processes; one that only waits to be collected by init has ended.

    :raises TimeoutError: naming those that live on.
    """
    left = list(processes)

    def ended() -> bool:
        left[:] = [process for process in left if _lives(process)]
        return not left

    try:
        wait_until(ended, timeout_s=timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"still alive: {left}") from error


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
