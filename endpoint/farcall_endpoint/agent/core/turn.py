"""Turn: what the agent's core has decided since the last actions, and the actions that this makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from farcall_common.wire import BlobGrant, FunctionSpec, TaskTransition
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core.actions import Action
from farcall_endpoint.agent.core.prewarm import Change
from farcall_endpoint.agent.core.tasks import Kept, Task
from farcall_endpoint.files.orders import Order

_NOTHING: Final = do.WriteSpool()


@dataclasses.dataclass(slots=True)
class Turn:
    """Changes that become the next actions. The core and :class:`HeldTasks` add them. The spool is written before any
    other action is performed."""

    # to the spool
    functions: list[tuple[FunctionSpec, bytes]] = dataclasses.field(default_factory=list)
    accepted: list[Task] = dataclasses.field(default_factory=list)
    redelivered: list[Task] = dataclasses.field(default_factory=list)
    fetched: list[Task] = dataclasses.field(default_factory=list)
    starts: list[Task] = dataclasses.field(default_factory=list)
    finished: list[Task] = dataclasses.field(default_factory=list)
    dropped: list[int] = dataclasses.field(default_factory=list)
    forgotten: list[int] = dataclasses.field(default_factory=list)
    retried: list[Task] = dataclasses.field(default_factory=list)
    storing: list[Task] = dataclasses.field(default_factory=list)
    # to managers
    orders: dict[str, list[Task]] = dataclasses.field(default_factory=dict)
    cancels: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    prewarms: Sequence[Change] = ()
    passed: list[do.PassOn | do.CopyFiles | do.ReturnTasks] = dataclasses.field(default_factory=list)
    # to the blob store
    fetches: list[Task] = dataclasses.field(default_factory=list)
    uploads: list[tuple[Task, BlobGrant]] = dataclasses.field(default_factory=list)
    # to the cloud
    acknowledged: list[Task] = dataclasses.field(default_factory=list)
    transitions: list[TaskTransition] = dataclasses.field(default_factory=list)
    results: list[Task] = dataclasses.field(default_factory=list)
    upload_requests: list[Task] = dataclasses.field(default_factory=list)
    credit: int = 0
    # to the store of output
    outputs: list[Kept] = dataclasses.field(default_factory=list)
    # to the transfer process
    transfers: list[Order] = dataclasses.field(default_factory=list)
    # to the log
    signed: list[do.LogSigner] = dataclasses.field(default_factory=list)
    file_failures: list[str] = dataclasses.field(default_factory=list)

    def spool_write(self) -> do.WriteSpool | None:
        """The part of the spool; None if that is empty."""
        write = do.WriteSpool(
            tuple(self.functions),
            tuple(self.accepted),
            tuple(self.redelivered),
            tuple(self.fetched),
            tuple(self.starts),
            tuple(self.finished),
            tuple(self.dropped),
            tuple(self.forgotten),
            tuple(self.retried),
            tuple(self.storing),
        )
        return None if write == _NOTHING else write

    def cancel_actions(self) -> list[Action]:
        """The cancels of the turn, and what is about calls and copies of files, which need not wait for the spool."""
        actions: list[Action] = [do.CancelTasks(manager_id, tuple(ids)) for manager_id, ids in self.cancels.items()]
        self.cancels.clear()
        actions += self.passed
        self.passed.clear()
        return actions

    def other_actions(self) -> list[Action]:
        """The actions that wait for the spool."""
        actions: list[Action] = [do.RunTasks(manager_id, tuple(tasks)) for manager_id, tasks in self.orders.items()]
        if self.prewarms:
            actions += [do.Prewarm(each.manager_id, each.environment, each.count, each.retry) for each in self.prewarms]
        if self.fetches:
            actions.append(do.FetchPayloads(tuple(self.fetches)))
        if self.uploads:
            actions.append(do.UploadResults(tuple(self.uploads)))
        if self.file_failures:
            actions.append(do.LogFiles(tuple(self.file_failures)))
        if self.outputs:
            actions.append(do.KeepOutput(tuple(self.outputs)))
        if self.acknowledged:
            actions.append(do.AcknowledgeTasks(tuple(self.acknowledged)))
        if self.credit:
            actions.append(do.GiveCredit(self.credit))
        if self.transitions:
            actions.append(do.ReportTransitions(tuple(self.transitions)))
        if self.results:
            actions.append(do.ReportResults(tuple(self.results)))
        if self.upload_requests:
            actions.append(do.RequestUploads(tuple(self.upload_requests)))
        if self.transfers:
            actions.append(do.MoveFiles(tuple(self.transfers)))
        return actions + self.signed
