"""Shim of Singularity 3.8: the options of its ``exec`` and ``build`` that are used, its words and exit codes."""

from __future__ import annotations

import getopt
import os
import re
import sys
from pathlib import Path

from tests.support.shims.shim import fail, record, root_of, run

_EXEC = [
    *("bind=", "cleanenv", "contain", "containall", "env=", "fakeroot", "home=", "hostname=", "ipc", "keep-privs"),
    *("net", "network=", "no-home", "no-init", "no-mount=", "no-privs", "nv", "overlay=", "pid", "pwd=", "rocm"),
    *("scratch=", "security=", "userns", "uts", "vm", "workdir=", "writable", "writable-tmpfs"),
]
_BUILD = [
    "disable-cache",
    "docker-login",
    "fakeroot",
    "fix-perms",
    "force",
    "json",
    "library=",
    "no-cleanup",
    "nohttps",
]
_NO_MOUNT = ("proc", "sys", "dev", "devpts", "home", "tmp", "hostfs", "cwd", "bind-paths")


def main(arguments: list[str]) -> None:
    record("singularity", arguments)
    while arguments and arguments[0] in ("--silent", "-s", "--quiet", "-q", "--debug", "-d", "--verbose", "-v"):
        arguments = arguments[1:]
    name, rest = arguments[0] if arguments else "", arguments[1:]
    match name:
        case "exec":
            _exec(*_parsed(name, rest, "B:eCcfH:inpS:uW:w", _EXEC))
        case "build":
            _build(*_parsed(name, rest, "fsF", [*_BUILD, "sandbox"]))
        case "buildcfg":
            print(os.environ.get("SHIM_LIBEXEC", "/usr/libexec"))
        case _:
            fail(f'Error for command "singularity": unknown command "{name}" for "singularity"', 1)


def _parsed(command: str, arguments: list[str], short: str, long: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    try:
        return getopt.getopt(arguments, short, long)
    except getopt.GetoptError as error:
        fail(f'Error for command "{command}": unknown flag: --{error.opt}', 1)


def _exec(options: list[tuple[str, str]], rest: list[str]) -> None:
    if len(rest) < 2:
        fail(f'Error for command "exec": requires at least 2 arg(s), only received {len(rest)}', 1)
    found, mounts = dict(options), []
    for option, value in options:
        if option in ("--bind", "-B"):
            source, target, *flags = value.split(":")
            if not Path(source).exists():
                fail(
                    f"FATAL:   container creation failed: mount {source}->{target} error: no such file or directory",
                    255,
                )
            mounts.append((source, target, flags != ["ro"]))
        elif option == "--no-mount" and (unknown := [each for each in value.split(",") if each not in _NO_MOUNT]):
            print(f"WARNING: Ignoring unknown mount type '{unknown[0]}'", file=sys.stderr)
        elif option == "--network" and value not in ("none", "bridge", "host"):
            fail(f"FATAL:   container creation failed: {value}: no net configuration with that name", 255)
    image = Path(rest[0])
    if not image.exists():
        path = rest[0]
        words = (
            f"could not open image {path}: failed to retrieve path for {path}: lstat {path}: no such file or directory"
        )
        fail(f"FATAL:   {words}", 255)
    root = image if image.is_dir() else Path(image.read_text())
    given = {
        name.removeprefix("SINGULARITYENV_"): value
        for name, value in os.environ.items()
        if name.startswith("SINGULARITYENV_")
    }
    isolated = found.keys() & {"--containall", "-C", "--cleanenv", "-e"}
    inherited = {} if isolated else {name: value for name, value in os.environ.items() if name not in given}
    namespaces = ["--unshare-net"] if found.get("--network") == "none" and "--net" in found else []
    if found.keys() & {"--containall", "-C", "--pid", "-p"}:
        namespaces.append("--unshare-pid")
    run(
        root,
        rest[1:],
        mounts=mounts,
        variables={"PATH": "/usr/bin:/bin", **inherited, **given},
        directory=found.get("--pwd", "/"),
        namespaces=namespaces,
    )


def _build(options: list[tuple[str, str]], rest: list[str]) -> None:
    target, location = rest
    reference = re.sub("^docker://", "", location)
    root = root_of(reference)
    print("INFO:    Starting build...", file=sys.stderr)
    if root is None:
        words = f"conveyor failed to get: reading manifest in {reference}: manifest unknown: manifest unknown"
        fail(f"FATAL:   While performing build: {words}", 255)
    if any(option in ("--sandbox", "-s") for option, _ in options):
        Path(target).symlink_to(root)
    else:
        Path(target).write_text(str(root))
    print("INFO:    Build complete: " + target, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
