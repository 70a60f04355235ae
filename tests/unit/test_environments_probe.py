"""What an image's Python answers: it is input from the maker of the image."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from farcall_endpoint.environments.prepare import probe
from farcall_endpoint.environments.prepare.bundle import own_abi

GOOD = {
    "executable": "/usr/bin/python3",
    "version": [3, 12],
    "implementation": "cpython",
    "soabi": "cpython-312-x86_64-linux-gnu",
    "missing": [],
}


def answer(**changes: object) -> bytes:
    return f"a word of the image\nfarcall-probe:{json.dumps({**GOOD, **changes})}\n".encode()


def test_this_python() -> None:
    done = subprocess.run(probe.command(sys.executable), capture_output=True, check=True)
    found = probe.read(done.stdout)
    assert found is not None
    assert found.abi == own_abi()
    assert found.problem() == ""


def test_a_good_one() -> None:
    found = probe.read(answer())
    assert found is not None
    assert (found.executable, found.abi.version, found.abi.platform) == (
        "/usr/bin/python3",
        "3.12",
        "x86_64-unknown-linux-gnu",
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": [3, 10]}, "its Python is 3.10, and workers need 3.11 or later"),
        ({"version": [2, 7]}, "its Python is 2.7, and workers need 3.11 or later"),
        ({"implementation": "pypy"}, "its Python is pypy, not CPython"),
        ({"soabi": ""}, "its Python is cpython, not CPython"),
        ({"missing": ["ctypes", "ssl"]}, "its Python lacks modules of the standard library: ctypes, ssl"),
    ],
)
def test_pythons_that_cannot_run_a_worker(changes: dict[str, object], problem: str) -> None:
    found = probe.read(answer(**changes))
    assert found is not None
    assert found.problem() == problem


@pytest.mark.parametrize(
    "changes",
    [
        {"executable": "relative"},
        {"executable": "/a\nb"},
        {"executable": "/" + "x" * 2000},
        {"version": [3]},
        {"version": ["3", "12"]},
        {"soabi": "../../etc"},
        {"soabi": "x" * 200},
        {"missing": ["a"] * 1000},
        {"missing": ["a; rm -rf /"]},
        {"implementation": 1},
    ],
)
def test_answers_that_are_none(changes: dict[str, object]) -> None:
    assert probe.read(answer(**changes)) is None


@pytest.mark.parametrize("output", [b"", b"\xff" * 100, b"farcall-probe:", b"farcall-probe:" + b"[" * 100_000])
def test_other_output(output: bytes) -> None:
    assert probe.read(output) is None


@pytest.mark.parametrize(
    "output",
    [
        b"bwrap: execvp python3: No such file or directory",
        b"Error: crun: executable file `python3` not found in $PATH: No such file or directory: OCI runtime error",
        b"ch-run[1]: error: can't execve(2): python3: No such file or directory (ch_core.c:1 2)",
        b"FATAL:   stat /usr/bin/python3: no such file or directory",
    ],
)
def test_words_of_runners_for_a_program_that_is_not_there(output: bytes) -> None:
    assert probe.is_absent("python3", output)


def test_words_for_an_image_that_is_not_there_are_others() -> None:
    assert not probe.is_absent("python3", b"bwrap: Can't find source path /images/sci: No such file or directory")


def test_last_lines_are_short_and_plain() -> None:
    assert probe.last_lines(b"one\n\n\x1b[31mtwo\x1b[0m\n") == "one; two"
    assert len(probe.last_lines(b"x" * 10_000)) <= 1010


@pytest.mark.parametrize(
    ("environment_type", "python", "first"),
    [
        ("bubblewrap", "", "/usr/local/sbin:/usr/local/bin:"),
        ("charliecloud", "/usr/local/bin/python3", "/usr/local/sbin:/usr/local/bin:"),
        ("bubblewrap", "/opt/conda/bin/python3", "/opt/conda/bin:/usr/local/sbin:"),
    ],
)
def test_a_directory_tree_has_a_search_path(environment_type: str, python: str, first: str) -> None:
    assert probe.search_path(environment_type, python)["PATH"].startswith(first)


@pytest.mark.parametrize("environment_type", ["apptainer", "docker", "venv", "uv"])
def test_images_and_prefixes_have_a_search_path_of_their_own(environment_type: str) -> None:
    assert probe.search_path(environment_type, "/usr/bin/python3") == {}
