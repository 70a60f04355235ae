"""Functions that all systems run; a module, because most peers send functions by name."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

Stops = tuple[tuple[int, int, int], ...]
"""Of a value on its way: process, and nanoseconds of the machine's monotonic clock when a function got it and returned
it."""


# -- edges -------------------------------------------------------------------------------------------------------------


def pass_on(carried: tuple[Stops, Any]) -> tuple[Stops, Any]:
    """A stage of a chain: the value that it gets, with its own stop."""
    began = time.monotonic_ns()
    stops, value = carried
    return (*stops, (os.getpid(), began, time.monotonic_ns())), value


def load_numpy(pause_s: float) -> None:
    """Import what the next functions need, and wait, so that each worker gets one of these calls."""
    import numpy  # noqa: F401

    time.sleep(pause_s)


def produce(size: int, mark: int, pause_s: float) -> tuple[Stops, Any]:
    """A new array, after a pause in which all receivers fall asleep."""
    import numpy as np

    value = np.full(size, mark, np.uint8)
    time.sleep(pause_s)
    return ((os.getpid(), 0, time.monotonic_ns()),), value


def produce_in_place(size: int, mark: int, pause_s: float) -> tuple[Stops, Any]:
    """The same in memory that its reader shares."""
    import numpy as np

    from farcall import current

    value = np.frombuffer(current().buffer(size), np.uint8)
    value[:] = mark
    time.sleep(pause_s)
    return ((os.getpid(), 0, time.monotonic_ns()),), value


def consume(carried: tuple[Stops, Any], size: int, mark: int) -> Stops:
    """The stops of an array that is the right one."""
    began = time.monotonic_ns()
    stops, value = carried
    assert value.size == size
    assert value[0] == mark == value[-1]
    return (*stops, (os.getpid(), began, 0))


# -- small functions ---------------------------------------------------------------------------------------------------


def numbers(count: int) -> list[int]:
    """The values for a fan-out."""
    return list(range(count))


def increment(number: int) -> int:
    """One call of a fan-out."""
    return number + 1


def increment_at(values: Sequence[int], place: int) -> int:
    """The same where a system passes lists as a whole."""
    return values[place] + 1


def total(values: Sequence[int]) -> int:
    """A fan-in."""
    return sum(values)


def total_of(*values: int) -> int:
    """The same where a system passes values one by one."""
    return sum(values)


def join(one: int, other: int) -> int:
    """A node of the layers."""
    return (one + other) % 1009


def drive(count: int) -> int:
    """A function that calls a function."""
    from farcall import current

    return sum(current().map(increment, range(count)))


Away = tuple[bool, int, float, float]
"""Of a call: whether another manager ran it, in which process; microseconds from its submission to its beginning there,
and from its return there to its value at its caller."""


def drive_elsewhere(count: int, size: int, pauses_s: tuple[float, float, float]) -> list[Away]:
    """Calls that another manager runs, because this function keeps the only worker of its own busy."""
    from farcall_common.running import current

    def elsewhere(size: int, pause_s: float) -> tuple[int, int, int, bytes, int]:
        began = time.monotonic_ns()
        value = os.urandom(size)
        time.sleep(pause_s)
        return os.getppid(), os.getpid(), began, value, time.monotonic_ns()

    ended: list[Away] = []
    for number in range(count):
        longer = 1 if number else 4  # the first call imports what the others need
        submitted = time.monotonic_ns()
        future = current().submit(elsewhere, size, longer * pauses_s[1])
        time.sleep(longer * pauses_s[0])
        parent, process, began, value, returned = future.result()
        back_us = (time.monotonic_ns() - returned) / 1000
        assert len(value) == size
        ended.append((parent != os.getppid(), process, (began - submitted) / 1000, back_us))
        time.sleep(pauses_s[2])
    return ended


# -- Alexa skills (ServerlessBench, test case 4) -----------------------------------------------------------------------


def frontend(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a person said, for a skill."""
    words = request["text"].lower().replace(",", "").split()
    skill = "smarthome" if "home" in words else "fact"
    return {"skill": skill, "text": " ".join(words), "user": request["user"], "session": request["session"]}


def interact(request: Mapping[str, Any]) -> dict[str, Any]:
    """The intent and its slots in a sentence."""
    before, _, password = request["text"].rpartition("password ")
    intent = "EnterHomeIntent" if "enter" in before else "AMAZON.FallbackIntent"
    slots = {"password": {"name": "password", "value": password, "confirmationStatus": "NONE"}}
    return {
        "session": {"sessionId": request["session"], "user": {"userId": request["user"]}, "new": False},
        "request": {"type": "IntentRequest", "locale": "en-US", "intent": {"name": intent, "slots": slots}},
    }


def smarthome(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Commands for the devices of a home, if the password is right."""
    intent = envelope["request"]["intent"]
    is_right = intent["name"] == "EnterHomeIntent" and intent["slots"]["password"]["value"] == "sesame"
    command = {"req_switch": "ON" if is_right else "OFF"}
    return {"user": envelope["session"]["user"]["userId"], "door": command, "light": command}


def door(commands: Mapping[str, Any]) -> str:
    """A device."""
    return f"door {commands['door']['req_switch']} for {commands['user']}"


def light(commands: Mapping[str, Any]) -> str:
    """Another one."""
    return f"light {commands['light']['req_switch']} for {commands['user']}"


REQUEST = {"text": "Alexa, enter home with password sesame", "user": "u-17", "session": "s-4711"}
ALEXA_RESULT = ["door ON for u-17", "light ON for u-17"]


# -- word count --------------------------------------------------------------------------------------------------------


def split(text: str, count: int) -> list[str]:
    """A text in as many pieces."""
    lines = text.splitlines()
    step = -(-len(lines) // count)
    return ["\n".join(lines[at : at + step]) for at in range(0, len(lines), step)]


def count_words(text: str) -> dict[str, int]:
    """How often each word is in a text."""
    return dict(collections.Counter(text.split()))


def merge(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The sums by word."""
    sums: collections.Counter[str] = collections.Counter()
    for each in counts:
        sums.update(each)
    return dict(sums)


def corpus(lines: int) -> str:
    """A text of ten words a line, some of them frequent."""
    return "\n".join(
        " ".join(f"word{(line * 7 + place * place) % (11 if place % 2 else 200)}" for place in range(10))
        for line in range(lines)
    )
