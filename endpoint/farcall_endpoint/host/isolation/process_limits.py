"""Limits of processes (``RLIMIT_NPROC``) and descriptors of workers of other submitters. Imports nothing of Farcall.

The kernel counts processes and threads for the whole account, so one submitter could use up what another one needs. A
limit is therefore relative to what runs when a worker starts. In a user namespace of its own, the kernel counts a
worker's processes apart, from Linux 5.14 on. Root is exempt from this limit, also without its capabilities.

As a program, it limits and becomes a command: ``python -I -S process_limits.py MORE COMMAND...``.
"""

from __future__ import annotations

import os
import re
import resource
import sys

_COUNTS_APART = (5, 14)
"""First version of Linux that counts the processes of each user namespace separately."""
_LEAST_SHARE = 256
"""Least limit of a submitter: libraries start a thread for each core."""
_FIELDS = re.compile(rb"^(Uid|Threads):\s*(\d+)", re.MULTILINE)


def command(more: int) -> list[str]:
    """Return the words to write before a command to limit its processes; none where the limit has no effect.

    :param more: processes and threads that may run besides those that run when the command starts; 0: no limit.
    """
    return [sys.executable, "-I", "-S", __file__, str(more)] if more and os.geteuid() != 0 else []


def limit_processes(more: int, *, apart: int = 0, outer: str = "") -> None:
    """Limit the processes and threads of this account, for this process and its descendants, for good.

    :param more: processes and threads that may run besides those that run now; 0: no limit.
    :param apart: the limit to use instead of ``more`` in a user namespace other than ``outer``, if the kernel counts
        the processes of each user namespace separately.
    """
    if outer not in ("", user_namespace()) and _kernel() >= _COUNTS_APART:
        more = apart
    if not more:
        return
    most = _running() + more
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def limit_descriptors() -> None:
    """Limit open descriptors to less than what the endpoint may have. The kernel compares those that are on their way
    through sockets, of the whole account, with this limit of the sender: then the endpoint can still send some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = soft - soft // 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def user_namespace() -> str:
    """The name of this process's user namespace."""
    return os.readlink("/proc/self/ns/user")  # noqa: PTH115


def share(limit: int, *, workers: int) -> int:
    """A limit for each worker, or less where the account may not have as many: an equal part then, with one for the
    endpoint itself, but not fewer than a task may need.

    :param limit: 0: no limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if not limit or soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return limit
    return min(limit, max(_LEAST_SHARE, soft // (workers + 1)))


def _kernel() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


def _running() -> int:
    """The threads of this account that this process sees."""
    user, count = os.getuid(), 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            try:
                # root owns the entries of processes that others may not read
                if entry.name.isdigit() and entry.stat().st_uid in (0, user):
                    with open(f"/proc/{entry.name}/status", "rb") as file:  # noqa: PTH123
                        fields = dict(_FIELDS.findall(file.read()))
                    count += int(fields[b"Threads"]) if int(fields[b"Uid"]) == user else 0
            except (OSError, KeyError):  # it has ended
                continue
    return count


if __name__ == "__main__":
    limit_descriptors()
    limit_processes(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
