"""Game day on LocalStack: each test is an event that a deployment has to survive while users submit tasks and endpoints
are connected. Afterwards no task is lost, no session was cut without a redirect, and the API's answers were typed.

Times and numbers are short by default; ``FARCALL_GAMEDAY_FULL=1`` has those of docs/operations/backup.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import pytest

import farcall
from farcall_common.store import Stores, StoreSettings, open_stores
from farcall_infra.regions import BUDGET_TYPE
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_localstack import LocalStackTier, Tier
from farcall_localstack.deploy import Deployer
from farcall_localstack.synth import ensure_assembly
from tests.support.gameday import Day, game_day
from tests.support.localstack_faults import silent_servers
from tests.support.releases import with_new_code
from tests.waiting import WAIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_FULL: Final = os.environ.get("FARCALL_GAMEDAY_FULL") == "1"
#: Seconds that a store is away, and connected endpoints.
AWAY_S: Final = 300.0 if _FULL else 20.0
SESSIONS: Final = 200 if _FULL else 40
#: Of the file system of the database, in MiB.
DISK_MIB: Final = 600
#: Spot capacity, for its interruption; everything else is the largest profile.
SETTINGS: Final = {"forwarder.spot": "true"}

#: Makes the load of one event.
NewDay = Callable[[], AbstractContextManager[Day]]


@pytest.fixture(scope="module")
def assembly() -> Path:
    return ensure_assembly(profile="facility", settings=SETTINGS)


@pytest.fixture(scope="module")
def raised() -> Path:
    """The same deployment with more connections to the database."""
    return ensure_assembly(profile="facility", settings={**SETTINGS, "database.connections": "450"})


@pytest.fixture(scope="module")
def disk() -> Iterator[Path | None]:
    """A small file system for the database; None where none can be mounted."""
    with tempfile.TemporaryDirectory(prefix="farcall-gameday-") as name:
        path = Path(name)
        path.chmod(0o711)  # root runs PostgreSQL as another user
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=711", "tmpfs", name]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        yield path if mounted else None
        if mounted:
            subprocess.run(["umount", name], check=True)


@pytest.fixture(scope="module")
def tier(assembly: Path, disk: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("tier")
        starting = LocalStackTier(directory, assembly=assembly)
        if disk:
            patch.setattr(tempfile, "tempdir", str(disk))
        running = starting.up()
        patch.undo()
        try:
            for name, value in running.variables().items():
                patch.setenv(name, value)
            yield running
        finally:
            starting.close()


@pytest.fixture(scope="module")
def stores(tier: Tier) -> Iterator[Stores]:
    opened = open_stores(StoreSettings.from_environment(tier.environment()))
    with contextlib.closing(opened):
        yield opened


@pytest.fixture(scope="module")
def client(tier: Tier) -> Iterator[farcall.Client]:
    with farcall.Client(tier.api_url, tier.token) as client:
        yield client


@pytest.fixture(scope="module")
def endpoint(tier: Tier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEndpoint]:
    environment = Deployment(tier.api_url, {"dev": tier.token}, tier.directory).environment("dev")
    with LocalEndpoint("gameday", home=tmp_path_factory.mktemp("home"), environment=environment) as running:
        yield running


@pytest.fixture
def new_day(
    tier: Tier, stores: Stores, client: farcall.Client, endpoint: LocalEndpoint, request: pytest.FixtureRequest
) -> NewDay:
    name = request.node.name.removeprefix("test_").replace("_", " ")
    return lambda: game_day(name, tier, stores, client, endpoint.endpoint_id, sessions=SESSIONS)


def test_passwords_are_rotated_under_load(new_day: NewDay) -> None:
    with new_day() as day:
        for program in ("api", "forwarder", "reconciler"):
            _cloud("rotate", program)
    assert all(each.status == 200 for each in day.probe.answers), "a rotation interrupts nothing"


def test_database_is_silent_and_replaced(tier: Tier, new_day: NewDay) -> None:
    """A fail-over: the connections of the old server say nothing, and a new one has the address."""
    with new_day() as day, silent_servers(tier.localstack_pid or 0, "postgres", replaced=True):
        _wait_away(day)


def test_database_is_stopped(tier: Tier, new_day: NewDay) -> None:
    rds = Deployer(tier.endpoint_url).client("rds")
    [instance] = rds.describe_db_instances()["DBInstances"]
    named = {"DBInstanceIdentifier": instance["DBInstanceIdentifier"]}
    with new_day() as day:
        rds.stop_db_instance(**named)
        _wait_away(day)
        rds.start_db_instance(**named)


def test_queue_is_replaced_by_an_empty_one(tier: Tier, new_day: NewDay) -> None:
    """The old one says nothing for a while, as the node of a machine that was lost."""
    with new_day(), silent_servers(tier.localstack_pid or 0, "valkey-server", replaced=True):
        _wait_over()


def test_disk_of_the_database_is_full(tier: Tier, disk: Path | None, new_day: NewDay) -> None:
    if disk is None:
        pytest.skip("no small file system can be mounted here")
    with new_day() as day, (disk / "ballast").open("wb", buffering=0) as ballast:
        try:
            with contextlib.suppress(OSError):
                while ballast.write(bytes(4096)):
                    pass
            _wait_away(day)
        finally:
            ballast.truncate(0)


def test_connections_are_raised(tier: Tier, raised: Path, new_day: NewDay) -> None:
    rds = Deployer(tier.endpoint_url).client("rds")

    def parameters() -> str:
        [instance] = rds.describe_db_instances()["DBInstances"]
        [group] = instance["DBParameterGroups"]
        return str(group["ParameterApplyStatus"])

    with new_day():
        Deployer(tier.endpoint_url).deploy(raised, parameters=tier.parameters())
        assert parameters() == "pending-reboot"
        [instance] = rds.describe_db_instances()["DBInstances"]
        rds.reboot_db_instance(DBInstanceIdentifier=instance["DBInstanceIdentifier"])
        assert parameters() == "in-sync"


def test_spot_interruption_of_a_forwarder(tier: Tier, new_day: NewDay) -> None:
    ecs = Deployer(tier.endpoint_url).client("ecs")
    task, *_ = ecs.list_tasks(cluster=tier.name)["taskArns"]
    url = f"{tier.endpoint_url}/_localstack/farcall/interrupt/{task.rpartition('/')[2]}"

    def described() -> Any:
        [found] = ecs.describe_tasks(cluster=tier.name, tasks=[task])["tasks"]
        return found

    with new_day() as day:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=WAIT_S) as answer:
            assert json.loads(answer.read()) == {"interrupted": True}
        wait_until(lambda: described().get("stopCode") == "SpotInterruption", "the task has stopped")
        wait_until(lambda: len(tier.forwarder_pids()) == 2, "another task runs")
    assert day.sessions.redirected


def test_region_without_budgets(tier: Tier, tmp_path: Path) -> None:
    """The last stack can be created there, and the doctor names what is missing."""
    region = "eu-north-1"
    environment = {**os.environ, "AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    _cloud("synth", "--profile", "facility", "--region", region, "--templates-only", "--output", str(tmp_path))
    template = json.loads((tmp_path / f"{tier.name}-observability.template.json").read_text(encoding="utf-8"))
    types = {each["Type"] for each in template["Resources"].values()}
    assert "AWS::CloudWatch::Alarm" in types
    assert BUDGET_TYPE not in types
    found = _cloud("doctor", "--profile", "facility", environment=environment, check=False)
    assert f"CloudFormation has no {BUDGET_TYPE} in {region}" in " ".join(found.split())


def test_release_with_connected_endpoints(tier: Tier, raised: Path, new_day: NewDay, tmp_path: Path) -> None:
    before = set(tier.forwarder_pids())
    with new_day() as day:
        Deployer(tier.endpoint_url).deploy(with_new_code(raised, tmp_path / "new"), parameters=tier.parameters())
        assert before.isdisjoint(tier.forwarder_pids())
    assert day.sessions.redirected >= SESSIONS


def _cloud(*command: str, environment: dict[str, str] | None = None, check: bool = True) -> str:
    """Run `farcall cloud`; returns what it printed."""
    program = [str(Path(sys.executable).with_name("farcall")), "cloud", *command]
    done = subprocess.run(program, env=environment, check=check, stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
    return done.stdout


def _wait_away(day: Day) -> None:
    """Wait for the time that the database is away, and until the API has said so."""
    _wait_over()
    wait_until(lambda: day.probe.statuses()[503], "the API says that the database is away")


def _wait_over() -> None:
    """Wait for the time that a store is away."""
    until = time.monotonic() + AWAY_S
    wait_until(lambda: time.monotonic() > until, "the end of the outage", timeout_s=AWAY_S + WAIT_S)
