"""Preparations that fail: the words and the code of the error, and what is left."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.prepare.bundle import Abi, make_bundle
from farcall_endpoint.environments.prepare.image_preparation import Preparation
from farcall_endpoint.environments.prepare.preparation import (
    Crowded,
    Failed,
    PreparationReport,
    PreparationSettings,
    Prepared,
)
from farcall_endpoint.environments.runners.apptainer import ApptainerRunner
from farcall_endpoint.environments.runners.oci import OciRunner
from farcall_endpoint.environments.runners.registry import runners_of
from farcall_endpoint.manager.core.events import EnvironmentReady
from tests.support.container_user import apptainer_user, podman_user
from tests.support.environments import running_node
from tests.support.packages import make_wheel
from tests.waiting import wait_until


def ended(environment: Environment, cache: Path, settings: EnvironmentSettings) -> Prepared | ErrorRecord:
    """How a preparation ends."""
    reports: list[PreparationReport] = []
    of = PreparationSettings(environments=settings, cache=str(cache))
    preparation = Preparation(of, report=reports.append, runners=runners_of(settings))
    preparation.prepare(environment, trusted=True)
    preparation.release(environment.key)
    last = reports[-1]
    assert isinstance(last, Prepared | Failed)
    return last if isinstance(last, Prepared) else last.record


def test_what_is_beyond_the_limit_goes_when_it_is_released(tmp_path: Path) -> None:
    index, reports = tmp_path / "index", list[PreparationReport]()
    index.mkdir()
    environments = [Environment(type="uv", requirements=(name,)) for name in ("bridge", "stone")]
    for environment in environments:
        make_wheel(index, environment.requirements[0], "1.0")
    settings = EnvironmentSettings(index_url=str(index), cache_bytes=1)
    of = PreparationSettings(environments=settings, cache=str(tmp_path / "cache"))
    preparation = Preparation(of, report=reports.append, runners=runners_of(settings))
    for environment in environments:
        preparation.prepare(environment, trusted=True)
    images = [Path(report.image) for report in reports if isinstance(report, Prepared)]
    assert Crowded() in reports
    assert [image.exists() for image in images] == [True, True]
    preparation.release(environments[0].key)
    assert [image.exists() for image in images] == [False, True]


@contextlib.contextmanager
def server(status: int, body: object = None) -> Iterator[str]:
    """A server that gives one answer, but to ``/v2/``; its host and port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v2/" else status)
            data = json.dumps(body).encode()
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(data if self.command == "GET" else b"")

        do_HEAD = do_GET  # noqa: N815 - the base class's

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "words", "retryable"),
    [(404, "stone was not found in the package registry", False), (503, "503 Service Unavailable", True)],
)
def test_an_index_that_has_nothing_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, words: str, *, retryable: bool
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with server(status) as address:
        settings = EnvironmentSettings(index_url=f"http://user:t0ken@{address}/simple")
        record = ended(Environment(type="uv", requirements=("stone",)), tmp_path / "cache", settings)
    assert isinstance(record, ErrorRecord)
    assert (record.code, record.retryable) == ("REQUIREMENTS_FAILED", retryable)
    assert words in record.message
    assert "t0ken" not in record.message


def test_an_index_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    settings = EnvironmentSettings(index_url="http://127.0.0.1:9/simple")
    record = ended(Environment(type="uv", requirements=("stone",)), tmp_path / "cache", settings)
    assert isinstance(record, ErrorRecord)
    assert (record.code, record.retryable) == ("REQUIREMENTS_FAILED", True)
    assert "http://127.0.0.1:9/.../stone" in record.message


@pytest.mark.parametrize(("libc", "tag"), [("gnu", "manylinux_2_17_x86_64"), ("musl", "musllinux_1_2_x86_64")])
def test_the_workers_code_is_that_of_the_images_c_library(tmp_path: Path, libc: str, tag: str) -> None:
    """By the real uv, of a directory of wheels."""
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    cache.mkdir()
    version = importlib.metadata.version("msgspec")
    for each in ("manylinux_2_17_x86_64", "musllinux_1_2_x86_64", "musllinux_1_2_aarch64"):
        make_wheel(index, "msgspec", version, code=f"BUILT_FOR = {each!r}\n", tag=f"cp313-cp313-{each}")
    abi = Abi(version="3.13", soabi=f"cpython-313-x86_64-linux-{libc}")
    run = functools.partial(subprocess.run, check=True)
    made = make_bundle(abi, cache, run=run, index_url=str(index))
    assert tag in (made / "lib" / "msgspec.py").read_text()


MUSL = os.environ.get("FARCALL_MUSL_ROOT", "")


@pytest.mark.skipif(not MUSL, reason="FARCALL_MUSL_ROOT names no root file system with musl and a Python, as of Alpine")
def test_a_worker_and_a_fork_of_it_run_with_musl(tmp_path: Path) -> None:
    environment = Environment(type="bubblewrap", location=MUSL)

    def built_for() -> str:
        import sysconfig

        return str(sysconfig.get_config_var("SOABI"))

    with running_node(tmp_path) as node:
        worker = node.ready(environment)
        assert "musl" in node.run(worker, built_for)

        def is_forkable() -> bool:
            node.serve()
            return EnvironmentReady(environment.key, forkable=True) in node.events

        wait_until(is_forkable)
        fork = node.launch(environment)
        assert fork.container is None
        node.packet(fork)
        assert "musl" in node.run(fork, built_for)


def test_a_full_disk_while_the_workers_code_is_copied(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k,mode=700", "tmpfs", str(cache)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    environment = Environment(type="venv", location=sys.prefix)
    try:
        record = ended(environment, cache, EnvironmentSettings())
        assert isinstance(record, ErrorRecord)
        assert (record.code, record.retryable) == ("ENVIRONMENT_FAILED", True)
        assert "No space left on device" in record.message
        assert not list(cache.glob("*worker*/*"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(cache)], check=True)
        assert isinstance(ended(environment, cache, EnvironmentSettings()), Prepared)
    finally:
        subprocess.run(["umount", str(cache)], check=True)


@pytest.mark.parametrize("type_", ["podman", "apptainer"])
def test_an_image_that_the_registry_does_not_have(type_: str) -> None:
    unknown = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
    with server(404, unknown) as address, (podman_user if type_ == "podman" else apptainer_user)() as user:
        settings = user.directory_of("registries") / "registries.conf"
        settings.write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
        runner = OciRunner("podman", python=user.python) if type_ == "podman" else ApptainerRunner("apptainer")
        environment = Environment(type=type_, location=f"docker://{address}/lab/sci:1")
        [command] = runner.prepare(environment, cache=user.directory_of("cache")).commands
        variables = {"APPTAINER_NOHTTPS": "1", "CONTAINERS_REGISTRIES_CONF": str(settings)}
        done = user.run(command, {**variables, "NO_PROXY": "127.0.0.1"})
    assert done.returncode != 0
    assert "manifest unknown" in done.stdout
