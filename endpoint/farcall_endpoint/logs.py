"""Log lines for whoever has to find out at three in the morning: one per event, ids in fields, never user bytes."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Final, Literal

__all__ = ["LogFormat", "set_up_logging"]

LogFormat = Literal["text", "json"]
_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


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
        return json.dumps(line, default=str)


def set_up_logging(
    *, file: Path | None, to_console: bool, role: str, level: int = logging.INFO, style: LogFormat = "text"
) -> None:
    """Send this process's log to a file, to standard error, or to both. ``role`` names the process in text lines."""
    text = f"%(asctime)s %(levelname)-7s {role}[{os.getpid()}] %(message)s"
    formatter = _JsonFormatter() if style == "json" else logging.Formatter(text)
    handlers: list[logging.Handler] = [logging.StreamHandler()] if to_console else []
    if file is not None:
        handlers.append(logging.FileHandler(file))
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
