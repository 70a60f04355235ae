"""Filter of system calls: its table, its documentation and its program."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from farcall_endpoint.host.isolation import supervisor
from farcall_endpoint.host.isolation.seccomp import program
from farcall_endpoint.host.isolation.system_calls import NEWEST, OWN, RULES, Action, Rule

SECURITY = Path(__file__).parents[2] / "docs" / "security" / "system-calls.md"
BEGINNING, END = "<!-- system calls: -->", "<!-- :system calls -->"
AUDIT = {0: 0xC000_003E, 1: 0xC000_00B7}
ALLOW, NOTIFY, ERROR = 0x7FFF_0000, 0x7FC0_0000, 0x0005_0000
OWN_PID = 4711


def table() -> str:
    """The rules as a table, one row for each outcome and reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, rule in RULES.items():
        rows.setdefault((outcome(rule), rule.reason), []).append(f"`{name}`")
    lines = ["| system calls | at `landlock` | because otherwise the call |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {what} | {reason} |" for (what, reason), names in rows.items()]
    return "\n".join(lines)


def outcome(rule: Rule) -> str:
    if rule.action is Action.SUPERVISE:
        return "performed by the supervisor"
    if rule.action is Action.IGNORE:
        return "without effect in part" if rule.refused else "without effect on other threads and processes"
    if any(argument.value == OWN for form in rule.permitted for argument in form):
        return "refused, but for the caller itself"
    return "refused in part" if rule.refused or rule.permitted else "refused"


def test_documentation_has_the_table() -> None:
    """``FARCALL_WRITE_ATTACKS=1`` writes it."""
    text = SECURITY.read_text()
    before, _, rest = text.partition(BEGINNING)
    written = f"{before}{BEGINNING}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"
    if os.environ.get("FARCALL_WRITE_ATTACKS"):
        SECURITY.write_text(written)
    assert SECURITY.read_text() == written


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_are_unique(column: int) -> None:
    numbers = [rule.numbers[column] for rule in RULES.values() if rule.numbers[column] is not None]
    assert len(set(numbers)) == len(numbers)
    assert max(each for each in numbers if each is not None) <= NEWEST


def test_numbers_are_those_of_the_kernel() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no headers of the kernel")
    words = [line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR_")]
    known = {name.removeprefix("__NR_"): int(number) for _, name, number in words}
    assert {name: known[name] for name in RULES if name in known} == {
        name: rule.numbers[0] for name, rule in RULES.items() if name in known
    }


@pytest.mark.parametrize(("column", "machine"), [(0, "x86_64"), (1, "aarch64")])
def test_supervisor_knows_the_calls_that_it_gets(column: int, machine: str) -> None:
    supervised = {
        rule.numbers[column]: name
        for name, rule in RULES.items()
        if rule.action is Action.SUPERVISE and rule.numbers[column] is not None
    }
    assert supervisor._CALLS[machine] == supervised


def run(code: bytes, number: int, arguments: Sequence[int] = (), *, audit: int = AUDIT[0]) -> int:
    """Run a program of classic BPF on a call; its answer."""
    padded = [each & 0xFFFF_FFFF_FFFF_FFFF for each in (*arguments, *[0] * 6)][:6]
    data = struct.pack("<IIQ6Q", number, audit, 0, *padded)
    at, value = 0, 0
    while True:
        operation, yes, no, constant = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            [value] = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:
            value &= constant
        elif operation in (0x15, 0x25):
            at += yes if (value == constant if operation == 0x15 else value > constant) else no
        else:
            assert operation == 0x06
            return int(constant)


@pytest.mark.parametrize("column", [0, 1])
def test_every_call_of_the_kernel_has_the_answer_of_its_rule(column: int) -> None:
    code = program(RULES.values(), column=column, audit=AUDIT[column], process=OWN_PID, newest=NEWEST)
    rules = {rule.numbers[column]: rule for rule in RULES.values() if rule.numbers[column] is not None}
    for number in range(NEWEST + 1):
        rule = rules.get(number)
        if rule is None or rule.refused or rule.permitted:
            continue
        expected = {
            Action.SUPERVISE: NOTIFY,
            Action.IGNORE: ERROR,
            Action.REFUSE: ERROR | rule.error,
        }[rule.action]
        assert run(code, number, audit=AUDIT[column]) == expected
    for number in set(range(NEWEST + 1)) - rules.keys():
        assert run(code, number, audit=AUDIT[column]) == ALLOW
    for number in (NEWEST + 1, 2**20, 0x4000_0000 | 250, 2**32 - 1):
        assert run(code, number, audit=AUDIT[column]) == ERROR | errno.ENOSYS
    assert run(code, 1, audit=0x4000_0003) == ERROR | errno.ENOSYS, "programs of 32 bits"


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("prlimit64", (0, 7, 1), ALLOW),
        ("prlimit64", (OWN_PID, 7, 1), ALLOW),
        ("prlimit64", (1, 7, 0), ALLOW),
        ("prlimit64", (1, 7, 1), ERROR | errno.EPERM),
        ("prlimit64", (1, 7, 1 << 32), ERROR | errno.EPERM),
        ("setpriority", (0, 0, 1), ALLOW),
        ("setpriority", (0, 1, 1), ERROR | errno.EPERM),
        ("setpriority", (2, 0, 1), ERROR | errno.EPERM),
        ("sched_setaffinity", (0,), ALLOW),
        ("sched_setaffinity", (1,), ERROR),
        ("seccomp", (1, 0), ALLOW),
        ("seccomp", (1, 8), ERROR | errno.EPERM),
        ("seccomp", (1, 8 | 32), ERROR | errno.EPERM),
        ("fcntl", (0, 8), ERROR | errno.EPERM),
        ("ioctl", (0, 0x8901), ERROR | errno.EPERM),
        ("clone", (17,), ALLOW),
        ("clone", (0x0001_0000 | 17,), ALLOW),
        ("clone", (0x1000_0000 | 17,), ERROR | errno.EPERM),
        ("unshare", (0x0000_0400,), ALLOW),
        ("unshare", (0x80,), ERROR | errno.EPERM),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), ERROR | errno.EPERM),
        ("ioctl", (0, 0x5412 | 1 << 32), ERROR | errno.EPERM),
        ("fcntl", (0, 2), ALLOW),
        ("fcntl", (0, 1026), ERROR | errno.EPERM),
        ("socket", (1, 1), ALLOW),
        ("socket", (1, 5 | 0x80000), ALLOW),
        ("socket", (1, 2 | 0x80000), ERROR | errno.EPERM),
        ("socket", (2, 2), ALLOW),
        ("socketpair", (1, 3), ERROR | errno.EPERM),
    ],
)
def test_forms_of_a_call(name: str, arguments: tuple[int, ...], answer: int) -> None:
    code = program(RULES.values(), column=0, audit=AUDIT[0], process=OWN_PID, newest=NEWEST)
    assert run(code, RULES[name].numbers[0] or 0, arguments) == answer


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("unshare", [0x1000_0000], ERROR | errno.EPERM),  # CLONE_NEWUSER
        ("unshare", [0x400], ALLOW),  # CLONE_FILES
        ("clone", [0x1000_0011], ERROR | errno.EPERM),
        ("clone", [0x11], ALLOW),
        ("setns", [3, 0], ERROR | errno.EPERM),
        ("setsockopt", [3, 1, 13], ERROR),  # SOL_SOCKET, SO_LINGER: it succeeds without effect
        ("setsockopt", [3, 1, 2], ALLOW),
    ],
)
@pytest.mark.parametrize("column", [0, 1])
def test_sandboxed_workers_make_no_namespaces_and_no_slow_connections(
    column: int, name: str, arguments: list[int], answer: int
) -> None:
    rules = [rule for rule in RULES.values() if rule.sandboxed]
    code = program(rules, column=column, audit=AUDIT[column], process=OWN_PID, newest=NEWEST)
    number = RULES[name].numbers[column]
    assert number is not None
    assert run(code, number, arguments, audit=AUDIT[column]) == answer
