"""A shared endpoint under attack by one of its users: objects in memory, and tickets in the kernel's keyrings."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.endpoint import FakeCloud, running_endpoint
from tests.support.endpoint.levels import ATTACKER, LEVELS, VICTIM, endpoint_at_each_level

endpoint = endpoint_at_each_level(workers=1)


def put_object() -> Any:
    from farcall import store

    return store.put(list(range(200)))


def sum_of(references: list[Any]) -> int:
    return sum(references[0].get())


def plant_code(path: str) -> dict[str, str]:
    """Look for names of objects, and put code in the place of one whose name has leaked."""
    import ctypes
    import os
    import pathlib
    import pickle

    import farcall

    class Planted:
        def __reduce__(self) -> Any:
            return eval, ("[31337]",)

    def watch() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        watched = str(farcall.current().memory_dir.parent)  # type: ignore[union-attr]
        if libc.inotify_add_watch(libc.inotify_init1(os.O_NONBLOCK), watched.encode(), 0xFFF) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def write() -> None:
        with pathlib.Path(path).open("r+b") as file:
            data = file.read()
            planted = data[64:].partition(b"\n")[0] + b"\n" + pickle.dumps(Planted())
            file.seek(64)
            file.write(planted.ljust(len(data) - 64, b"\0"))

    found = {}
    for action in (watch, write):
        try:
            action()
        except OSError as error:
            found[action.__name__] = type(error).__name__
        else:
            found[action.__name__] = "done"
    return found


@pytest.mark.parametrize("reader", ["", VICTIM], ids=["the owner", "another submitter"])
def test_code_in_the_place_of_an_object_does_not_run(cloud: FakeCloud, level: str, reader: str) -> None:
    reference: Any = cloud.end(cloud.submit(put_object, submitter=reader)).value
    file = Path(reference.config["path"]) / reference.key.name
    attacked: Any = cloud.end(cloud.submit(plant_code, str(file), submitter=ATTACKER)).value
    ended = cloud.end(cloud.submit(sum_of, [reference], submitter=reader))
    if level in ("none", "process"):
        assert attacked == {"watch": "done", "write": "done"}
        assert ended.value == 31337, "the attack works where nothing separates submitters"
        return
    if level == "landlock":
        assert attacked["watch"] != "done"
        assert attacked["write"] == "done", "tasks can open files in memory by name"
        assert ended.error["exception_type"].endswith("ObjectDamaged")
        return
    assert attacked["write"] == "FileNotFoundError"
    assert ended.value == 19900


KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(os.uname().machine)
"""Numbers of add_key and keyctl."""


def keep_tickets(add_key: int, keyctl: int) -> list[str]:
    """Keep a key wherever Kerberos keeps tickets; the names of the keyrings that this kernel has."""
    import ctypes

    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    rings = {"session": ctypes.c_long(-3), "user": ctypes.c_long(-4)}
    persistent = call(ctypes.c_long(keyctl), ctypes.c_long(22), ctypes.c_long(-1), ctypes.c_long(-2))
    if persistent > 0:
        rings["persistent"] = ctypes.c_long(persistent)
    kept = []
    for name, ring in rings.items():
        key = call(ctypes.c_long(add_key), b"user", f"ticket-{name}".encode(), b"secret", ctypes.c_long(6), ring)
        if key > 0:
            call(ctypes.c_long(keyctl), ctypes.c_long(15), ctypes.c_long(key), ctypes.c_long(600))  # SET_TIMEOUT
            kept.append(name)
    return kept


def steal_tickets(keyctl_number: int) -> dict[str, str]:
    """Read the owner's tickets. The user's keyring and the persistent one must be linked first."""
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long

    def keyctl(*arguments: object) -> int:
        values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        result = int(libc.syscall(ctypes.c_long(keyctl_number), *values))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def search(ring: int, name: str) -> str:
        data = ctypes.create_string_buffer(64)
        length = keyctl(11, keyctl(10, ring, b"user", f"ticket-{name}".encode(), 0), data, 64)  # SEARCH, READ
        return data.raw[:length].decode()

    def in_user() -> str:
        keyctl(8, -4, -2)  # LINK, to the keyring of the process
        return search(-2, "user")

    def in_persistent() -> str:
        return search(keyctl(22, -1, -2), "persistent")  # GET_PERSISTENT

    found = {}
    for name, action in {
        "session": lambda: search(-3, "session"),
        "user": in_user,
        "persistent": in_persistent,
    }.items():
        try:
            found[name] = action()
        except OSError:
            found[name] = "refused"
    return found


@pytest.mark.skipif(KEYCTL is None, reason="the numbers of the calls are not known here")
@pytest.mark.parametrize("level", LEVELS)
def test_tasks_of_others_read_no_ticket_of_the_owner(level: str, tmp_path: Path) -> None:
    """The owner has logged in, and has a session keyring. Other tests may have spoiled that of the user."""
    assert KEYCTL is not None
    joined = ctypes.CDLL(None).syscall(ctypes.c_long(KEYCTL[1]), ctypes.c_long(1), None)  # JOIN_SESSION_KEYRING
    assert joined > 0
    with running_endpoint(tmp_path, workers=1, engine={"isolation": level}) as endpoint:
        cloud = endpoint.cloud
        kept: Any = cloud.end(cloud.submit(keep_tickets, *KEYCTL)).value
        own: Any = cloud.end(cloud.submit(steal_tickets, KEYCTL[1])).value
        found: Any = cloud.end(cloud.submit(steal_tickets, KEYCTL[1], submitter=ATTACKER)).value
    assert "session" in kept
    assert {name for name in kept if own[name] == "secret"} == set(kept), "that tickets can be read at all"
    readable = {"none": set(kept), "process": set(kept) - {"session"}}.get(level, set())
    assert {name for name in kept if found[name] != "refused"} == readable
