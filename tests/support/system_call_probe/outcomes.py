"""Outcomes of the walk: words for them, what is accepted, and the table in docs/security/system-calls.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

_PAGE: Final = Path(__file__).parents[3] / "docs" / "security" / "system-calls.md"
_BEGINNING, _END = "<!-- walk: -->", "<!-- :walk -->"
_LEVELS: Final = ("`none`", "`process`", "`landlock`", "`bubblewrap`")
NOTHING: Final = "nothing"

_PLURAL: Final = {
    "file": "files",
    "directory": "directories",
    "link": "links",
    "process": "processes",
    "command line": "command lines",
    "socket": "sockets",
    "server": "servers",
    "terminal": "terminals",
    "key": "keys",
    "System V object": "System V objects",
    "message queue": "message queues",
    "shared memory": "shared memory",
    "node": "the node",
}
_SIGNALS: Final = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
_FILES: Final = (
    *("stat", "lstat", "fstat", "newfstatat", "statx", "statfs", "fstatfs", "access", "faccessat", "faccessat2"),
    *("open", "openat", "chdir", "fchdir", "readlink", "readlinkat", "file_getattr"),
)
_PROCESSES: Final = (
    *("getpgid", "getsid", "getpriority", "sched_getparam", "sched_getscheduler", "sched_rr_get_interval"),
    *("sched_getaffinity", "sched_getattr", "ioprio_get", "prlimit64", "timer_create", "clock_gettime"),
    *("clock_getres", "clock_nanosleep", "pidfd_open"),
)
_OTHERS: Final = (
    *("openat2", "open_tree", "name_to_handle_at", "listxattr", "llistxattr", "flistxattr", "listxattrat"),
    *("getxattr", "lgetxattr", "fgetxattr", "getxattrat", "get_robust_list", "shmget", "semget", "msgget", "mq_open"),
    "keyctl",
)
_VERBS: Final = {
    **dict.fromkeys((*_FILES, *_PROCESSES, *_OTHERS), "finds"),
    **dict.fromkeys(_SIGNALS, "signals"),
    **dict.fromkeys(("flock", "fcntl"), "locks"),
    **dict.fromkeys(("inotify_add_watch", "fanotify_mark"), "watches"),
    "ptrace": "traces",
    "pidfd_getfd": "takes descriptors of",
    "kcmp": "compares",
}
"""What a call does with a resource of another where it succeeds; calls without a verb use the resource."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call reaches: pairs of a verb and the label of a resource."""

    reached: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, call: str, *, read: Collection[str], changed: Collection[str], found: Collection[str]) -> Outcome:
        """Outcome of a call, by the labels of the resources."""
        pairs = {("reads", label) for label in read}
        pairs |= {("reaches" if label in ("socket", "server") else "changes", label) for label in changed}
        verb = _VERBS.get(call, "uses")
        weaker = {label for _, label in pairs} if verb in ("finds", "uses") else set()
        pairs |= {(verb, label) for label in found if label not in weaker}
        return cls(frozenset(pairs))


def cell(outcome: Outcome) -> str:
    """An outcome in words."""
    verbs: dict[str, list[str]] = {}
    order = list(_PLURAL)
    for verb, label in sorted(outcome.reached, key=lambda each: (each[0], order.index(each[1]))):
        verbs.setdefault(verb, []).append(_PLURAL[label])
    return "; ".join(f"{verb} {', '.join(labels)}" for verb, labels in verbs.items()) or NOTHING


# -- what is accepted --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Outcomes that the list "What is accepted" of docs/security/sharing.md has.

    :param calls: empty: all.
    :param labels: empty: all.
    """

    levels: tuple[str, ...]
    calls: tuple[str, ...]
    verbs: tuple[str, ...]
    labels: tuple[str, ...]
    reason: str


ACCEPTED: Final = (
    Accepted(
        ("landlock",),
        _FILES,
        ("finds",),
        (),
        "names, sizes and times are visible to every process of the account; a descriptor of O_PATH gives no more",
    ),
    Accepted(("landlock",), ("readlink", "readlinkat"), ("reads",), ("link",), "the target of a link counts as a name"),
    Accepted(("landlock",), _PROCESSES, ("finds",), ("process",), "/proc reports the same to all of the account"),
    Accepted(
        ("landlock",),
        ("lseek", "ioctl", "fcntl", "flock", "cachestat"),
        ("uses", "locks"),
        ("process",),
        "a descriptor of a process (pidfd) has no content, and no program uses locks on it",
    ),
    Accepted(
        ("landlock",), (), ("reads", "changes", "finds", "uses", "locks"), ("shared memory",), "programs need /dev/shm"
    ),
    Accepted(("landlock", "bubblewrap"), ("connect",), ("reaches",), ("server",), "every level leaves the network"),
)


def not_accepted(level: str, found: Mapping[str, Outcome]) -> dict[str, list[tuple[str, str]]]:
    """What calls reach at a level and no row of :data:`ACCEPTED` has."""
    rows = [row for row in ACCEPTED if level in row.levels]
    left = {}
    for call, outcome in found.items():
        pairs = [
            (verb, label)
            for verb, label in sorted(outcome.reached)
            if not any(
                (not row.calls or call in row.calls) and verb in row.verbs and (not row.labels or label in row.labels)
                for row in rows
            )
        ]
        if pairs:
            left[call] = pairs
    return left


# -- the table ---------------------------------------------------------------------------------------------------------


def documented() -> dict[str, dict[str, str]]:
    """Cells by call and level, as the table of docs/security/system-calls.md has them."""
    lines = _PAGE.read_text().partition(_BEGINNING)[2].partition(_END)[0].strip().splitlines()
    if not lines:
        return {}
    names, _, *rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    table = {}
    for row in rows:
        for call in row[0].split(","):
            table[call.strip().strip("`")] = dict(zip(names[1:], row[1:], strict=True))
    return table


def document(column: str, cells: Mapping[str, str]) -> None:
    """Write a column of the table (``FARCALL_WRITE_ATTACKS=1``)."""
    table = documented()
    for call, text in cells.items():
        table.setdefault(call, {})[column] = text
    groups: dict[tuple[str, ...], list[str]] = {}
    for call in cells:
        texts = tuple(table[call].get(each, NOTHING) for each in _LEVELS)
        if set(texts) != {NOTHING}:
            groups.setdefault(texts, []).append(f"`{call}`")
    lines = [["system calls", *_LEVELS], ["---"] * 5]
    lines += [[", ".join(calls), *texts] for texts, calls in groups.items()]
    before, _, rest = _PAGE.read_text().partition(_BEGINNING)
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    _PAGE.write_text(f"{before}{_BEGINNING}\n\n{rows}\n{_END}{rest.partition(_END)[2]}")
