"""Log files: one writer each, bounded in size, and readable."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_endpoint.host.logs import LogFormat, RepeatedLines, manager_log_file, set_up_logging, tail


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_log_rotates_by_size_and_drops_the_oldest(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.log"
    set_up_logging(file=file, to_console=False, role="agent", max_bytes=1000, backups=2)
    for number in range(100):
        logging.getLogger("x").info("line %d of a long day", number)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["endpoint.log", "endpoint.log.1", "endpoint.log.2"]
    assert all((tmp_path / name).stat().st_size <= 1000 for name in files)
    assert "line 99" in file.read_text()
    kept = "".join((tmp_path / name).read_text() for name in reversed(files))
    numbers = [int(line.split("line ")[1].split()[0]) for line in kept.splitlines()]
    assert numbers == list(range(numbers[0], 100)), "nothing is lost between two files"


def test_repeated_lines_are_written_once_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    repeated = RepeatedLines(logging.getLogger("x"), clock=lambda: now)
    for number in range(121):
        now = float(number)
        repeated.log(logging.WARNING, "no key from %s", number)
        repeated.log(logging.ERROR, "no thread")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "no key from 0",
        "no key from 60 (and 59 more times since the last such line)",
        "no key from 120 (and 59 more times since the last such line)",
    ]
    assert len(caplog.records) == 6, "each message counts apart"


def test_removed_log_is_created_again(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.log"
    set_up_logging(file=file, to_console=False, role="agent")
    logging.getLogger("x").info("before")
    file.unlink()
    logging.getLogger("x").info("after")
    assert "after" in file.read_text()


def test_lines_have_source_and_time_as_text_and_json(tmp_path: Path) -> None:
    text, lines = tmp_path / "text.log", tmp_path / "json.log"
    set_up_logging(file=text, to_console=False, role="manager")
    logging.getLogger("x").warning("a block is late")
    assert f"WARNING manager[{os.getpid()}] a block is late" in text.read_text()
    set_up_logging(file=lines, to_console=False, role="manager", style="json", level=logging.DEBUG)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("it failed", extra={"task_id": "t1"})
    (line,) = lines.read_text().splitlines()
    data = json.loads(line)
    assert data["task_id"] == "t1"
    assert data["level"] == "ERROR"
    assert "ValueError: no" in data["exception"]


def test_each_manager_has_a_file_and_old_files_are_removed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name, written_at in {"manager-n1-1.log": 0, "manager-n1-1.log.1": 0, "console.log": 0}.items():
        (logs / name).write_text("x")
        os.utime(logs / name, (written_at, written_at))
    (logs / "manager-n2-7.log").write_text("x")
    mine = manager_log_file(logs)
    assert mine.name == f"manager-{socket.gethostname()}-{os.getpid()}.log"
    assert sorted(path.name for path in logs.iterdir()) == ["console.log", "manager-n2-7.log"]


def test_number_of_manager_logs_is_bounded(tmp_path: Path) -> None:
    for number in range(600):
        path = tmp_path / f"manager-n-{number}.log"
        path.touch()
        os.utime(path, (1e9 + number, 1e9 + number) if number < 50 else None)
    manager_log_file(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 500
    assert "manager-n-0.log" not in left


def test_tail_of_a_file_has_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.log"
    assert tail(file, 10) == ""
    file.write_text("one\ntwo\nthree\n")
    assert tail(file, 100) == "one\ntwo\nthree\n"
    assert tail(file, 8) == "three\n"


@pytest.mark.parametrize("style", ["text", "json"])
def test_text_of_others_neither_steers_a_terminal_nor_forges_a_line(tmp_path: Path, style: LogFormat) -> None:
    file = tmp_path / "endpoint.log"
    set_up_logging(file=file, to_console=False, role="agent", style=style)
    forged = "x\n2026-01-01 00:00:00,000 INFO    agent[1] all is fine"
    logging.getLogger("x").info("the environment of %s: %s", "a\u202eb\x1b[2J\x9b", forged)
    try:
        raise ValueError(forged)
    except ValueError:
        logging.getLogger("x").exception("failed")
    text = file.read_text()
    assert not set(text) & set("\u202e\x1b\x9b")
    assert "\\u202e" in text
    assert not [line for line in text.splitlines() if line.startswith("2026-01-01")]
