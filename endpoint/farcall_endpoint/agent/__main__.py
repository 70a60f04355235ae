"""Agent process: ``python -m farcall_endpoint.agent``, the daemon of ``farcall-endpoint start --detach``."""

# ruff: noqa: E402 - what httpx must not load has to be known before
from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
from pathlib import Path

sys.modules["httpx._main"] = None  # type: ignore[assignment]  # its command loads 6 MiB of rich, pygments and click

from farcall_common.errors import FarcallError
from farcall_common.exit_codes import DONE, INTERNAL, exit_code
from farcall_endpoint.agent.shell.launch import run_agent
from farcall_endpoint.config.reader import read_config
from farcall_endpoint.host.isolation.environment import SECRETS
from farcall_endpoint.host.isolation.process import make_private
from farcall_endpoint.host.logs import set_up_logging
from farcall_endpoint.services.directory import EndpointDirectory

_logger = logging.getLogger(__name__)

_COLLECT_AFTER = 100_000
"""Thousands of tasks are alive at a time and none of them is garbage: collect less often than by default."""


def main() -> int:
    """Run an endpoint; writes one line of JSON to ``--ready-fd``: whether it connected, or why it could not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--console", action="store_true", help="log to standard error too")
    options = parser.parse_args()
    make_private()
    ready = _ReadyPipe(options.ready_fd)
    try:
        directory = EndpointDirectory.of(options.home, options.name)
        directory.require()
        directory.require_writable()
        config = read_config(directory.config_file)
        level = logging.DEBUG if options.debug or config.debug else logging.INFO
        set_up_logging(
            file=directory.log_file,
            to_console=options.console,
            role="agent",
            level=level,
            style=config.log_format,
            max_bytes=config.log_max_bytes,
            backups=config.log_backups,
        )
        directory.close_to_others()
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        login = directory.find_login(home=options.home, environ=os.environ)
        own_environment = dict(os.environ)
        for name in SECRETS:
            os.environ.pop(name, None)  # so that no command of a scheduler inherits it
        run_agent(
            directory,
            config=config,
            login=login,
            own_environment=own_environment,
            environment=os.environ,
            on_connected=ready.connected,
        )
    except FarcallError as error:
        _logger.error("the endpoint stops: %s", error)
        ready.failed(error)
        return exit_code(error)
    except Exception:
        _logger.exception("the endpoint stops because of a defect; its tasks are in the spool")
        return INTERNAL
    return DONE


class _ReadyPipe:
    """Reports once to the process that waits for the start, and closes the pipe."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)

    def connected(self) -> None:
        self._write({"connected": True})

    def failed(self, error: FarcallError) -> None:
        self._write({"error": str(error)})

    def _write(self, message: dict[str, object]) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(BrokenPipeError):  # no process waits any more
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")
        os.close(self._descriptor)
        self._descriptor = None


if __name__ == "__main__":
    sys.exit(main())
