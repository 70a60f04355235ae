"""Fork safety: what makes a process unfit to be a template, in one sentence each.

A fork copies one thread. A lock that another thread held stays locked in the child, a connection would be shared by all
children, and the contexts of accelerators do not survive at all.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Final

#: Packages that must not be in a template, and why.
FORBIDDEN: Final[Mapping[str, str]] = {
    "polars": "its thread pool does not survive a fork: a child hangs in its first query",
    "grpc": "gRPC does not support forks of a process that has loaded it: calls of a child hang",
    "jax": "JAX has threads, and deadlocks in a fork",
    "jaxlib": "JAX has threads, and deadlocks in a fork",
    "tensorflow": "its thread pools and devices do not survive a fork",
    "torch_xla": "its devices do not survive a fork",
    "cudf": "it opens a context on a GPU when it is imported",
    "mpi4py.MPI": "its import calls MPI_Init, and MPI does not survive a fork",
    "ray": "its connection to a cluster does not survive a fork",
    "pyspark": "its connection to a Java process does not survive a fork",
    "jpype": "a Java machine does not survive a fork",
    "gevent.monkey": "it replaces what the worker itself stands on",
    "duckdb": "its threads do not survive a fork",
}

#: The module of a package that may run its program when it is imported, as that of ``venv`` does.
PROGRAM: Final = "__main__"
#: Modules whose import does what a template must not do, however often tasks import them.
SIDE_EFFECTS: Final = frozenset(
    (
        *("__main__", "antigravity", "idlelib", "lib2to3", "site", "sitecustomize", "test", "this", "turtledemo"),
        "usercustomize",
    )
)

_REMADE_THREADS: Final = ("jemalloc_bg_thd",)
"""Names of threads that a fork may lose. jemalloc's, which gives memory back to the kernel, runs from the moment that a
library with it is loaded (as pyarrow's is, and so pandas where pyarrow is installed): around a fork jemalloc takes its
locks, and it works without the thread in the child."""
_DEVICES: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband/")
_KINDS: Final = {
    "anon_inode:[eventpoll]": "an epoll descriptor",
    "anon_inode:[io_uring]": "an io_uring",
    "anon_inode:inotify": "an inotify descriptor",
    "anon_inode:[fanotify]": "a fanotify descriptor",
    "anon_inode:[eventfd]": "an eventfd",
    "anon_inode:[timerfd]": "a timer descriptor",
    "anon_inode:[signalfd]": "a signalfd",
    "anon_inode:[userfaultfd]": "a userfaultfd",
}


def is_forbidden(module: str) -> str:
    """Why a module, or its package, must not be imported in a template; empty if it may."""
    parts = module.split(".")
    if parts[0] in SIDE_EFFECTS or PROGRAM in parts:
        return f"{module}: its import has effects of its own"
    for count in range(1, len(parts) + 1):
        package = ".".join(parts[:count])
        if package in FORBIDDEN:
            return f"{package}: {FORBIDDEN[package]}"
    return ""


def hazard(*, expected: Collection[int]) -> str:
    """Why this process cannot be forked; empty if it can.

    :param expected: descriptors that it had before it imported modules of others.
    """
    return _threads() or _libraries(sys.modules) or _open_files(expected) or _mapped_devices()


def thread_count() -> int:
    """The threads of this process that a fork would lose, and the one that forks. Those of C libraries count, too."""
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - before every fork: pathlib takes longer
    return len(threads) if len(threads) == 1 else sum(not _is_remade(thread) for thread in threads)


def _is_remade(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().strip() in _REMADE_THREADS
    except OSError:
        return False  # it has ended, or may not be read


def kept_files(expected: Collection[int]) -> set[int]:
    """Descriptors of files that modules opened for reading: they belong to the modules, in all children."""
    return {descriptor for descriptor in _descriptors() - set(expected) if _is_read_only_file(descriptor)}


def _threads() -> str:
    count = thread_count()
    return "" if count == 1 else f"it has {count} threads, and a fork copies one"


def _libraries(loaded: Iterable[str]) -> str:
    found = sorted(FORBIDDEN.keys() & set(loaded))
    return f"{found[0]} is loaded: {FORBIDDEN[found[0]]}" if found else ""


def _open_files(expected: Collection[int]) -> str:
    for descriptor in sorted(_descriptors() - set(expected)):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        except OSError:
            continue  # that of the listing
        if target.startswith(_DEVICES):
            return f"it has a device open ({target}), whose context does not survive a fork"
        if target.startswith("socket:"):
            return "it has a socket open, which all children would share"
        if target in _KINDS:
            return f"it has {_KINDS[target]} open, which all children would share"
        if not _is_read_only_file(descriptor):
            return f"it has {target} open, which all children would share"
    return ""


def _is_read_only_file(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="utf-8") as file:  # noqa: PTH123
            flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
        target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return False
    writable = flags & os.O_ACCMODE != os.O_RDONLY
    harmless_device = target in ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")
    return harmless_device or (not writable and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)))


def _mapped_devices() -> str:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        for line in file:
            path = line[line.find("/") :].strip() if "/" in line else ""
            if path.startswith(_DEVICES):
                return f"it has mapped {path}, whose context does not survive a fork"
    return ""


def _descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
