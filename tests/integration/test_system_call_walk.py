"""A walk through all system calls at each level of isolation: what tasks of others reach of an owner's resources."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any, Final

import pytest

from farcall_endpoint.host.isolation.system_calls import NEWEST, RULES
from tests.support.endpoint import FakeCloud, running_endpoint
from tests.support.endpoint.levels import ATTACKER, LEVELS, VICTIM, victims_of
from tests.support.ordinary_user import USER
from tests.support.system_call_probe import walker
from tests.support.system_call_probe.calls import CALLS
from tests.support.system_call_probe.outcomes import (
    Outcome,
    cell,
    document,
    documented,
    not_accepted,
)
from tests.support.system_call_probe.owner import ADDRESS, Owner, orders, unknown_numbers
from tests.waiting import WAIT_S, wait_until

MORE: Final = int(os.environ.get("FARCALL_WALK_MORE", "0"))
"""Further combinations of each call's arguments, at random. ``make walk`` sets it."""
ENOSYS: Final = 38


def wait_with_tokens(address: int, memory: str, file: str) -> None:
    """Have a token in memory and one in a file. The process is known by its name, and has no capabilities."""
    import ctypes
    import mmap
    import pathlib
    import time

    libc = ctypes.CDLL(None)
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    libc.prctl(15, b"victim", 0, 0, 0)  # PR_SET_NAME
    libc.mmap.restype = ctypes.c_void_p
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    libc.mmap(ctypes.c_void_p(address), 4096, 3, kind, -1, 0)
    ctypes.memmove(address, memory.encode(), 8)
    pathlib.Path("note").write_text(file)
    time.sleep(1000)


def walk(source: str, port: int) -> None:
    """Run the walker. A task cannot import its module."""
    import sys
    import types

    module = sys.modules["walker"] = types.ModuleType("walker")
    exec(source, module.__dict__)
    module.main(port)


def walk_at(level: str, home: Path) -> tuple[dict[str, Outcome], dict[str, list[int]]]:
    """Walk through all calls; the outcome and the error numbers of each."""
    user = USER if os.geteuid() == 0 and level != "bubblewrap" else os.geteuid()
    found: dict[str, Outcome] = {}
    errors: dict[str, list[int]] = {}
    with (
        Owner(home, user) as owner,
        running_endpoint(home, workers=2, engine={"isolation": level}) as endpoint,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        cloud = endpoint.cloud
        tokens = owner.token("process", "worker"), owner.token("file", "note")
        waiting = cloud.submit(wait_with_tokens, ADDRESS, *tokens, submitter=VICTIM)
        working = endpoint.directory.path / "tasks_working_dir"
        notes = [working / "submitters" / VICTIM / "note", working / "note"]
        wait_until(lambda: victims_of(endpoint) and [each for each in notes if each.exists() and each.read_text()])
        [victim] = victims_of(endpoint)
        [manager] = endpoint.managers()
        assert endpoint.agent is not None
        processes = {"agent": endpoint.agent.pid, "manager": manager.pid, "worker": victim.pid}
        owner.attach(processes, [each for each in notes if each.exists()])
        source = Path(walker.__file__).read_text()
        task = cloud.submit(walk, source, server.getsockname()[1], submitter=ATTACKER, max_attempts=1)
        server.settimeout(WAIT_S)
        connection, _ = server.accept()
        connection.settimeout(WAIT_S)
        with connection, connection.makefile("rw") as lines:
            for name, order in orders(owner, more=MORE if level in ("landlock", "bubblewrap") else 0):
                lines.write(json.dumps(order) + "\n")
                lines.flush()
                answer = _answer(lines.readline(), cloud, task, name)
                read = {owner.label(token) or token for token in answer["tokens"]}
                reached = set(answer["found"])
                changed = owner.changed(name, reached=bool(read or reached))
                found[name] = Outcome.of(name, read=read, changed=changed, found=reached)
                errors[name] = answer["errors"]
        assert cloud.end(task).error == {}
        cloud.cancel(waiting)
    return found, errors


def _answer(line: str, cloud: FakeCloud, task: str, name: str) -> dict[str, Any]:
    assert line, f"the walk ended at {name}: {cloud.end(task).error}"
    answer: dict[str, Any] = json.loads(line)
    return answer


@pytest.mark.parametrize("level", LEVELS)
def test_walk_of_all_system_calls(level: str, tmp_path: Path) -> None:
    """docs/security/system-calls.md says what each call reaches. From ``landlock`` on, all of it is accepted."""
    found, errors = walk_at(level, tmp_path)
    for name, number in unknown_numbers():
        if number <= NEWEST or level == "landlock":
            assert set(errors[name]) <= {ENOSYS}, f"system call {number} is not in calls.txt"
    if level in ("landlock", "bubblewrap"):
        assert not_accepted(level, found) == {}
    if MORE:
        return
    cells = {name: cell(outcome) for name, outcome in found.items() if name in CALLS}
    if os.environ.get("FARCALL_WRITE_ATTACKS"):
        document(f"`{level}`", cells)
    known = documented()
    expected = {name: known.get(name, {}).get(f"`{level}`", "nothing") for name in cells}
    missing = {name for name in cells if set(errors[name]) <= {ENOSYS}}  # an older kernel lacks it, or a filter refuses
    different = {name: (cells[name], expected[name]) for name in cells if cells[name] != expected[name]}
    assert {name: pair for name, pair in different.items() if name not in missing} == {}


def test_every_call_has_a_place_in_the_walk() -> None:
    """Each number up to the newest that was reviewed is that of one call, which is walked or has a reason not to be."""
    holes = (set(range(337, 424)), {*range(244, 260), *range(295, 424)})
    for column, hole in enumerate(holes):
        numbers = [call.numbers[column] for call in CALLS.values() if call.numbers[column] is not None]
        assert len(set(numbers)) == len(numbers)
        assert hole.isdisjoint(numbers)
        assert set(numbers) | hole == set(range(NEWEST + 1))
    assert all(bool(call.forms) != bool(call.excluded) for call in CALLS.values())
    assert {name: CALLS[name].numbers for name in RULES} == {name: rule.numbers for name, rule in RULES.items()}
