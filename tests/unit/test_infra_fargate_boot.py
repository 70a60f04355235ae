"""Boot program of the forwarder's container: signatures, credentials, address, and the command that it starts."""

from __future__ import annotations

import datetime
import hashlib
import http.server
import importlib.util
import io
import json
import os
import socket
import ssl
import threading
import zipfile
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from farcall_infra.bundles import RUNTIME, content_digest
from tests.certificates import Authority

_BOOT = RUNTIME / "fargate_boot.py"


@pytest.fixture(scope="module")
def boot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fargate_boot", _BOOT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("token", ["", "a-session-token"])
def test_the_signature_equals_botocores(boot: ModuleType, token: str) -> None:
    url = "https://assets.s3.eu-west-1.amazonaws.com/ab12.zip"
    now = datetime.datetime.now(datetime.UTC)
    ours = boot.signed_headers(url, region="eu-west-1", access_key="AKID", secret="SECRET", token=token, now=now)

    request = AWSRequest("GET", url, headers={"X-Amz-Content-SHA256": ours["x-amz-content-sha256"]})
    request.context["timestamp"] = ours["x-amz-date"]
    theirs = S3SigV4Auth(Credentials("AKID", "SECRET", token or None), "s3", "eu-west-1")
    theirs_request = theirs.canonical_request(_with_date_and_token(request, ours["x-amz-date"], token))
    signature = theirs.signature(theirs.string_to_sign(request, theirs_request), request)

    assert ours["authorization"].endswith(f"Signature={signature}")


def _with_date_and_token(request: AWSRequest, stamp: str, token: str) -> AWSRequest:
    request.headers["X-Amz-Date"] = stamp
    if token:
        request.headers["X-Amz-Security-Token"] = token
    return request


def test_the_object_is_in_the_tasks_region_or_at_the_endpoint(boot: ModuleType) -> None:
    assert boot.object_url({"AWS_REGION": "eu-west-1"}, "b", "k.zip") == "https://b.s3.eu-west-1.amazonaws.com/k.zip"
    assert boot.object_url({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "b", "k.zip") == "http://127.0.0.1:9/b/k.zip"


def test_credentials_come_from_the_container_endpoint(boot: ModuleType) -> None:
    answer = {"AccessKeyId": "AKID", "SecretAccessKey": "SECRET", "Token": "TOKEN"}
    asked = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        return json.dumps(answer).encode()

    given = boot.credentials({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/1"}, fetch)
    assert given == ("AKID", "SECRET", "TOKEN")
    assert asked == ["http://169.254.170.2/v2/credentials/1"]


_EMPTY = hashlib.sha256(b"").hexdigest()
_DIGEST = hashlib.sha256(f"{_EMPTY}  farcall_forwarder/__main__.py\n".encode()).hexdigest()


def _task_environment(**more: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "AKID",
        "AWS_SECRET_ACCESS_KEY": "SECRET",
        "AWS_REGION": "us-east-1",
        "FARCALL_BUNDLE_BUCKET": "assets",
        "FARCALL_BUNDLE_KEY": "bundle.zip",
        "FARCALL_BUNDLE_DIGEST": _DIGEST,
        **more,
    }


class _Became(Exception):
    """Raised instead of replacing this process."""

    def __init__(self, program: str, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(program)
        self.command = command
        self.environment = environment


class Cloud(dict[str, bytes]):
    """The answer of each URL, and the answers of services that name addresses, an error if there is none."""

    def __init__(self, answers: Mapping[str, bytes]) -> None:
        super().__init__(answers)
        self.addresses = {"checkip.amazonaws.com": ["198.51.100.7"]}
        self.pauses_s: list[float] = []

    def ask(self, host: str) -> str:
        if not (answers := self.addresses.get(host)):
            raise TimeoutError("timed out")
        return answers.pop(0)

    def boot(self, boot: ModuleType, command: list[str], environ: Mapping[str, str]) -> None:
        boot.main(command, environ, self.fetch, ask=self.ask, pause=self.pauses_s.append)

    def fetch(self, url: str, _headers: Mapping[str, str] | None = None) -> bytes:
        return self[url]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cloud:
    """A cloud in which replacing the process raises an exception."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("farcall_forwarder/__main__.py", "")
    answers = {
        "https://assets.s3.us-east-1.amazonaws.com/bundle.zip": archive.getvalue(),
    }

    def become(program: str, command: list[str], environment: dict[str, str]) -> None:
        raise _Became(program, command, environment)

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Cloud(answers)


def test_boot_starts_the_command_with_bundle_and_address(boot: ModuleType, cloud: Cloud) -> None:
    with pytest.raises(_Became) as caught:
        cloud.boot(boot, ["python", "-m", "farcall_forwarder"], _task_environment())
    assert caught.value.command == ["python", "-m", "farcall_forwarder"]
    assert caught.value.environment["FARCALL_FORWARDER_ADVERTISE"] == "198.51.100.7"
    assert (Path(caught.value.environment["PYTHONPATH"]) / "farcall_forwarder" / "__main__.py").exists()


@pytest.mark.parametrize(
    "files",
    [
        [("farcall_forwarder/__main__.py", "import evil")],
        [("farcall_forwarder/__main__.py", ""), ("sitecustomize.py", "import evil")],
        [("farcall_forwarder/__main__.py", "import evil"), ("farcall_forwarder/__main__.py", "")],
        [("farcall_forwarder/main.py", "")],
        [],
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_bundle_that_was_replaced_is_not_unpacked(
    boot: ModuleType, cloud: Cloud, tmp_path: Path, files: list[tuple[str, str]]
) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as bundle:
        for name, text in files:
            bundle.writestr(name, text)
    cloud["https://assets.s3.us-east-1.amazonaws.com/bundle.zip"] = archive.getvalue()
    with pytest.raises(SystemExit, match="is not the one that was deployed"):
        cloud.boot(boot, ["python", "-m", "farcall_forwarder"], _task_environment())
    assert not list(tmp_path.iterdir())


def test_the_digest_does_not_depend_on_how_the_files_are_zipped(boot: ModuleType, tmp_path: Path) -> None:
    files = {"z.py": b"1", "a/b.py": b"2", "a/c.py": b"", "a.py": b"3", "ä.txt": b"4"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for order, method in ((files, zipfile.ZIP_STORED), (sorted(files), zipfile.ZIP_DEFLATED)):
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", method) as bundle:
            bundle.mkdir("a")
            for name in order:
                bundle.writestr(name, files[name])
        with zipfile.ZipFile(archive) as bundle:
            assert boot.digest(bundle) == content_digest(tmp_path)


def test_an_image_with_the_code_needs_no_bundle(boot: ModuleType, cloud: Cloud) -> None:
    environment = {name: value for name, value in _task_environment().items() if "BUNDLE" not in name}
    with pytest.raises(_Became) as caught:
        cloud.boot(boot, ["python", "-m", "farcall_forwarder"], environment)
    assert caught.value.environment == {**environment, "FARCALL_FORWARDER_ADVERTISE": "198.51.100.7"}


def test_address_outside_of_aws_is_that_of_the_route(boot: ModuleType, cloud: Cloud) -> None:
    endpoint = "http://127.0.0.1:4566"
    cloud[f"{endpoint}/assets/bundle.zip"] = cloud["https://assets.s3.us-east-1.amazonaws.com/bundle.zip"]
    with pytest.raises(_Became) as caught:
        cloud.boot(boot, ["true"], _task_environment(AWS_ENDPOINT_URL=endpoint))
    assert caught.value.environment["FARCALL_FORWARDER_ADVERTISE"] == "127.0.0.1"


def test_a_given_address_is_kept(boot: ModuleType, cloud: Cloud) -> None:
    with pytest.raises(_Became) as caught:
        cloud.boot(boot, ["true"], _task_environment(FARCALL_FORWARDER_ADVERTISE="127.0.0.1"))
    assert caught.value.environment["FARCALL_FORWARDER_ADVERTISE"] == "127.0.0.1"


def test_a_service_that_fails_is_replaced_and_asked_again(boot: ModuleType, cloud: Cloud) -> None:
    cloud.addresses = {
        "checkip.amazonaws.com": ["<html>come back later</html>", "2001:db8::7"],
        "checkip.global.api.aws": ["", "", "198.51.100.8"],
    }
    with pytest.raises(_Became) as caught:
        cloud.boot(boot, ["true"], _task_environment())
    assert caught.value.environment["FARCALL_FORWARDER_ADVERTISE"] == "198.51.100.8"
    assert cloud.pauses_s == list(boot.ADDRESS_PAUSES_S[:2])


def test_a_task_without_an_address_ends(boot: ModuleType, cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.addresses = {}
    with pytest.raises(SystemExit, match="FARCALL_FORWARDER_ADVERTISE"):
        cloud.boot(boot, ["true"], _task_environment())
    assert capsys.readouterr().err.count("names no IPv4 address") == 8
    # Within the time in which ECS does not expect a healthy container yet.
    assert 2 * 4 * boot.ADDRESS_TIMEOUT_S + sum(boot.ADDRESS_PAUSES_S) < 60


def test_the_address_is_asked_over_ipv4(boot: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tasks are in dual-stack subnets, and the service may have IPv6: it would name the wrong address."""
    authority = Authority()
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.write(tmp_path / "authority.pem")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certify("checkip.example.org", tmp_path / "server.pem"))

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.end_headers()
            self.wfile.write(f"{self.client_address[0]}\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    def resolve(_host: str, port: int, *_: object, **__: object) -> list[Any]:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        try:
            assert boot.ask_over_ipv4("checkip.example.org", port=server.server_port) == "127.0.0.1"
        finally:
            server.shutdown()
            serving.join()
