"""An endpoint that others may use, also in tests that root runs: an endpoint of root refuses the tasks of others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from farcall_local.endpoint import LocalEndpoint
from tests.support.ordinary_user import USER, as_ordinary_user


class OrdinaryEndpoint(LocalEndpoint):
    """A local endpoint of an ordinary user.

    :param owned: further directories that its tasks use. If root runs the test, they belong to the user from the next
        command on.
    :param reachable: further paths that its tasks read.
    """

    def __init__(
        self,
        name: str,
        *,
        home: Path,
        environment: Mapping[str, str],
        owned: Iterable[Path] = (),
        reachable: Iterable[Path] = (),
    ) -> None:
        super().__init__(name, home=home, environment=environment)
        self._owned = [home, *owned]
        self._reachable = [*self._owned, *reachable]

    def _command_line(self, arguments: Sequence[str]) -> list[str]:
        command = super()._command_line(arguments)
        if os.geteuid() == 0:
            for directory in self._owned:
                for path in (directory, *directory.rglob("*")):
                    os.chown(path, USER, USER, follow_symlinks=False)
        return as_ordinary_user(command, reachable=self._reachable)
