"""Shim of Shifter's ``shifterimg``: its modes and words, after ``src/shifterimg.c``."""

from __future__ import annotations

import os
import sys

from tests.support.shims.shim import fail, record, root_of


def main(arguments: list[str]) -> None:
    record("shifterimg", arguments)
    if not arguments:
        fail("Must specify mode (images, lookup, pull)!", 1)
    if arguments[0].startswith("-"):
        fail("Missing an argument!", 1)
    if arguments[0] not in ("lookup", "pull", "pullnb", "images", "login", "expire", "autoexpire"):
        fail("Invalid mode specified", 1)
    if "SHIM_NO_GATEWAY" in os.environ:
        print("ERROR: failed to contact the image gateway.")
        sys.exit(1)
    image = arguments[1]
    known = root_of(image.removeprefix("docker:")) is not None
    if arguments[0] == "pull":
        state = "READY" if known else "FAILURE"
        print(f"\r\x1b[2K2026-11-25T12:00:00 Pulling Image: {image}, status: {state}")
    elif arguments[0] == "lookup":
        if not known:
            sys.exit(1)
        print("2c5e5a1f")


if __name__ == "__main__":
    main(sys.argv[1:])
