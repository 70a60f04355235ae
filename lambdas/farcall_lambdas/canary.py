"""Canary: one call through the whole cloud tier, with the time of each step.

It acts as user and as endpoint. As a user it registers a function, submits a task, opens a result stream and reads
the record; as an endpoint it connects to a forwarder by the real protocol, takes the task and reports its result. So
the API, PostgreSQL, Valkey and a forwarder have to work; no user's endpoint is needed. No function runs: the canary
makes the result.

``python -m farcall_lambdas.canary`` tests the deployment of ``FARCALL_API_URL`` with the token of ``FARCALL_TOKEN``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import zmq

from farcall_common import wire
from farcall_common.errors import (
    ConfigurationError,
    EndpointUnknown,
    ErrorRecord,
    FarcallError,
    ProtocolError,
    Unavailable,
    error_from_record,
)
from farcall_common.http_errors import error_from_response
from farcall_common.sockets import client_socket

Json = dict[str, Any]
#: Makes one request to the API (method, path, body) and returns the answer's body.
Ask = Callable[[str, str, Json | None], Any]
M = TypeVar("M", bound=wire.Message)

#: The name of the canary's function and endpoints.
NAME: Final = "farcall-canary"
#: An endpoint older than this was left by a round that was interrupted.
_INTERRUPTED_S: Final = 600.0
_SINCE: Final = "canary since "
_HEARTBEAT_S: Final = 30.0
_REACH_S: Final = 2.0
#: A packed buffer that is never opened.
_CODE: Final = "01\nfarcall-canary"


class Canary:
    """Runs rounds.

    :param ask: calls the API.
    :param within_s: seconds to wait for each message.
    :param clock: epoch seconds.
    """

    def __init__(self, ask: Ask, *, within_s: float = 20.0, clock: Callable[[], float] = time.time) -> None:
        self._ask = ask
        self._within_s = within_s
        self._clock = clock
        self._step = ""

    def run(self) -> dict[str, float]:
        """One round: seconds by step, and as ``canary_s`` those from the submit to its recorded result.

        :raises FarcallError: if a step fails; a note names it.
        """
        try:
            with zmq.Context() as context, contextlib.ExitStack() as stack:
                return self._run(context, stack)
        except FarcallError as error:
            error.add_note(f"during: {self._step}")
            raise

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], stack: contextlib.ExitStack) -> dict[str, float]:
        took: dict[str, float] = {}
        payload, result = f"01\n{wire.new_id()}", f"01\n{wire.new_id()}".encode()
        with self._timed("register_s", took):
            function_id = self._function()
            endpoint_id = self._endpoint()
        stack.callback(self._delete_endpoints, endpoint_id)
        with self._timed("connect_s", took):
            agent = stack.enter_context(_Connection.open(context, self._ask, f"/v3/endpoints/{endpoint_id}/connect"))
            client = stack.enter_context(_Connection.open(context, self._ask, "/v3/stream"))
            group_id = wire.new_id()
            agent.send(
                wire.Hello(
                    endpoint_id=endpoint_id,
                    ticket=agent.ticket,
                    instance_id=wire.new_id(),
                    spool_id=wire.new_id(),
                    protocol_versions=(wire.PROTOCOL_VERSION,),
                    heartbeat_s=_HEARTBEAT_S,
                )
            )
            client.send(
                wire.OpenStream(
                    ticket=client.ticket,
                    protocol_versions=(wire.PROTOCOL_VERSION,),
                    heartbeat_s=_HEARTBEAT_S,
                    task_group_ids=(group_id,),
                )
            )
            agent.receive(wire.Welcome, within_s=self._within_s)
            client.receive(wire.StreamOpened, within_s=self._within_s)
            agent.send(wire.Credit(tasks=1))
        with self._timed("canary_s", took):
            with self._timed("submit_s", took):
                body = {"tasks": {function_id: [payload]}, "task_group_id": group_id, "memoize": False}
                [task_id] = self._ask("POST", f"/v3/endpoints/{endpoint_id}/submit", body)["tasks"][function_id]
            with self._timed("dispatch_s", took):
                order, frames = agent.receive(wire.RunTasks, within_s=self._within_s)
                ref = _check_order(order, frames, task_id, payload)
            with self._timed("record_s", took):
                agent.send(wire.TasksAccepted(tasks=(ref,)))
                reported = wire.ResultSpec(
                    task_id=task_id, attempt=ref.attempt, state=wire.TaskState.SUCCESS, result=0, started_at=time.time()
                )
                agent.send(wire.TaskResults(results=(reported,)), result)
                agent.receive(wire.ResultsRecorded, within_s=self._within_s)
            with self._timed("push_s", took):
                pushed, bodies = client.receive(wire.ResultsReady, within_s=self._within_s)
                _check(
                    "the stream", [(each.task_id, each.state) for each in pushed.results], task_id, bodies[0], result
                )
            with self._timed("read_s", took):
                task = self._ask("GET", f"/v2/tasks/{task_id}", None)
                state = [(task["task_id"], wire.TaskState(task["status"]))]
                _check("the API", state, task_id, str(task.get("result")).encode(), result)
        agent.send(wire.Goodbye(reason="done"))
        client.send(wire.Goodbye(reason="done"))
        return {name: round(seconds, 4) for name, seconds in took.items()}

    @contextlib.contextmanager
    def _timed(self, step: str, took: dict[str, float]) -> Iterator[None]:
        self._step = step.removesuffix("_s")
        began = time.monotonic()
        yield
        took[step] = time.monotonic() - began

    def _function(self) -> str:
        """The canary's function, registered by the first round."""
        known = self._ask("GET", f"/v3/functions?search={NAME}", None)["functions"]
        for each in known:
            if each["function_name"] == NAME:
                return str(each["function_uuid"])
        registered = self._ask("POST", "/v3/functions", {"function_name": NAME, "function_code": _CODE})
        return str(registered["function_uuid"])

    def _endpoint(self) -> str:
        """An endpoint of this round: concurrent rounds do not share one. Its name has the time of registration."""
        body = {"endpoint_name": NAME, "display_name": f"{_SINCE}{self._clock():.0f}"}
        return str(self._ask("POST", "/v3/endpoints", body)["endpoint_id"])

    def _delete_endpoints(self, own_id: str) -> None:
        """Delete the endpoint of this round, and those of rounds that were interrupted: no round lasts so long."""
        for each in self._ask("GET", "/v2/endpoints", None):
            is_old = self._clock() - _since(each["display_name"] or "") > _INTERRUPTED_S
            if each["uuid"] == own_id or (each["name"] == NAME and is_old):
                with contextlib.suppress(EndpointUnknown):  # a concurrent round was faster
                    self._ask("DELETE", f"/v2/endpoints/{each['uuid']}", None)


def _since(display_name: str) -> float:
    """The epoch second at which a round's endpoint was registered, by its name; 0 without one."""
    with contextlib.suppress(ValueError):
        return float(display_name.removeprefix(_SINCE))
    return 0.0


def _reachable(forwarders: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """The first that accepts a connection: a killed one stays registered for some seconds.

    :raises Unavailable: if none does.
    """
    for forwarder in forwarders:
        address = urllib.parse.urlsplit(forwarder["address"])
        with contextlib.suppress(OSError):
            socket.create_connection((address.hostname or "", address.port or 0), timeout=_REACH_S).close()
            return forwarder
    raise Unavailable("no forwarder accepts a connection")


class _Connection:
    """One connection to a forwarder. ``ticket`` is valid for its key."""

    def __init__(self, socket: zmq.Socket[bytes], ticket: str) -> None:
        self._socket = socket
        self.ticket = ticket

    @classmethod
    @contextlib.contextmanager
    def open(cls, context: zmq.Context[zmq.Socket[bytes]], ask: Ask, path: str) -> Iterator[_Connection]:
        """A connection with a new key, to a forwarder that the API names."""
        public_key, secret_key = map(bytes.decode, zmq.curve_keypair())
        way = ask("POST", path, {"public_key": public_key})
        forwarder = _reachable(way["forwarders"])
        with client_socket(
            context, server_key=forwarder["server_key"], public_key=public_key, secret_key=secret_key, linger_ms=200
        ) as dealer:
            dealer.sndtimeo = 1000
            dealer.connect(forwarder["address"])
            yield cls(dealer, way["ticket"])

    def send(self, message: wire.Message, *frames: bytes) -> None:
        """Send a message."""
        try:
            self._socket.send_multipart(wire.encode(wire.Envelope(message, frames)))
        except zmq.Again:
            raise Unavailable("the forwarder accepts no message") from None

    def receive(self, kind: type[M], *, within_s: float) -> tuple[M, Sequence[bytes]]:
        """Wait for a message of this kind; others except a refusal are skipped.

        :raises Unavailable: if none arrives in time.
        :raises FarcallError: the forwarder's refusal.
        """
        give_up_at = time.monotonic() + within_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            if not self._socket.poll(round(left_s * 1000)):
                break
            envelope = wire.decode(self._socket.recv_multipart())
            if isinstance(envelope.message, kind):
                return envelope.message, envelope.frames
            if isinstance(envelope.message, wire.Refused):
                raise error_from_record(ErrorRecord.from_json(envelope.message.error))
        raise Unavailable(f"no {kind.__name__} arrived from the forwarder within {within_s:g} s")


def _check_order(order: wire.RunTasks, frames: Sequence[bytes], task_id: str, payload: str) -> wire.TaskRef:
    [spec] = order.tasks
    if spec.task_id != task_id or spec.payload is None or frames[spec.payload] != payload.encode():
        raise ProtocolError("the forwarder sent a different task than was submitted")
    if hashlib.sha256(frames[order.functions[0].body]).hexdigest() != spec.function_hash:
        raise ProtocolError("the forwarder sent a different function than was registered")
    return wire.TaskRef(task_id=task_id, attempt=spec.attempt)


def _check(where: str, states: Sequence[tuple[str, wire.TaskState]], task_id: str, got: bytes, expected: bytes) -> None:
    if list(states) != [(task_id, wire.TaskState.SUCCESS)] or got != expected:
        raise ProtocolError(f"{where} has a different result than was reported")


def http_caller(api_url: str, token: str, *, timeout_s: float = 30.0) -> Ask:
    """Calls the API over HTTP, as users do."""

    def ask(method: str, path: str, body: Json | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{api_url.rstrip('/')}{path}", data, headers, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - the user's own address
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                called = f"{method} {request.full_url.partition('?')[0]}"
                raise error_from_response(error.code, dict(error.headers), error.read(), request=called) from None
        except OSError as error:
            raise Unavailable(f"the API at {api_url} does not answer: {error}") from error

    return ask


def main(environ: Mapping[str, str]) -> int:
    """One round, printed as JSON; 1 if it failed."""
    try:
        ask = http_caller(environ["FARCALL_API_URL"], environ["FARCALL_TOKEN"])
    except KeyError as error:
        raise ConfigurationError(f"{error.args[0]} is not set") from None
    try:
        took = Canary(ask).run()
    except FarcallError as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        print(json.dumps({"canary": "failed", "code": error.record.code, "message": f"{error} ({notes})"}))  # noqa: T201
        return 1
    print(json.dumps({"canary": "ok", **took}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
