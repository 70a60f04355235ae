"""``python -m farcall_endpoint.worker SOCKET CLAIMS``: started by a launcher; both are inherited descriptors.

In an environment, ``worker/bootstrap.py`` calls :func:`boot` instead: the descriptors come through a Unix socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import socket
import sys
import time
from collections.abc import Callable

from farcall_endpoint.contracts.manager_worker import Channel, NewModules, Ready, Run, Sync
from farcall_endpoint.host import process_reaper
from farcall_endpoint.worker.boot import BEGUN, connect, receive_boot, take_on
from farcall_endpoint.worker.capture import Capture
from farcall_endpoint.worker.imports import ImportReporter
from farcall_endpoint.worker.inbox import Inbox, Received
from farcall_endpoint.worker.inputs import Inputs, Recalled
from farcall_endpoint.worker.runner import Runner
from farcall_endpoint.worker.settings import WorkerSettings

_PAUSE_S = 0.05


def main(descriptor: int, claims: int, *, find_packages: Callable[[], object] | None = None) -> None:
    """Serve tasks until the manager is gone; then kill the remaining processes of tasks.

    :param find_packages: makes packages importable that are not yet; it may run code of theirs.
    """
    cores = os.environ.get("FARCALL_WORKER_CORES")
    if cores:  # before other threads start, which inherit the affinity
        os.sched_setaffinity(0, map(int, cores.split(",")))
    with contextlib.suppress(OSError):  # then only processes with a live parent are found
        process_reaper.adopt_orphans()
    try:
        _serve(descriptor, claims, find_packages)
    finally:
        if _has_children():  # where the kernel lists none, to read all processes takes as long as to fork a template
            process_reaper.kill_trees(process_reaper.own_children())


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def boot(path: str, find_packages: Callable[[], object]) -> None:
    """Connect to the manager's Unix socket, become the worker that its answer describes, and serve tasks."""
    with connect(path) as connection:
        received = receive_boot(connection)

        def begin() -> None:
            find_packages()
            connection.send(BEGUN)
            connection.close()

        if received is not None:
            main(*take_on(*received), find_packages=begin)


def _serve(descriptor: int, claims: int, find_packages: Callable[[], object] | None) -> None:
    settings = WorkerSettings.of(os.environ)
    more, apart, outer = settings.processes
    if more or apart:
        from farcall_endpoint.host.isolation.process_limits import limit_processes

        limit_processes(more, apart=apart, outer=outer)
    if settings.isolation or settings.writable:
        from farcall_endpoint.host.isolation.confinement import confine  # not needed by the owner's workers

        confine(settings.isolation, readable=settings.readable, writable=settings.writable)
    if more or (settings.isolation and not apart):  # else it was limited from outside
        from farcall_endpoint.host.isolation.process_limits import limit_descriptors

        limit_descriptors()  # at last: to be confined, this process has sent some
    faulthandler.enable()
    for inherited in (descriptor, claims):
        os.set_inheritable(inherited, False)
    end, pause = socket.socket(fileno=descriptor), functools.partial(time.sleep, _PAUSE_S)
    channel = Channel(end, socket.socket(fileno=claims), pause=pause)
    inbox = Inbox(channel, settings=settings)
    runner = Runner(Capture(), endpoint_id=os.environ.get("FARCALL_ENDPOINT_ID", ""), settings=settings, inbox=inbox)
    if find_packages is not None:
        find_packages()
    else:
        runner.lacks_packages = bool(sys.flags.no_user_site)
    inbox.offer()
    imports = ImportReporter() if settings.reports_imports else None
    zombies = process_reaper.ZombieReaper()
    channel.send(Ready(os.getpid()))
    while (received := inbox.next()) is not None:
        if type(received.packet) is Run:
            work(inbox, runner, received, imports)
        elif type(received.packet) is Sync:
            inbox.sync()
        del received  # free its memory before the next task
        zombies.reap(now=time.monotonic())


def work(inbox: Inbox, runner: Runner, received: Received, imports: ImportReporter | None) -> None:
    """Run the tasks of a packet. Imports are reported before the result: a manager may kill the worker when it has
    that."""
    packet, body, syncs = received
    assert isinstance(packet, Run)
    channel, edges = inbox.channel, inbox.edges
    at = runner.learn(packet, body)
    for order in packet.orders:
        end = at + order.payload_bytes
        arrived = None if order.call is None else inbox.arrived(order.task_id, order.call)
        if inbox.syncs == syncs and (arrived is not None or channel.claim()):
            if order.submitter:
                runner.is_of_other = True
            if runner.lacks_packages:  # they run code: if that ends the worker, its task has failed, and not its start
                from farcall_endpoint.host.isolation.confinement import add_user_packages

                runner.lacks_packages = False
                add_user_packages()
            begun = runner.begin(order)
            if begun is not None:
                channel.send(begun)
            inputs = None if order.call is None else Inputs(order.call, body, end, arrived)
            try:
                done, result = runner.run(order, body[at:end], inputs)
                if runner.is_of_other:
                    from farcall_endpoint.worker.helper_processes import stop_helpers  # not needed by the owner's

                    stop_helpers()
                if imports is not None and (names := imports.new()):
                    channel.send(NewModules(names))
                try:
                    channel.send(done, result)
                except OSError as error:  # no room in memory; or the manager is gone, and this fails, too
                    done = runner.not_stored(order, done, result, error)
                    channel.send(done)
                if done.lent is not None:
                    edges.lent_to_manager()
                del result
            except Recalled:
                pass
            if inbox.places is not None:
                inbox.remove_scratch()
            del inputs  # free their memory before the next task
            if order.call is not None or edges.has_buffers:
                edges.end_task()
        at = end if order.call is None else end + order.call.input_bytes


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
