"""Policy: the periods and limits of the core, and its clock readings."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from farcall_common.limits import (
    MAX_FILE_PIECE_BYTES,
    MAX_INLINE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RELAYED_FILE_BYTES,
    MAX_STREAM_GROUPS,
)
from farcall_common.report_limiter import BURST, LEAST_S, SUSTAINED_S


class Instant(NamedTuple):
    """One moment on both clocks: ``mono`` seconds for waiting, ``epoch`` seconds for records and messages."""

    mono: float
    epoch: float


@dataclasses.dataclass(frozen=True)
class Policy:
    """Periods in seconds, limits in bytes or counts."""

    #: A lease that is not renewed ends after this long. Maintenance renews it while the agent has a session, and for
    #: ``return_s`` longer if the task may not run twice: a returning agent's spool has the outcome of the task.
    lease_s: float = 30.0
    return_s: float = 900.0
    #: An agent that is silent for so long after tasks were sent to it gets no more until its next message.
    silence_s: float = 5.0
    #: A tick that comes so late means that this process was stopped, and messages of peers are unread.
    stall_s: float = 5.0
    ownership_ttl_s: float = 45.0
    maintenance_s: float = 10.0
    #: How often the queue of a connected endpoint is checked for work that no wake-up announced.
    sweep_s: float = 1.0
    #: Sweeps are spread so that all endpoints together cause no more than this many a second. After an interruption of
    #: the wake-ups all endpoints are swept at once.
    sweeps_per_s: float = 500.0
    announce_ttl_s: float = 15.0
    announce_s: float = 5.0
    presence_s: float = 30.0
    #: Shortest period between two writes of an agent's own data to the database: its spool's generation, its numbers.
    record_s: float = LEAST_S
    #: Numbers that change all the time: so many writes come ``record_s`` apart, the following ones this far.
    record_sustained_s: float = SUSTAINED_S
    record_burst: int = BURST
    #: How often the numbers for metrics are written to the log.
    meter_s: float = 60.0
    #: How often free memory is returned to the operating system.
    tidy_s: float = 10.0
    #: Range of the heartbeat that a peer may request.
    min_heartbeat_s: float = 1.0
    max_heartbeat_s: float = 60.0

    max_lease_batch: int = 500
    #: Most tasks beyond the credit, for any reserve that an agent requests.
    max_reserve: int = 64
    #: User bytes in one envelope to an agent.
    max_run_bytes: int = 4 * 1024 * 1024
    flush_rows: int = 500
    #: Transitions wait so long for the task to end: idle, and under load, when results are flushed first.
    transitions_idle_s: float = 0.1
    transitions_busy_s: float = 1.0
    transitions_rows: int = 1000
    function_cache_bytes: int = 64 * 1024 * 1024

    #: Of a result, and of one that travels inline: larger ones go through the blob store.
    max_result_bytes: int = MAX_PAYLOAD_BYTES
    max_inline_bytes: int = MAX_INLINE_BYTES
    upload_url_ttl_s: int = 3600
    download_url_ttl_s: int = 3600

    #: Blobs that are relayed to and from agents: bytes in memory at once, bytes in one message, and how long an agent
    #: may take until its next message.
    relay_bytes: int = 32 * 1024 * 1024
    relay_piece_bytes: int = 1024 * 1024
    relay_timeout_s: float = 30.0

    #: Files that endpoints read from others: the size of one, and bytes that an identity may store in a day, with its
    #: arguments (0: any number).
    max_relayed_file_bytes: int = MAX_RELAYED_FILE_BYTES
    stored_bytes_per_day: int = 100 * 1024 * 1024 * 1024
    #: How long the endpoint with the file may take for a piece, and the forwarder that asks waits for that.
    file_read_s: float = 120.0
    file_pull_s: float = 130.0
    #: How long the URL of a piece is valid, and how long the piece is kept for an agent that does not take it.
    file_piece_s: float = 900.0

    #: How long other forwarders remember that an owner's clients are connected here, and how often that is renewed.
    watch_ttl_s: float = 45.0
    watch_s: float = 15.0
    #: Results that wait to be shared with other forwarders; more are dropped, and clients find them from the API.
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
    #: Peers that are redirected per second of a drain, so that they do not all reconnect at once.
    redirects_per_s: float = 300.0
    #: Time after the last redirect for messages that agents have under way.
    drain_grace_s: float = 2.0
    #: Redirected peers reconnect after a random time up to this.
    redirect_spread_s: float = 2.0
    #: Time after the end of its ticket until the session of a peer ends that does not follow its redirect.
    ticket_grace_s: float = 30.0

    @property
    def file_piece_bytes(self) -> int:
        """Most bytes of a piece of a file: it is uploaded as a result is."""
        return min(MAX_FILE_PIECE_BYTES, self.max_result_bytes)

    def heartbeat_s(self, requested_s: float) -> float:
        """The heartbeat of a peer that requests this one."""
        return min(max(requested_s, self.min_heartbeat_s), self.max_heartbeat_s)

    @property
    def tick_s(self) -> float:
        """How often deadlines are checked: often enough for the shortest of the periods."""
        return min(self.sweep_s, self.maintenance_s, self.min_heartbeat_s, self.record_s) / 2
