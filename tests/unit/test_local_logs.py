"""Log rotation of the local tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall_common.errors import ConfigurationError
from farcall_local.process import bound_log
from farcall_local.supervisor import _max_log_bytes


def test_a_large_log_is_rotated_with_one_copy(tmp_path: Path) -> None:
    path = tmp_path / "api.log"
    with path.open("ab", buffering=0) as log:  # as programs open it
        log.write(b"first " * 10)
        bound_log(path, max_bytes=60)
        assert path.stat().st_size == 60
        log.write(b"second")
        bound_log(path, max_bytes=60)
        log.write(b"third")
        assert (path.read_bytes(), (tmp_path / "api.log.1").read_bytes()) == (b"third", b"first " * 10 + b"second")
        bound_log(path, max_bytes=4)
    assert (path.read_bytes(), (tmp_path / "api.log.1").read_bytes()) == (b"", b"third")


def test_a_large_log_is_truncated_even_if_it_cannot_be_copied(tmp_path: Path) -> None:
    path = tmp_path / "api.log"
    path.write_bytes(b"x" * 100)
    (tmp_path / "api.log.1").mkdir()  # cannot be written to, as on a full disk
    bound_log(path, max_bytes=50)
    assert path.read_bytes() == b""


def test_a_missing_log_is_no_error(tmp_path: Path) -> None:
    bound_log(tmp_path / "api.log", max_bytes=50)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["0", "-1", "1 MB", ""])
def test_the_log_size_setting_must_be_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FARCALL_LOCAL_MAX_LOG_BYTES", text)
    with pytest.raises(ConfigurationError, match="FARCALL_LOCAL_MAX_LOG_BYTES"):
        _max_log_bytes()
