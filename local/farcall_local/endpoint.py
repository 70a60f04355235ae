"""A local endpoint for demo, tests and benchmarks, controlled through its command line as by a user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_local.process import log_tail

#: The end of an agent is noticed at once; a start on a loaded machine takes long.
_CONNECTED_WITHIN_S = 240
_COMMAND_WITHIN_S = 300.0
_POLL_S = 0.02


class LocalEndpoint:
    """One endpoint under ``home`` (its FARCALL_HOME): configured and started on entering, stopped on leaving.

    ``environment`` has the address and the token of its API (see :meth:`farcall_local.tier.LocalTier.environment`);
    ``python`` is the interpreter that runs it, next to which is its command.
    """

    def __init__(
        self, name: str, *, home: Path, environment: Mapping[str, str], python: Path = Path(sys.executable)
    ) -> None:
        self.name = name
        self._program = python.with_name("farcall-endpoint")
        self.home = home
        self.directory = home / "endpoints" / name
        self._environment = {**os.environ, **environment, "FARCALL_HOME": str(home)}

    def __enter__(self) -> Self:
        self.configure()
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.kill()

    @property
    def endpoint_id(self) -> str:
        """The endpoint's id, assigned at its first start."""
        return str(json.loads((self.directory / "endpoint.json").read_text())["endpoint_id"])

    @property
    def log_path(self) -> Path:
        return self.directory / "endpoint.log"

    def configure(self) -> None:
        """Create the endpoint's directory, unless it exists."""
        if not (self.directory / "config.yaml").exists():
            self.home.mkdir(parents=True, exist_ok=True)
            self.command("configure", self.name)

    def start(self) -> None:
        """Start the endpoint in the background; returns when its agent is connected."""
        self.command("start", self.name, "--detach", "--timeout", str(_CONNECTED_WITHIN_S))

    def stop(self) -> None:
        """Stop the endpoint, if it runs."""
        if self.agent() is not None:
            self.command("stop", self.name)

    def command(self, *arguments: str) -> str:
        """Run ``farcall-endpoint`` and return its output.

        :raises Unavailable: if it fails; with its output, and the end of the endpoint's log.
        """
        if not self._program.exists():
            raise ConfigurationError("farcall-endpoint is not installed", hint="pip install farcall-endpoint")
        done = subprocess.run(
            self._command_line(arguments),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_COMMAND_WITHIN_S,
        )
        if done.returncode:
            raise Unavailable(
                f"farcall-endpoint {' '.join(arguments)} ended with status {done.returncode}:\n{done.stdout}\n"
                f"{log_tail(self.log_path)}",
                hint=f"The whole log: {self.log_path}",
            )
        return done.stdout

    def _command_line(self, arguments: Sequence[str]) -> list[str]:
        return [str(self._program), *arguments]

    def agent(self) -> psutil.Process | None:
        """The process of the agent, or None while it is down."""
        try:
            named = json.loads((self.directory / "daemon.pid").read_text())
            process = psutil.Process(int(named["pid"]))
            same = abs(process.create_time() - float(named["started_at"])) < 2.0  # process ids are reused
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (FileNotFoundError, ValueError, KeyError, psutil.NoSuchProcess):
            return None

    def processes(self, role: str) -> Sequence[psutil.Process]:
        """The processes of a role (manager or worker) below the agent."""
        agent = self.agent()
        found = []
        for process in agent.children(recursive=True) if agent else []:
            try:
                if f"farcall_endpoint.{role}" in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def wait_for(self, role: str, *, within_s: float = 240.0) -> Sequence[psutil.Process]:
        """Wait until a process of the role runs; returns all of them.

        :raises Unavailable: after ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if found := self.processes(role):
                return found
            time.sleep(_POLL_S)
        raise Unavailable(f"no {role} started within {within_s:g} s:\n{log_tail(self.log_path)}")

    def kill(self) -> None:
        """Kill all remaining processes of the endpoint."""
        agent = self.agent()
        family = [*agent.children(recursive=True), agent] if agent else []
        for process in family:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=5)
