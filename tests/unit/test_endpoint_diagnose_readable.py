"""Directories that tasks of other submitters read, and that other accounts may write."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from farcall_endpoint.diagnose import gather
from farcall_endpoint.diagnose.readable import Acl, read_acl, writable_by_others
from farcall_endpoint.services.directory import EndpointDirectory

USER = os.geteuid()


def tree(root: Path, **modes: int) -> dict[str, Path]:
    """Directories by name, ``__`` for a slash, with their modes."""
    found = {}
    for name, mode in modes.items():
        path = found[name] = root / name.replace("__", "/")
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
    return found


def writable(*paths: Path, below: Path, user: int = USER) -> dict[str, str]:
    found = writable_by_others(map(str, paths), user=user)
    return {str(Path(path).relative_to(below)): why for path, why in found.items() if Path(path).is_relative_to(below)}


def test_directories_that_all_may_write_are_named(tmp_path: Path) -> None:
    found = tree(tmp_path, good=0o755, all=0o777, sticky=0o1777, good__inner=0o777, good__inner__deep=0o777)
    assert writable(found["good"], found["all"], found["sticky"], below=tmp_path) == {
        "all": "writable for all",
        "sticky": "writable for all",  # anyone may make a socket there
        "good/inner": "writable for all",
    }


def test_parents_in_which_a_directory_can_be_replaced_are_named(tmp_path: Path) -> None:
    found = tree(tmp_path, open=0o777, open__tools=0o755, sticky=0o1777, sticky__tools=0o755)
    assert writable(found["open__tools"], found["sticky__tools"], below=tmp_path) == {"open": "writable for all"}


def test_directories_of_other_accounts_are_named(tmp_path: Path) -> None:
    found = tree(tmp_path, tools=0o755)
    if USER == 0:
        os.chown(found["tools"], 4242, 0)
        assert writable(found["tools"], below=tmp_path) == {"tools": "belongs to user 4242"}
    else:
        assert "tools" in writable(found["tools"], below=tmp_path, user=4242)


def test_groups_count_if_they_have_other_accounts(tmp_path: Path) -> None:
    found = tree(tmp_path, tools=0o775)
    if USER != 0:
        pytest.skip("only root gives a directory to any group")
    assert writable(found["tools"], below=tmp_path) == {}, "the group of root"
    os.chown(found["tools"], 0, 4242)
    assert writable(found["tools"], below=tmp_path) == {"tools": "writable for the group 4242"}


def acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries)


def test_access_control_lists_are_read() -> None:
    no_id = 2**32 - 1
    value = acl((1, 7, no_id), (2, 7, 1001), (2, 5, 1002), (4, 7, no_id), (8, 6, 50), (16, 7, no_id), (32, 5, no_id))
    assert read_acl(value) == Acl((1001,), (50,), True)
    masked = acl((1, 7, no_id), (2, 7, 1001), (4, 7, no_id), (16, 5, no_id), (32, 5, no_id))
    assert read_acl(masked) == Acl((), (), False)
    for wrong in (b"", b"\x01\x00\x00\x00", value[:-1]):
        with pytest.raises(ValueError, match="access control list"):
            read_acl(wrong)


def test_access_control_lists_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tree(tmp_path, tools=0o775)
    no_id = 2**32 - 1
    value = acl((1, 7, no_id), (2, 7, 4242), (4, 5, no_id), (16, 7, no_id), (32, 5, no_id))
    monkeypatch.setattr("os.getxattr", lambda path, _: value if path == str(found["tools"]) else b"")
    assert writable(found["tools"], below=tmp_path) == {"tools": "writable for user 4242"}


def test_findings_name_them(tmp_path: Path) -> None:
    found = tree(tmp_path, tools=0o777)
    directory = EndpointDirectory.of(tmp_path / "home", "lab")
    directory.create()
    directory.config_file.write_text(f"engine:\n  readable_paths: [{found['tools']}]\n")
    report = gather(
        directory, home=tmp_path / "home", environ={"PATH": ""}, with_network=False, with_environments=False
    )
    assert f"tasks of other submitters read {found['tools']}" in report.files["findings.txt"]
    assert f'"{found["tools"]}": "writable for all"' in report.files["readable.json"]
