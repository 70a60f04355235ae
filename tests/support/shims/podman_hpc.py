"""Shim of NERSC's podman-hpc, which is a wrapper of Podman itself: with a Podman that is real, all its options are."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.shims.shim import fail, record


def main(arguments: list[str]) -> None:
    record("podman-hpc", arguments)
    if arguments[:1] == ["pull"]:
        done = subprocess.run(["podman", *arguments], check=False)
        if done.returncode:
            fail("Pull failed.", done.returncode)
        print("INFO: Migrating image to /scratch/squash")
        return
    if arguments[:1] and arguments[0].startswith("-") and arguments[0] not in ("--help", "--version"):
        fail(f"Error: No such option: {arguments[0]}", 2)
    os.execvp("podman", ["podman", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
