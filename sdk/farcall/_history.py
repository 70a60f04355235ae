"""What the client tells of the past, and what it does about tasks that have ended."""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from farcall._api import Api

Json = dict[str, Any]
Moment = dt.datetime | float

#: Entries that the API gives at once.
_PAGE: Final = 1000


class History:
    """The half of the client that looks back. Moments are datetimes or epoch seconds."""

    _api: Api

    def get_tasks(self, *, state: str | None = None, limit: int = 100) -> list[Json]:
        """Your tasks, newest first, without results; with ``state``, those in that state."""
        return list(itertools.islice(self.iter_tasks(state=state, page=min(limit, _PAGE)), limit))

    def iter_tasks(
        self,
        *,
        state: str | None = None,
        endpoint_id: str | uuid.UUID | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        page: int = _PAGE,
    ) -> Iterator[Json]:
        """Your tasks that were submitted from ``since`` to before ``until``, newest first, without results: all of
        them, read page by page.

        In the state ``dead-lettered``, those that were not discarded; with ``endpoint_id``, those of everybody there if
        the endpoint is yours.
        """
        query = {
            "state": state,
            "endpoint_id": None if endpoint_id is None else str(endpoint_id),
            "since": _epoch_s(since),
            "until": _epoch_s(until),
            "limit": page,
        }
        return _pages(lambda cursor: self._api.page_of_tasks(query | {"before": cursor}), "tasks")

    def get_task_events(self, task_id: str) -> list[Json]:
        """The history of a task: ``state, reporter, at`` (epoch seconds), ``attempt, detail``."""
        return self._api.list_events(task_id)

    def retry(self, task_id: str | uuid.UUID) -> str:
        """Run a task that has ended again: the same function, arguments, endpoint and options. Returns the id of the
        new task; the old one stays as it ended.

        :raises TaskUnknown: if you have no such task.
        :raises Conflict: while it has not ended, and when its arguments are not kept any more.
        :raises FarcallError: whatever a submit raises.
        """
        from farcall_common.wire import new_task_id

        return str(self._api.retry(str(task_id), as_task_id=new_task_id())["task_id"])

    def discard(self, task_id: str | uuid.UUID) -> None:
        """Forget a dead letter: it is listed no more, and its arguments are gone. Doing it again is harmless.

        :raises TaskUnknown: if you have no such task.
        :raises Conflict: if it is no dead letter.
        """
        self._api.discard(str(task_id))

    def iter_audit(self, *, since: Moment | None = None, until: Moment | None = None) -> Iterator[Json]:
        """What you did, and what others did to what is yours, oldest first: ``at`` (epoch seconds), ``identity_id``,
        ``action``, ``object_id``, ``owner_id``, ``detail``."""
        query = {"since": _epoch_s(since), "until": _epoch_s(until), "limit": _PAGE}
        return _pages(lambda cursor: self._api.page_of_audit(query | {"after": cursor}), "entries")


def _pages(ask: Callable[[str | None], Json], name: str) -> Iterator[Json]:
    """The entries of an answer and of all that follow it."""
    answer = ask(None)
    yield from answer[name]
    while (cursor := answer.get("next")) is not None:
        answer = ask(cursor)
        yield from answer[name]


def _epoch_s(at: Moment | None) -> float | None:
    return at.timestamp() if isinstance(at, dt.datetime) else at
