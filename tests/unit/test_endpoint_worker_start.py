"""Start of a worker: its directory, its variables, its descriptors, its random numbers and its capture files, where a
shorter way is taken than Python's own. What changes a process is tested in one of its own."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from farcall_endpoint.host.slots import Slot
from farcall_endpoint.manager.shell import worker_process
from farcall_endpoint.manager.shell.launcher import FreshProcessLauncher
from farcall_endpoint.manager.shell.worker_process import (
    NextWorkerEnds,
    WorkerDirectories,
    WorkerEnds,
    Workplace,
    open_capture_file,
)
from farcall_endpoint.worker.namespaces import open_descriptors
from farcall_endpoint.worker.settings import WorkerSettings

VARIABLES = """
import ctypes, json, os, subprocess
from farcall_endpoint.worker.environment import set_all
c = ctypes.CDLL(None)
c.getenv.restype = ctypes.c_char_p
def seen(name):
    value = c.getenv(name.encode())
    return [os.environ.get(name), None if value is None else value.decode()]
os.environ["KEPT"] = os.environ["CHANGED"] = "old"
set_all({"CHANGED": "new", **{f"V{number}": "x" * number for number in range(200)}}, merged=True)
answer = [seen(name) for name in ("KEPT", "CHANGED", "V199")]
set_all({"ONLY": "\\u00fc"}, merged=False)
answer += [seen(name) for name in ("KEPT", "V199", "ONLY")]
os.environ["LATER"] = "1"
del os.environ["ONLY"]
answer += [seen(name) for name in ("LATER", "ONLY")]
child = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout
print(json.dumps([*answer, child]))
"""

DESCRIPTORS = """
import json, os, resource
from farcall_endpoint.worker import namespaces
if {old_kernel}:
    namespaces._SYS_CLOSE_RANGE = 10**6
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
high = os.dup2(opened[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
kept = {{0, 1, 2, opened[1], opened[4], opened[5]}}
namespaces.keep_only(kept)
print(json.dumps(namespaces.open_descriptors() == kept))
"""

SEED = """
import json, os
import numpy
from farcall_endpoint.worker import template
numpy.random.seed(1)
numpy.random.standard_normal()  # the other one of the pair is kept
address = template._numpy_state()
reading, writing = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        template._reseed(address)
        drawn = [*numpy.random.random(2000).tolist(), *numpy.random.standard_normal(3).tolist()]
        os.write(writing, json.dumps([drawn[0], drawn[-1], sum(drawn[:2000]) / 2000]).encode() + b"\\n")
        os._exit(0)
    os.wait()
os.close(writing)
drawn = [json.loads(line) for line in open(reading)]
print(json.dumps([address is not None, drawn]))
"""


def answer(program: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_all_variables_are_set_for_python_c_and_programs() -> None:
    kept, changed, last, gone, also_gone, only, later, deleted, child = answer(VARIABLES)
    assert kept == ["old", "old"]
    assert changed == ["new", "new"]
    assert last == ["x" * 199, "x" * 199]
    assert gone == also_gone == deleted == [None, None]
    assert only == ["\u00fc", "\u00fc"]
    assert later == ["1", "1"]
    assert child == "LATER=1\n"


@pytest.mark.parametrize("old_kernel", [False, True])
def test_only_the_named_descriptors_are_kept(old_kernel: bool) -> None:
    assert answer(DESCRIPTORS.format(old_kernel=old_kernel)) is True


def test_numpy_gets_its_own_numbers_in_each_fork() -> None:
    is_quick, drawn = answer(SEED)
    assert is_quick
    assert len({first for first, _, _ in drawn}) == len({normal for _, normal, _ in drawn}) == 3
    assert all(0.45 < mean < 0.55 for _, _, mean in drawn)


@pytest.mark.parametrize("unnamed", [True, False])
def test_capture_files_have_no_name(unnamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without_unnamed_files(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    if not unnamed:
        monkeypatch.setattr(os, "open", without_unnamed_files)
    descriptor = open_capture_file()
    try:
        assert os.fstat(descriptor).st_nlink == 0
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600
        os.write(descriptor, b"ab")
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, b"cd")  # appended
        assert os.pread(descriptor, 9, 0) == b"abcd"
    finally:
        os.close(descriptor)


def test_the_ends_of_the_next_worker_are_made_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    ends = NextWorkerEnds()
    ends.serve()
    assert ends.next_deadline() == float("inf")  # for a manager that starts none, there are none
    monkeypatch.setattr(worker_process, "_MAKE_AFTER_S", 1000.0)
    first = ends.take()
    assert ends.next_deadline() < float("inf")
    ends.serve()
    of_one = open_descriptors() - before
    assert len(of_one) == 7
    monkeypatch.setattr(worker_process, "_MAKE_AFTER_S", 0.0)
    ends.take().close()
    ends.serve()
    assert ends.next_deadline() == float("inf")
    with_next = open_descriptors() - before
    assert len(with_next) == 14
    second = ends.take()
    assert open_descriptors() - before == with_next  # nothing was opened
    assert {*first.handed(), *second.handed()} <= with_next
    assert len({*first.handed(), *second.handed()}) == 8
    ends.serve()
    for each in (first, second, ends):
        each.close()
    assert open_descriptors() == before


def test_nothing_is_left_open_of_ends_that_could_not_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    monkeypatch.setattr(worker_process, "_MAKE_AFTER_S", 0.0)
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        WorkerEnds.made()
    ends = NextWorkerEnds()
    with pytest.raises(FileNotFoundError):
        ends.take()
    ends.serve()  # says nothing, and tries no more
    assert ends.next_deadline() == float("inf")
    assert open_descriptors() == before


def test_nothing_is_left_open_of_a_worker_that_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = Workplace(
        working_dir=tmp_path, environment=dict(os.environ), slots=[Slot(0)], settings=WorkerSettings.of({})
    )
    launcher = FreshProcessLauncher(place)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, "no more of them")

    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BlockingIOError, match="no more of them"):
        launcher.launch(0, slot=0, submitter="")  # makes the temporary directory, which is locked
    before = open_descriptors()
    with pytest.raises(BlockingIOError, match="no more of them"):
        launcher.launch(1, slot=0, submitter="")
    assert open_descriptors() == before
    launcher.close()
    assert not list(tmp_path.glob("farcall-*"))


def test_the_working_directory_is_made_whenever_it_is_missing(tmp_path: Path) -> None:
    path, link = tmp_path / "a" / "work", tmp_path / "link"
    link.symlink_to(path)
    path.mkdir(parents=True)
    directories = WorkerDirectories(Workplace(working_dir=link, environment={}, slots=[], settings=WorkerSettings()))
    assert directories.working() == directories.working() == path
    link.unlink()
    other = tmp_path / "other"
    other.mkdir()
    link.symlink_to(other)
    assert directories.working() == other  # it leads to another place now
    (tmp_path / "moved").mkdir()
    other.rename(tmp_path / "moved" / "other")
    link.unlink()
    link.symlink_to(tmp_path / "moved" / "other")
    assert directories.working() == tmp_path / "moved" / "other"  # the same directory, elsewhere
    link.unlink()
    assert directories.working() == link
    assert link.is_dir()
    link.rmdir()
    link.touch()
    with pytest.raises(FileExistsError):
        directories.working()
