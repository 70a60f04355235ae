"""The way of payloads and results that are too large for a message: to the blob store, or by the forwarder."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Final, Literal, Protocol

from farcall_common.wire import BlobGrant, BlobLocation, BlobPiece, BlobTaken, Message
from farcall_endpoint.agent.background import Background
from farcall_endpoint.agent.core import AgentCore
from farcall_endpoint.agent.relay import Relay
from farcall_endpoint.agent.tasks import Task
from farcall_endpoint.agent.transfers import TransferFailed, Transfers

__all__ = ["Blobs", "BlobsMode"]

_logger = logging.getLogger(__name__)

BlobsMode = Literal["auto", "direct", "relay"]

#: After so many seconds the blob store is tried again: what could not be reached may have been away.
_REMEMBER_S: Final = 600.0


class _Clock(Protocol):
    def monotonic(self) -> float: ...
    def epoch(self) -> float: ...


class Blobs:
    """Carries blobs for an agent; its core hears how it went.

    :param mode: ``direct`` by URL only, ``relay`` by the forwarder only, ``auto`` by the forwarder while the blob store
        cannot be reached.
    :param say: sends a message to the forwarder.
    """

    def __init__(
        self,
        mode: BlobsMode,
        *,
        core: AgentCore,
        background: Background,
        transfers: Transfers,
        clock: _Clock,
        say: Callable[[Message, tuple[bytes, ...]], None],
    ) -> None:
        self._mode = mode
        self._core = core
        self._background = background
        self._transfers = transfers
        self._clock = clock
        self._relay = Relay(say)
        self._relayed_until = 0.0
        self._unreachable = ""  # why, as long as it counts

    # -- the session ---------------------------------------------------------------------------------------------------

    def opened(self, piece_bytes: int) -> None:
        """A session is open; its forwarder relays pieces of so many bytes, or nothing."""
        self._relay.opened(piece_bytes, now=self._clock.monotonic())

    def closed(self) -> None:
        """The session is gone."""
        self._relay.closed()

    def received(self, message: BlobPiece | BlobTaken, frames: tuple[bytes, ...]) -> None:
        """The forwarder says something about a blob on its way."""
        self._relay.received(message, frames, now=self._clock.monotonic())

    def tick(self) -> None:
        """Time has passed."""
        self._relay.tick(now=self._clock.monotonic())

    def next_deadline(self) -> float | None:
        """The monotonic second at which :meth:`tick` may have something to do."""
        return self._relay.next_deadline()

    # -- what the core wants -------------------------------------------------------------------------------------------

    def fetch(self, task: Task) -> None:
        """Get a payload."""
        blob = task.spec.payload_blob
        assert blob is not None
        if self._is_relayed:
            self._pull(task, blob)
            return

        def job() -> Callable[[], None]:
            try:
                if blob.url is None:
                    raise TransferFailed("no address came with them", retryable=False)
                payload = self._transfers.download(blob.url, sha256=blob.sha256, size_bytes=blob.size_bytes)
            except TransferFailed as failure:
                if self._may_relay(failure):
                    return functools.partial(self._fall_back, str(failure), functools.partial(self._pull, task, blob))
                reason = str(failure)
                return lambda: self._core.fetch_failed(task, reason)
            return functools.partial(self._arrived, task, payload)

        self._background.submit(job)

    def upload(self, task: Task, grant: BlobGrant, body: bytes) -> None:
        """Put a result where it was granted."""
        end = task.end
        assert end is not None
        location = BlobLocation(blob_key=grant.blob_key, size_bytes=end.size_bytes, sha256=end.sha256)
        if self._is_relayed:
            self._push(task, location, body)
            return

        def job() -> Callable[[], None]:
            try:
                self._transfers.upload(grant.upload_url, body, headers=grant.headers)
            except TransferFailed as failure:
                if self._may_relay(failure):
                    go_on = functools.partial(self._push, task, location, body)
                    return functools.partial(self._fall_back, str(failure), go_on)
                return self._not_uploaded(task, failure)
            return functools.partial(self._stored, task, location)

        self._background.submit(job)

    def _arrived(self, task: Task, payload: bytes) -> None:
        self._unreachable = ""
        self._core.fetched(task, payload)

    def _stored(self, task: Task, location: BlobLocation) -> None:
        self._unreachable = ""
        self._core.uploaded(task, location)

    # -- by the forwarder ----------------------------------------------------------------------------------------------

    @property
    def _is_relayed(self) -> bool:
        return self._mode == "relay" or (self._mode == "auto" and self._clock.monotonic() < self._relayed_until)

    def _may_relay(self, failure: TransferFailed) -> bool:
        return self._mode == "auto" and failure.is_unreachable

    def _fall_back(self, reason: str, go_on: Callable[[], None]) -> None:
        if reason and not self._unreachable:
            _logger.warning("the blob store cannot be reached (%s): blobs go by the forwarder from now on", reason)
        self._unreachable = reason
        self._relayed_until = self._clock.monotonic() + _REMEMBER_S
        go_on()

    def _why(self, failure: TransferFailed) -> str:
        return (
            f"{failure}; the blob store cannot be reached: {self._unreachable}" if self._unreachable else str(failure)
        )

    def _pull(self, task: Task, blob: BlobLocation) -> None:
        def done(outcome: bytes | TransferFailed) -> None:
            if isinstance(outcome, TransferFailed):
                self._core.fetch_failed(task, self._why(outcome))
            else:
                self._core.fetched(task, outcome)

        self._relay.download(task.task_id, task.attempt, blob, done, now=self._clock.monotonic())

    def _push(self, task: Task, location: BlobLocation, body: bytes) -> None:
        def done(outcome: bytes | TransferFailed) -> None:
            if isinstance(outcome, TransferFailed):
                self._not_uploaded(task, outcome)()
            else:
                self._core.uploaded(task, location)

        self._relay.upload(task.task_id, task.attempt, location, body, done, now=self._clock.monotonic())

    def _not_uploaded(self, task: Task, failure: TransferFailed) -> Callable[[], None]:
        reason, retryable = self._why(failure), failure.retryable
        return lambda: self._core.upload_failed(task, reason, retryable=retryable, now=self._clock.epoch())
