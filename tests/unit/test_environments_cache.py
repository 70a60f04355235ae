"""The cache of prepared images: one makes, many use, the least recently used go first."""

from __future__ import annotations

import itertools
import os
import types
from pathlib import Path

import pytest

from farcall_endpoint.environments.cache import Cache
from farcall_endpoint.environments.commands import CommandError, Commands
from farcall_endpoint.process_reaper import read_process
from tests.waiting import wait_until


def make(cache: Cache, name: str, size_bytes: int, *, used_at: float = 0.0) -> None:
    with cache.making(name, waiting=lambda: False):
        (cache.directory / name).write_bytes(b"x" * size_bytes)
    os.utime(cache.directory / f".{name}.use", (used_at, used_at))


def has_ended(file: Path) -> bool:
    """Whether the process with the id in a file has ended; it may wait to be reaped."""
    process = read_process(int(file.read_text()))
    return process is None or process.is_zombie


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, most_bytes=250_000)
    for name, used_at in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        make(cache, name, 100_000, used_at=used_at)
        cache.release(name)
    assert cache.clean() == ["b"]
    assert cache.clean() == []
    assert (tmp_path / "a").exists()


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path, most_bytes=1), Cache(tmp_path, most_bytes=1)
    make(cache, "a", 100_000)
    assert other.clean() == []
    cache.release("a")
    assert other.clean() == ["a"]


def test_directories_with_read_only_parts_are_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path, most_bytes=1)
    with cache.making("image", waiting=lambda: False):
        (tmp_path / "image" / "inner").mkdir(parents=True)
        (tmp_path / "image" / "inner" / "file").write_bytes(b"x" * 10_000)
        (tmp_path / "image" / "inner").chmod(0o500)
    cache.release("image")
    assert cache.clean() == ["image"]
    assert [path.name for path in tmp_path.iterdir()] == [".image.use"]


def test_two_do_not_make_the_same(tmp_path: Path) -> None:
    first, second = Cache(tmp_path, most_bytes=10**9), Cache(tmp_path, most_bytes=10**9)
    waits = itertools.count(1)
    with first.making("a", waiting=lambda: False):
        with (
            pytest.raises(TimeoutError, match="another process has been preparing a"),
            second.making("a", waiting=lambda: next(waits) < 2),
        ):
            pass
        (tmp_path / "a").touch()
    assert next(waits) == 3
    with second.making("a", waiting=lambda: False):  # it is there: both use it
        assert (tmp_path / "a").exists()


def test_others_may_not_write_into_it(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(PermissionError, match="only this user can write"):
            Cache(tmp_path / name, most_bytes=1).make()
    Cache(tmp_path / "new", most_bytes=1).make()


def test_a_file_system_without_programs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(PermissionError, match=r"noexec.*cache_dir"):
        Cache(tmp_path / "cache", most_bytes=1).make()


def test_a_command_that_takes_too_long_is_killed_as_a_whole(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(CommandError) as raised:
        Commands().run(["sh", "-c", f"setsid sleep 1000 & echo $! > {pid}; wait"], limit_s=2.0)
    assert raised.value.code is None
    if pid.exists():
        wait_until(lambda: has_ended(pid))


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    Commands().run(["sh", "-c", f"setsid sleep 1000 >/dev/null 2>&1 & echo $! > {pid}"], limit_s=60.0)
    wait_until(lambda: has_ended(pid))


def test_output_of_a_command_is_bounded_and_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    output = Commands().run(["sh", "-c", "yes | head -c 5000000; echo end"], limit_s=60.0, log=log)
    assert len(output) <= 64 * 1024
    assert output.endswith(b"end\n")
    assert log.stat().st_size < 2**21
    assert log.stat().st_mode & 0o077 == 0


def test_no_command_after_the_end(tmp_path: Path) -> None:
    commands = Commands()
    commands.close()
    with pytest.raises(CommandError, match="the manager ends"):
        commands.run(["true"], limit_s=1.0)


def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(CommandError, match="no-such-program: No such file or directory") as raised:
        Commands().run(["no-such-program"], limit_s=60.0)
    assert raised.value.code == 127
