"""The numbers that the forwarder decides by, and how it tells the time."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from farcall_common.limits import MAX_INLINE_BYTES, MAX_PAYLOAD_BYTES, MAX_STREAM_GROUPS

__all__ = ["Instant", "Policy"]


class Instant(NamedTuple):
    """One moment on both clocks: ``mono`` seconds for waiting, ``epoch`` seconds for what others will read."""

    mono: float
    epoch: float


@dataclasses.dataclass(frozen=True)
class Policy:
    """Periods in seconds, limits in bytes or counts."""

    #: A lease that nobody prolongs ends after this long. It is prolonged each upkeep while the agent has a session, and
    #: for a task that may not run twice ``return_s`` longer: a returning agent's spool says what became of the task.
    lease_s: float = 30.0
    return_s: float = 900.0
    #: An agent from which nothing was heard for so long after tasks were sent to it gets no more until it is heard.
    silence_s: float = 5.0
    #: A tick that comes so late means that this process was stopped, and has not read what peers said meanwhile.
    stall_s: float = 5.0
    ownership_ttl_s: float = 45.0
    upkeep_s: float = 10.0
    #: How often the queue of a connected endpoint is asked for work that no wake-up told of.
    sweep_s: float = 1.0
    #: Sweeps are spread out so that all endpoints together cause no more than this many a second, unless wake-ups could
    #: not be heard for a while: then all of them are looked at.
    sweeps_per_s: float = 500.0
    announce_ttl_s: float = 15.0
    announce_s: float = 5.0
    presence_s: float = 30.0
    #: How often what an agent says of itself is written to the database at most: how new its spool is, its numbers.
    record_s: float = 1.0
    #: How often the numbers that metrics are made of are written to the log.
    meter_s: float = 60.0
    #: How often memory that nobody uses is given back.
    tidy_s: float = 10.0
    #: What a peer may ask for as its heartbeat.
    min_heartbeat_s: float = 1.0
    max_heartbeat_s: float = 60.0

    max_lease_batch: int = 500
    #: Tasks beyond the credit, whatever reserve an agent asks for.
    max_reserve: int = 64
    #: User bytes in one envelope to an agent.
    max_run_bytes: int = 4 * 1024 * 1024
    flush_rows: int = 500
    #: Reports of moves wait this long for the task to end; under load, when results come first, up to the second.
    moves_idle_s: float = 0.1
    moves_busy_s: float = 1.0
    moves_rows: int = 1000
    function_cache_bytes: int = 64 * 1024 * 1024

    #: Of a result, and of one that travels inline: larger ones go through the blob store.
    max_result_bytes: int = MAX_PAYLOAD_BYTES
    max_inline_bytes: int = MAX_INLINE_BYTES
    upload_url_ttl_s: int = 3600
    download_url_ttl_s: int = 3600

    #: Blobs that are passed on to and from agents: bytes in memory at once, bytes in one message, and how long an agent
    #: may take to say the next word.
    relay_bytes: int = 32 * 1024 * 1024
    relay_piece_bytes: int = 1024 * 1024
    relay_patience_s: float = 30.0

    #: How long other forwarders remember that an owner's clients wait here, and how often they are told.
    watch_ttl_s: float = 45.0
    watch_s: float = 15.0
    #: Ends that wait to be told to other forwarders; more are dropped, and clients find them by asking.
    share_rows: int = 2000

    max_groups: int = MAX_STREAM_GROUPS
    ring_results: int = 10_000
    ring_bytes: int = 16 * 1024 * 1024
    #: How long an owner without a stream can come back and resume.
    ring_idle_s: float = 120.0
    #: Bytes and results in one envelope to a client.
    max_push_bytes: int = 1024 * 1024
    max_push_results: int = 500

    drain_s: float = 20.0
    #: Peers that are sent away per second of a drain, so that they do not all reconnect at once.
    moves_per_s: float = 300.0
    #: After the last peer was sent away: time for what agents had on the way.
    drain_grace_s: float = 2.0
    #: Peers that are told to move come back after a random time up to this.
    move_spread_s: float = 2.0

    def heartbeat_s(self, asked_s: float) -> float:
        """The heartbeat of a peer that asks for this one."""
        return min(max(asked_s, self.min_heartbeat_s), self.max_heartbeat_s)

    @property
    def tick_s(self) -> float:
        """How often deadlines are looked at: often enough for the shortest of the periods."""
        return min(self.sweep_s, self.upkeep_s, self.min_heartbeat_s, self.record_s) / 2
