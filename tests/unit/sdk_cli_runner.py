"""The command line in this process, against a cloud in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner

from farcall import Client
from farcall.cli._app import app
from farcall.cli._connect import CommandEnvironment
from farcall.testing import FakeCloud


class Farcall:
    """``farcall`` of a user who is logged in at a cloud. Called with arguments, it returns what became of them."""

    def __init__(self, cloud: FakeCloud) -> None:
        self._cloud = cloud
        self._runner = CliRunner()
        #: How commands pause.
        self.pause: Callable[[float], None] = time.sleep

    def __call__(self, *arguments: str, input: str | None = None) -> Any:  # noqa: A002 - as the runner calls it
        return self._runner.invoke(
            app, arguments, input=input, obj=CommandEnvironment(self._connect, pause=self.pause), prog_name="farcall"
        )

    def lines(self, *arguments: str) -> list[list[str]]:
        """The cells of what a command that succeeds writes into a pipe."""
        result = self(*arguments)
        assert result.exit_code == 0, result.output
        return [line.split("\t") for line in result.stdout.splitlines()]

    def _connect(self, api_url: str | None, token: str | None) -> Client:
        return Client(api_url or "https://farcall.test", token or self._cloud.token, transport=self._cloud.transport)
