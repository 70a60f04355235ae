"""The journal in front of the local tier's S3."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from werkzeug.test import Client
from werkzeug.wrappers import Request, Response

from farcall_local.journal import Journal

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse

SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=KEY1/20260101/us-east-1/s3/aws4_request"}


class Memory:
    """An object store that forgets."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refuse = False

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        return self.answer(Request(environ))(environ, start_response)

    def answer(self, request: Request) -> Response:
        if request.method == "PUT":
            if self.refuse:
                return Response("no", 400)
            self.objects[request.path] = request.get_data()
            return Response(headers={"ETag": request.headers.get("X-Tag", "")})
        if request.method == "DELETE":
            self.objects.pop(request.path, None)
            return Response(status=204)
        if request.path not in self.objects:
            return Response(status=404)
        return Response(self.objects[request.path])


def client(memory: Memory, directory: Path, *, memory_bytes: int = 1000) -> Client:
    return Client(Journal(memory, directory=directory, access_key="KEY1", memory_bytes=memory_bytes))


def test_an_object_outlives_the_memory(tmp_path: Path) -> None:
    assert client(Memory(), tmp_path).put("/b/owner/key", data=b"body", headers=SIGNED).status_code == 200

    reborn = client(Memory(), tmp_path)

    assert reborn.get("/b/owner/key", headers=SIGNED).data == b"body"
    assert reborn.get("/b/owner/other", headers=SIGNED).status_code == 404


def test_a_presigned_request_needs_no_header(tmp_path: Path) -> None:
    web = client(Memory(), tmp_path)
    assert web.put("/b/k?X-Amz-Credential=KEY1/2026", data=b"x").status_code == 200
    assert web.get("/b/k?AWSAccessKeyId=KEY1").data == b"x"


def test_requests_of_strangers_are_refused(tmp_path: Path) -> None:
    web = client(Memory(), tmp_path)
    web.put("/b/k", data=b"x", headers=SIGNED)
    assert web.get("/b/k").status_code == 403
    assert web.get("/b/k", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=KEY2/2026"}).status_code == 403
    assert web.get("/b", headers=SIGNED).status_code == 404  # a bucket is passed on, not refused


def test_what_the_store_refused_is_not_kept(tmp_path: Path) -> None:
    memory = Memory()
    memory.refuse = True
    assert client(memory, tmp_path).put("/b/k", data=b"x", headers=SIGNED).status_code == 400
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_and_nothing_is_lost(tmp_path: Path) -> None:
    memory = Memory()
    web = client(memory, tmp_path, memory_bytes=100)
    for number in range(10):
        web.put(f"/b/{number}", data=bytes([number]) * 40, headers=SIGNED)

    assert sum(map(len, memory.objects.values())) <= 100
    assert all(web.get(f"/b/{number}", headers=SIGNED).data == bytes([number]) * 40 for number in range(10))
    assert sum(map(len, memory.objects.values())) <= 100


def test_a_deleted_object_stays_deleted(tmp_path: Path) -> None:
    web = client(Memory(), tmp_path)
    web.put("/b/k", data=b"x", headers=SIGNED)
    web.delete("/b/k", headers=SIGNED)
    assert web.get("/b/k", headers=SIGNED).status_code == 404
    assert client(Memory(), tmp_path).get("/b/k", headers=SIGNED).status_code == 404


def test_the_newest_body_wins(tmp_path: Path) -> None:
    web = client(Memory(), tmp_path)
    for body in (b"one", b"two"):
        web.put("/b/k", data=body, headers=SIGNED)
    assert client(Memory(), tmp_path).get("/b/k", headers=SIGNED).data == b"two"
