"""Voice assistant: a request passes through five functions, as the skill for a smart home of the Alexa benchmark.

    python examples/alexa.py --endpoint NAME

Each request is one task: the functions give their values to one another at the endpoint (see :func:`farcall.chain`).
One by one, each of them would be a round trip through the cloud tier. The chain is that of ServerlessBench (SoCC 2020),
with which Molecule was measured, too ("Serverless Computing on Heterogeneous Computers", ASPLOS 2022).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from farcall import chain

REQUESTS = (
    "Alexa, ask smart home to open the door with code 1729",
    "Alexa, ask smart home to switch on the light in the kitchen",
    "Alexa, ask smart home to open the door with code 0000",
    "Alexa, ask weather for tomorrow",
)
ANSWERS = (
    "The door is open.",
    "The light in the kitchen is on.",
    "The code is wrong: the door stays closed.",
    "There is no skill named weather.",
)


def frontend(spoken: str) -> dict[str, Any]:
    """The words of what was said, without the assistant's name."""
    name, _, rest = spoken.partition(",")
    return {"for": name.strip().lower(), "words": rest.lower().split()}


def interact(request: dict[str, Any]) -> dict[str, Any]:
    """The skill that is asked for, and what it is asked."""
    words = request["words"][1:]
    skill = "smart home" if words[:2] == ["smart", "home"] else words[0]
    return {"skill": skill, "words": [word for word in words if word not in skill.split()]}


def smart_home(request: dict[str, Any]) -> dict[str, Any]:
    """The device and its new state, with what permits that."""
    words = request["words"]
    if request["skill"] != "smart home":
        return {"device": None, "skill": request["skill"]}
    if "door" in words:
        return {"device": "door", "permitted": words[-1] == "1729"}
    return {"device": "light", "room": words[-1], "on": "on" in words}


def device(order: dict[str, Any]) -> dict[str, Any]:
    """The state of the device after the order."""
    if order["device"] == "door":
        return {**order, "state": "open" if order["permitted"] else "closed"}
    return {**order, "state": "on" if order.get("on") else "off"}


def answer(state: dict[str, Any]) -> str:
    """What is said in reply."""
    match state:
        case {"device": "door", "permitted": False}:
            return "The code is wrong: the door stays closed."
        case {"device": "door", "state": found}:
            return f"The door is {found}."
        case {"device": "light", "room": room, "state": found}:
            return f"The light in the {room} is {found}."
        case _:
            return f"There is no skill named {state['skill']}."


skill = chain(frontend, interact, smart_home, device, answer)


def run(executor: Executor, requests: Sequence[str] = REQUESTS) -> list[str]:
    """The answers, in the order of the requests.

    :raises RuntimeError: if one of the known requests has another answer.
    """
    answers = list(executor.map(skill, requests))
    known = dict(zip(REQUESTS, ANSWERS, strict=True))
    for request, found in zip(requests, answers, strict=True):
        if known.get(request, found) != found:
            raise RuntimeError(f"{request!r} was answered with {found!r}")
    return answers


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Answer requests to a voice assistant.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    with farcall.Executor(endpoint_id=parser.parse_args().endpoint) as executor:
        for request, found in zip(REQUESTS, run(executor), strict=True):
            print(f"{request}\n    {found}")
        took_ms = []
        for number in range(20):
            began = time.perf_counter()
            run(executor, REQUESTS[number % len(REQUESTS) :][:1])
            took_ms.append(1000 * (time.perf_counter() - began))
    print(f"five functions, one after the other: {statistics.median(took_ms):.1f} ms (median of {len(took_ms)})")


if __name__ == "__main__":
    main()
