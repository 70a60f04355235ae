"""Recorder: decides when results and transitions are written to the database, and shared with other forwarders."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from farcall_common.store.model import TaskResult
from farcall_forwarder.core import actions as do
from farcall_forwarder.core.actions import Action, ShareResults
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.transitions import TransitionBuffer


class ShareBuffer:
    """Recorded results that are not shared yet. They collect while one share is under way, and the oldest are dropped
    when there are too many. Sharing is a hint, like every push: clients find missed results from the API. The
    buffer stays empty while there is no other forwarder."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._groups: deque[tuple[float, Sequence[TaskResult]]] = deque()
        self._size = 0
        self._is_sharing = False
        self._has_others = False

    def on_announced(self, *, others: int) -> None:
        """Take over the number of other forwarders."""
        self._has_others = others > 0

    def add(self, results: Iterable[TaskResult], *, recorded_at: float) -> None:
        """Add results that were recorded at an epoch second."""
        group = tuple(results)
        if not group or not self._has_others:
            return
        self._groups.append((recorded_at, group))
        self._size += len(group)
        while self._size > self._limit and len(self._groups) > 1:
            _, dropped = self._groups.popleft()
            self._size -= len(dropped)

    def next_share(self, *, url_ttl_s: int) -> ShareResults | None:
        """A step with all waiting results, unless a share is under way."""
        if self._is_sharing or not self._groups:
            return None
        groups, self._groups, self._size = tuple(self._groups), deque(), 0
        self._is_sharing = True
        return ShareResults(groups, url_ttl_s)

    def on_shared(self) -> None:
        """The share under way is over, with or without success."""
        self._is_sharing = False


class Recorder:
    """Begins flushes of results, recordings of transitions, and shares, each as soon as the one before it is over."""

    def __init__(self, policy: Policy, *, outbox: Outbox, transitions: TransitionBuffer) -> None:
        self._policy = policy
        self._outbox = outbox
        self._transitions = transitions
        self._is_recording_transitions = False
        #: Results to share with other forwarders.
        self.share = ShareBuffer(limit=policy.share_rows)

    @property
    def is_done(self) -> bool:
        """Whether the database has all reported results."""
        return not self._outbox.is_flushing and not len(self._outbox)

    def next_deadline(self, tick_at: float) -> float:
        """The monotonic second at which transitions are due, or ``tick_at`` if that is earlier."""
        if self._transitions.since is None or self._is_recording_transitions:
            return tick_at
        return min(tick_at, self._transitions_due_at(self._transitions.since))

    def next_steps(self, watchers: Iterable[str], now: Instant) -> list[Action]:
        """Steps to begin now. ``watchers`` are owners whose clients are connected here."""
        policy = self._policy
        flush: do.FlushResults | None = None
        if len(self._outbox):
            flush = self._outbox.next_flush(
                rows=policy.flush_rows, watchers=watchers, url_ttl_s=policy.download_url_ttl_s
            )
        share = self.share.next_share(url_ttl_s=policy.download_url_ttl_s)
        actions: list[Action] = [step for step in (flush, share) if step]
        since = self._transitions.since
        if since is not None and not self._is_recording_transitions and now.mono >= self._transitions_due_at(since):
            self._is_recording_transitions = True
            actions.append(do.RecordTransitions(self._transitions.take(policy.transitions_rows)))
        return actions

    def transitions_recorded(self) -> None:
        """The transitions under way are recorded."""
        self._is_recording_transitions = False

    def flushed(self, batches: Sequence[do.ResultBatch], first: Iterable[TaskResult], *, recorded_at: float) -> None:
        """A flush of these batches is over; ``first`` are the results that it made final."""
        self._outbox.flushed(batches)
        self.share.add(first, recorded_at=recorded_at)

    def put_back(self, batch: do.ResultBatch) -> None:
        """A batch was refused: its results wait again, unless the endpoint began a new generation."""
        self._outbox.put_back(batch)

    def _transitions_due_at(self, since: float) -> float:
        return since + (self._policy.transitions_idle_s if self.is_done else self._policy.transitions_busy_s)
