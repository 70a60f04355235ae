"""The cache of files: what a killed process leaves, a full disk, and many copies."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farcall_endpoint.files.cache import Cache
from farcall_endpoint.files.movers import MoveError

KILLED = """
import hashlib, os, pathlib, signal, sys
from farcall_endpoint.files.cache import Cache

def rename(path, target):
    if sys.argv[2] == "after":
        os.rename(path, target)
    os.kill(os.getpid(), signal.SIGKILL)

cache = Cache(pathlib.Path(sys.argv[1]))
pathlib.Path.rename = rename
with cache.draft("", 1, 5) as draft:
    draft.write_bytes(b"first")
    cache.add("", draft, hashlib.sha256(b"first").hexdigest())
"""


def put(cache: Cache, number: int, content: bytes, *, submitter: str = "", payer: str = "") -> str:
    """Let a file be in the cache; its SHA-256."""
    sha256 = hashlib.sha256(content).hexdigest()
    with cache.draft(submitter, number, len(content), payer=payer) as draft:
        draft.write_bytes(content)
        cache.add(submitter, draft, sha256)
    cache.remember(submitter, f"s3://lab/{number}", "1", sha256)
    return sha256


def copies(directory: Path) -> set[str]:
    """The files of all copies."""
    return {each.name for each in directory.glob("*/??/*")}


def killed(directory: Path, when: str) -> None:
    """A process adds a copy, and is killed when that gets its name."""
    ended = subprocess.run([sys.executable, "-c", KILLED, str(directory), when], check=False)
    assert ended.returncode == -signal.SIGKILL


def test_a_copy_of_a_killed_process_is_known_and_makes_room(tmp_path: Path) -> None:
    killed(tmp_path, "after")
    first = hashlib.sha256(b"first").hexdigest()
    assert copies(tmp_path) == {first}
    cache = Cache(tmp_path, budget_bytes=4096)
    second = put(cache, 2, b"second")
    assert copies(tmp_path) == {second}
    cache.close()


def test_a_copy_that_a_killed_process_did_not_finish_is_none(tmp_path: Path) -> None:
    killed(tmp_path, "before")
    cache = Cache(tmp_path, budget_bytes=4096)
    with cache.using("", hashlib.sha256(b"first").hexdigest()) as found:
        assert found is None
    put(cache, 2, b"second")
    cache.close()


def test_where_removing_copies_is_not_enough_none_is_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "files", budget_bytes=8192)
    held, free = put(cache, 1, b"held"), put(cache, 2, b"free")
    with cache.using("", held) as found:
        assert found is not None
        (tmp_path / "task").hardlink_to(found[0])
    with pytest.raises(MoveError) as error, cache.draft("", 3, 8192):
        pass
    assert error.value.missing_bytes == 4096
    assert copies(tmp_path / "files") == {held, free}
    cache.close()


def test_room_for_a_file_does_not_take_longer_with_many_copies(tmp_path: Path) -> None:
    """Counted in steps of SQLite's virtual machine."""

    def steps_with(copies: int) -> int:
        cache = Cache(tmp_path / str(copies), budget_bytes=copies * 4096)
        for number in range(copies):
            put(cache, number, b"%d" % number)
        steps = 0

        def count() -> None:
            nonlocal steps
            steps += 1

        cache._index.set_progress_handler(count, 1)
        for number in range(copies, copies + 5):
            put(cache, number, b"%d" % number)
        cache.close()
        return steps

    assert steps_with(1000) < 2 * steps_with(100)


def test_signed_urls_of_one_content_do_not_fill_the_index(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for number in range(2500):
        cache.remember("", f"https://lab/file?signature={number}", "1", "content")
    known = [each for each in range(2500) if cache.known("", f"https://lab/file?signature={each}", "1")]
    assert known[-1] == 2499
    assert len(known) <= 1000
    cache.close()


def test_copies_are_used_and_go_although_the_index_has_no_room_to_note_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path, budget_bytes=10 * 4096)
    sha256 = put(cache, 1, b"first")
    cache._index.execute("PRAGMA query_only = ON").fetchall()  # each statement that writes fails, as with a full disk
    with cache.using("", sha256) as found:
        assert found is not None
    assert cache.make_room()
    assert copies(tmp_path) == set()
    cache._index.execute("PRAGMA query_only = OFF").fetchall()
    with cache.using("", sha256) as found:
        assert found is None
    cache.close()


def test_the_submitter_with_the_most_bytes_loses_copies_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, budget_bytes=5 * 4096)
    alices = put(cache, 1, b"first", submitter="alice")  # not used for longest
    bobs = [put(cache, number, b"%d" % number, submitter="bob") for number in range(2, 12)]
    assert copies(tmp_path) == {alices, *bobs[-4:]}
    assert cache.used_bytes == 5 * 4096
    more = [put(cache, number, b"%d" % number, submitter="alice") for number in range(12, 14)]
    assert copies(tmp_path) == {alices, *more, *bobs[-2:]}, "until both have as much"
    last = put(cache, 20, b"last", submitter="alice")
    assert copies(tmp_path) == {*more, last, *bobs[-2:]}
    cache.close()
    again = Cache(tmp_path, budget_bytes=5 * 4096)
    assert again.used_bytes == 5 * 4096
    again.close()


def test_copies_of_service_accounts_count_for_their_payer(tmp_path: Path) -> None:
    cache = Cache(tmp_path, budget_bytes=6 * 4096)
    bobs = [put(cache, number, b"%d" % number, submitter="bob") for number in range(2)]
    for number in range(2, 12):
        put(cache, number, b"%d" % number, submitter=f"robot-{number}", payer="mallory")
    assert {*bobs} < copies(tmp_path), "bob has two copies, and each account has one"
    assert len(copies(tmp_path)) == 6
    cache.close()
    again = Cache(tmp_path, budget_bytes=6 * 4096)
    more = put(again, 12, b"12", submitter="bob")
    assert {*bobs, more} < copies(tmp_path), "the payers are known after a restart"
    again.close()


def test_a_copy_that_a_task_has_made_larger_is_dropped_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path, budget_bytes=2**20)
    grown, touched, changed = put(cache, 1, b"grown"), put(cache, 2, b"touched"), put(cache, 3, b"changed")
    for sha256 in (grown, touched, changed):
        [path] = tmp_path.glob(f"*/??/{sha256}")
        path.chmod(0o600)
        if sha256 == grown:
            os.truncate(path, 2**40)
        elif sha256 == changed:
            path.write_bytes(b"CHANGED")
    with cache.using("", touched) as found:
        assert found is not None
    with cache.using("", changed) as found:
        assert found is None
    monkeypatch.setattr(Path, "open", None)
    with cache.using("", grown) as found:
        assert found is None
    assert copies(tmp_path) == {touched}
    cache.close()
