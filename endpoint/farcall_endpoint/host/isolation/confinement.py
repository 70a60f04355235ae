"""Confinement: a worker of another submitter gives up what its tasks must not reach, before the first of them."""

from __future__ import annotations

import json
import os
import site
import socket
import sys
from collections.abc import Sequence
from typing import Final

from farcall_endpoint.host.isolation import Isolation

_SOCKET: Final = "FARCALL_WORKER_SUPERVISOR"
_PROGRAM: Final = os.path.join(os.path.dirname(__file__), "supervisor.py")  # noqa: PTH118, PTH120
SUPERVISED: Final = (sys.executable, "-I", "-S", _PROGRAM, _SOCKET)
"""Start of a command that runs below a supervisor, as a worker of level ``landlock`` must."""

_CONFINE: Final = (
    "import json, os, sys; from farcall_endpoint.host.isolation.confinement import confine; "
    "confine('landlock', **json.loads(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
)


def confined_command(command: Sequence[str], *, readable: Sequence[str], writable: Sequence[str]) -> list[str]:
    """A command that runs another one at level ``landlock``."""
    paths = json.dumps({"readable": readable, "writable": writable})
    return [*SUPERVISED, sys.executable, "-P", "-s", "-c", _CONFINE, paths, *command]


def confine(level: str, *, readable: Sequence[str], writable: Sequence[str]) -> None:
    """Confine this process, which has one thread, for good. No code of the submitter has run in it.

    :param level: of :class:`Isolation`; empty: the process is confined from outside, and by Landlock.
    :param writable: without some, Landlock is not used.
    :raises OSError: if the kernel refuses.
    """
    if level:
        from farcall_endpoint.host.isolation.process import (
            drop_capabilities,  # an image's Python may lack what they need         )
        )

        drop_capabilities()
    if writable:
        from farcall_endpoint.host.isolation import landlock

        landlock.confine(readable=readable, writable=writable)
    if level:
        from farcall_endpoint.host.isolation import seccomp

        listener = seccomp.install(namespaced=level == Isolation.BUBBLEWRAP)
        if listener is not None:
            with socket.socket(fileno=int(os.environ.pop(_SOCKET))) as supervisor:
                socket.send_fds(supervisor, [b"."], [listener])
                supervisor.sendall(json.dumps({"readable": readable, "writable": writable}).encode())
            os.close(listener)


def add_user_packages() -> None:
    """Make packages importable that the submitter's tasks have installed with ``pip install --user``.

    The worker's interpreter starts without them (``-s``), since they would run before the confinement.
    """
    is_plain_venv = [sys.prefix] == site.PREFIXES
    if not is_plain_venv and os.path.isdir(directory := site.getusersitepackages()):  # noqa: PTH112
        site.addsitedir(directory)
