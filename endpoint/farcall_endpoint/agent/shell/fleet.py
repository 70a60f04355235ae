"""Managers of an agent, on this machine and on others: starts their blocks, sends and receives, detects their end."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import zmq

from farcall_common.environments import Environment
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core.actions import PassOn
from farcall_endpoint.agent.core.blocks import Blocks
from farcall_endpoint.agent.core.demand import Demand
from farcall_endpoint.agent.core.replicas import CopyOrder
from farcall_endpoint.agent.core.tasks import Task
from farcall_endpoint.agent.shell.links import Gap, Links, Malformed, Network
from farcall_endpoint.agent.shell.payers import Payers
from farcall_endpoint.contracts import agent_manager, outcomes
from farcall_endpoint.contracts.agent_manager import Limits
from farcall_endpoint.contracts.liveness import LivenessTimer
from farcall_endpoint.graphs.values import read
from farcall_endpoint.host.shared_memory import Bytes, Frame
from farcall_endpoint.providers import Block, BlockStatus, Phase, Provider

_logger = logging.getLogger(__name__)

_MAX_KNOWN_FUNCTIONS: Final = 1024
_MAX_BATCH_BYTES: Final = 32 * 1024 * 1024
_NODE_FILE_BYTES: Final = 400
"""Maximum size of the entry for one file of a task in a message."""
_RESULTS_MEMORY_BYTES: Final = 256 * 10**6
_LEAST_WINDOW_BYTES: Final = 2**20
_TICK_S: Final = 0.5
"""Period of the checks for silent managers and of scaling."""
_LAST_MESSAGES_S: Final = 0.01
"""The last messages of a manager are read first; its end is detected a moment later."""
_NOT_STAGED: Final = "/"
"""The directory of files that the agent has not copied; those of the endpoint (``file://``) are where they are."""
_NOWHERE: Final = "127.0.0.1:0"
"""In place of the address of a manager that has ended: nothing can be reached there."""
_QUIET_S: Final = 3.0
"""Seconds of silence after the end of a block until its managers on other machines count as ended, too."""
_JOIN_LIMIT_S: Final = 600.0
"""Time after which a running block without a manager that reaches the agent is given up."""
_KILL_AFTER_S: Final = 10.0
"""Time after which a block without managers is killed."""


NO_LIMITS: Final = Limits()
Reported = (
    agent_manager.Registered
    | agent_manager.Progress
    | agent_manager.OutputRead
    | agent_manager.CallsTaken
    | agent_manager.CallNews
    | agent_manager.CallsDropped
    | agent_manager.ValkeyRequested
    | agent_manager.FilesReported
    | agent_manager.Ending
)
"""Messages from a manager to the agent."""


@dataclasses.dataclass(frozen=True)
class Lost:
    """A manager that is gone, and why. ``expected`` if it was released; ``unstarted`` if none of its tasks was
    started."""

    manager_id: str
    reason: str
    expected: bool = False
    unstarted: bool = False


@dataclasses.dataclass
class _Block:
    handle: Block
    started_at: float
    managers: set[str] = dataclasses.field(default_factory=set)
    image: str = ""
    running_since: float | None = None
    ended_at: float | None = None
    kill_at: float | None = None
    end_reason: str = ""


@dataclasses.dataclass
class _Manager:
    registered: agent_manager.Registered
    silence: LivenessTimer
    heard_at: float
    held_bytes: int = 0  # of its results, which are in memory until :meth:`Fleet.take`
    window_bytes: int = agent_manager.FIRST_WINDOW_BYTES
    functions: set[str] = dataclasses.field(default_factory=set)
    numbers: agent_manager.Progress = dataclasses.field(default_factory=agent_manager.Progress)  # of its last report


class Fleet:
    """Blocks of managers.

    :param network: how managers on other machines find the agent; only for providers that are not local.
    :param address: see :class:`Links`.
    :param variables: for the environment of managers and their tasks.
    :param heartbeat_s: period of the messages by which managers detect that the agent is alive.
    :param silence_limit_s: a manager that is silent for so long is given up for good.
    :param limits: what no attempt may exceed, whatever its task requests.
    :param is_restricted: whether the endpoint runs certain functions only: a task then calls none but its callees.
    :param results_memory_bytes: what results on their way from managers may take together.
    :param batching: whether many tasks may share a message; for measurements.
    :param function_body: gives the body of a function by its hash.
    :param payload: gives the arguments of a task.
    :param demand: returns what the blocks should be enough for.
    :param image_of: returns the image of an environment, by its key, where blocks have images.
    :param files_dir: returns the directory of a task's files, by its id and its submitter, empty for the owner.
    :param files_key: by which managers know one another when they copy files or blocks.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        poller: zmq.Poller,
        provider: Provider,
        blocks: Blocks,
        command_options: Sequence[str],
        function_body: Callable[[str], bytes],
        payload: Callable[[Task], Frame],
        demand: Callable[[], Demand],
        image_of: Callable[[str], str] = lambda _: "",
        network: Network | None = None,
        address: str | None = None,
        variables: Mapping[str, str] | None = None,
        heartbeat_s: float = 10.0,
        silence_limit_s: float = 60.0,
        limits: Limits = NO_LIMITS,
        is_restricted: bool = False,
        results_memory_bytes: int = _RESULTS_MEMORY_BYTES,
        batching: bool = True,
        files_dir: Callable[[str, str], str] = lambda _task_id, _submitter: _NOT_STAGED,
        files_key: bytes = b"",
    ) -> None:
        self._links = Links(context, address=address, poller=poller, network=network)
        self._poller = poller
        self._provider = provider
        self._blocks = blocks
        self._options = [*command_options, "--heartbeat-threshold", str(silence_limit_s), *self._links.options]
        self._variables = {**(variables or {}), **self._links.variables}
        if provider.walltime_s is not None:
            self._options += ["--walltime", str(provider.walltime_s)]
        self._function_body = function_body
        self._payload = payload
        self._demand = demand
        self._image_of = image_of
        self._draining: tuple[str, ...] = ()
        self._heartbeat_s = heartbeat_s
        self._silence_limit_s = silence_limit_s
        self._limits = None if limits == NO_LIMITS else limits
        self._is_restricted = is_restricted
        self._results_memory_bytes = results_memory_bytes
        self._batching = batching
        self._files_dir = files_dir
        self._files_key = files_key
        #: Gets the payers of service accounts that have tasks.
        self.payers: Payers | None = None
        self._tick_s = min(_TICK_S, silence_limit_s / 4)
        self._tick_at = 0.0
        self._look_at = 0.0
        self._ping_at = 0.0
        self._here: dict[str, _Block] = {}
        self._managers: dict[str, _Manager] = {}
        self._lost: list[Lost] = []
        self._unsent: list[tuple[str, agent_manager.Finished]] = []  # tasks that a manager could not be sent
        self._to_take: set[str] = set()
        #: Workers that the managers keep, or are about to start.
        self.slots = 0
        self._stopping = False
        #: The identity of the endpoint's owner, whose tasks run in the working directory itself; empty if not known.
        self.owner_id = ""
        self._software = agent_manager.software_fingerprint()
        poller.register(provider.fileno(), zmq.POLLIN)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def maintain(self, *, now: float, ready: Collection[object] = ()) -> list[Lost]:
        """Start blocks; collect those that have ended, and managers that are silent for too long.

        :param ready: what the poller found readable.
        """
        if self._provider.fileno() in ready or now >= self._look_at:
            self._look_at = now + self._tick_s
            self._provider.changed()
            for block_id, block in list(self._here.items()):
                self._read_status(block_id, block, now)
        if now >= self._tick_at:
            self._tick_at = now + self._tick_s
            self._check_liveness(now)
            self._ping(now)
            if not self._stopping:
                self._rescale(now)
        lost, self._lost = self._lost, []
        return lost

    def next_deadline(self) -> float:
        """The monotonic second at which :meth:`maintain` may have something to do."""
        return 0.0 if self._lost or self._unsent else min(self._tick_at, self._look_at)

    @property
    def nodes(self) -> list[agent_manager.Registered]:
        """The registrations of the present managers."""
        return [manager.registered for manager in self._managers.values()]

    @property
    def draining(self) -> tuple[str, ...]:
        """Managers that should get no task: their blocks are wanted for another image."""
        return tuple(
            manager_id
            for block_id in self._draining
            if block_id in self._here
            for manager_id in sorted(self._here[block_id].managers)
        )

    @property
    def pending_blocks(self) -> int:
        """How many blocks wait or start: they have no manager yet."""
        return sum(not block.managers and block.kill_at is None for block in self._here.values())

    @property
    def block_count(self) -> int:
        """How many blocks were started and have not ended."""
        return len(self._here)

    @property
    def is_empty(self) -> bool:
        """Whether no block is left."""
        return not self._here

    @property
    def refusal(self) -> str:
        """Why no manager can be had, if so: tasks should not wait for any."""
        return "" if self._managers else self._blocks.refusal

    @property
    def blocked(self) -> str:
        """Why there is no manager after several tries, if so; tasks may wait or fail."""
        return "" if self._managers else self._blocks.blocked

    @property
    def problem(self) -> str:
        """The problem of the blocks, or why they wait; empty while there are managers or nothing is known."""
        if self._managers:
            return ""
        waiting = [b.handle.status().text for b in self._here.values() if b.running_since is None]
        return self._blocks.problem or next(filter(None, waiting), "")

    def describe(self, *, offset_s: float) -> list[dict[str, object]]:
        """The blocks, for the status.

        :param offset_s: from monotonic to epoch seconds.
        """
        return [
            {
                "block_id": block_id,
                "state": block.handle.status().phase.name.lower() if block.kill_at is None else "ending",
                "since": round(block.started_at + offset_s, 3),
                "managers": len(block.managers),
                "workers": sum(self._managers[manager_id].registered.slots for manager_id in block.managers),
                **({"image": self._image_of(block.image)} if block.image else {}),
                "scheduler": block.handle.status().text,
            }
            for block_id, block in self._here.items()
        ]

    def stop(self, *, grace_s: float) -> None:
        """Stop all managers, and start none any more."""
        self._stopping = True
        for manager_id in self._managers:
            self._links.send(manager_id, agent_manager.Stop(grace_s))
        for block in self._here.values():
            if not block.managers:
                block.handle.kill()

    def kill(self) -> None:
        """End all blocks now; on this machine the managers' process reapers kill the workers."""
        for block in self._here.values():
            block.handle.kill()

    def end(self) -> None:
        """End all blocks now, and wait for those of this machine."""
        self.kill()
        while self._here:
            self._here.popitem()[1].handle.close()

    def close(self) -> None:
        """Close all sockets. The provider is the caller's."""
        self._poller.unregister(self._provider.fileno())
        self._links.close()

    def _read_status(self, block_id: str, block: _Block, now: float) -> None:
        """Read the status of a block."""
        status = block.handle.status()
        if status.phase is Phase.ENDED:
            self._reap(block_id, block, status, now)
        elif block.kill_at is not None:
            if now >= block.kill_at:
                block.handle.kill()
        elif status.phase is Phase.RUNNING and not block.managers:
            if block.running_since is None:
                block.running_since = now
            elif now >= block.running_since + _JOIN_LIMIT_S:
                block.end_reason = f"it ran for {_JOIN_LIMIT_S:g} s, and none of its managers reached the agent"
                block.kill_at = now

    def _reap(self, block_id: str, block: _Block, status: BlockStatus, now: float) -> None:
        """A block has ended; its managers have when they are silent too."""
        reason = block.end_reason or status.text
        if block.ended_at is None:
            block.ended_at = now
        for manager_id in list(block.managers):
            if self._is_silent(block, manager_id, now):
                self._lose(manager_id, f"its manager ended ({reason})", now)
        if block.managers:
            if block.handle.pipe is not None:
                self._look_at = min(self._look_at, now + _LAST_MESSAGES_S)
        else:
            self._block_ended(block_id, reason, now, refused=status.refused)
            if block.handle.pipe is not None:  # the poller has not reported its end yet, if the block has just ended
                self._links.detach(block.handle.pipe)
            block.handle.close()
            del self._here[block_id]
            self._tick_at = now

    def _block_ended(self, block_id: str, reason: str, now: float, *, refused: bool = False) -> None:
        if self._blocks.ended(block_id, reason, now=now, refused=refused) and not self._stopping:
            then = "waiting tasks fail" if self._blocks.refusal else "tasks wait, and another block is tried"
            _logger.warning("%s; %s", self._blocks.problem, then)

    def _is_silent(self, block: _Block, manager_id: str, now: float) -> bool:
        """Whether no more messages of a manager can arrive, once its block has ended."""
        pipe = block.handle.pipe
        if pipe is not None:
            return not self._links.is_attached(pipe)
        return now >= self._managers[manager_id].heard_at + _QUIET_S

    def _check_liveness(self, now: float) -> None:
        for manager_id, manager in list(self._managers.items()):
            if manager.silence.is_expired(now=now):
                _logger.error("manager %s has been silent for %g s; giving it up", manager_id, self._silence_limit_s)
                self._lose(manager_id, f"its manager was silent for {self._silence_limit_s:g} s", now, kill_after_s=0.0)

    def _ping(self, now: float) -> None:
        if now >= self._ping_at:
            self._ping_at = now + self._heartbeat_s
            for manager_id in self._managers:
                self._links.send(manager_id, agent_manager.Ping())

    def _rescale(self, now: float) -> None:
        demand, here = self._demand(), self._managers
        busy = {here[manager_id].registered.block_id for manager_id in demand.busy if manager_id in here}
        orders = self._blocks.decide(
            tasks=demand.tasks,
            busy=busy,
            now=now,
            images=demand.images,
            limited=demand.limited,
            prewarmed=demand.prewarmed,
            nodes=demand.nodes,
        )
        self._draining = orders.drain
        for block_id in orders.start:
            self._start(block_id, now, image=orders.images.get(block_id, ""))
        for block_id in orders.release:
            _logger.info("block %s has nothing to do and is given back", block_id)
            for manager_id in list(self._here[block_id].managers):
                self._links.send(manager_id, agent_manager.Stop(0.0))
                self._lose(manager_id, "its block was given back", now, expected=True)

    def _start(self, block_id: str, now: float, *, image: str) -> None:
        command = [sys.executable, "-P", "-m", "farcall_endpoint.manager", *self._options, "--block-id", block_id]
        try:
            handle = self._provider.start(
                command, block_id=block_id, environment=self._variables, image=self._image_of(image) if image else ""
            )
        except OSError as error:
            _logger.exception("cannot start a block")
            self._block_ended(block_id, str(error), now)
        else:
            self._here[block_id] = _Block(handle, now, image=image)
            if handle.pipe is not None:
                self._links.attach(handle.pipe)

    def _lose(
        self,
        manager_id: str,
        reason: str,
        now: float,
        *,
        expected: bool = False,
        unstarted: bool = False,
        kill_after_s: float = _KILL_AFTER_S,
    ) -> None:
        """Give up a manager for good. A block that has lost its last one is killed after ``kill_after_s``."""
        manager = self._managers.pop(manager_id, None)
        if manager is None:
            return
        self._lost.append(Lost(manager_id, reason, expected, unstarted))
        self._links.forget(manager_id)
        self.slots -= manager.registered.slots
        block_id = manager.registered.block_id
        self._blocks.left(block_id, manager_id)
        block = self._here[block_id]
        block.managers.discard(manager_id)
        if not block.managers and block.kill_at is None:
            block.kill_at = now + kill_after_s

    # -- managers ------------------------------------------------------------------------------------------------------

    def receive(self, *, ready: Collection[object], now: float) -> Iterator[tuple[str, Reported, list[Frame]]]:
        """Yield the reports of managers: id, message, bodies. A manager of another version is sent away, and so is a
        manager of an earlier agent or one that this fleet has given up: its tasks run elsewhere.

        :param ready: sockets that the poller found readable.
        """
        unsent, self._unsent = self._unsent, []
        for manager_id, failed in unsent:
            if (manager := self._managers.get(manager_id)) is not None:
                yield manager_id, msgspec.structs.replace(manager.numbers, finished=(failed,)), []
        for manager_id, message, bodies in self._links.receive(ready):
            manager = self._managers.get(manager_id)
            if manager is None and isinstance(message, agent_manager.Registered):
                manager = self._register(manager_id, message, now)
                message = message if manager is None else manager.registered
            if manager is None:
                self._links.send(manager_id, agent_manager.Stop(0.0))
                continue
            manager.heard_at = now
            manager.silence.heard(now=now)
            manager.held_bytes += sum(map(len, bodies))
            if manager.held_bytes >= manager.window_bytes // 4:
                self._to_take.add(manager_id)
            match message:
                case Gap():
                    _logger.error("messages of manager %s were lost on the way; giving it up", manager_id)
                    self._links.send(manager_id, agent_manager.Stop(0.0))
                    self._lose(manager_id, "the connection to its manager broke, and messages were lost", now)
                case Malformed(reason=reason):
                    _logger.error("manager %s sent what is no message (%s); giving it up", manager_id, reason)
                    self._links.send(manager_id, agent_manager.Stop(0.0))
                    self._lose(manager_id, f"its manager sent what is no message ({reason})", now)
                case agent_manager.Leaving(reason=reason, failed=True):
                    block_id = manager.registered.block_id
                    self._blocks.failed(block_id)
                    self._here[block_id].end_reason = reason
                    self._lose(manager_id, f"its manager could start no worker ({reason})", now, unstarted=True)
                case agent_manager.Leaving(reason=reason):
                    self._lose(manager_id, f"its manager ended ({reason})", now)
                case _:
                    if isinstance(message, agent_manager.Progress):
                        manager.numbers = agent_manager.Progress(
                            workers=message.workers, idle_workers=message.idle_workers, problem=message.problem
                        )
                        if message.workers:
                            self._blocks.working(manager.registered.block_id)
                    yield manager_id, message, bodies

    def take(self) -> None:
        """The results that arrived have left the memory: managers may send more. Each receives
        a message when they are a quarter of its window, which is its share of the memory for all managers."""
        while self._to_take:
            manager_id = self._to_take.pop()
            if (manager := self._managers.get(manager_id)) is not None:
                share_bytes = self._results_memory_bytes // len(self._managers)
                manager.window_bytes = max(share_bytes, _LEAST_WINDOW_BYTES)
                self._links.send(manager_id, agent_manager.ResultsTaken(manager.held_bytes, manager.window_bytes))
                manager.held_bytes = 0

    def order(self, manager_id: str, tasks: Sequence[Task]) -> None:
        """Send tasks to a manager."""
        manager = self._managers.get(manager_id)
        if manager is None:
            return
        for batch in _batches(tasks) if self._batching else [[task] for task in tasks]:
            self._order(manager_id, manager, batch)

    def _order(self, manager_id: str, manager: _Manager, tasks: Sequence[Task]) -> None:
        forget = len(manager.functions) > _MAX_KNOWN_FUNCTIONS
        if forget:
            manager.functions.clear()
        limits = self._limits_of(manager)
        bodies: list[Frame] = []
        functions: list[tuple[str, int]] = []
        orders: list[agent_manager.TaskOrder] = []
        files: dict[str, tuple[agent_manager.NodeFile, ...]] = {}
        for task in tasks:
            spec, options = task.spec, task.spec.options
            if spec.function_hash not in manager.functions:
                manager.functions.add(spec.function_hash)
                functions.append((spec.function_hash, len(bodies)))
                bodies.append(self._function_body(spec.function_hash))
            for callee in options.callees:
                if callee.function_hash not in manager.functions:
                    manager.functions.add(callee.function_hash)
                    functions.append((callee.function_hash, len(bodies)))
                    bodies.append(self._function_body(callee.function_hash))
            orders.append(
                agent_manager.TaskOrder(
                    spec.task_id,
                    task.attempt,
                    spec.function_hash,
                    len(bodies),
                    options if limits is None else limits.applied_to(options),
                    spec.traceparent,
                    self.owner_or(spec.submitter),
                    spec.data_only,
                    task.retries_used,
                    self._is_restricted or spec.data_only,  # the service has a list of functions, too
                    "" if task.files is None else self._files_dir(spec.task_id, self.owner_or(spec.submitter)),
                    task.target,
                    spec.payer,
                )
            )
            if spec.payer and self.payers is not None:
                self.payers.add(spec.submitter, spec.payer)
            if task.node_files and manager.registered.files_address:
                files[spec.task_id] = tuple(task.node_files)
            bodies.append(self._payload(task))
        try:
            self._links.send(
                manager_id, agent_manager.RunTasks(tuple(orders), tuple(functions), forget, limits, files), bodies
            )
        except OSError as error:  # no room in memory
            manager.functions.difference_update([function_hash for function_hash, _ in functions])
            if len(tasks) == 1:
                record = outcomes.arguments_not_stored(sum(map(len, bodies)), error.strerror)
                failed = agent_manager.Finished(tasks[0].task_id, TaskState.FAILED, error=record.to_json())
                self._unsent.append((manager_id, failed))
                return
            for task in tasks:
                self._order(manager_id, manager, [task])

    def owner_or(self, submitter: str) -> str:
        """A submitter; empty if it is the endpoint's owner."""
        return "" if submitter == self.owner_id else submitter

    def pass_on(self, passed: PassOn) -> None:
        """Send a manager something about calls. Large values stay in their files where that is possible."""
        manager = self._managers.get(passed.manager_id)
        if manager is None:
            return
        message = passed.message
        if isinstance(message, agent_manager.RunCalls):
            message = msgspec.structs.replace(message, limits=self._limits_of(manager))
        bodies: list[Frame] = [b"" if body is None else body for body in passed.bodies.bodies]
        if not self._links.is_here(passed.manager_id):
            bodies = [_read(body) for body in bodies]
        self._links.send(passed.manager_id, message, bodies)

    def _limits_of(self, manager: _Manager) -> Limits | None:
        if not manager.registered.image:
            return self._limits
        return msgspec.structs.replace(self._limits or NO_LIMITS, in_image=True)  # the node itself is the container

    def prewarm(self, manager_id: str, environment: Environment, count: int, *, retry: bool) -> None:
        """Let a manager keep ``count`` workers of an environment warm; with ``retry`` also if it has just failed."""
        self._links.send(manager_id, agent_manager.Prewarm(environment, count, retry))

    def read_output(self, manager_id: str, request: agent_manager.ReadOutput) -> None:
        """Request output of running tasks from a manager."""
        self._links.send(manager_id, request)

    def copy_files(self, manager_id: str, copies: Sequence[CopyOrder]) -> None:
        """Let a manager copy files."""
        ordered = tuple([agent_manager.FileCopy(each.content, self._source(each.source)) for each in copies])
        self._links.send(manager_id, agent_manager.CopyFiles(ordered))

    def _source(self, source: str | None) -> str | None:
        """The address of a manager from which files are copied."""
        if not source:
            return source
        manager = self._managers.get(source)
        return _NOWHERE if manager is None else manager.registered.files_address

    def answer_valkey(self, manager_id: str, message: agent_manager.ValkeyAnswered) -> None:
        """Send a manager the address of a Valkey server."""
        self._links.send(manager_id, message)

    def cancel(self, manager_id: str, task_ids: Iterable[str]) -> None:
        """Send a manager the ids of tasks to stop."""
        self._links.send(manager_id, agent_manager.CancelTasks(tuple(task_ids)))

    def take_back(self, manager_id: str, task_ids: Iterable[str]) -> None:
        """Send a manager the ids of tasks to give back, unless they have begun."""
        self._links.send(manager_id, agent_manager.ReturnTasks(tuple(task_ids)))

    @property
    def isolation(self) -> str:
        """Separation of submitters on the nodes; several levels where nodes differ."""
        return ", ".join(sorted({_isolation(manager.registered) for manager in self._managers.values()}))

    def _register(self, manager_id: str, message: agent_manager.Registered, now: float) -> _Manager | None:
        block = self._here.get(message.block_id)
        if block is None or block.kill_at is not None or self._stopping:
            return None
        if message.software != self._software:
            _logger.error("manager %s has another version; restart the endpoint after an upgrade", manager_id)
            block.end_reason = "its manager has another version than the agent"
            block.kill_at = now
            return None
        if message.refusal:
            _logger.warning("%s refuses tasks of other submitters than the owner: %s", manager_id, message.refusal)
        message = msgspec.structs.replace(message, image=block.image)  # what the agent ordered, not what a node claims
        manager = _Manager(message, LivenessTimer(limit_s=self._silence_limit_s, now=now), now)
        self._managers[manager_id] = manager
        self.slots += message.slots
        if message.files_address or message.has_blocks:
            self._links.send(manager_id, agent_manager.FilesKey(self._files_key))
        block.managers.add(manager_id)
        self._blocks.joined(message.block_id, manager_id, slots=message.slots, now=now)
        return manager


def _read(body: Frame) -> Bytes:
    """A copy of a body; nothing if its file has lost it, as one that belongs to a hostile task may."""
    try:
        return read(body)
    except ValueError as error:
        _logger.warning("%s", error)
        return b""


def _isolation(registered: agent_manager.Registered) -> str:
    if not registered.refusal:
        return registered.isolation
    return f"{registered.isolation}, for tasks of the owner only ({registered.refusal})"


def _batches(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    """Tasks for one message each: together only as far as their large arguments, and their files, may be in memory
    together."""
    start, size_bytes = 0, 0
    for index, task in enumerate(tasks):
        blob = task.spec.payload_blob
        if blob is not None or task.node_files:
            task_bytes = _NODE_FILE_BYTES * len(task.node_files) + (0 if blob is None else blob.size_bytes)
            size_bytes += task_bytes
            if size_bytes > _MAX_BATCH_BYTES and index > start:
                yield tasks[start:index]
                start, size_bytes = index, task_bytes
    yield tasks[start:]
