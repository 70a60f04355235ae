"""A transfer process for tests, in place of whose agent the test gives orders."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import zmq

from farcall_common.file_arguments import place_of
from farcall_common.staged_files import FileUse
from farcall_endpoint.files import orders
from farcall_endpoint.files.client import TransferClient
from farcall_endpoint.files.places import files_directory
from farcall_endpoint.files.settings import TransferSettings
from tests.waiting import wait_until


class TransferProcess:
    """The process of an endpoint in a directory.

    :param environment: further variables.
    :param options: of the client and of the settings.
    """

    def __init__(self, directory: Path, *, environment: Mapping[str, str] | None = None, **options: Any) -> None:
        self.directory = directory
        self.working_dir = directory / "work"
        self.poller = zmq.Poller()
        client = {name: options.pop(name) for name in ("clock", "idle_s", "owner_or") if name in options}
        settings = TransferSettings(directory=str(directory / "files"), working_dir=str(self.working_dir), **options)
        self.client = TransferClient(
            lambda: settings, poller=self.poller, environment={**os.environ, **(environment or {})}, **client
        )
        self.reports: list[orders.Report] = []
        self.losses: list[str] = []
        self.numbers = itertools.count(1)

    @property
    def process(self) -> psutil.Process:
        assert self.client.pid is not None
        return psutil.Process(self.client.pid)

    def listen(self) -> None:
        """One turn of the agent."""
        self.poller.poll(20)
        reports, lost = self.client.receive()
        self.reports += reports
        self.losses += [lost] if lost else []

    def wait_for(self, *kinds: type, count: int = 1) -> list[Any]:
        """Wait for so many reports of these kinds; they are taken out.

        :raises AssertionError: if a transfer fails, and that was not waited for.
        """

        def found() -> list[orders.Report]:
            self.listen()
            failed = [each for each in self.reports if isinstance(each, orders.Failed)]
            assert orders.Failed in kinds or not failed, failed
            return [each for each in self.reports if isinstance(each, kinds)]

        wait_until(lambda: len(found()) >= count, f"{count} reports of {[kind.__name__ for kind in kinds]}")
        taken = found()
        self.reports = [each for each in self.reports if not isinstance(each, kinds)]
        return taken

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Turns of the agent until something is so."""

        def is_so() -> object:
            self.listen()
            return condition()

        wait_until(is_so, what)

    def make(self, *task_ids: str, submitter: str = "", writes: tuple[str, ...] = ()) -> None:
        """Make the directories of tasks; ``writes`` are URLs."""
        self.client.order([orders.Make(task_id, submitter, writes) for task_id in task_ids])
        for made in self.wait_for(orders.Made, count=len(task_ids)):
            assert made.error is None

    def order(self, use: FileUse, *task_ids: str, submitter: str = "") -> int:
        """Order a transfer; its number."""
        number = next(self.numbers)
        if use.mode == "r":
            self.client.order([orders.Fetch(number, submitter, use, task_ids)])
        else:
            self.client.order([orders.Store(number, submitter, use, task_ids[0])])
        return number

    def move(self, use: FileUse, *task_ids: str, submitter: str = "") -> Any:
        """Move a file, and wait for it; the report."""
        self.order(use, *(task_ids or ("t",)), submitter=submitter)
        [report] = self.wait_for(orders.Fetched, orders.Stored, orders.Failed)
        return report

    def error(self, use: FileUse, *task_ids: str, submitter: str = "") -> dict[str, Any]:
        """The error with which a transfer fails."""
        report = self.move(use, *task_ids, submitter=submitter)
        assert isinstance(report, orders.Failed), report
        return report.error

    def code(self, use: FileUse, *task_ids: str, submitter: str = "") -> str:
        """The code of the error with which a transfer fails."""
        return str(self.error(use, *task_ids, submitter=submitter)["code"])

    def place(self, use: FileUse, task_id: str = "t", submitter: str = "") -> Path:
        """Where a task finds a file."""
        return Path(place_of(str(files_directory(self.working_dir, task_id, submitter)), use.url, use.mode))

    def remove(self, task_id: str, submitter: str = "") -> None:
        self.client.order([orders.Remove(task_id, submitter)])
        self.wait_for(orders.Removed)

    def copies(self) -> list[Path]:
        """The copies in the cache."""
        return sorted(each for each in (self.directory / "files").glob("*/??/*") if each.parent.name != "drafts")

    def drafts(self) -> list[Path]:
        return list((self.directory / "files").glob("*/drafts/*"))


@contextlib.contextmanager
def transfer_process(directory: Path, **options: Any) -> Iterator[TransferProcess]:
    """A process that is gone afterwards."""
    transfers = TransferProcess(directory, **options)
    try:
        yield transfers
    finally:
        transfers.client.close()
