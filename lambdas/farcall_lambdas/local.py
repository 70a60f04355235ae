"""Local API server: the same routes and the same authorizer under uvicorn.

Powertools' ``HttpResolverLocal`` turns ASGI requests into proxy events, each with its own state. Out of the box it
runs plain (not async) routes on the event loop, where one slow query would hold up every other request, and its
validation on nested worker threads. :class:`LocalResolver` answers each request from start to end on one thread of a
pool instead, within API Gateway's limits.

``python -m farcall_lambdas.local --host 127.0.0.1 --port 0 --port-file PATH``
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import functools
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import uvicorn
import uvloop
from aws_lambda_powertools.event_handler import APIGatewayRestResolver, HttpResolverLocal
from aws_lambda_powertools.event_handler.http_resolver import HttpProxyEvent
from aws_lambda_powertools.utilities.data_classes.common import BaseProxyEvent

from farcall_common.errors import ConfigurationError, InvalidRequest, RequestTooLarge, Unavailable
from farcall_common.exit_codes import DONE, exit_code
from farcall_common.files import write_whole
from farcall_common.http_limits import LimitedHttp
from farcall_common.store import StoreSettings, open_stores
from farcall_lambdas.answers import error_response
from farcall_lambdas.app import AdmittingResolver, JsonReader, assemble
from farcall_lambdas.auth import provider_from_settings
from farcall_lambdas.identity import Authorizer
from farcall_lambdas.issued_credentials import IssuedCredentials, ProviderWithCredentials
from farcall_lambdas.local_gateway import LocalGateway
from farcall_lambdas.logs import configure, log_ids, logger
from farcall_lambdas.services import Reconciler, Services
from farcall_lambdas.settings import ApiSettings, AuthSettings
from farcall_lambdas.signed_caller import CallerKey

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]

#: Requests answered at once. Each may hold a database connection.
THREADS: Final = 8


class LocalResolver(AdmittingResolver, HttpResolverLocal):
    """Answers requests on a pool of threads, behind the authorizer, as the Lambda does behind API Gateway."""

    def __init__(
        self, services: Services, settings: ApiSettings, authorizer: Authorizer, gateway: LocalGateway | None = None
    ) -> None:
        super().__init__(enable_validation=True)
        self._authorizer = authorizer
        self._gateway = gateway or LocalGateway()
        self._max_request_bytes = settings.max_request_bytes
        self._json_reader = JsonReader(settings.max_request_bytes)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="request")
        assemble(self)
        self.context.update(services=services, settings=settings)

    def close(self) -> None:
        """Wait for the requests that are being answered, and stop the threads."""
        self._threads.shutdown()

    #: As behind API Gateway, a slash at the end of a path is ignored.
    _compile_regex = staticmethod(APIGatewayRestResolver._compile_regex)

    async def __call__(  # type: ignore[override]
        self, scope: Scope, receive: Callable[[], Any], send: Callable[[Message], Any]
    ) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        try:
            self._gateway.admit()
            body = await self._read(receive)
            if body is not None:
                await super().__call__(scope, _replay(body), send)
        except UnicodeDecodeError:
            await self._refuse(InvalidRequest("The request is not UTF-8 text."), scope, send)
        except Exception as error:  # noqa: BLE001  # the last resort: the error table answers, and logs bugs
            await self._refuse(error, scope, send)

    async def _read(self, receive: Callable[[], Any]) -> bytes | None:
        """The whole body, or None when the client disconnected. A body over the limit is read and dropped: a client
        that is still writing would not see the answer."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size <= self._max_request_bytes:
                parts.append(part)
            if not message.get("more_body", False):
                break
        if size > self._max_request_bytes:
            raise RequestTooLarge(f"The request has {size} bytes; {self._max_request_bytes} are allowed.")
        return b"".join(parts)

    async def _refuse(self, error: Exception, scope: Scope, send: Callable[[Message], Any]) -> None:
        request_id = str(uuid.uuid4())
        log_ids(request_id=request_id)
        response = error_response(error, request_id=request_id, path=str(scope["path"]))
        headers = {**response.headers, "Content-Type": response.content_type}
        await self._send_response(send, {"statusCode": response.status_code, "headers": headers, "body": response.body})

    def _to_proxy_event(self, event: dict[str, Any]) -> BaseProxyEvent:
        event["requestContext"] = {"stage": "local", "requestId": str(uuid.uuid4())}
        proxy_event = HttpProxyEvent._from_dict(event)
        proxy_event._json_deserializer = self._json_reader
        return proxy_event

    async def _resolve_async(self) -> dict[str, Any]:  # type: ignore[override]
        # The state of this request is in a context variable; the thread works in a copy of the context.
        answer = functools.partial(contextvars.copy_context().run, self._answer)
        answered = asyncio.get_running_loop().run_in_executor(self._threads, answer)
        try:
            return await asyncio.wait_for(answered, self._gateway.timeout_s)
        except TimeoutError:
            raise self._gateway.timed_out() from None

    def _answer(self) -> dict[str, Any]:
        identity = self._authorizer.identify(self.current_event.headers.get("authorization"))
        self.current_event["requestContext"]["authorizer"] = identity.to_context()
        return self.within_limit(self._resolve().build(self.current_event, self._cors))


class _Server(uvicorn.Server):
    """Writes its port to a file when it serves."""

    def __init__(self, config: uvicorn.Config, port: int, port_file: Path | None) -> None:
        super().__init__(config)
        self._port = port
        self._port_file = port_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._port_file is not None and self.started:
            write_whole(self._port_file, f"{self._port}\n".encode())
        logger.info("serving", port=self._port)


async def serve(
    resolver: LocalResolver, reconciler: Reconciler, listener: socket.socket, port_file: Path | None, *, period_s: float
) -> None:
    """Serve until SIGTERM or SIGINT, and reconcile every ``period_s`` seconds meanwhile.

    ``port_file`` gets the bound port once requests are served.
    """
    config = uvicorn.Config(
        resolver,
        http=LimitedHttp,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=10,
    )
    server = _Server(config, listener.getsockname()[1], port_file)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has shut down; with this handler the process survives that.
        signal.signal(number, server.handle_exit)
    async with asyncio.TaskGroup() as group:
        reconciling = group.create_task(_reconcile(reconciler, period_s=period_s))
        await server.serve(sockets=[listener])
        reconciling.cancel()


async def _reconcile(reconciler: Reconciler, *, period_s: float) -> None:
    """In the cloud a schedule does this. An outage is waited out; any other error stops the process."""
    while True:
        started = time.monotonic()
        try:
            await asyncio.to_thread(reconciler.run)
        except Unavailable as error:
            logger.warning("cannot reconcile", reason=str(error))
        await asyncio.sleep(max(0.0, started + period_s - time.monotonic()))


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the process. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="farcall_lambdas.local", description="Farcall's API as a local process.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--listener", type=int, help="number of an inherited socket that listens, instead of a port")
    parser.add_argument("--port-file", type=Path, help="file that gets the bound port when requests are served")
    options = parser.parse_args(arguments)
    configure(environ.get("FARCALL_LOG_LEVEL", "INFO"), servers=frozenset({"uvicorn", "uvicorn.error"}))
    try:
        settings = ApiSettings.from_environment(environ)
        auth = AuthSettings.from_environment(environ)
        gateway = LocalGateway.from_environment(environ)
        # The one process is authorizer and API: they need no key of their own.
        key = CallerKey.from_environment({"FARCALL_CALLER_KEY": environ.get("FARCALL_TICKET_KEY", ""), **environ})
        credentials = IssuedCredentials(key)
        authorizer = Authorizer(
            ProviderWithCredentials(provider_from_settings(auth), credentials, allowed=auth.allowed)
        )
        stores = open_stores(StoreSettings.from_environment(environ), max_connections=THREADS + 1)
    except ConfigurationError as error:
        logger.error("cannot start", reason=str(error))
        return exit_code(error)
    services = Services.over(stores, settings, credentials=credentials)
    resolver = LocalResolver(services, settings, authorizer, gateway)
    try:
        with (
            _listener(options) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            period_s = settings.reconcile_period_s
            runner.run(serve(resolver, services.reconciler, listener, options.port_file, period_s=period_s))
    except ConfigurationError as error:
        logger.error("cannot listen", reason=str(error))
        return exit_code(error)
    finally:
        resolver.close()
        stores.close()
    return DONE


def _listener(options: argparse.Namespace) -> socket.socket:
    """:raises ConfigurationError: if the port cannot be used."""
    if options.listener is not None:
        return socket.socket(fileno=options.listener)
    try:
        return socket.create_server((options.host, options.port), backlog=2048)
    except OSError as error:
        raise ConfigurationError(
            f"Port {options.port} of {options.host} cannot be used: {error.strerror}.",
            hint="Stop the program that uses it, or choose another port.",
        ) from error


def _replay(body: bytes) -> Callable[[], Any]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


if __name__ == "__main__":
    sys.exit(main())
