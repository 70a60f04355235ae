"""Simulator program: a block of many simulated managers in one process.

It replaces a manager's program and takes the same options. Each of its managers has its own socket and identity and
speaks the real protocol; only the workers are missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import heapq
import os
import resource
import select
import socket
import time
from collections.abc import Sequence
from typing import Final

import zmq

from benchmarks.engine.scale.managers import SimulatedManager
from farcall_endpoint.contracts import agent_manager
from farcall_endpoint.host.transport import agent_socket, receive_frames, send_frames

_REPORT_PERIOD_S: Final = 1.0
_LINGER_MS: Final = 1000
_COLLECT_AFTER: Final = 100_000
_DESCRIPTORS_EACH: Final = 4
_SPARE: Final = 64


@dataclasses.dataclass(eq=False, slots=True)
class _Member:
    link: zmq.Socket[bytes]
    manager: SimulatedManager
    wake_at: float
    sent: int = 0

    def send(self, message: agent_manager.FromManager, bodies: Sequence[bytes] = ()) -> None:
        self.sent += 1
        send_frames(self.link, agent_manager.encode(message, bodies, number=self.sent))

    def has_unread(self) -> bool:
        return bool(self.link.get(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[operator, arg-type]


def allow_descriptors(count: int) -> None:
    """Raise the descriptor limit of this process and its children: a socket needs several, and 1,024 is a usual limit.

    :raises OSError: if the machine's hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise OSError(f"{count} file descriptors needed, {hard} allowed: raise the hard limit ('ulimit -H -n')")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


class Block:
    """The managers of one process, and their loop. Instants are epoch seconds.

    :param slots: workers of each manager.
    :param task_s: seconds of each task.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        agent: str,
        agent_pid: int,
        block_id: str,
        managers: int,
        slots: int,
        task_s: float,
    ) -> None:
        self._agent_pidfd = os.pidfd_open(agent_pid)
        self._epoll = select.epoll()
        self._epoll.register(self._agent_pidfd, select.EPOLLIN)
        self._members: dict[int, _Member] = {}  # by descriptor of the socket
        self._alarms: list[tuple[float, int]] = []  # a heap; those that differ from a member's ``wake_at`` are stale
        software, hostname, now = agent_manager.software_fingerprint(), socket.gethostname(), time.time()
        for number in range(managers):
            manager_id = f"{block_id}-{number}"
            link = agent_socket(context, address=agent, manager_id=manager_id)
            next_report_at = now + _REPORT_PERIOD_S * number / managers  # spread over the period
            member = _Member(link, SimulatedManager(slots=slots, task_s=task_s), next_report_at)
            member.send(agent_manager.Registered(manager_id, software, slots, os.getpid(), hostname, block_id))
            member.send(*member.manager.progress(now=now))
            self._members[link.fileno()] = member
            self._epoll.register(link.fileno(), select.EPOLLIN)
            heapq.heappush(self._alarms, (next_report_at, link.fileno()))

    def run(self) -> None:
        """Serve until the agent has stopped all managers, or has ended."""
        # The descriptor of a ZeroMQ socket is edge-triggered, and a send may consume the edge: after a send, check
        # the socket again.
        unread = set(self._members)
        while self._members:
            ready = {descriptor for descriptor, _ in self._epoll.poll(0.0 if unread else self._timeout_s())} | unread
            if self._agent_pidfd in ready:
                return
            for descriptor in ready & self._members.keys():
                self._receive(descriptor)
            unread = self._report()

    def close(self) -> None:
        """Close all sockets and descriptors."""
        for descriptor in list(self._members):
            self._leave(descriptor)
        self._epoll.close()
        os.close(self._agent_pidfd)

    def _timeout_s(self) -> float:
        return max(0.0, self._alarms[0][0] - time.time())

    def _receive(self, descriptor: int) -> None:
        member = self._members[descriptor]
        while True:
            try:
                frames = receive_frames(member.link)
            except zmq.Again:
                return
            message, _ = agent_manager.decode_from_agent(frames)
            now = time.time()
            match message:
                case agent_manager.RunTasks(tasks=tasks):
                    member.manager.run(tasks, now=now)
                    self._wake(descriptor, member, member.manager.next_end(now=now))
                case agent_manager.CancelTasks(task_ids=task_ids):
                    member.manager.cancel(task_ids)
                    self._wake(descriptor, member, now)
                case agent_manager.Stop():
                    member.send(agent_manager.Leaving("stopped by the agent"))
                    self._leave(descriptor)
                    return

    def _wake(self, descriptor: int, member: _Member, at: float) -> None:
        if at < member.wake_at:
            member.wake_at = at
            heapq.heappush(self._alarms, (at, descriptor))

    def _report(self) -> set[int]:
        """Send due reports; returns the members with unread messages."""
        unread = set()
        now = time.time()
        while self._alarms and self._alarms[0][0] <= now:
            alarm_at, descriptor = heapq.heappop(self._alarms)
            member = self._members.get(descriptor)
            if member is None or alarm_at != member.wake_at:
                continue
            member.send(*member.manager.progress(now=now))
            member.wake_at = min(member.manager.next_end(now=now), now + _REPORT_PERIOD_S)
            heapq.heappush(self._alarms, (member.wake_at, descriptor))
            if member.has_unread():
                unread.add(descriptor)
        return unread

    def _leave(self, descriptor: int) -> None:
        member = self._members.pop(descriptor)
        self._epoll.unregister(descriptor)
        member.link.close(linger=_LINGER_MS)


def main() -> None:
    """Serve an agent until it stops."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--block-id", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--managers", type=int, required=True)
    parser.add_argument("--task-s", type=float, required=True)
    options, _ = parser.parse_known_args()  # the others are for real managers
    allow_descriptors(_SPARE + _DESCRIPTORS_EACH * options.managers)
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    with zmq.Context() as context:
        context.max_sockets = options.managers + _SPARE
        block = Block(
            context,
            agent=options.agent,
            agent_pid=options.agent_pid,
            block_id=options.block_id,
            managers=options.managers,
            slots=options.slots,
            task_s=options.task_s,
        )
        try:
            block.run()
        finally:
            block.close()


if __name__ == "__main__":
    main()
