"""Templates and bundles for a LocalStack with containers. Running one needs docker and a licence."""

from __future__ import annotations

import http.server
import json
import platform
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_infra.bundles import X86_64
from farcall_infra.deployment import TARGETS
from farcall_localstack import LocalStackTier
from farcall_localstack.assembly import assets, in_order, zipped
from farcall_localstack.bundles import THIS_PYTHON, target_of
from farcall_localstack.synth import ensure_assembly

_X86_64_ELF = 62  # e_machine of an ELF file
_OUR_PYTHON = re.compile(r"\.(cpython-314-x86_64-linux-gnu|abi3)\.so$")
_ANY_PYTHON = re.compile(r"\.(cpython-|abi3)[^/]*\.so$")


def test_containers_on_arm64_use_the_same_wheels_as_aws() -> None:
    assert TARGETS["localstack-arm64"].wheels == TARGETS["aws"].wheels
    assert TARGETS["localstack-x86_64"].wheels is X86_64
    assert X86_64.python_version == TARGETS["aws"].wheels.python_version


@pytest.mark.slow
def test_templates_and_wheels_are_for_the_same_processor_and_python() -> None:
    assembly = ensure_assembly(target="localstack-x86_64")
    resources = [
        resource
        for stack in in_order(assembly)
        for resource in json.loads(stack.template.read_text(encoding="utf-8"))["Resources"].values()
    ]
    functions = [each["Properties"] for each in resources if each["Type"] == "AWS::Lambda::Function"]
    assert functions
    for function in functions:
        assert (function["Architectures"], function["Runtime"]) == (["x86_64"], f"python{X86_64.python_version}")
    (task,) = (each["Properties"] for each in resources if each["Type"] == "AWS::ECS::TaskDefinition")
    assert task["RuntimePlatform"]["CpuArchitecture"] == "X86_64"
    _check_addresses(functions, task)

    bundles = {zipped(source) for stack in in_order(assembly) for source, _, _ in assets(assembly, stack)}
    assert len(bundles) == 2
    for bundle in bundles:
        _check_wheels(bundle)


def _check_addresses(functions: list[dict[str, Any]], task: dict[str, Any]) -> None:
    """The addresses of database, queue and bucket come from LocalStack's attributes of them."""
    (container,) = task["ContainerDefinitions"]
    told = [{each["Name"]: each["Value"] for each in container["Environment"]}]
    told += [function["Environment"]["Variables"] for function in functions if "VpcConfig" in function]
    for variables in told:
        where = {name: value for name, value in variables.items() if re.search(r"(HOST|PORT|ARN|BUCKET)$", name)}
        where = {name: value for name, value in where.items() if not re.match("FARCALL_(FORWARDER|BUNDLE)_", name)}
        assert {"FARCALL_DATABASE_HOST", "FARCALL_DATABASE_PORT"} <= where.keys()
        assert all("Fn::ImportValue" in value or "Ref" in value for value in where.values()), where
        assert "FARCALL_FORWARDER_ADVERTISE" not in variables  # the boot program finds it at run time


def _check_wheels(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).suffixes]
        extensions = [name for name in libraries if _ANY_PYTHON.search(name)]
        assert extensions
        assert all(_OUR_PYTHON.search(name) for name in extensions), extensions
        for library in libraries:
            with archive.open(library) as file:
                assert int.from_bytes(file.read(20)[18:20], "little") == _X86_64_ELF, library


class _LocalStack(http.server.BaseHTTPRequestHandler):
    """The two URLs that are requested."""

    server: _LocalStackServer

    def do_GET(self) -> None:
        body = {"/_localstack/health": {"edition": "pro"}}
        if self.server.python is not None:
            body["/_localstack/farcall"] = {"python": self.server.python}
        self.send_response(200 if self.path in body else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body.get(self.path)).encode())

    def log_message(self, *_: object) -> None:
        """No log: the tests' output is for failures."""


class _LocalStackServer(http.server.ThreadingHTTPServer):
    """``python`` is the answer of our plugin, None without it."""

    python: str | None = None


@pytest.fixture
def server() -> Iterator[_LocalStackServer]:
    with _LocalStackServer(("127.0.0.1", 0), _LocalStack) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def endpoint_url(server: _LocalStackServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize(("machine", "target"), [("aarch64", "arm64"), ("arm64", "arm64"), ("AMD64", "x86_64")])
def test_without_our_plugin_bundles_have_lambdas_wheels_for_this_machine(
    endpoint_url: str, machine: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert target_of(endpoint_url) == f"localstack-{target}"


def test_another_processor_can_be_named(endpoint_url: str) -> None:
    for processor in ("arm64", "x86_64"):
        assert target_of(endpoint_url, bundles=processor) == f"localstack-{processor}"
    with pytest.raises(ConfigurationError, match="unknown bundles 'riscv'") as caught:
        target_of(endpoint_url, bundles="riscv")
    assert "host, arm64, x86_64" in caught.value.hint


def test_a_processor_without_a_lambda_image_is_an_error(endpoint_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigurationError, match="riscv64") as caught:
        target_of(endpoint_url)
    assert "--bundles" in caught.value.hint


def test_with_our_plugin_bundles_have_this_pythons_wheels_or_an_error_says_why_not(
    server: _LocalStackServer, endpoint_url: str
) -> None:
    server.python = THIS_PYTHON
    assert target_of(endpoint_url) == "localstack"
    with pytest.raises(ConfigurationError, match="need containers of Lambda's image"):
        target_of(endpoint_url, bundles="x86_64")
    server.python = "linux-x86_64-cpython-39"
    with pytest.raises(ConfigurationError, match="runs functions under linux-x86_64-cpython-39"):
        target_of(endpoint_url)


def test_mode_host_has_no_containers() -> None:
    with pytest.raises(ConfigurationError, match="cannot run bundles for arm64"):
        LocalStackTier(bundles="arm64")


def test_an_unreachable_localstack_is_an_error() -> None:
    with pytest.raises(Unavailable, match="there is no LocalStack") as caught:
        target_of("http://127.0.0.1:1")
    assert "AWS_ENDPOINT_URL" in caught.value.hint
