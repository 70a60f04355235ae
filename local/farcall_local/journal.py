"""Durability for an in-memory S3: a WSGI application in front of it that keeps the requests which made its objects."""

from __future__ import annotations

import io
import json
import os
import tempfile
import threading
import urllib.parse
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.util import setup_testing_defaults

from werkzeug.wrappers import Request, Response

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["Journal"]

_SIGNER_PARAMETERS = ("X-Amz-Credential", "AWSAccessKeyId")
_KEPT = frozenset({"REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "CONTENT_TYPE"})


#: Objects that are kept in memory together, in bytes; older ones are on disk alone until they are asked for again.
MEMORY_BYTES = 64 * 1024 * 1024


class Journal:
    """A WSGI application in front of an in-memory S3.

    It writes each successful ``PUT`` of an object to ``directory`` before it answers, and replays it into
    ``application`` when the object is asked for and not in memory: after a restart, or because too much else was.
    Requests that were not signed with ``access_key`` are refused.
    """

    def __init__(
        self, application: WSGIApplication, *, directory: Path, access_key: str, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._application = application
        self._directory = directory
        self._access_key = access_key
        self._memory_bytes = memory_bytes
        #: Sizes in bytes of the objects in memory by path, the oldest first.
        self._in_memory: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def make_bucket(self, name: str) -> None:
        """Let a bucket exist; it is not in the journal."""
        self._pass_on({"REQUEST_METHOD": "PUT", "PATH_INFO": f"/{name}"})

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        request = Request(environ)
        # In the header of a direct request; in the query of a pre-signed one (signature versions 4 and 2).
        signers = (request.headers.get("Authorization", ""), *map(request.args.get, _SIGNER_PARAMETERS))
        if not any(self._access_key in signer for signer in signers if signer):
            return _FORBIDDEN(environ, start_response)
        body = request.get_data(cache=False)  # before the lock: a slow client must not hold up the others
        kept = {key: value for key, value in environ.items() if key.startswith("HTTP_") or key in _KEPT}
        is_object = request.path.count("/") > 1
        if is_object and request.method == "PUT":
            answer = self._put(request.path, kept, body)
        else:
            with self._lock:
                if is_object and request.method in ("GET", "HEAD"):
                    self._recall(request.path)
                elif is_object and request.method == "DELETE":
                    self._entry(request.path).unlink(missing_ok=True)
                answer = self._pass_on(kept, body)
        return answer(environ, start_response)

    def _put(self, path: str, kept: dict[str, str], body: bytes) -> Response:
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix="new-", delete=False) as entry:
            entry.write(json.dumps(kept).encode() + b"\n" + body)
            entry.flush()
            os.fsync(entry.fileno())
        with self._lock:
            answer = self._pass_on(kept, body)
            if answer.status_code == 200:
                Path(entry.name).replace(self._entry(path))
                self._keep(path, len(body))
            else:
                Path(entry.name).unlink()
        return answer

    def _recall(self, path: str) -> None:
        entry = self._entry(path)
        if path in self._in_memory or not entry.exists():
            return
        head, _, body = entry.read_bytes().partition(b"\n")
        self._pass_on(json.loads(head), body)
        self._keep(path, len(body))

    def _keep(self, path: str, size_bytes: int) -> None:
        self._in_memory[path] = size_bytes
        self._in_memory.move_to_end(path)
        while sum(self._in_memory.values()) > self._memory_bytes and len(self._in_memory) > 1:
            oldest, _ = self._in_memory.popitem(last=False)
            self._pass_on({"REQUEST_METHOD": "DELETE", "PATH_INFO": oldest})

    def _pass_on(self, kept: Mapping[str, str], body: bytes = b"") -> Response:
        environ: dict[str, Any] = {
            **kept,
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
            "wsgi.input_terminated": True,
        }
        setup_testing_defaults(environ)
        return Response.from_app(self._application, environ)

    def _entry(self, path: str) -> Path:
        return self._directory / urllib.parse.quote(path, safe="")


_FORBIDDEN = Response("<Error><Code>AccessDenied</Code></Error>", 403, content_type="application/xml")
