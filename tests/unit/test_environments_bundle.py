"""The worker's code in an image: what it is made of, and that it is enough."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from farcall_endpoint.environments.prepare import bundle
from farcall_endpoint.environments.prepare.bundle import Abi, make_bundle, own_abi, uv_command
from farcall_endpoint.environments.prepare.probe import STANDARD_MODULES
from farcall_endpoint.worker import bootstrap

MOST_BYTES = 4_000_000
OWN = {
    *("farcall_common", "farcall_endpoint", "cloudpickle", "dill", "landlockpy", "msgspec", "typing_extensions"),
}

#: What a worker imports before and during tasks: with code and data of every kind, and confined.
IMPORTS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("bootstrap", sys.argv[1] + "/bootstrap.py")
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)
before = set(sys.modules)
packages = bootstrap.Packages(sys.argv[1] + "/lib")
import farcall_endpoint.worker.__main__
import farcall_endpoint.worker.template
packages.find()
import cloudpickle, dill, dill.source
import farcall_common.payload.by_value
import farcall_endpoint.host.isolation.confinement
import farcall_endpoint.host.isolation.landlock
import farcall_endpoint.host.isolation.process
import farcall_endpoint.worker.files
import farcall_endpoint.worker.helper_processes
import farcall_endpoint.worker.nested
import farcall_endpoint.worker.node_memory
from farcall_common.objects import *
import farcall_endpoint.host.isolation.process_limits
import farcall_endpoint.worker.places
import farcall_common.progress
new = sorted(set(sys.modules) - before)
print(json.dumps({name: getattr(sys.modules[name], "__file__", None) for name in new}))
"""


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(own_abi(), tmp_path_factory.mktemp("cache"), run=run)


def imports(made: Path) -> dict[str, str | None]:
    command = [sys.executable, "-I", "-S", "-c", IMPORTS, str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def modules_in(library: Path) -> Iterator[str]:
    """The names of the Python modules in a bundle's library."""
    for path in library.rglob("*.py"):
        parts = path.relative_to(library).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_bundle_is_small(made: Path) -> None:
    assert {name.partition(".")[0] for name in modules_in(made / "lib")} == OWN
    assert {name for name in modules_in(made / "lib") if name.startswith("farcall_")} == set(bundle.MODULES)
    assert sum(path.stat().st_size for path in made.rglob("*") if path.is_file()) < MOST_BYTES


def test_the_bundle_is_enough_and_no_more(made: Path) -> None:
    """All that a worker imports is in the bundle or the standard library; all of ours in the bundle is imported."""
    found = {name: path for name, path in imports(made).items() if name.partition(".")[0] in OWN}
    assert [name for name, path in found.items() if path and not path.startswith(str(made))] == []
    assert {name for name in found if name.startswith("farcall_")} == set(bundle.MODULES)


def test_the_probe_asks_for_what_the_worker_imports_of_the_standard_library(made: Path) -> None:
    tops = {name.partition(".")[0] for name in imports(made)} & sys.stdlib_module_names
    public = {name for name in tops if not name.startswith("_")} | {"__future__"}
    built_in = {"posixpath", "ntpath", "genericpath", "sitecustomize"}
    assert public - set(STANDARD_MODULES) - built_in <= INDIRECT
    assert set(STANDARD_MODULES) <= sys.stdlib_module_names


#: Imported by other modules of the standard library, with which they are installed.
INDIRECT = {
    *("binascii", "bisect", "bz2", "collections", "copy", "dis", "errno", "functools", "heapq", "itertools", "keyword"),
    *("locale", "lzma", "opcode", "operator", "reprlib", "string", "token"),
}


def test_no_one_else_may_write_a_bundle(made: Path) -> None:
    assert [str(path) for path in (made, *made.rglob("*")) if path.stat().st_mode & 0o022] == []
    assert list((made / "run").iterdir()) == []


def test_processes_that_make_the_same_bundle_do_not_disturb_each_other(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(make_bundle(own_abi(), tmp_path, run=run))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(made) == {tmp_path / bundle.name_of(own_abi())}
    assert list(tmp_path.iterdir()) == [made[0]]


@pytest.mark.parametrize("lost", ["lib/farcall_common/errors.py", "files", "run"])
def test_a_bundle_of_which_a_part_was_deleted_is_made_again(made: Path, tmp_path: Path, lost: str) -> None:
    copy = shutil.copytree(made, tmp_path / made.name)
    kept = (copy / "bootstrap.py").stat().st_ino
    assert make_bundle(own_abi(), tmp_path, run=run) == copy
    assert (copy / "bootstrap.py").stat().st_ino == kept, "a whole one stays"
    path = copy / lost
    path.rmdir() if path.is_dir() else path.unlink()
    assert make_bundle(own_abi(), tmp_path, run=run) == copy
    assert path.exists()
    assert [each.name for each in tmp_path.iterdir()] == [copy.name]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """The limit of a file's size stands for the disk."""
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from farcall_endpoint.environments.prepare.bundle import make_bundle, own_abi\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: make_bundle(own_abi(), Path(sys.argv[1]), run=print)\n"
        "except OSError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout
    assert len(done.stdout) < 500
    assert not list(tmp_path.iterdir())


def test_a_failed_installation_leaves_nothing(tmp_path: Path) -> None:
    def fail(command: Sequence[str]) -> None:
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        make_bundle(Abi(version="3.13", soabi="cpython-313-x86_64-linux-gnu"), tmp_path, run=fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "soabi", "words"),
    [
        ("3.12", "cpython-312-x86_64-linux-gnu", ["3.12", "x86_64-unknown-linux-gnu"]),
        ("3.13", "cpython-313t-x86_64-linux-gnu", ["3.13t", "x86_64-unknown-linux-gnu"]),
        ("3.13", "cpython-313-aarch64-linux-musl", ["3.13", "aarch64-unknown-linux-musl"]),
    ],
)
def test_wheels_are_those_of_the_image(version: str, soabi: str, words: list[str]) -> None:
    command = uv_command(
        Abi(version=version, soabi=soabi), Path("/target"), index_url="https://index.example.org/simple"
    )
    assert [command[command.index(option) + 1] for option in ("--python-version", "--python-platform")] == words
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert command[command.index("--default-index") + 1] == "https://index.example.org/simple"


def test_an_image_has_its_own_libraries_and_the_worker_its_own(made: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    site = prefix / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for name in ("msgspec", "dill", "typing_extensions"):
        (site / f"{name}.py").write_text("WHOSE = 'the image'\n")
    (site / "farcall_common").mkdir()
    (site / "farcall_common" / "__init__.py").write_text("")
    (site / "farcall_common" / "more.py").write_text("WHOSE = 'the image'\n")
    program = """
import runpy, sys
sys.argv[1:] = []
names = runpy.run_path(sys.path_of_bundle + "/bootstrap.py")
packages = names["Packages"](sys.path_of_bundle + "/lib")
from farcall_endpoint.contracts.manager_worker import Order
packages.find()
import dill, msgspec, typing_extensions, farcall_common.more, farcall_common.errors
print(msgspec.WHOSE, typing_extensions.WHOSE, farcall_common.more.WHOSE, hasattr(dill, "WHOSE"))
"""
    program = program.replace("sys.path_of_bundle", repr(str(made)))
    command = [str(prefix / "bin" / "python"), "-I", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "the image the image the image False\n", done.stderr
    assert bootstrap.HIDDEN == ("msgspec", "typing_extensions")
