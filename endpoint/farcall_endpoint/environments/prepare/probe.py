"""Probe: which Python an image has, asked by a tiny program that the image's own Python runs. No I/O.

What it prints is input from the maker of the image: it is bounded and checked.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from farcall_common.environments import TREES, WITHOUT_CONTAINER
from farcall_common.plain_text import plain
from farcall_endpoint.environments.prepare.bundle import Abi

LEAST_VERSION: Final = (3, 11)
MOST_OUTPUT_BYTES: Final = 64 * 1024

STANDARD_MODULES: Final = (
    *(
        "__future__",
        "array",
        "ast",
        "atexit",
        "base64",
        "concurrent",
        "contextlib",
        "copyreg",
        "ctypes",
        "dataclasses",
        "datetime",
        "decimal",
    ),
    *("difflib", "enum", "faulthandler", "fcntl", "fnmatch", "gc", "hashlib", "hmac", "importlib", "inspect"),
    "ipaddress",
    *(
        "json",
        "linecache",
        "logging",
        "math",
        "mmap",
        "multiprocessing",
        "numbers",
        "os",
        "pathlib",
        "pickle",
        "platform",
        "random",
        "re",
    ),
    *(
        "resource",
        "select",
        "selectors",
        "shutil",
        "signal",
        "site",
        "socket",
        "stat",
        "struct",
        "subprocess",
        "tempfile",
    ),
    *("sysconfig", "textwrap", "threading", "tokenize", "traceback", "types", "typing", "urllib", "uuid", "warnings"),
    *("weakref", "zlib"),
)
"""Modules of the standard library that a worker needs; distributions leave some out of a small Python."""

_MARK: Final = "farcall-probe:"
_PROGRAM: Final = """
import importlib.util, json, os, sys, sysconfig
known = sys.builtin_module_names
print("\\nMARK" + json.dumps({
    "executable": sys.executable or os.readlink("/proc/self/exe"),
    "version": sys.version_info[:2],
    "implementation": sys.implementation.name,
    "soabi": sysconfig.get_config_var("SOABI") or "",
    "missing": [m for m in sys.argv[1].split(",") if m not in known and importlib.util.find_spec(m) is None],
}))
""".replace("MARK", _MARK)

_CANDIDATES: Final = (
    *("python3", "python", "/usr/local/bin/python3", "/usr/bin/python3", "/opt/conda/bin/python3"),
    *("/opt/venv/bin/python3", "/venv/bin/python3"),
)
_ABSENT: Final = re.compile(r"no such file|not found|cannot find|can't find|not executable|permission denied", re.I)

_SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NOT_FOUND: Final = (126, 127)
"""Exit codes of a runner, and of a shell, for a program that does not exist."""


class Python(msgspec.Struct, frozen=True, kw_only=True):
    """The Python of an image."""

    executable: Annotated[str, msgspec.Meta(pattern=r"^/[ -~]+$", max_length=1000)]
    version: tuple[int, int]
    implementation: Annotated[str, msgspec.Meta(pattern=r"^[a-z]+$", max_length=20)]
    soabi: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_-]*$", max_length=80)]
    missing: Annotated[list[Annotated[str, msgspec.Meta(pattern=r"^\w+$", max_length=40)]], msgspec.Meta(max_length=99)]

    @property
    def abi(self) -> Abi:
        """Its kind."""
        return Abi(version="{}.{}".format(*self.version), soabi=self.soabi)

    def problem(self) -> str:
        """Why it cannot run a worker; empty if it can."""
        if self.version < LEAST_VERSION or self.version > (3, 99):
            return "its Python is {}.{}, and workers need {}.{} or later".format(*self.version, *LEAST_VERSION)
        if self.implementation != "cpython" or not self.soabi.startswith("cpython-"):
            return f"its Python is {self.implementation}, not CPython"
        if self.missing:
            return f"its Python lacks modules of the standard library: {', '.join(self.missing)}"
        return ""


def candidates(environment_type: str, image: str) -> tuple[str, ...]:
    """Return the paths at which to look for Python, the best first."""
    if environment_type in WITHOUT_CONTAINER:
        return f"{image}/bin/python3", f"{image}/bin/python"
    return _CANDIDATES


def search_path(environment_type: str, python: str = "") -> dict[str, str]:
    """The variable with the search path of programs, for a directory tree: it lacks the settings that an image has.

    :param python: the absolute path of the tree's Python, whose directory comes first.
    """
    if environment_type not in TREES:
        return {}
    directory = python.rpartition("/")[0]
    is_new = bool(directory) and directory not in _SEARCH_PATH.split(":")
    return {"PATH": f"{directory}:{_SEARCH_PATH}" if is_new else _SEARCH_PATH}


def command(python: str) -> tuple[str, ...]:
    """Return the command that runs the program in an image."""
    return python, "-I", "-S", "-c", _PROGRAM, ",".join(STANDARD_MODULES)


def read(output: bytes) -> Python | None:
    """Decode the program's output; None if this is not its output."""
    lines = output[:MOST_OUTPUT_BYTES].decode(errors="replace").splitlines()
    found = next((line for line in reversed(lines) if line.startswith(_MARK)), "")
    try:
        return msgspec.json.decode(found.removeprefix(_MARK), type=Python)
    except msgspec.DecodeError:
        return None


def is_absent(python: str, output: bytes) -> bool:
    """Whether a runner says that a program does not exist in the image."""
    lines = output[-MOST_OUTPUT_BYTES:].decode(errors="replace").splitlines()
    return any(python in line and _ABSENT.search(line) for line in lines)


def last_lines(output: bytes, *, most_lines: int = 8, most_characters: int = 1000) -> str:
    """The end of a runner's output, for an error message."""
    lines = [plain(line).strip() for line in output.decode(errors="replace").splitlines()]
    text = "; ".join([line for line in lines if line and not line.startswith(_MARK)][-most_lines:])
    return text if len(text) <= most_characters else f"...{text[-most_characters:]}"
