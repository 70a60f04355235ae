"""Process of the owner that tasks of others attack: it has a token in each place that belongs to a process.

A program that stands alone: ``python -I -S owner_process.py JSON`` prints the identifiers of its kernel objects, and
removes these at the end of its input.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_FIXED_NOREPLACE = 0x100000
_USER_KEYRING = -4


def show(address: int, token: bytes) -> None:
    """Map a page at an address that no other process uses, with a token."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    found = _libc.mmap(ctypes.c_void_p(address), 4096, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    assert found == address
    ctypes.memmove(address, token, len(token))


def main(settings: dict[str, Any]) -> None:
    """Have the tokens until the input ends."""
    numbers, tokens = settings["numbers"], {name: text.encode() for name, text in settings["tokens"].items()}

    def call(name: str, *arguments: object) -> int:
        values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        result = int(_libc.syscall(ctypes.c_long(numbers[name]), *values))
        if result < 0:
            raise OSError(ctypes.get_errno(), name)
        return result

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})  # stays pending, where the owner sees it
    os.chdir(settings["directory"])
    show(settings["address"], tokens["memory"])
    named = os.memfd_create(settings["tokens"]["mapping"])
    os.ftruncate(named, 4096)
    mapped = mmap.mmap(named, 4096)
    key, queue = settings["key"], settings["queue"].encode()
    memory = call("shmget", key, 4096, 0o1600)
    address = call("shmat", memory, 0, 0)
    ctypes.memmove(address, tokens["shm"], 8)
    semaphores = call("semget", key, 1, 0o1600)
    messages = call("msgget", key, 0o1600)
    call("msgsnd", messages, (1).to_bytes(8, "little") + tokens["message"], 8, 0)
    waiting = call("mq_open", queue, os.O_CREAT | os.O_RDWR, 0o600, None)
    call("mq_timedsend", waiting, tokens["queue"], 8, 0, None)
    secret = call("add_key", b"user", settings["key_name"].encode(), tokens["key"], 8, _USER_KEYRING)
    print(json.dumps({"shm": memory, "sem": semaphores, "msg": messages, "key": secret}), flush=True)
    sys.stdin.read()
    mapped.close()
    for name, *arguments in (
        ("shmctl", memory, 0, 0),
        ("semctl", semaphores, 0, 0, 0),
        ("msgctl", messages, 0, 0),
        ("mq_unlink", queue),
        ("keyctl", 9, secret, _USER_KEYRING),
    ):
        try:
            call(str(name), *arguments)
        except OSError:
            continue  # a task has removed it


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
