"""Shim of NERSC's Shifter: options, checks and words of ``src/shifter.c`` and ``src/VolumeMap.c``, version 18.03."""

from __future__ import annotations

import getopt
import os
import re
import sys
from pathlib import Path

from tests.support.shims.shim import fail, record, root_of, run

_LONG = ["help", "volume=", "verbose", "image=", "entrypoint", "workdir=", "module=", "env=", "env-file=", "clearenv"]
_REFUSED_TARGETS = ("/etc", "/var", "/opt/udiImage", "/dev", "/proc")


def main(arguments: list[str]) -> None:
    record("shifter", arguments)
    try:
        options, command = getopt.getopt(arguments, "hnvV:i:e:Ew:m:", _LONG)
    except getopt.GetoptError as error:
        if "not recognized" in error.msg:
            print(f"shifter: unrecognized option '--{error.opt}'", file=sys.stderr)
        fail("Missing an argument!", 1)
    image, volumes, variables, clear, directory = "", [], {}, False, str(Path.cwd())
    for name, value in options:
        match name:
            case "-h" | "--help":
                print("Usage:\nshifter [-h|--help] [-v|--verbose] [--image=<imageType>:<imageTag>]")
                sys.exit(0)
            case "-i" | "--image":
                if not re.fullmatch("(docker|custom|id):.+", value):
                    fail('Incorrect format for image identifier: need "image_type:image_desc"', 1)
                image = value
            case "-V" | "--volume":
                volumes += [_volume(each) for each in value.split(";")]
            case "-e" | "--env":
                if not re.fullmatch("[^=]+=.+", value, re.DOTALL):
                    fail(f"Improperly formatted environment variable: {value}", 1)
                variables[value.partition("=")[0]] = value.partition("=")[2]
            case "-E" | "--clearenv":
                clear = True
            case "-w" | "--workdir":
                directory = value
    if not image:
        fail("No image specified, or specified incorrectly!", 1)
    kind, _, tag = image.partition(":")
    root = root_of(tag)
    if root is None:
        fail(f"FAILED to lookup {kind} image {tag}", 1)
    if os.getuid() == 0:
        fail("Failed to lookup username or attempted to run as root.\n", 1)
    site = [path for path in os.environ.get("SHIM_SITE", "").split(":") if path]
    for index, (source, target, _) in enumerate(volumes):
        # The source is looked for in the container, which has the site's directories.
        if not any(Path(source).is_relative_to(path) for path in site) or not Path(source).exists():
            fail(f'FAILED to find real path for volume "from": {source}\nFAILED to setup image.', 1)
        if not Path(source).is_dir():
            fail(f'FAILED "from" location is not directory: {source}\nFAILED to setup image.', 1)
        if not _exists(target, [("/", str(root)), *((to, of) for of, to, _ in volumes[:index])]):
            fail(f'FAILED to find volume "to": {target}\nFAILED to setup image.', 1)
    inherited = {} if clear else dict(os.environ)
    image_variables = {"PATH": "/usr/bin:/bin"}
    run(
        root,
        command or ["/bin/sh"],
        mounts=[*((path, path, True) for path in site), *volumes],
        variables={**inherited, **image_variables, **variables},
        directory=directory,
    )


def _exists(target: str, mounted: list[tuple[str, str]]) -> bool:
    """Whether a directory exists where these are mounted: target and source of each."""
    to, source = [each for each in mounted if Path(target).is_relative_to(each[0])][-1]
    return (Path(source) / Path(target).relative_to(to)).is_dir()


def _volume(text: str) -> tuple[str, str, bool]:
    source, _, rest = text.partition(":")
    target, _, flags = rest.partition(":")
    if not source or not target:
        fail("Failed to parse volume map options", 1)
    if target == "/opt" or (target != "/var/tmp" and target.startswith(_REFUSED_TARGETS)):
        fail(f"Invalid Volume Map: {text}, aborting! 1\nFailed to parse volume map options", 1)
    if flags not in ("", "ro"):
        fail(f"Invalid mount flags specified: {flags}\nFailed to parse volume map options", 1)
    return source, target, flags != "ro"


if __name__ == "__main__":
    main(sys.argv[1:])
