"""Endpoint: the state of one endpoint in one generation.

The functions of ``resume``, ``dispatch``, ``reports``, ``presence`` and ``maintenance`` read and change it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from farcall_common import wire
from farcall_common.qos_report import QosReport
from farcall_common.report_limiter import ReportLimiter
from farcall_common.store.model import EndpointStatus, FunctionBody, TaskResult
from farcall_forwarder.core import actions as do
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.files import FilePulls, FileReads
from farcall_forwarder.core.leases import LeaseTable, Stage
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.output import OutputRequests
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.relay import Relay
from farcall_forwarder.core.sessions import PeerSession
from farcall_forwarder.core.transitions import TransitionBuffer


class EndpointPhase(enum.Enum):
    CLAIMING = enum.auto()
    READING = enum.auto()
    RESTORING = enum.auto()
    COMPARING = enum.auto()
    SERVING = enum.auto()


class FunctionCache:
    """Functions by id and hash, bounded by their size. The least recently used are evicted first.

    Not by hash alone: the name of a function is for those who may use it, however many others have the same body.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._functions: OrderedDict[tuple[str, str], FunctionBody] = OrderedDict()

    def get(self, function_id: str, function_hash: str) -> FunctionBody | None:
        """A function; None if it must be fetched."""
        found = self._functions.get((function_id, function_hash))
        if found is not None:
            self._functions.move_to_end((function_id, function_hash))
        return found

    def add(self, function_id: str, function_hash: str, function: FunctionBody) -> None:
        """Add a function; others are evicted if the cache is full."""
        if (function_id, function_hash) not in self._functions:
            self._functions[function_id, function_hash] = function
            self._size_bytes += len(function.body)
        while self._size_bytes > self._limit_bytes:
            _, dropped = self._functions.popitem(last=False)
            self._size_bytes -= len(dropped.body)


@dataclasses.dataclass
class ForwarderContext:
    """Objects that all endpoints of a forwarder share. ``is_draining``: no more tasks are leased. ``delayed``: ids of
    endpoints with data to record a little later."""

    forwarder_id: str
    policy: Policy
    functions: FunctionCache
    outbox: Outbox
    transitions: TransitionBuffer
    relay: Relay
    file_pulls: FilePulls
    is_draining: bool = False
    delayed: set[str] = dataclasses.field(default_factory=set)


class Endpoint:
    """One endpoint, from the Hello of an agent until its leases have ended. Without a connection there may still be
    leases."""

    def __init__(
        self,
        endpoint_id: str,
        generation: int,
        session: PeerSession,
        hello: wire.Hello,
        context: ForwarderContext,
        *,
        now: Instant,
    ) -> None:
        self.endpoint_id = endpoint_id
        self.generation = generation
        self.instance_id = hello.instance_id
        self.public_key = session.peer.public_key
        self.weights = hello.weights
        self.output = OutputRequests()
        self.file_reads = FileReads()
        #: It runs signed functions only.
        self.signed_functions = hello.capabilities.signed_functions
        #: Technologies of environments that it runs; none at agents that do not know environments.
        self.containers = frozenset(hello.capabilities.containers)

        self.context = context
        self.policy = context.policy
        self.functions = context.functions
        self.outbox = context.outbox
        self.transitions = context.transitions
        self.relay = context.relay
        self.file_pulls = context.file_pulls

        # Ownership
        self.fence = 0
        #: The endpoint runs certain functions only: arguments are read only if that runs no code.
        self.data_only = False
        self.phase = EndpointPhase.CLAIMING
        #: Set when an endpoint without a connection has nothing left to do.
        self.is_over = False

        # Connection of the agent
        self.session: PeerSession | None = session
        self.is_welcomed = False
        #: Monotonic second of the first tasks sent since the agent's last message.
        self.unheard_since: float | None = None
        self.is_silent = False

        # Spool of the agent
        self.spool_id = hello.spool_id
        #: None if the agent does not count generations.
        self.spool_generation = hello.spool_generation
        self.recorded_spool_generation = hello.spool_generation
        self.spool_recorded_at = float("-inf")

        # Tasks
        self.leases = LeaseTable()
        #: Until the endpoint is served: attempts of the tasks that the agent holds, and of those that the queue leases.
        self.held: Mapping[str, int] = {held.task_id: held.attempt for held in hello.held}
        self.queue_leases: Mapping[str, int] = {}

        # Store steps under way: at most one of each kind
        self.is_leasing = False
        self.is_maintaining = False
        self.is_reading_cancels = False
        self.is_reading_attempts = False
        self.is_recording_spool = False
        #: Number of RequeueTasks steps under way.
        self.requeues = 0

        # Dispatch
        self.may_have_work = True
        #: Tasks in one lease step: fewer while they name very many functions to call.
        self.lease_batch = self.policy.max_lease_batch
        #: New submitters have no tasks at the agent, or fewer than their weight.
        self.may_have_new_submitters = True
        #: Number of tasks in preparation for this session: they will use its credit.
        self.preparing = 0

        # Maintenance
        self.sweep_at = self.maintain_at = now.mono
        #: Ids of the leases that the maintenance under way renews.
        self.renewed: Sequence[str] = ()
        #: Ids of the leases that were returned since the maintenance under way began: it may report them as expired.
        self.requeued: set[str] = set()
        #: Monotonic second until which leases of tasks that may not run twice wait for a disconnected agent.
        self.return_until = 0.0
        self.status = EndpointStatus()
        self.qos: QosReport | None = None
        self.presence_at = 0.0
        #: Of the records that are made because the agent reported its numbers.
        self.status_limiter = ReportLimiter(
            least_s=self.policy.record_s,
            sustained_s=self.policy.record_sustained_s,
            burst=self.policy.record_burst,
        )
        self.is_presence_stale = False

    @property
    def is_serving(self) -> bool:
        return self.phase is EndpointPhase.SERVING

    @property
    def connected_spool_id(self) -> str:
        """The spool of the connected agent, or empty."""
        return self.spool_id if self.session else ""

    def is_newer_than(self, hello: wire.Hello) -> bool:
        """Whether the spool of this Hello is an old copy of this one."""
        return hello.spool_id == self.spool_id and hello.spool_generation < self.spool_generation

    def forget_steps(self) -> None:
        """Forget the steps under way: they belong to an earlier claim, and their answers are ignored."""
        self.is_leasing = self.is_maintaining = self.is_reading_cancels = self.is_reading_attempts = False
        self.is_recording_spool = False
        self.requeues = 0

    def expect_work(self) -> None:
        """The queue may have tasks."""
        self.may_have_work = self.may_have_new_submitters = True

    def update_silence(self, now: Instant) -> None:
        """Update ``is_silent``: whether the agent has left sent tasks unanswered for too long."""
        since = self.unheard_since
        self.is_silent = since is not None and now.mono - since >= self.policy.silence_s

    def send(self, message: wire.Message, now: Instant) -> list[Action]:
        """Send a message to the agent, if its session permits that now."""
        if self.session is None or not self.session.may_send(type(message)):
            return []
        return [self.session.send(message, now)]

    def requeue(self, task_ids: Sequence[str]) -> list[Action]:
        """Return the leases of tasks that never reached the agent."""
        if not task_ids:
            return []
        self.requeues += 1
        self.requeued.update(task_ids)
        return [do.RequeueTasks(self.endpoint_id, self.fence, task_ids)]

    def finish(self, result: TaskResult, *, verified: bool = True) -> None:
        """Record the result of a task. It is verified if the task is leased here or the forwarder declares it."""
        if lease := self.leases.get(result.task_id):
            lease.stage = Stage.RETURNED
        self.transitions.drop(result.task_id)
        self.outbox.add(result, verified=verified)
