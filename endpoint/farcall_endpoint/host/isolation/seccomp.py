"""seccomp: a filter of system calls, generated from :data:`~farcall_endpoint.host.isolation.system_calls.RULES`.

The filter is a program of classic BPF (https://docs.kernel.org/userspace-api/seccomp_filter.html). libseccomp's Python
binding for ``ctypes`` has had no release since 2021, and needs the C library on the node.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from farcall_endpoint.host.isolation.system_calls import (
    NEWEST,
    OWN,
    RULES,
    SANDBOX_RULES,
    Action,
    Argument,
    Rule,
    architecture,
)

_LOAD: Final = 0x20
"""BPF_LD | BPF_W | BPF_ABS."""
_EQUAL: Final = 0x15
"""BPF_JMP | BPF_JEQ | BPF_K."""
_GREATER: Final = 0x25
"""BPF_JMP | BPF_JGT | BPF_K."""
_AND: Final = 0x54
"""BPF_ALU | BPF_AND | BPF_K."""
_RETURN: Final = 0x06
"""BPF_RET | BPF_K."""

_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Places in ``struct seccomp_data``."""
_ALLOW: Final = 0x7FFF_0000
_ERROR: Final = 0x0005_0000
_NOTIFY: Final = 0x7FC0_0000
_SET_FILTER: Final = 1
"""SECCOMP_SET_MODE_FILTER."""
_NEW_LISTENER: Final = 1 << 3
_WAIT_KILLABLE: Final = 1 << 5
"""A call that the supervisor performs is not begun again after a signal (Linux 5.19)."""
_NO_NEW_PRIVILEGES: Final = 38
"""PR_SET_NO_NEW_PRIVS."""
_ALL_BUT_X32: Final = 0x3FFF_FFFF
"""Largest number without the bit that marks the calls of x32, which would pass by the rules."""
_SECCOMP: Final = (317, 277)
"""Numbers of the system call itself, by column."""
_GET_ACTION: Final = 2
"""SECCOMP_GET_ACTION_AVAIL."""

_Instruction = tuple[int, int, int, int]


def missing() -> str:
    """Why system calls cannot be filtered on this node; empty if they can."""
    found = architecture()
    if found is None:
        return f"seccomp: no table of system calls for {os.uname().machine}"
    action = ctypes.c_uint32(_NOTIFY)
    if _libc().syscall(_SECCOMP[found[0]], _GET_ACTION, 0, ctypes.byref(action)) != 0:
        return f"seccomp: kernel {os.uname().release} lacks CONFIG_SECCOMP_FILTER or user notification"
    return ""


def install(*, namespaced: bool) -> int | None:
    """Filter the system calls of this process and its descendants, for good. The process has one thread.

    :param namespaced: whether the process has namespaces of its own: then only rules hold that say so.
    :returns: a descriptor on which a supervisor receives calls; None if it has nothing to do.
    :raises OSError: if the kernel refuses.
    """
    found = architecture()
    if found is None:
        raise OSError(errno.ENOSYS, missing())
    column, audit = found
    rules = {name: rule for name, rule in RULES.items() if rule.sandboxed or not namespaced}
    newest = _ALL_BUT_X32 if namespaced else NEWEST
    code = program(rules.values(), column=column, audit=audit, process=os.getpid(), newest=newest)
    array = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(array))
    libc = _libc()
    flags = 0 if namespaced else _NEW_LISTENER | _WAIT_KILLABLE
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    listener: int = libc.syscall(_SECCOMP[column], _SET_FILTER, flags, header)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return None if namespaced else listener


@functools.cache
def sandbox_program() -> bytes:
    """Assemble the filter of a sandbox (:data:`~farcall_endpoint.host.isolation.system_calls.SANDBOX_RULES`).

    :raises OSError: if this machine's architecture is not known.
    """
    found = architecture()
    if found is None:
        raise OSError(errno.ENOSYS, missing())
    column, audit = found
    return program(SANDBOX_RULES.values(), column=column, audit=audit, process=0, newest=_ALL_BUT_X32)


def program(rules: Iterable[Rule], *, column: int, audit: int, process: int, newest: int) -> bytes:
    """Assemble the filter.

    :param column: of the architecture in :attr:`Rule.numbers`; ``audit``: its ``AUDIT_ARCH``.
    :param process: id of the process that :data:`OWN` stands for.
    :param newest: number above which all calls are refused.
    """
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),  # programs of 32 bits
        (_LOAD, 0, 0, _NUMBER_AT),
        (_GREATER, 0, 1, newest),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for rule in rules:
        number = rule.numbers[column]
        if number is not None:
            body = list(_body(rule, process))
            code += [(_EQUAL, 0, len(body), number), *body]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *each) for each in code)


def _body(rule: Rule, process: int) -> Iterator[_Instruction]:
    """What follows the comparison of a call's number; every way through it returns."""
    outcome = _outcome(rule)
    match, other = (outcome, _ALLOW) if rule.refused else (_ALLOW, outcome)
    for form in rule.refused or rule.permitted:
        yield from _form(form, match, process)
    yield _RETURN, 0, 0, other


def _form(form: tuple[Argument, ...], match: int, process: int) -> Iterator[_Instruction]:
    """Return ``match`` if all comparisons hold, otherwise continue behind."""
    size = sum(2 if each.mask == 0xFFFF_FFFF else 3 for each in form) + 1
    for argument in form:
        yield _LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument.index + 4 * argument.high
        size -= 1
        if argument.mask != 0xFFFF_FFFF:
            yield _AND, 0, 0, argument.mask
            size -= 1
        size -= 1
        yield _EQUAL, 0, size, process if argument.value == OWN else argument.value
    yield _RETURN, 0, 0, match


def _outcome(rule: Rule) -> int:
    match rule.action:
        case Action.SUPERVISE:
            return _NOTIFY
        case Action.IGNORE:
            return _ERROR
        case Action.REFUSE:
            return _ERROR | rule.error


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
