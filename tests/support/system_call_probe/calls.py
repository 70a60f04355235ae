"""Table of all system calls: numbers, and kinds of the arguments that the walk gives them."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Call:
    """A system call.

    :param numbers: on x86-64 and on AArch64; None: the architecture lacks the call.
    :param forms: kinds of the arguments, for each form of the call.
    :param excluded: why the walk does not make the call.
    """

    name: str
    numbers: tuple[int | None, int | None]
    forms: tuple[str, ...]
    excluded: str = ""


def _read() -> dict[str, Call]:
    found = {}
    for line in (Path(__file__).parent / "calls.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        names, _, kinds = line.partition("|")
        x86, arm, name = names.split()
        numbers = (_number(x86), _number(arm))
        reason = kinds.strip().removeprefix("- ") if kinds.strip().startswith("- ") else ""
        found[name] = Call(name, numbers, () if reason else tuple(kinds.split(";")), reason)
    return found


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


CALLS = _read()
