"""bubblewrap: a worker in mount, process and IPC namespaces of its own, and in a user namespace where that works.

What is not mounted does not exist for its tasks: neither files nor the Unix sockets among them. What they may only read
is mounted read-only, so its modes and times cannot be changed either. They see no processes but their own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_endpoint.host.isolation import sandbox, seccomp
from farcall_endpoint.host.isolation.paths import DEVICES, SHARED_MEMORY
from farcall_endpoint.host.isolation.trial import problem

#: A private directory in memory, for programs that do not ask for TMPDIR.
TEMPORARY: Final = "/tmp"  # noqa: S108 - the worker's own
_NAMESPACES: Final = (
    *("--unshare-user-try", "--unshare-pid", "--unshare-ipc"),
    *("--cap-drop", "ALL"),  # root would keep its own
    "--die-with-parent",  # with its manager, and all processes of the namespace with it
)

OF_DESCRIPTOR: Final = "--ro-bind-fd"
"""Mounts what a descriptor refers to, or fails."""
KERNEL_SETTINGS: Final = ("/proc/sys", "/proc/fs")
"""Root may write there without any capability, as the owner of the files: one of them names a program that the kernel
runs. bubblewrap itself makes other such files read-only, not these."""
_NESTED: Final = ("--cap-add", "CAP_SETFCAP")
"""Without it, root of a user namespace can make no further one (from Linux 5.12 on). The runner drops it."""
_OF_TEMPLATES: Final = ("--unshare-user", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP")
"""Root's: an ordinary user makes further user namespaces. Never without a user namespace: there it is the machine's."""


def missing() -> str:
    """Why workers cannot be started in namespaces on this node; empty if they can."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap: the program bwrap is not installed"
    if reason := seccomp.missing():
        return f"bubblewrap: {reason}"
    mounts = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", TEMPORARY]
    reason = problem([*_program(program), *_NAMESPACES, *mounts, "true"])
    return f"bubblewrap: {reason}" if reason else ""


def _program(path: str) -> list[str]:
    """bubblewrap as the command of a sandbox whose local sockets have a network namespace of their own."""
    code = seccomp.sandbox_program().hex()
    return [sys.executable, "-I", "-S", sandbox.__file__, code, path]


def of_template(prefix: Sequence[str]) -> list[str]:
    """A :func:`prefix` for a template whose forks get namespaces of their own. Only for the endpoint's own Python and
    modules: as root, they could mount another ``/proc`` and write the settings of the kernel. Its forks cannot."""
    if os.geteuid() != 0 or not prefix:
        return list(prefix)
    at = prefix.index(_NAMESPACES[-1]) + 1
    return [*prefix[:at], *_OF_TEMPLATES, *prefix[at:]]


def prefix(
    *,
    readable: Iterable[str],
    writable: Iterable[str],
    directory: Path,
    nested: bool = False,
    shown: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the words to write before a command so that it runs in namespaces with only these paths.

    :param readable: existing paths, with those of their targets where they are links.
    :param writable: directories without links. What is mounted lies in none of them: their owner could replace the
        place of a mount by a link.
    :param directory: working directory of the command; it is empty if it is not among the paths.
    :param nested: whether the command is a container's runner, which makes namespaces in these.
    :param shown: further paths to read, each with the path without links, or the number of the descriptor, that is seen
        there. What lies in a readable directory is looked up in the view instead.
    """
    sources = {} if shown is None else shown
    mounts = {path: "--ro-bind-try" for path in readable if Path(path).parts[1:2] not in (("proc",), ("dev",))}
    mounts |= {path: "--ro-bind-try" if source.startswith("/") else OF_DESCRIPTOR for path, source in sources.items()}
    in_memory = [path for path in writable if path.startswith(f"{SHARED_MEMORY}/")]
    mounts |= dict.fromkeys(set(writable).difference(in_memory), "--bind") | {TEMPORARY: "--tmpfs"}
    command = [*_program(shutil.which("bwrap") or "bwrap"), *_NAMESPACES]
    if nested and os.geteuid() == 0:
        command += _NESTED
    done: dict[str, str] = {}
    for path in sorted(mounts, key=lambda each: Path(each).parts):
        kind = mounts[path]
        above = next((done[str(each)] for each in Path(path).parents if str(each) in done), "")
        if above == "--ro-bind-try" and (kind == above or path in sources):
            continue  # it is there already
        done[path] = "--ro-bind-try" if kind == OF_DESCRIPTOR else kind
        command += [kind, path] if kind == "--tmpfs" else [kind, sources.get(path, path), path]
    command += ["--dev", "/dev", "--proc", "/proc"]
    for path in in_memory:
        command += ["--bind", path, path]
    for path in KERNEL_SETTINGS if os.geteuid() == 0 else ():
        command += ["--ro-bind-try", path, path]
    for device in filter(os.path.exists, DEVICES):
        command += ["--dev-bind-try", device, device]
    return [*command, "--dir", str(directory), "--remount-ro", "/", "--chdir", str(directory), "--"]
