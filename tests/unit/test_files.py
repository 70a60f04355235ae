"""Atomic file writes."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from farcall_common.files import write_private, write_whole
from farcall_endpoint.services.directory import EndpointDirectory
from farcall_localstack.tier import Tier

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = (
    "common/farcall_common",
    "sdk/farcall",
    "endpoint/farcall_endpoint",
    "lambdas/farcall_lambdas",
    "forwarder_fargate/farcall_forwarder",
    "infra/farcall_infra",
    "local/farcall_local",
    "localstack/farcall_localstack",
    "localstack/plugin/farcall_localstack_plugin",
)

#: Modules that put a file in the place of another themselves.
REPLACING: Final = {
    "common/farcall_common/files.py",  # write_whole
    "common/farcall_common/store/blobs_files.py",  # a blob comes in parts, and is made durable
    "endpoint/farcall_endpoint/files/movers/globus.py",  # a link to a file
    "endpoint/farcall_endpoint/worker/files.py",  # what a task has written, when its function has returned
    "local/farcall_local/services.py",  # moves a file away
    "localstack/farcall_localstack/assembly.py",  # an archive, made in a directory of its own
    "localstack/plugin/farcall_localstack_plugin/files.py",  # runs where farcall_common is not installed
}


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_no_group_can_write_in_new_directories_and_no_more_in_those_of_an_endpoint(tmp_path: Path, umask: None) -> None:
    os.umask(0o002)
    home = tmp_path / "new" / "home"
    write_private(home / "config.toml", b"")
    directory = EndpointDirectory.of(home, "lab")
    directory.create()
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (directory.path, home / "endpoints", home)}
    assert modes == {"lab": 0o700, "endpoints": 0o755, "home": 0o755}
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o755
    (home / "endpoints").chmod(0o2775)
    home.chmod(0o777)
    directory.close_to_others()
    assert stat.S_IMODE((home / "endpoints").stat().st_mode) == 0o2755
    assert stat.S_IMODE(home.stat().st_mode) == 0o755


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    """No file grows beyond 1 KiB, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("umask")
def test_a_file_is_replaced_and_has_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    for write, mode in ((write_whole, 0o644), (write_private, 0o600)):
        write(path, b"new")
        assert path.read_bytes() == b"new"
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_gets_its_directory(tmp_path: Path) -> None:
    write_private(tmp_path / "new" / "file", b"data")
    assert (tmp_path / "new" / "file").read_bytes() == b"data"
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "other" / "file", b"data")


@pytest.mark.parametrize("write", [write_whole, write_private])
def test_old_file_survives_a_full_disk(write: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="File too large"), little_room():
        write(path, bytes(4096))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_state_of_a_tier_survives_a_full_disk(tmp_path: Path) -> None:
    tier = Tier(
        name="lab", profile="lab", target="host", stacks=(), api_url="http://x", token="t", tokens={}, endpoint_url="",
        directory=tmp_path, localstack_pid=None, database_directory=None,
    )  # fmt: skip
    tier.save()
    larger = dataclasses.replace(tier, tokens={"user": "t" * 2000})
    with pytest.raises(OSError, match="File too large"), little_room():
        larger.save()
    assert Tier.load(tmp_path) == tier
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert stat.S_IMODE((tmp_path / "state.json").stat().st_mode) == 0o600


def test_synced_file_is_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"new", sync=True)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


def test_failed_replacement_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_no_other_module_replaces_files() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(map(_replaces_a_file, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == REPLACING, "farcall_common.files writes files as a whole"


def _replaces_a_file(node: ast.AST) -> bool:
    """``path.replace(other)`` and ``os.replace(path, other)``; other methods of that name take two values, or names."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("os"), attr="replace")):
            return True
        case ast.Call(func=ast.Attribute(attr="replace"), args=[_], keywords=[]):
            return True
    return False
