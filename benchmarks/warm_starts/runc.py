"""The peer: containers of bare runc, with the worker's code mounted and its first message sent as by our launcher."""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_endpoint.contracts.manager_worker import channel_pair
from farcall_endpoint.environments.launcher import RunningTemplate
from farcall_endpoint.environments.prepare.bundle import BOOTSTRAP, RUN, make_bundle, own_abi
from farcall_endpoint.host.process_reaper import kill_trees
from farcall_endpoint.manager.core.events import Event
from farcall_endpoint.manager.shell.worker_process import WorkerProcess, open_capture_file
from farcall_endpoint.worker import boot as booting
from farcall_endpoint.worker.boot import Boot, Descriptors
from farcall_endpoint.worker.settings import WorkerSettings

_TARGET: Final = "/run/farcall"
_SOCKET: Final = "s"
_LIMIT_MS: Final = 60_000
_SECRET_BYTES: Final = 32
_PRIVATE: Final = ("nosuid", "nodev", "mode=1777")


class RuncLauncher:
    """A :class:`~farcall_endpoint.manager.shell.launcher.WorkerLauncher`; :meth:`launch` waits for the container's
    program.

    Each container has namespaces for mounts, processes, IPC and the host name, no capabilities and runc's own control
    group, and shares the network, as those of our bubblewrap runner do.

    :param image: the directory of a root file system with this process's version of Python.
    :param directory: of its own.
    """

    def __init__(self, image: Path, directory: Path) -> None:
        program = shutil.which("runc", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        if program is None:
            raise RuntimeError("runc is not installed")
        self._command = [program, "--root", str(directory / "runc")]
        self._image, self._work = image, directory / "work"
        self._containers: dict[str, tuple[WorkerProcess, Path]] = {}
        self._connections: dict[str, socket.socket] = {}
        self._names = (f"farcall-bench-{os.getpid()}-{number}" for number in itertools.count())
        self._bundle = make_bundle(
            own_abi(), directory / "cache", run=lambda command: subprocess.run(command, check=True)
        )
        self._epoll = select.epoll()

    def launch(
        self,
        worker_id: int,  # noqa: ARG002
        *,
        slot: int,  # noqa: ARG002
        submitter: str,  # noqa: ARG002
        environment: Environment | None = None,  # noqa: ARG002
    ) -> WorkerProcess:
        """Start a worker."""
        directory = Path(tempfile.mkdtemp())
        run = directory / RUN
        run.mkdir()
        (run / booting.SECRET).write_bytes(secret := secrets.token_bytes(_SECRET_BYTES))
        name = next(self._names)
        (directory / "config.json").write_text(json.dumps(self._configuration(run)))
        channel, worker_end, claims = channel_pair()
        output = (open_capture_file(), open_capture_file())
        with booting.listen(str(run / _SOCKET)) as listener:
            process = subprocess.Popen(
                [*self._command, "run", "--bundle", str(directory), name],
                stdin=subprocess.DEVNULL,
                stdout=output[0],
                stderr=output[1],
                start_new_session=True,
            )
            pidfd = os.pidfd_open(process.pid)
            worker = WorkerProcess(process, channel, worker_end, pidfd, output, namespaced=True)
            self._containers[name] = worker, directory
            poll = select.poll()
            for each in (listener, pidfd):
                poll.register(each, select.POLLIN)
            ready = dict(poll.poll(_LIMIT_MS))
            if listener.fileno() not in ready:
                raise RuntimeError(f"runc: {worker.tails()[1]}")
            # The worker writes to it when it begins.
            connection = self._connections[name] = listener.accept()[0]
            if connection.recv(len(secret)) != secret:
                raise RuntimeError("another program than the container's has connected")
        with claims:
            variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", **WorkerSettings().to_variables()}
            boot = Boot(variables, str(self._work), merged=True)
            booting.send_boot(connection, boot, Descriptors(worker_end.fileno(), claims.fileno(), *output))
        return worker

    def _configuration(self, run: Path) -> dict[str, Any]:
        def temporary(path: str) -> dict[str, Any]:
            return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": list(_PRIVATE)}

        def bound(source: Path, target: str, *options: str) -> dict[str, Any]:
            return {"destination": target, "type": "bind", "source": str(source), "options": ["rbind", *options]}

        return {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": ["python3", "-I", "-S", f"{_TARGET}/{BOOTSTRAP}", f"{_TARGET}/{RUN}/{_SOCKET}"],
                "env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"],
                "cwd": "/",
                "capabilities": {name: [] for name in ("bounding", "effective", "permitted")},
                "noNewPrivileges": True,
            },
            "root": {"path": str(self._image), "readonly": True},
            "hostname": "farcall",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                temporary("/tmp"),
                temporary("/run"),
                bound(self._bundle, _TARGET, "ro"),
                bound(run, f"{_TARGET}/{RUN}", "ro"),
                bound(self._work, str(self._work), "rw"),
            ],
            "linux": {"namespaces": [{"type": each} for each in ("pid", "mount", "ipc", "uts")]},
        }

    def serve(self) -> Sequence[Event]:
        """Remove what is left of containers that have ended."""
        for name, (worker, directory) in list(self._containers.items()):
            if worker.process.poll() is not None:  # type: ignore[attr-defined]
                subprocess.run([*self._command, "delete", "--force", name], check=False, capture_output=True)
                shutil.rmtree(directory)
                if (connection := self._connections.pop(name, None)) is not None:
                    connection.close()
                del self._containers[name]
        return ()

    def close(self) -> None:
        """End what is left."""
        for worker, _ in self._containers.values():
            kill_trees({worker.pid})
            worker.process.wait()
        self.serve()
        self._epoll.close()

    def fileno(self) -> int:
        """Never readable."""
        return self._epoll.fileno()

    def next_deadline(self) -> float:
        """Never."""
        return math.inf

    @property
    def children(self) -> set[int]:
        """None but workers."""
        return set()

    def prepare(self, environment: Environment) -> None:
        """Nothing is to be prepared."""

    def release(self, key: str) -> None:
        """Nothing is to be released."""

    def refusal(self, environment: Environment) -> ErrorRecord | None:  # noqa: ARG002
        """None."""
        return None

    def trust(self, environment: Environment) -> None:
        """All are."""

    def learn(self, imports_key: str, modules: Sequence[str]) -> None:
        """There are no templates."""

    def measured(self, process: WorkerProcess) -> None:
        """Not asked for."""

    @property
    def has_templates_of_others(self) -> bool:
        """There are no templates."""
        return False

    def templates_of_others(self) -> Sequence[RunningTemplate]:
        """There are none."""
        return ()

    def template_takes(self, name: str, size_bytes: int) -> None:
        """There is none."""

    def end_template(self, name: str, reason: str) -> None:
        """There is none."""
