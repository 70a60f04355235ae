"""The cache of prepared images: one makes, many use, the least recently used go first."""

from __future__ import annotations

import itertools
import os
import shutil
import types
from pathlib import Path

import pytest

from farcall_endpoint.environments.cache import Cache
from farcall_endpoint.environments.prepare.commands import CommandError, Commands
from farcall_endpoint.host.process_reaper import read_process
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
    assert list(tmp_path.iterdir()) == []


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


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_a_killed_preparation_has_left_is_removed(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path, most_bytes=10**9), Cache(tmp_path, most_bytes=10**9)
    make(cache, "uv-1", 10)
    left = ("apptainer-2.part-AbC123", "uv-3.part-x_1", "worker-1-3.12-cpython-312.part-abc_removed", ".removed-0")
    for name in left:
        (tmp_path / name / "inner").mkdir(parents=True)
    for name in (".apptainer-2.use", ".uv-9.use", ".uv-3.lock"):
        (tmp_path / name).touch()
    own = {".imports", "notes.txt", "apptainer-mine"}
    for name in own:
        (tmp_path / name).touch()
    with other.making("apptainer-5", waiting=lambda: False):
        (tmp_path / "apptainer-5.part-1").touch()
        cache.tidy()
        assert names(tmp_path) == {"uv-1", ".uv-1.use", "apptainer-5.part-1", ".apptainer-5.use", ".layout", *own}
        (tmp_path / "apptainer-5.part-1").rename(tmp_path / "apptainer-5")
    cache.tidy()
    assert {"apptainer-5", ".apptainer-5.use"} < names(tmp_path)


def test_what_could_not_be_made_leaves_no_lock_file(tmp_path: Path) -> None:
    with pytest.raises(CommandError), Cache(tmp_path, most_bytes=1).making("uv-1", waiting=lambda: False):
        raise CommandError(b"no such package", 1)
    assert names(tmp_path) == set()


def test_what_was_deleted_while_others_use_it_is_made_again(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path, most_bytes=10**9), Cache(tmp_path, most_bytes=10**9)
    make(other, "uv-1", 10)
    (tmp_path / "uv-1").unlink()  # by a program that cleans /tmp
    make(cache, "uv-1", 10)
    other.release("uv-1")
    other.remove("uv-1")
    assert (tmp_path / "uv-1").exists(), "it is in use"


def test_a_cache_that_was_deleted_in_use_is_made_again_and_kept_at_the_next_start(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    cache = Cache(directory, most_bytes=10**9)
    cache.make()
    cache.tidy()
    shutil.rmtree(directory)
    cache.make()
    make(cache, "apptainer-1", 10)
    cache.release("apptainer-1")
    Cache(directory, most_bytes=10**9).tidy()
    assert names(directory) == {"apptainer-1", ".apptainer-1.use", ".layout"}


def test_a_cache_of_another_layout_is_emptied_but_for_what_is_in_use(tmp_path: Path) -> None:
    former = Cache(tmp_path, most_bytes=10**9)
    for name in ("apptainer-0123456789abcdef", "uv-0123456789abcdef"):
        make(former, name, 10)
    former.release("apptainer-0123456789abcdef")
    Cache(tmp_path, most_bytes=10**9).tidy()
    assert names(tmp_path) == {"uv-0123456789abcdef", ".uv-0123456789abcdef.use", ".layout"}
    former.release("uv-0123456789abcdef")
    Cache(tmp_path, most_bytes=10**9).tidy()
    assert "uv-0123456789abcdef" in names(tmp_path), "the cache has this layout now"
    (tmp_path / ".layout").write_text("1000")
    Cache(tmp_path, most_bytes=10**9).tidy()
    assert names(tmp_path) == {".layout"}


def test_an_entry_that_was_removed_before_its_lock_was_had_is_made_again(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path, most_bytes=1), Cache(tmp_path, most_bytes=1)
    make(cache, "uv-1", 100_000)

    def waiting() -> bool:
        cache.release("uv-1")
        assert cache.clean() == ["uv-1"]
        return True

    (tmp_path / "uv-1").rename(tmp_path / "hidden")  # so that the other one waits
    with (
        pytest.raises(OSError, match="another process has removed uv-1"),
        other.making("uv-1", waiting=lambda: bool((tmp_path / "hidden").rename(tmp_path / "uv-1")) and waiting()),
    ):
        assert not (tmp_path / "uv-1").exists()


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


def test_log_of_a_command_has_no_control_characters(tmp_path: Path) -> None:
    log = tmp_path / "log"
    output = Commands().run(["printf", r"\033[2J\302\233\342\200\256 words\n"], limit_s=60.0, log=log)
    assert output == "\x1b[2J\x9b\u202e words\n".encode()
    assert log.read_text().split("\n")[1] == r"\x1b[2J\x9b\u202e words"


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
