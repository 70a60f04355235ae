"""Deployment to an already running LocalStack: with our command line, and with ``cdklocal``.

This LocalStack has the plugin but no driver; the deployment knows only its URL.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

import farcall
from farcall_infra.jsii_node import choose
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_localstack.assembly import ACCOUNT, REGION
from farcall_localstack.deploy import Deployer
from farcall_localstack.environment import ensure_environment
from farcall_localstack.server import LocalStackServer, group_members
from farcall_localstack.synth import ensure_assembly
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_CDKLOCAL = Path(__file__).parents[2] / ".tools" / "cdklocal" / "node_modules" / "aws-cdk-local" / "bin" / "cdklocal"
_DEV = {"identity_id": "5e0d6f5c-7a3b-5c6e-9f43-2d1f6f1c7b9a", "username": "dev"}


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[LocalStackServer]:
    directory = tmp_path / "foreign"
    directory.mkdir()
    server = LocalStackServer(ensure_environment(), directory=directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _engines(server: LocalStackServer) -> list[str]:
    names = [psutil.Process(pid).name() for pid in group_members(server.pid)]
    return [name for name in names if "postgres" in name or "valkey" in name]


def _double(number: int) -> int:
    return 2 * number


def _runs_a_task(api_url: str, token: str, tmp_path: Path) -> None:
    deployment = Deployment(api_url, {"dev": token}, tmp_path)
    endpoint = LocalEndpoint("own", home=tmp_path / "home", environment=deployment.environment("dev"))
    with endpoint, farcall.Client(api_url, token) as client, farcall.Executor(client=client) as executor:
        executor.endpoint_id = endpoint.endpoint_id
        assert executor.submit(_double, 21).result(timeout=WAIT_S) == 42


def test_up_and_down_leave_a_running_localstack_unchanged(foreign: LocalStackServer, tmp_path: Path) -> None:
    directory = tmp_path / "state"

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "farcall_localstack", *arguments, "--directory", str(directory)]
        environment = {**os.environ, "AWS_ENDPOINT_URL": foreign.url}
        return subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=3 * WAIT_S
        ).stdout

    with pytest.raises(subprocess.CalledProcessError):  # its functions run under this Python, without containers
        run("up", "--mode", "endpoint", "--bundles", "x86_64")
    said = dict(re.findall(r"export (\w+)=(\S+)", run("up", "--mode", "endpoint")))
    assert said["FARCALL_API_URL"].startswith(foreign.url)
    assert "(not started by up)" in run("status")
    _runs_a_task(said["FARCALL_API_URL"], said["FARCALL_TOKEN"], tmp_path)
    run("down")
    assert _engines(foreign) == []
    assert Deployer(foreign.url).client("cloudformation").list_exports()["Exports"] == []
    assert psutil.pid_exists(foreign.pid)  # it keeps running


@pytest.mark.skipif(not _CDKLOCAL.exists(), reason="cdklocal is not installed: make .tools/cdklocal/.made")
def test_cdklocal_deploys_and_destroys(foreign: LocalStackServer, tmp_path: Path) -> None:
    choose()  # the Node of our environment: the system's may be too old for the CDK
    environment = {**os.environ, **_credentials(foreign.url)}
    assembly = str(ensure_assembly())

    def cdklocal(*arguments: str) -> None:
        command = [os.environ["JSII_NODE"], str(_CDKLOCAL), *arguments, "--app", assembly]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=3 * WAIT_S, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    tokens = json.dumps({"token-of-another-user": _DEV})
    cdklocal("bootstrap", f"aws://{ACCOUNT}/{REGION}")
    cdklocal("deploy", "--all", "--require-approval", "never", "--parameters", f"farcall-api:DevTokens={tokens}")
    described = Deployer(foreign.url).client("cloudformation").describe_stacks(StackName="farcall-api")["Stacks"][0]
    outputs = {output["OutputKey"]: output["OutputValue"] for output in described["Outputs"]}
    api_url = f"{foreign.url}/_aws/execute-api/{outputs['ApiId']}/{outputs['ApiStage']}"
    _runs_a_task(api_url, "token-of-another-user", tmp_path)
    cdklocal("destroy", "--all", "--force")
    assert _engines(foreign) == []


def _credentials(url: str) -> Mapping[str, str]:
    """The environment of cdklocal; the second URL is for S3, whose buckets would otherwise be in the host name."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": ACCOUNT,
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
    }
