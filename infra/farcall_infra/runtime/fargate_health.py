"""Health check of the forwarder's container: exit status 0 if ``/livez`` answers 200, else 1.

ECS starts it every ten seconds, for ever, so it uses no module that Python has to read from files: an HTTP client of
the standard library would need a fifteenth of a quarter vCPU. It runs as ``python -I -S -c`` and is part of the task
definition. Reads ``FARCALL_FORWARDER_HEALTH_PORT``.
"""

import _socket
import posix

_TIMEOUT_S = 4.0  # below the timeout of the check

peer = _socket.socket()
peer.settimeout(_TIMEOUT_S)
peer.connect(("127.0.0.1", int(posix.environ[b"FARCALL_FORWARDER_HEALTH_PORT"])))
peer.send(b"GET /livez HTTP/1.1\r\n\r\n")
raise SystemExit(not peer.recv(16).startswith(b"HTTP/1.1 200 "))
