"""Deployment to an already running LocalStack: with our command line, and with ``cdklocal``.

This LocalStack has the plugin but no driver; the deployment knows only its URL.
"""

from __future__ import annotations

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
from tests.support.ci_example import RUN_TESTS, START_TIER, STOP_TIER, WITH_A_TIER, Runner, github_steps
from tests.support.runbooks import Block, Shell, block
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_CDKLOCAL = Path(__file__).parents[2] / ".tools" / "cdklocal" / "node_modules" / "aws-cdk-local" / "bin" / "cdklocal"


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

    def run(*arguments: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "farcall_localstack", *arguments, "--directory", str(directory)]
        environment = {**os.environ, "AWS_ENDPOINT_URL": foreign.url}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=3 * WAIT_S)
        return done.stdout, done.stderr

    with pytest.raises(subprocess.CalledProcessError):  # its functions run under this Python, without containers
        run("up", "--mode", "endpoint", "--bundles", "x86_64")
    printed, progress = run("up", "--mode", "endpoint")
    variables = dict(re.findall(r"^export (\w+)=(\S+)$", printed, re.MULTILINE))
    assert len(variables) == len(printed.splitlines())
    assert variables["FARCALL_API_URL"].startswith(foreign.url)
    steps = re.findall(r"^\[ *\d+\.\d s\] (.+)$", progress, re.MULTILINE)
    assert [step for step in steps if step.startswith("deploying")] == [
        f"deploying farcall-{part}" for part in ("network", "data", "api", "forwarder")
    ]
    assert "(not started by up)" in run("status")[0]
    _boto3_and_farcall_cloud_work_with(variables)
    _runs_the_example_for_ci(printed, tmp_path)
    run("down")
    assert _engines(foreign) == []
    assert Deployer(foreign.url).client("cloudformation").list_exports()["Exports"] == []
    assert psutil.pid_exists(foreign.pid)  # it keeps running


def _runs_the_example_for_ci(printed: str, directory: Path) -> None:
    """Its steps with this tier, which `up` in its own step would have started."""
    steps, runner = github_steps("localstack"), Runner(directory, home=directory / "home")
    up, read = steps[START_TIER].splitlines()
    assert up == "python -m farcall_localstack up --profile hobby > tier.env"
    (runner.project / "tier.env").write_text(printed, encoding="utf-8")
    runner.run(read)
    *names, last = WITH_A_TIER
    outputs = runner.run_steps(steps, names=names, finally_=[last])
    assert "3 passed" in outputs[RUN_TESTS]
    assert steps[STOP_TIER] == "python -m farcall_localstack down"


def _boto3_and_farcall_cloud_work_with(variables: Mapping[str, str]) -> None:
    """Nothing but the lines that `up` prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FARCALL_"))}
    environment |= variables

    def output(program: str, *arguments: str) -> str:
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        return subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=WAIT_S
        ).stdout

    program = "import boto3; print(*boto3.client('ecs').list_clusters()['clusterArns'])"
    assert output("python", "-c", program) == f"arn:aws:ecs:{REGION}:{ACCOUNT}:cluster/farcall\n"
    status = output("farcall", "cloud", "status")
    assert "Healthy." in status
    assert f"export FARCALL_API_URL={variables['FARCALL_API_URL']}\n" in status


@pytest.mark.skipif(not _CDKLOCAL.exists(), reason="cdklocal is not installed: make .tools/cdklocal/.made")
def test_cdklocal_deploys_and_destroys(foreign: LocalStackServer, tmp_path: Path) -> None:
    choose()  # the Node of our environment: the system's may be too old for the CDK
    shell = Shell({}, directory=tmp_path)
    shell.add_program("cdklocal", f'exec {os.environ["JSII_NODE"]} {_CDKLOCAL} "$@"')
    here = {"http://localhost:4566": foreign.url}

    def run(typed: Block) -> None:
        shell.run(typed, here, within_s=3 * WAIT_S)

    run(block("A LocalStack that runs already", starting="cdklocal bootstrap"))
    run(block("A LocalStack that runs already", starting="cdklocal deploy"))
    described = Deployer(foreign.url).client("cloudformation").describe_stacks(StackName="farcall-api")["Stacks"][0]
    outputs = {output["OutputKey"]: output["OutputValue"] for output in described["Outputs"]}
    api_url = f"{foreign.url}/_aws/execute-api/{outputs['ApiId']}/{outputs['ApiStage']}"
    _runs_a_task(api_url, "the-token-of-a-user", tmp_path)
    run(block("A LocalStack that runs already", starting="cdklocal destroy"))
    assert _engines(foreign) == []
