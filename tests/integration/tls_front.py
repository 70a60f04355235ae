"""TLS before a server that has none: the stores' wheels are built without it, and AWS' stores insist on it."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.waiting import WAIT_S

#: What a PostgreSQL client sends first when it wants TLS, and the server's yes.
_SSL_REQUEST: Final = (8).to_bytes(4) + (80877103).to_bytes(4)
_YES: Final = b"S"


class TlsFront:
    """Listens on a port of its own, takes TLS off, and passes everything on to ``target_port``."""

    def __init__(self, certificate: Path, *, target_port: int, postgres: bool = False) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._target = ("127.0.0.1", target_port)
        self._postgres = postgres
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, name="tls-front")]
        self._ending = threading.Event()
        self.port: int = self._listener.getsockname()[1]
        #: How many clients have agreed on keys with us.
        self.handshakes = 0

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        socket.create_connection(("127.0.0.1", self.port)).close()  # wakes the thread that accepts
        for thread in self._threads:
            thread.join(timeout=WAIT_S)
        self._listener.close()

    def show(self, certificate: Path) -> None:
        """From now on show clients another certificate."""
        self._context.load_cert_chain(certificate)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._ending.is_set():
                connection.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), name="tls-connection"))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            if self._postgres:
                if connection.recv(len(_SSL_REQUEST), socket.MSG_WAITALL) != _SSL_REQUEST:
                    return
                connection.sendall(_YES)
            try:
                secured = self._context.wrap_socket(connection, server_side=True)
            except OSError:  # a client that does not trust us says so by going away
                return
            self.handshakes += 1
            with secured, socket.create_connection(self._target) as plain:
                self._pass_on(secured, plain)

    def _pass_on(self, secured: ssl.SSLSocket, plain: socket.socket) -> None:
        while not self._ending.is_set():
            ready: list[socket.socket] = [secured]
            if not secured.pending():
                ready, _, _ = select.select([secured, plain], [], [], 0.1)
            for source in ready:
                try:
                    data = source.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    return
                (plain if source is secured else secured).sendall(data)
