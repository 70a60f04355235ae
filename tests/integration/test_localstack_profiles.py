"""Profiles on one LocalStack: a deployment grows from the smallest to the largest and is updated in each; its stores
are away for a while; an idle forwarder sleeps, and loses its Spot capacity. All processes end with their deployment."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import farcall
from farcall_common.errors import Unavailable
from farcall_infra.profiles import load_profile, profile_names
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_localstack import LocalStackTier, Tier
from farcall_localstack.deploy import Deployer
from farcall_localstack.server import LocalStackServer, group_members
from farcall_localstack.synth import ensure_assembly
from tests.support.localstack_faults import silent_servers
from tests.support.releases import with_new_code
from tests.waiting import WAIT_S, wait_until

#: Parts of a line in an endpoint's log: its session has ended, and because of a redirect.
ENDED = "not connected any more: "
REDIRECTED = f"{ENDED}the forwarder asks the agent to reconnect: this forwarder shuts down"
#: ECS replaces a task after three failed checks. By default, the load balancer ends its connections after two.
CHECKS_OF_AN_OUTAGE = 8
#: API Gateway refuses shorter ones without calling the authorizer.
NEW_USERS_TOKEN = "token-of-a-new-user"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def _double(number: int) -> int:
    return 2 * number


def _programs(server: LocalStackServer) -> set[str]:
    """The running data stores, load balancers and forwarders."""
    lines = [" ".join(psutil.Process(pid).cmdline()) for pid in group_members(server.pid)]
    return {name for name in ("postgres", "valkey", "relay", "farcall_forwarder") for line in lines if name in line}


def _peers(pid: int) -> set[int]:
    """The peers' processes of the connections to a forwarder's port."""
    forwarder: list[Any] = psutil.Process(pid).net_connections("tcp")
    ports = {each.laddr.port for each in forwarder if each.status == psutil.CONN_LISTEN}
    theirs = {(each.raddr.port, each.laddr.port) for each in forwarder if each.raddr and each.laddr.port in ports}
    everybody: list[Any] = [each for each in psutil.net_connections("tcp") if each.raddr and each.pid is not None]
    return {each.pid for each in everybody if (each.laddr.port, each.raddr.port) in theirs}


def _version(tier: Tier) -> str:
    request = urllib.request.Request(f"{tier.api_url}/v2/version", headers={"Authorization": f"Bearer {tier.token}"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return str(json.loads(answer.read()))


def test_a_deployment_grows_through_the_profiles_and_keeps_its_data(
    localstack: LocalStackServer, tmp_path: Path
) -> None:
    """In each profile it is used, updated with other parameters and with new code."""
    first, *later = profile_names()
    with LocalStackTier(
        localstack.directory, assembly=ensure_assembly(profile=first), endpoint_url=localstack.url
    ) as started:
        tier = started.tier
        deployer = Deployer(tier.endpoint_url)
        database, version = tier.environment()["FARCALL_DATABASE_PORT"], _version(tier)
        deployment = Deployment(tier.api_url, {"dev": tier.token}, tier.directory)
        endpoint = LocalEndpoint("own", home=tmp_path / "home", environment=deployment.environment("dev"))
        with farcall.Client(tier.api_url, tier.token) as client, endpoint:
            results = []
            for profile in (first, *later):
                size = load_profile(profile)
                before = tier.forwarder_pids()
                if profile != first:
                    if size.queue.failover:  # in two steps, as on AWS: see docs/operations/upgrades.md
                        first_step = ensure_assembly(profile=profile, settings={"queue.failover": "false"})
                        deployer.deploy(first_step, parameters=tier.parameters())
                    deployer.deploy(ensure_assembly(profile=profile), parameters=tier.parameters())
                    tier.require_healthy()
                    assert set(tier.forwarder_pids()).isdisjoint(before)  # another size means new tasks
                    assert tier.environment()["FARCALL_DATABASE_PORT"] == database
                results.append(_run_a_task(client, endpoint))  # the endpoint has reconnected
                _check_the_way_in(tier, balanced=size.network.load_balancer, endpoint=endpoint)
                with _redirected(endpoint):
                    _update(deployer, tier, profile, version, tmp_path)
                assert [client.get_result(task_id) for task_id in results] == [42] * len(results)
            _check_an_outage(localstack, tier, endpoint)
            _run_a_task(client, endpoint)
    assert tier.forwarder_pids() == []
    assert _programs(localstack) == set()


def _run_a_task(client: farcall.Client, endpoint: LocalEndpoint) -> str:
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        future = executor.submit(_double, 21)
        assert future.result(timeout=WAIT_S) == 42
        return future.task_id


def _update(deployer: Deployer, tier: Tier, profile: str, version: str, directory: Path) -> None:
    """Another parameter leaves the forwarders alone, whose stack has not changed; new code replaces them."""
    assembly, before = ensure_assembly(profile=profile), tier.forwarder_pids()
    assert len(before) == load_profile(profile).forwarder.tasks
    tokens = {
        **json.loads(tier.parameters()["DevTokens"]),
        NEW_USERS_TOKEN: {"identity_id": "5" * 32, "username": "new"},
    }
    deployer.deploy(assembly, parameters={"DevTokens": json.dumps(tokens)})
    assert tier.forwarder_pids() == before
    with farcall.Client(tier.api_url, NEW_USERS_TOKEN) as new_user:
        assert not new_user.get_endpoints()
    assert _version(tier) == version
    deployer.deploy(with_new_code(assembly, directory / profile), parameters=tier.parameters())
    tier.require_healthy()
    assert _version(tier) == f"7.{version}"
    assert set(tier.forwarder_pids()).isdisjoint(before)


def _check_the_way_in(tier: Tier, *, balanced: bool, endpoint: LocalEndpoint) -> None:
    """With a load balancer all peers connect through it; without one they connect to the forwarders."""

    def peers() -> set[int]:
        return set().union(*(_peers(pid) for pid in tier.forwarder_pids()))

    def relays() -> set[int]:
        return {pid for pid in peers() if any("relay" in part for part in psutil.Process(pid).cmdline())}

    assert peers()
    if balanced:
        wait_until(lambda: peers() == relays(), "the ends of connections from before")
        assert len(set(tier.forwarder_addresses())) == 1
    else:
        assert not relays()
        agent = endpoint.agent()
        assert agent is not None
        assert agent.pid in peers()


@contextlib.contextmanager
def _redirected(endpoint: LocalEndpoint) -> Iterator[None]:
    """In the block, a forwarder redirects this endpoint, and none of its sessions ends in another way."""
    before = endpoint.log_path.read_text(encoding="utf-8")
    yield
    wait_until(lambda: _log_since(endpoint, before).count(REDIRECTED), "the endpoint is redirected")
    log = _log_since(endpoint, before)
    assert log.count(ENDED) == log.count(REDIRECTED), log


def _log_since(endpoint: LocalEndpoint, before: str) -> str:
    return endpoint.log_path.read_text(encoding="utf-8").removeprefix(before)


def _check_an_outage(server: LocalStackServer, tier: Tier, endpoint: LocalEndpoint) -> None:
    """While PostgreSQL and Valkey are away, no forwarder is stopped, and no connection ends."""
    forwarders, log = tier.forwarder_pids(), endpoint.log_path.read_text(encoding="utf-8")
    with silent_servers(server.pid, "postgres", "valkey-server"):
        enough = {file: checks + CHECKS_OF_AN_OUTAGE for file, checks in _checks(tier).items()}
        assert {file.name for file in enough} == {"health-container.json", "health-target.json"}
        wait_until(lambda: all(_checks(tier)[file] >= most for file, most in enough.items()), "checks of the outage")
        assert tier.forwarder_pids() == forwarders
    wait_until(lambda: _is_healthy(tier), "the forwarders find the stores again")
    assert tier.forwarder_pids() == forwarders
    assert ENDED not in (since := _log_since(endpoint, log)), since


def _checks(tier: Tier) -> dict[Path, int]:
    """Numbers of health checks of the running tasks, by file."""
    files = [file for pid in tier.directory.glob("tasks/*/pid") for file in pid.parent.glob("health-*.json")]
    return {file: json.loads(file.read_text(encoding="utf-8"))["checks"] for file in files}


def _is_healthy(tier: Tier) -> bool:
    try:
        tier.require_healthy()
    except Unavailable:
        return False
    return True


def _interrupt(tier: Tier) -> None:
    """Take the Spot capacity of the one forwarder away, and wait until another one has replaced it."""
    ecs = Deployer(tier.endpoint_url).client("ecs")
    [task] = ecs.list_tasks(cluster=tier.name)["taskArns"]
    url = f"{tier.endpoint_url}/_localstack/farcall/interrupt/{task.rpartition('/')[2]}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=WAIT_S) as answer:
        assert json.loads(answer.read()) == {"interrupted": True}

    def stopped() -> str | None:
        [described] = ecs.describe_tasks(cluster=tier.name, tasks=[task])["tasks"]
        code: str | None = described.get("stopCode")
        return code

    wait_until(stopped, "the task has stopped")
    assert stopped() == "SpotInterruption"
    wait_until(tier.forwarder_pids, "another task runs")


def _hang(tier: Tier) -> None:
    """Suspend the one forwarder, and wait until another one has replaced it."""
    [pid] = tier.forwarder_pids()
    process = psutil.Process(pid)
    process.suspend()
    try:
        wait_until(lambda: set(tier.forwarder_pids()) - {pid}, "ECS has replaced the forwarder that hangs")
    finally:
        process.resume()
    wait_until(lambda: pid not in tier.forwarder_pids(), "the replaced forwarder has drained")


def _let_sleep(functions: Any, tier: Tier) -> None:
    """Run the reconciler, as its schedule does, until it has stopped the forwarder and that has drained.

    Meanwhile the idle time is one second instead of a quarter of an hour; afterwards the schedule continues as before.
    """
    (name,) = (
        each["FunctionName"]
        for each in functions.list_functions()["Functions"]
        if each["Handler"] == "farcall_lambdas.handlers.reconciler.handle"
    )
    variables = functions.get_function_configuration(FunctionName=name)["Environment"]["Variables"]
    assert variables["FARCALL_FLEET_IDLE_S"] == str(60 * load_profile("hobby").forwarder.idle_minutes)
    _configure(functions, name, {**variables, "FARCALL_FLEET_IDLE_S": "1"})

    def sleeps() -> bool:
        answer = json.loads(functions.invoke(FunctionName=name)["Payload"].read())
        assert answer["slept"] in (0, 1), answer
        return not tier.forwarder_pids()

    wait_until(sleeps, "the forwarder goes to sleep")
    _configure(functions, name, variables)


def _configure(functions: Any, name: str, variables: dict[str, str]) -> None:
    functions.update_function_configuration(FunctionName=name, Environment={"Variables": variables})
    functions.get_waiter("function_updated_v2").wait(FunctionName=name)


def test_an_idle_forwarder_sleeps_and_is_woken(
    localstack: LocalStackServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assembly = ensure_assembly(profile="hobby")
    with LocalStackTier(localstack.directory, assembly=assembly, endpoint_url=localstack.url) as started:
        tier = started.tier
        deployment = Deployment(tier.api_url, {"dev": tier.token}, tier.directory)
        endpoint = LocalEndpoint("own", home=tmp_path / "home", environment=deployment.environment("dev"))
        functions = Deployer(localstack.url).client("lambda")
        _let_sleep(functions, tier)
        with (
            endpoint,
            farcall.Client(tier.api_url, tier.token) as client,
        ):  # the endpoint wakes the forwarder and waits for it
            assert endpoint.log_path.read_text(encoding="utf-8").count("FORWARDER_WAKING") == 1  # logged once
            with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
                assert executor.submit(_double, 21).result(timeout=WAIT_S) == 42
                with _redirected(endpoint):
                    _interrupt(tier)
                assert executor.submit(_double, 3).result(timeout=WAIT_S) == 6
                _hang(tier)
                assert executor.submit(_double, 5).result(timeout=WAIT_S) == 10
            endpoint.stop()
            _let_sleep(functions, tier)
            with farcall.Executor(endpoint.endpoint_id, client=client) as executor:  # now a client connects first
                waiting = executor.submit(_double, 4)
                wait_until(tier.forwarder_pids, "a client wakes it")
                endpoint.start()
                assert waiting.result(timeout=WAIT_S) == 8
                assert "is being woken, which takes about a minute" in caplog.text
    assert _programs(localstack) == set()
