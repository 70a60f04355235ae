"""Fake registry: live forwarders, admitted peers, wake-ups and shared results, in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from farcall_common.errors import Unavailable
from farcall_common.store.model import (
    FileAnswer,
    FileAsk,
    FileMessage,
    ForwarderInfo,
    OutputAnswer,
    OutputAsk,
    PeerKey,
    SharedResults,
)
from tests.support.stores.reach import Reach


class FakeRegistry(Reach):
    """:class:`~farcall_common.store.ports.Registry` in memory.

    :param clock: that of the store, epoch seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._clock = clock
        self._forwarders: dict[str, tuple[ForwarderInfo, float]] = {}
        self._peers: dict[str, PeerKey] = {}
        self._listeners: dict[str, list[FakeWakeUps]] = {}
        self._watchers: dict[str, dict[str, float]] = {}
        self._outputs: dict[str, tuple[list[OutputAnswer], float]] = {}
        self._answered = threading.Condition(self._lock)

    def wipe(self) -> None:
        """Forget everything, as after a restart without persistence. Subscriptions stay."""
        with self._call():
            self._forwarders.clear()
            self._peers.clear()
            self._watchers.clear()
            self._outputs.clear()

    def announce(self, info: ForwarderInfo, *, ttl_s: float) -> None:
        with self._call():
            self._forwarders[info.forwarder_id] = (info, self._clock() + ttl_s)

    def withdraw(self, forwarder_id: str) -> None:
        with self._call():
            self._forwarders.pop(forwarder_id, None)

    def forwarders(self) -> Sequence[ForwarderInfo]:
        with self._call():
            now = self._clock()
            return [info for info, until in self._forwarders.values() if until > now and not info.draining]

    def admit(self, key: PeerKey, *, ttl_s: float) -> bool:
        with self._call():
            return self._peers.setdefault(key.public_key, key) == key

    def dismiss(self, public_keys: Sequence[str]) -> None:
        with self._call():
            for public_key in public_keys:
                self._peers.pop(public_key, None)

    def find_peers(self, public_keys: Sequence[str]) -> Mapping[str, PeerKey]:
        with self._call():
            return {key: self._peers[key] for key in public_keys if key in self._peers}

    def listen(self, forwarder_id: str) -> FakeWakeUps:
        with self._call():
            listener = FakeWakeUps(self, forwarder_id)
            self._listeners.setdefault(forwarder_id, []).append(listener)
            return listener

    # result sharing between forwarders

    def watch(self, owner_ids: Sequence[str], forwarder_id: str, *, ttl_s: float) -> frozenset[str]:
        with self._call():
            now = self._clock()
            known = {
                owner_id for owner_id in owner_ids if self._watchers.get(owner_id, {}).get(forwarder_id, 0.0) > now
            }
            for owner_id in owner_ids:
                self._watchers.setdefault(owner_id, {})[forwarder_id] = now + ttl_s
            return frozenset(owner_ids) - known

    def watchers(self, owner_ids: Sequence[str]) -> Mapping[str, Sequence[str]]:
        with self._call():
            now, found = self._clock(), dict[str, list[str]]()
            for owner_id in owner_ids:
                for forwarder_id, until in self._watchers.get(owner_id, {}).items():
                    if until > now:
                        found.setdefault(forwarder_id, []).append(owner_id)
            return found

    def share(self, results: Mapping[str, Sequence[SharedResults]]) -> None:
        with self._call():
            for forwarder_id, messages in results.items():
                for listener in self._listeners.get(forwarder_id, []):
                    listener.hear_results(messages)

    # output of tasks

    def request_output(self, asks: Sequence[OutputAsk]) -> Sequence[bool]:
        with self._call():
            found = []
            for ask in asks:
                owner = self._owner_of(ask.endpoint_id)
                found.append(owner is not None)
                for listener in self._listeners.get(owner or "", []):
                    listener.hear_ask(ask)
            return found

    def _owner_of(self, endpoint_id: str) -> str | None:
        raise NotImplementedError

    def answer_output(self, request_id: str, answer: OutputAnswer, *, ttl_s: float) -> None:
        with self._call():
            self._outputs = {id_: kept for id_, kept in self._outputs.items() if kept[1] > self._clock()}
            answers, _ = self._outputs.get(request_id, ([], 0.0))
            self._outputs[request_id] = ([*answers, answer], self._clock() + ttl_s)
            self._answered.notify_all()

    def take_output(self, request_id: str, *, timeout_s: float) -> OutputAnswer | None:
        with self._call():
            self._answered.wait_for(lambda: self._answers(request_id), timeout_s)
            answers = self._answers(request_id)
            return answers.pop(0) if answers else None

    def _answers(self, request_id: str) -> list[OutputAnswer]:
        answers, until = self._outputs.get(request_id, ([], 0.0))
        return answers if until > self._clock() else []

    # files of other endpoints

    def ask_file(self, ask: FileAsk) -> bool:
        with self._call():
            listeners = self._listeners.get(self._owner_of(ask.endpoint_id) or "", [])
            for listener in listeners:
                listener.hear_file_message(ask)
            return bool(listeners)

    def answer_file(self, forwarder_id: str, answer: FileAnswer) -> None:
        with self._call():
            for listener in self._listeners.get(forwarder_id, []):
                listener.hear_file_message(answer)

    def unlisten(self, forwarder_id: str, listener: FakeWakeUps) -> None:
        """Forget a subscription; :meth:`WakeUps.close` calls it."""
        with self._lock:
            self._listeners[forwarder_id].remove(listener)


class FakeWakeUps:
    """A subscription to one forwarder's wake-ups."""

    def __init__(self, queue: FakeRegistry, forwarder_id: str) -> None:
        self._queue = queue
        self._forwarder_id = forwarder_id
        self._heard: dict[str, None] = {}
        self._shared: list[SharedResults] = []
        self._asks: list[OutputAsk] = []
        self._file_messages: list[FileMessage] = []
        self._changed = threading.Condition()

    def hear(self, endpoint_id: str) -> None:
        with self._changed:
            self._heard[endpoint_id] = None
            self._changed.notify_all()

    def hear_results(self, messages: Sequence[SharedResults]) -> None:
        with self._changed:
            self._shared += messages
            self._changed.notify_all()

    def hear_ask(self, ask: OutputAsk) -> None:
        with self._changed:
            self._asks.append(ask)
            self._changed.notify_all()

    def hear_file_message(self, message: FileMessage) -> None:
        with self._changed:
            self._file_messages.append(message)
            self._changed.notify_all()

    def take_file_messages(self) -> Sequence[FileMessage]:
        with self._changed:
            messages, self._file_messages = self._file_messages, []
            return messages

    def take_asks(self) -> Sequence[OutputAsk]:
        with self._changed:
            asks, self._asks = self._asks, []
            return asks

    def take_shared(self) -> Sequence[SharedResults]:
        with self._changed:
            shared, self._shared = self._shared, []
            return shared

    def get(self, timeout_s: float) -> Sequence[str] | None:
        if not self._queue.reachable:
            raise Unavailable("FakeQueue was cut off")
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._heard or self._shared or self._asks or self._file_messages), timeout_s
            )
            heard = list(self._heard)
            self._heard.clear()
            return heard

    def close(self) -> None:
        self._queue.unlisten(self._forwarder_id, self)
