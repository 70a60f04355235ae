"""Logs of the local tier have a largest size."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall_common.errors import ConfigurationError
from farcall_local.process import bound_log
from farcall_local.supervisor import _max_log_bytes


def test_a_log_that_is_too_large_is_kept_once_and_goes_on_empty(tmp_path: Path) -> None:
    path = tmp_path / "api.log"
    with path.open("ab", buffering=0) as log:  # as programs have it
        log.write(b"first " * 10)
        bound_log(path, max_bytes=60)
        assert path.stat().st_size == 60
        log.write(b"second")
        bound_log(path, max_bytes=60)
        log.write(b"third")
        assert (path.read_bytes(), (tmp_path / "api.log.1").read_bytes()) == (b"third", b"first " * 10 + b"second")
        bound_log(path, max_bytes=4)
    assert (path.read_bytes(), (tmp_path / "api.log.1").read_bytes()) == (b"", b"third")


def test_a_log_is_emptied_even_if_nothing_can_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "api.log"
    path.write_bytes(b"x" * 100)
    (tmp_path / "api.log.1").mkdir()  # cannot be written to, as on a full disk
    bound_log(path, max_bytes=50)
    assert path.read_bytes() == b""


def test_a_log_that_is_not_there_is_no_matter(tmp_path: Path) -> None:
    bound_log(tmp_path / "api.log", max_bytes=50)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["0", "-1", "1 MB", ""])
def test_the_setting_is_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FARCALL_LOCAL_MAX_LOG_BYTES", text)
    with pytest.raises(ConfigurationError, match="FARCALL_LOCAL_MAX_LOG_BYTES"):
        _max_log_bytes()
