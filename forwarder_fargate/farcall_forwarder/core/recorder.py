"""The way to the database, and from there to other forwarders: when which of what waits is taken there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farcall_common.store.model import TaskResult
from farcall_forwarder.core import actions as do
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.moves import MoveBuffer
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.sharing import ShareBuffer

__all__ = ["Recorder"]


class Recorder:
    """Begins flushes of ends, recordings of moves, and telling others, each as soon as the one before it is over."""

    def __init__(self, policy: Policy, *, outbox: Outbox, moves: MoveBuffer) -> None:
        self._policy = policy
        self._outbox = outbox
        self._moves = moves
        self._is_recording_moves = False
        #: What other forwarders are to be told.
        self.share = ShareBuffer(limit=policy.share_rows)

    @property
    def is_done(self) -> bool:
        """Whether the database has all ends that were reported."""
        return not self._outbox.is_flushing and not len(self._outbox)

    def next_deadline(self, tick_at: float) -> float:
        """The monotonic second at which moves are due, or ``tick_at`` if that is earlier."""
        if self._moves.since is None or self._is_recording_moves:
            return tick_at
        return min(tick_at, self._moves_due_at(self._moves.since))

    def next_steps(self, watchers: Iterable[str], now: Instant) -> list[Action]:
        """What is to be begun now. ``watchers`` are owners whose clients wait for their ends."""
        policy = self._policy
        flush: do.FlushResults | None = None
        if len(self._outbox):
            flush = self._outbox.next_flush(
                rows=policy.flush_rows, watchers=watchers, url_ttl_s=policy.download_url_ttl_s
            )
        share = self.share.next_share(url_ttl_s=policy.download_url_ttl_s)
        actions: list[Action] = [step for step in (flush, share) if step]
        since = self._moves.since
        if since is not None and not self._is_recording_moves and now.mono >= self._moves_due_at(since):
            self._is_recording_moves = True
            actions.append(do.RecordMoves(self._moves.take(policy.moves_rows)))
        return actions

    def moves_recorded(self) -> None:
        """The moves under way are recorded."""
        self._is_recording_moves = False

    def flushed(self, batches: Sequence[do.ResultBatch], first: Iterable[TaskResult], *, recorded_at: float) -> None:
        """A flush of these batches has come back; ``first`` are the ends that it made final."""
        self._outbox.flushed(batches)
        self.share.add(first, recorded_at=recorded_at)

    def put_back(self, batch: do.ResultBatch) -> None:
        """A batch was refused: its ends wait again, unless the endpoint began a new life."""
        self._outbox.put_back(batch)

    def _moves_due_at(self, since: float) -> float:
        return since + (self._policy.moves_idle_s if self.is_done else self._policy.moves_busy_s)
