"""Registry in Valkey: live forwarders, admitted peers, wake-ups and shared results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.client import PubSub

from farcall_common.store import codec
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
from farcall_common.store.valkey import Call, KeyedCall, Scripts, batches, mapped, refusal, texts

#: Longest time that one call waits at the server.
_BLOCKED_S: Final = 0.5


class ValkeyRegistry:
    """:class:`~farcall_common.store.ports.Registry` on redis-py; a part of the queue's adapter."""

    _client: Any
    _scripts: Scripts

    def announce(self, info: ForwarderInfo, *, ttl_s: float) -> None:
        with mapped():
            self._client.set(f"fwd:{info.forwarder_id}", codec.pack(info), px=round(ttl_s * 1000))
        self._scripts.run_on("announce", ["fwds"], info.forwarder_id, ttl_s)

    def withdraw(self, forwarder_id: str) -> None:
        with mapped():
            self._client.zrem("fwds", forwarder_id)
            self._client.delete(f"fwd:{forwarder_id}")

    def forwarders(self) -> Sequence[ForwarderInfo]:
        alive = texts(self._scripts.run_on("alive", ["fwds"]))
        with mapped():
            found = [self._client.get(f"fwd:{forwarder_id}") for forwarder_id in alive]
        infos = [codec.if_known(codec.unpack_forwarder, data) for data in found if data]
        return [info for info in infos if info and not info.draining]

    def admit(self, key: PeerKey, *, ttl_s: float) -> bool:
        name, packed, ttl_ms = f"zap:{key.public_key}", codec.pack(key), round(ttl_s * 1000)
        with mapped():
            known = self._client.set(name, packed, px=ttl_ms, nx=True, get=True)
            if known is None:
                return True
            if codec.if_known(codec.unpack_peer, known) not in (None, key):
                return False
            self._client.set(name, packed, px=ttl_ms)
            return True

    def dismiss(self, public_keys: Sequence[str]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for public_key in public_keys:
            pipeline.delete(f"zap:{public_key}")
        with mapped():
            pipeline.execute()

    def find_peers(self, public_keys: Sequence[str]) -> Mapping[str, PeerKey]:
        pipeline = self._client.pipeline(transaction=False)  # not MGET, which takes keys of one slot only
        for public_key in public_keys:
            pipeline.get(f"zap:{public_key}")
        with mapped():
            found = pipeline.execute()
        peers = {
            key: codec.if_known(codec.unpack_peer, data) for key, data in zip(public_keys, found, strict=True) if data
        }
        return {key: peer for key, peer in peers.items() if peer}

    def listen(self, forwarder_id: str) -> ValkeyWakeUps:
        return ValkeyWakeUps(self._client, forwarder_id)

    # result sharing between forwarders

    def watch(self, owner_ids: Sequence[str], forwarder_id: str, *, ttl_s: float) -> frozenset[str]:
        fresh: set[str] = set()
        for batch in batches(owner_ids):
            calls: list[KeyedCall] = [("announce", [f"watch:{owner_id}"], (forwarder_id, ttl_s)) for owner_id in batch]
            answers = self._scripts.run_many_on(calls)
            fresh |= {
                owner_id for owner_id, answer in zip(batch, answers, strict=True) if not refusal(answer) and answer
            }
        return frozenset(fresh)

    def watchers(self, owner_ids: Sequence[str]) -> Mapping[str, Sequence[str]]:
        answers = self._scripts.run_many_on([("alive", [f"watch:{owner_id}"], ()) for owner_id in owner_ids])
        found: dict[str, list[str]] = {}
        for owner_id, forwarder_ids in zip(owner_ids, answers, strict=True):
            for forwarder_id in texts(() if refusal(forwarder_ids) else forwarder_ids):
                found.setdefault(forwarder_id, []).append(owner_id)
        return found

    def share(self, results: Mapping[str, Sequence[SharedResults]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for forwarder_id, messages in results.items():
            for message in messages:
                pipeline.publish(f"results:{forwarder_id}", codec.pack(message))
        with mapped():
            pipeline.execute()

    # output of tasks

    def request_output(self, asks: Sequence[OutputAsk]) -> Sequence[bool]:
        calls: list[Call] = [("request_output", ask.endpoint_id, (codec.pack(ask),)) for ask in asks]
        return [refusal(answer) is None and bool(answer) for answer in self._scripts.run_many(calls)]

    def answer_output(self, request_id: str, answer: OutputAnswer, *, ttl_s: float) -> None:
        key = f"output:{request_id}"
        pipeline = self._client.pipeline(transaction=False)
        pipeline.rpush(key, codec.pack(answer)).pexpire(key, round(ttl_s * 1000))
        with mapped():
            pipeline.execute()

    def take_output(self, request_id: str, *, timeout_s: float) -> OutputAnswer | None:
        deadline = time.monotonic() + timeout_s
        # In steps that are shorter than the client's timeout.
        while (left_s := deadline - time.monotonic()) > 0:
            with mapped():
                found = self._client.blpop([f"output:{request_id}"], timeout=min(left_s, _BLOCKED_S))
            if found is not None:
                return codec.if_known(codec.unpack_answer, found[1])
        return None

    # files of other endpoints

    def ask_file(self, ask: FileAsk) -> bool:
        answer = self._scripts.run("ask_file", ask.endpoint_id, codec.pack(ask))
        return refusal(answer) is None and bool(answer)

    def answer_file(self, forwarder_id: str, answer: FileAnswer) -> None:
        with mapped():
            self._client.publish(f"files:{forwarder_id}", codec.pack(answer))


class ValkeyWakeUps:
    """:class:`~farcall_common.store.ports.WakeUps` on its own connection."""

    def __init__(self, client: Any, forwarder_id: str) -> None:
        self._subscription: PubSub = client.pubsub()
        self._results_channel = f"results:{forwarder_id}".encode()
        self._output_channel = f"output:{forwarder_id}".encode()
        self._files_channel = f"files:{forwarder_id}".encode()
        self._shared: list[SharedResults] = []
        self._asks: list[OutputAsk] = []
        self._file_messages: list[FileMessage] = []
        channels = [f"{kind}:{forwarder_id}" for kind in ("wake", "results", "output", "files")]
        with mapped():
            self._subscription.subscribe(*channels)
            # The server's confirmations: messages that are published from here on arrive.
            for _ in channels:
                self._subscription.get_message(timeout=5.0)

    def get(self, timeout_s: float) -> Sequence[str] | None:
        endpoint_ids: dict[str, None] = {}
        deadline = time.monotonic() + timeout_s
        with mapped():
            while True:
                has_heard = bool(endpoint_ids or self._shared or self._asks or self._file_messages)
                wait_s = 0.0 if has_heard else max(0.0, deadline - time.monotonic())
                message = self._subscription.get_message(timeout=wait_s)
                if message is not None and message["type"] == "message":
                    if message["channel"] == self._results_channel:
                        if shared := codec.if_known(codec.unpack_shared, message["data"]):
                            self._shared.append(shared)
                    elif message["channel"] == self._output_channel:
                        if ask := codec.if_known(codec.unpack_ask, message["data"]):
                            self._asks.append(ask)
                    elif message["channel"] == self._files_channel:
                        if heard := codec.if_known(codec.unpack_file_message, message["data"]):
                            self._file_messages.append(heard)
                    else:
                        endpoint_ids[message["data"].decode()] = None
                elif message is None and (has_heard or time.monotonic() >= deadline):
                    return list(endpoint_ids)

    def take_shared(self) -> Sequence[SharedResults]:
        shared, self._shared = self._shared, []
        return shared

    def take_asks(self) -> Sequence[OutputAsk]:
        asks, self._asks = self._asks, []
        return asks

    def take_file_messages(self) -> Sequence[FileMessage]:
        messages, self._file_messages = self._file_messages, []
        return messages

    def close(self) -> None:
        self._subscription.close()
