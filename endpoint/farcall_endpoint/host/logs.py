"""Logging: one line per event, ids in fields, never user bytes.

Each process writes and rotates a separate file, so that no two processes rename the same one: the agent
``endpoint.log``, each manager ``logs/manager-<host>-<pid>.log``. A rotated file becomes ``….log.1``, that one
``….log.2``, and so on; the oldest is deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from farcall_common.files import make_directory
from farcall_common.plain_text import escaped, plain

LogFormat = Literal["text", "json"]
_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_KEEP_S: Final = 14 * 86_400.0
_MAX_MANAGER_LOGS: Final = 500
_REPEAT_S: Final = 60.0


class _TextFormatter(logging.Formatter):
    """Text of other people cannot steer a terminal that shows the log, nor look like another line of it."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record)).replace("\n", "\n    ")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return escaped(json.dumps(line, default=str))


class _LogFile(logging.handlers.RotatingFileHandler):
    """Opens a new file also if the current one was removed or moved."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None and not Path(self.baseFilename).exists():
            self.stream.close()
            self.stream = None  # the base class opens it again
        super().emit(record)


class RepeatedLines:
    """Lines of a log that other programs can cause at any rate: each message at most once in :data:`_REPEAT_S`, with
    the number of those that were left out. Used by any thread.

    :param clock: returns monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._written: dict[str, tuple[float, int]] = {}  # by message: when, and how many were left out since

    def log(self, level: int, message: str, *args: object) -> None:
        """Write a line; ``message`` is the format of ``args``, and what tells one line from another."""
        now = self._clock()
        with self._lock:
            written_at, left_out = self._written.get(message, (-math.inf, 0))
            is_due = now >= written_at + _REPEAT_S
            self._written[message] = (now, 0) if is_due else (written_at, left_out + 1)
        if is_due and left_out:
            self._logger.log(level, f"{message} (and %d more times since the last such line)", *args, left_out)
        elif is_due:
            self._logger.log(level, message, *args)


def set_up_logging(
    *,
    file: Path | None,
    to_console: bool,
    role: str,
    level: int = logging.INFO,
    style: LogFormat = "text",
    max_bytes: int = 10 * 2**20,
    backups: int = 4,
) -> None:
    """Send this process's log to a file, to standard error, or to both. ``role`` names the process in text lines.

    The file is rotated at ``max_bytes``; ``backups`` rotated files are kept. No other process may write to it.
    """
    text = f"%(asctime)s %(levelname)-7s {role}[{os.getpid()}] %(message)s"
    formatter = _JsonFormatter() if style == "json" else _TextFormatter(text)
    handlers: list[logging.Handler] = [logging.StreamHandler()] if to_console else []
    if file is not None:
        handlers.append(_LogFile(file, maxBytes=max_bytes, backupCount=backups, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def manager_log_file(directory: Path) -> Path:
    """The log file of this manager process. Old files of other managers are removed."""
    make_directory(directory, mode=0o700)
    _remove_old(directory, now=time.time())
    return directory / f"manager-{re.sub(r'[^A-Za-z0-9.-]', '_', socket.gethostname())}-{os.getpid()}.log"


def _remove_old(directory: Path, *, now: float) -> None:
    """Managers of many nodes may do this at once."""
    written: list[tuple[float, Path]] = []
    for path in directory.glob("manager-*.log*"):
        with contextlib.suppress(FileNotFoundError):
            written.append((path.stat().st_mtime, path))
    written.sort(reverse=True)
    for place, (written_at, path) in enumerate(written):
        if place >= _MAX_MANAGER_LOGS or now - written_at > _KEEP_S:
            path.unlink(missing_ok=True)


def tail(path: Path, max_bytes: int) -> str:
    """The last complete lines of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes).decode(errors="replace")
    except OSError:
        return ""
    return text if size <= max_bytes else text.partition("\n")[2]
