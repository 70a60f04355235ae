"""Fake actions of Globus Flows, in memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Sequence

from farcall_common.store.model import Action
from tests.support.stores.audit import FakeAudit


class FakeActions(FakeAudit):
    """:class:`~farcall_common.store.ports.Actions` in memory; a part of FakeDatabase."""

    def __init__(self) -> None:
        super().__init__()
        self._actions: dict[str, Action] = {}

    def add_action(self, action: Action) -> Action:
        with self._call():
            for each in self._actions.values():
                if (each.owner_id, each.request_id) == (action.owner_id, action.request_id):
                    return each
            self._actions[action.action_id] = action
            return action

    def get_action(self, action_id: str) -> Action | None:
        with self._call():
            return self._actions.get(action_id)

    def list_actions(self, owner_ids: Collection[str], *, limit: int = 100) -> Sequence[Action]:
        with self._call():
            found = [each for each in self._actions.values() if each.owner_id in owner_ids]
            return sorted(found, key=lambda each: each.action_id, reverse=True)[:limit]

    def delete_action(self, action_id: str) -> bool:
        with self._call():
            return self._actions.pop(action_id, None) is not None

    def find_overdue(self, *, at: dt.datetime, limit: int = 100) -> Sequence[Action]:
        with self._call():
            found = [(each.deadline, each) for each in self._actions.values() if each.deadline and each.deadline <= at]
            return [each for _, each in sorted(found, key=lambda pair: pair[0])][:limit]

    def forget_deadline(self, action_id: str) -> None:
        with self._call():
            if action := self._actions.get(action_id):
                self._actions[action_id] = dataclasses.replace(action, deadline=None)

    def purge_actions(self, *, created_before: dt.datetime, limit: int) -> int:
        with self._call():
            old = [id_ for id_, each in self._actions.items() if each.created_at < created_before][:limit]
            for action_id in old:
                del self._actions[action_id]
            return len(old)
