"""Service: assembles the parts of one forwarder process, runs them, and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVarTuple, Unpack

import zmq
from zmq.utils import z85

from farcall_common.files import write_whole
from farcall_common.store.settings import Stores
from farcall_common.wire import new_id
from farcall_forwarder.adapters.health import HealthServer
from farcall_forwarder.adapters.pool import StorePool
from farcall_forwarder.adapters.router import Router
from farcall_forwarder.adapters.steps import StoreSteps
from farcall_forwarder.adapters.wakeups import WakeUpThread
from farcall_forwarder.adapters.zap import Authenticator, find_peers
from farcall_forwarder.core.forwarder import Forwarder
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.settings import Settings
from farcall_forwarder.shell import IdSource, Shell

_BACKLOG_BYTES: Final = 16 * 1024 * 1024

_logger = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")


class Service:
    """One forwarder process. :meth:`run` returns when it has ended."""

    def __init__(self, settings: Settings, policy: Policy, stores: Stores) -> None:
        self._settings = settings
        self._policy = policy
        self._stores = stores
        self.forwarder_id = new_id()
        #: Content of the ready file; empty until peers can connect.
        self.ready: Mapping[str, str] = {}
        self._shell: Shell | None = None
        self._port = 0

    async def run(self) -> None:
        """Serve until a :meth:`drain` is over. Unexpected errors propagate."""
        with contextlib.ExitStack() as stack:
            shell = self._shell = self._assemble(stack)
            health = HealthServer({"/livez": shell.liveness, "/readyz": shell.readiness, "/healthz": shell.health})
            health_port = await health.start(self._settings.host, self._settings.health_port)
            try:
                self._announce_ready(shell, health_port)
                await shell.run()
            finally:
                await health.close()
        _logger.info("ended", extra={"forwarder_id": self.forwarder_id})

    def drain(self) -> None:
        """Redirect all peers, then end :meth:`run`. Call it in the loop of :meth:`run`."""
        if self._shell:
            self._shell.drain()

    def write_event_log(self) -> None:
        """Write the core's last events to the log. Call it in the loop of :meth:`run`."""
        if self._shell:
            self._shell.write_event_log()

    def _assemble(self, stack: contextlib.ExitStack) -> Shell:
        """Create the parts; ``stack`` closes them in reverse order."""
        settings, stores = self._settings, self._stores
        loop = asyncio.get_running_loop()
        public_key, secret_key = key_pair(settings.key_seed)  # the API gives peers the public key
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        pool = StorePool(StoreSteps(stores, forwarder_id=self.forwarder_id, clock=time.time))
        stack.callback(pool.close)
        look_up = functools.partial(pool.look_up, functools.partial(find_peers, stores.queue, stores.endpoints))
        authenticator = Authenticator(context, lookup=look_up, clock=time.monotonic)
        stack.callback(authenticator.close)
        router = Router(
            context,
            host=settings.host,
            port=settings.port,
            secret_key=secret_key,
            backlog_bytes=_BACKLOG_BYTES,
            max_connections=settings.max_connections,
            max_connections_of_source=settings.max_connections_of_source,
        )
        stack.callback(router.close)
        self._port = router.port
        id_source = IdSource()
        now = Instant(time.monotonic(), time.time())
        core = Forwarder(
            self._policy,
            forwarder_id=self.forwarder_id,
            address=settings.address(router.port),
            server_key=public_key.decode(),
            tickets=stores.tickets,
            id_source=id_source,
            now=now,
        )
        about_core = {"forwarder_id": self.forwarder_id, "began": now, "seed": id_source.seed}
        about_core |= {"policy": dataclasses.asdict(self._policy)}
        shell = Shell(core, router, authenticator, pool, about_core=about_core)
        wake_ups = WakeUpThread(
            stores.queue,
            self.forwarder_id,
            on_work_available=lambda endpoint_ids: _call(loop, shell.work_available, endpoint_ids),
            on_results=lambda shared_results: _call(loop, shell.results_heard, shared_results),
            on_asks=lambda asks: _call(loop, shell.output_requested, asks),
            on_file_messages=lambda messages: _call(loop, shell.file_messages_heard, messages),
            on_pubsub_lost=lambda: _call(loop, shell.pubsub_lost),
            on_error=lambda error: _call(loop, shell.fail, error),
        )
        wake_ups.start()
        stack.callback(wake_ups.stop)
        return shell

    def _announce_ready(self, shell: Shell, health_port: int) -> None:
        info = shell.info
        self.ready = {
            "address": info.address,
            "port": str(self._port),
            "health_url": f"http://{self._settings.local_host}:{health_port}/healthz",
            "server_key": info.server_key,
            "forwarder_id": info.forwarder_id,
        }
        if path := self._settings.ready_file:
            write_whole(path, json.dumps(self.ready).encode())
        _logger.info("ready", extra={"forwarder_id": info.forwarder_id, "address": info.address})


def key_pair(seed: str) -> tuple[bytes, bytes]:
    """Public and secret CURVE key in Z85: derived from the seed, or random without one."""
    if not seed:
        return zmq.curve_keypair()
    secret_key = z85.encode(hashlib.sha256(f"farcall forwarder key {seed}".encode()).digest())
    return zmq.curve_public(secret_key), secret_key


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Unpack[Ts]], None], *arguments: *Ts) -> None:
    """Call a function in the loop, from another thread. A closed loop ignores the call."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
