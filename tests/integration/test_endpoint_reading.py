"""Which files of an endpoint tasks elsewhere may read, on a real file system, where tasks have put links and pipes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from farcall_common.wire import FileReason, new_id
from farcall_endpoint.files.reading import NotReadable, ReadableFiles, ReadPiece
from farcall_endpoint.files.settings import Storage
from farcall_endpoint.worker.directories import name_of

GRACE = new_id()
OWNER = ""


@pytest.fixture
def working_dir(tmp_path: Path) -> Path:
    """With a directory of grace's, and one of ada's beside it; reached by a link, as home directories often are."""
    real = tmp_path / "disk" / "work"
    for name in (GRACE, "ada"):
        (real / "submitters" / name_of(name) / "shared").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    (real / "owner.txt").write_text("owner's")
    (real / "submitters" / name_of("ada") / "secret").write_text("ada's")
    return tmp_path / "home" / "work"


@pytest.fixture
def own(working_dir: Path) -> Path:
    """Grace's directory."""
    return working_dir / "submitters" / name_of(GRACE)


def files(working_dir: Path, *storages: Storage, is_restricted: bool = False) -> ReadableFiles:
    return ReadableFiles(working_dir=working_dir, storages=storages, is_restricted=is_restricted)


def read(readable: ReadableFiles, submitter: str, path: Path | str, **options: Any) -> ReadPiece:
    return readable.read(submitter, str(path), **{"offset_bytes": 0, "max_bytes": 100, **options})


def reason(readable: ReadableFiles, submitter: str, path: Path | str) -> FileReason:
    with pytest.raises(NotReadable) as caught:
        read(readable, submitter, path)
    return caught.value.reason


def test_pieces_have_the_version_of_the_file(working_dir: Path, tmp_path: Path) -> None:
    readable, path = files(working_dir), tmp_path / "data"
    path.write_bytes(b"0123456789")
    piece = read(readable, OWNER, path, offset_bytes=4, max_bytes=3)
    assert (piece.size_bytes, piece.data, piece.sha256) == (10, b"456", hashlib.sha256(b"456").hexdigest())
    end = read(readable, OWNER, path, offset_bytes=8)
    assert (end.data, end.version) == (b"89", piece.version)
    none = read(readable, OWNER, path, max_bytes=0)
    assert (none.data, none.sha256, none.version) == (b"", "", piece.version)
    os.utime(path, ns=(0, 1))
    assert read(readable, OWNER, path).version != piece.version
    path.write_bytes(b"")
    assert read(readable, OWNER, path).size_bytes == 0


def test_the_owner_reads_what_the_account_can_read(working_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(working_dir / "owner.txt")
    readable = files(working_dir)
    assert read(readable, OWNER, tmp_path / "link").data == b"owner's"
    assert reason(readable, OWNER, tmp_path / "missing") == FileReason.NOT_FOUND
    assert reason(readable, OWNER, working_dir / "owner.txt" / "x") == FileReason.NOT_FOUND
    assert reason(readable, OWNER, tmp_path) == FileReason.NOT_A_FILE
    assert reason(readable, OWNER, "/dev/zero") == FileReason.NOT_A_FILE
    for path in ("relative", f"{tmp_path}/x/../link", "/a\0b", ""):
        assert reason(readable, OWNER, path) == FileReason.NOT_PERMITTED


def test_others_read_what_is_below_their_own_directory(working_dir: Path, own: Path, tmp_path: Path) -> None:
    (own / "shared" / "mine").write_bytes(b"grace's")
    readable = files(working_dir)
    assert read(readable, GRACE, own / "shared" / "mine").data == b"grace's"
    # As a task sees it, which is not in the link.
    assert read(readable, GRACE, Path(os.path.realpath(own)) / "shared" / "mine").data == b"grace's"
    ada = working_dir / "submitters" / name_of("ada") / "secret"
    for path in (ada, working_dir / "owner.txt", "/etc/hostname", tmp_path / "missing", own, f"{own}x", "/"):
        assert reason(readable, GRACE, path) == FileReason.NOT_PERMITTED
    assert reason(readable, GRACE, own / "shared" / "none") == FileReason.NOT_FOUND


def test_links_and_pipes_of_a_task_lead_nowhere(working_dir: Path, own: Path) -> None:
    ada = working_dir / "submitters" / name_of("ada")
    (own / "file").symlink_to(ada / "secret")
    (own / "directory").symlink_to(ada)
    os.mkfifo(own / "pipe")
    readable = files(working_dir)
    assert reason(readable, GRACE, own / "file") == FileReason.NOT_PERMITTED
    assert reason(readable, GRACE, own / "directory" / "secret") in (FileReason.NOT_PERMITTED, FileReason.NOT_FOUND)
    assert reason(readable, GRACE, own / "pipe") == FileReason.NOT_A_FILE
    own.rename(own.with_name("away"))
    own.symlink_to(ada)
    assert reason(readable, GRACE, own / "secret") in (FileReason.NOT_PERMITTED, FileReason.NOT_FOUND)


def test_a_lease_of_a_task_on_its_file_holds_up_no_reader(working_dir: Path, own: Path) -> None:
    (own / "leased").write_text("data")
    with (own / "leased").open("r+") as file:
        former = signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert reason(files(working_dir), GRACE, own / "leased") is FileReason.NOT_READ
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        signal.signal(signal.SIGIO, former)
    assert read(files(working_dir), GRACE, own / "leased").data == b"data"


def test_files_without_a_known_size_are_refused(working_dir: Path) -> None:
    for max_bytes in (0, 100):
        with pytest.raises(NotReadable) as caught:
            read(files(working_dir), OWNER, "/proc/self/status", max_bytes=max_bytes)
        assert caught.value.reason is FileReason.NOT_A_FILE


def test_a_path_that_this_process_cannot_encode_is_not_found(
    working_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise UnicodeEncodeError("ascii", "日", 0, 1, "ordinal not in range")

    monkeypatch.setattr(os, "open", refuse)  # as in a locale that is not UTF-8
    assert reason(files(working_dir), OWNER, "/data/日") is FileReason.NOT_FOUND


def test_others_read_what_they_have_in_memory(working_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "memory"
    directories = {each: root / f"name of {each}" for each in (GRACE, "ada")}
    for each in directories.values():
        (each / "objects").mkdir(parents=True)
        (each / "objects" / "key.t").write_text(each.name)
    readable = ReadableFiles(
        working_dir=working_dir,
        storages=(),
        is_restricted=False,
        memory_of=directories.get,
    )
    own = directories[GRACE] / "objects" / "key.t"
    assert read(readable, GRACE, own).data.decode() == f"name of {GRACE}"
    for submitter, path in ((GRACE, directories["ada"] / "objects" / "key.t"), ("other", own), (GRACE, root)):
        assert reason(readable, submitter, path) == FileReason.NOT_PERMITTED


def test_storages_are_open_to_those_that_they_name(working_dir: Path, tmp_path: Path) -> None:
    for name in ("all", "graces", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a b").write_text(name)
    (tmp_path / "all" / "link").symlink_to(tmp_path / "outside" / "a b")
    readable = files(
        working_dir,
        Storage(url=f"file://{tmp_path}/all", submitters="*"),
        Storage(url=f"file://{tmp_path}/graces/", submitters=(GRACE,)),
        Storage(url="s3://lab", submitters="*"),
    )
    assert read(readable, "ada", tmp_path / "all" / "a b").data == b"all"
    assert read(readable, GRACE, tmp_path / "graces" / "a b").data == b"graces"
    for submitter, path in (("ada", "graces/a b"), (GRACE, "outside/a b"), (GRACE, "all/link"), (GRACE, "allx/a")):
        assert reason(readable, submitter, tmp_path / path) == FileReason.NOT_PERMITTED


def test_where_certain_functions_run_only_storages_are_read(working_dir: Path, own: Path, tmp_path: Path) -> None:
    (own / "mine").write_text("grace's")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a").write_text("a")
    readable = files(working_dir, Storage(url=f"file://{tmp_path}/open"), is_restricted=True)
    assert reason(readable, GRACE, own / "mine") == FileReason.NOT_PERMITTED
    assert reason(readable, OWNER, working_dir / "owner.txt") == FileReason.NOT_PERMITTED
    assert read(readable, OWNER, tmp_path / "open" / "a").data == b"a"
    assert reason(readable, GRACE, tmp_path / "open" / "a") == FileReason.NOT_PERMITTED
