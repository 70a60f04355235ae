"""End-to-end suite, the same for every tier: ``pytest tests/e2e --tier local|localstack|aws``.

A test that needs to kill or wipe a part of the cloud takes the ``local_tier`` fixture, and is skipped on AWS and on a
LocalStack that is not ours.
``--profile`` chooses what tier ``localstack`` deploys: to a LocalStack of its own, or to the one that
``AWS_ENDPOINT_URL`` names. Tier ``aws`` is a deployment that exists already: its address is in ``FARCALL_API_URL``, and
``FARCALL_E2E_TOKENS`` has a token for each of two people, as JSON with their names here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import farcall
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_local.process import log_tail
from farcall_local.tier import LocalTier
from tests.support.endpoint.ordinary_endpoint import OrdinaryEndpoint
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tests.support.localstack_faults import Faults

USERS = ("ada", "grace")
_FIRST_TEST_S = 1800


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers = ("local", "localstack", "aws")
    parser.addoption("--tier", choices=tiers, default="local", help="where the end-to-end suite runs")
    parser.addoption("--profile", default="lab", help="the profile that tier localstack deploys")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test also waits for the tier, and several tiers may start on one machine at the same time."""
    if items:
        items[0].add_marker(pytest.mark.timeout(_FIRST_TEST_S), append=False)


@pytest.fixture(scope="session")
def tier_name(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--tier", default="local"))


@pytest.fixture(scope="session")
def _tiers(
    tier_name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Deployment, LocalTier | Faults | None]]:
    if tier_name == "localstack":
        from farcall_localstack import LocalStackTier  # the other tiers do not need it
        from tests.support.localstack_faults import Faults

        mode = "endpoint" if "AWS_ENDPOINT_URL" in os.environ else "host"
        with LocalStackTier(users=USERS, profile=str(request.config.getoption("--profile")), mode=mode) as away:
            breakable = Faults(away.tier) if mode == "host" else None
            yield Deployment(away.api_url, away.tier.tokens, away.directory), breakable
    elif tier_name == "aws":
        yield _deployed(os.environ, tmp_path_factory.mktemp("aws")), None
    else:
        with LocalTier(users=USERS) as here:
            yield Deployment(here.api_url, here.tokens, here.directory), here


def _deployed(environ: Mapping[str, str], directory: Path) -> Deployment:
    """The deployment that the variables name; the run ends if they are not set."""
    try:
        tokens = json.loads(environ["FARCALL_E2E_TOKENS"])
        return Deployment(environ["FARCALL_API_URL"], {user: tokens[user] for user in USERS}, directory)
    except (KeyError, TypeError, ValueError) as error:
        pytest.exit(
            "--tier aws needs FARCALL_API_URL, and FARCALL_E2E_TOKENS with a token for each of two people:"
            f' {{"{USERS[0]}": "…", "{USERS[1]}": "…"}} ({type(error).__name__}: {error})',
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


@pytest.fixture(scope="session")
def cloud(_tiers: tuple[Deployment, LocalTier | Faults | None]) -> Deployment:
    return _tiers[0]


@pytest.fixture
def local_tier(
    _tiers: tuple[Deployment, LocalTier | Faults | None], tier_name: str, request: pytest.FixtureRequest
) -> Iterator[LocalTier | Faults]:
    """The cloud tier, with hooks to break it; all parts run again when the test ends."""
    tier = _tiers[1]
    if tier is None:
        pytest.skip("it breaks parts of the cloud, and this one is not ours")
    if tier_name == "localstack" and getattr(request.node, "callspec", None) and "blobs" in request.node.callspec.id:
        pytest.skip("the blob store is LocalStack itself, and everything else with it")
    yield tier
    for name in tier.state.processes if isinstance(tier, LocalTier) else tier.parts:
        tier.wait_up(name, within_s=WAIT_S)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def endpoint(cloud: Deployment, home: Path) -> Iterator[LocalEndpoint]:
    """An endpoint of ada's that no test breaks."""
    with LocalEndpoint("shared", home=home, environment=cloud.environment("ada")) as shared:
        yield shared


@pytest.fixture
def own_endpoint(cloud: Deployment, tmp_path: Path) -> Iterator[Callable[..., LocalEndpoint]]:
    """Makes endpoints (of ada's by default) that a test may break; they are stopped when it ends."""
    with ExitStack() as stack:

        def make(name: str = "own", *, user: str = "ada") -> LocalEndpoint:
            environment = cloud.environment(user)
            made = OrdinaryEndpoint(name, home=tmp_path / user, environment=environment, owned=[tmp_path])
            return stack.enter_context(made)

        yield make


@pytest.fixture(scope="session")
def client(cloud: Deployment) -> Iterator[farcall.Client]:
    """Ada's."""
    with farcall.Client(cloud.api_url, cloud.tokens["ada"]) as ada:
        yield ada


@pytest.fixture(scope="session")
def other_client(cloud: Deployment) -> Iterator[farcall.Client]:
    """Grace's, who owns nothing of ada's."""
    with farcall.Client(cloud.api_url, cloud.tokens["grace"]) as grace:
        yield grace


@pytest.fixture
def executor(client: farcall.Client, endpoint: LocalEndpoint) -> Iterator[farcall.Executor]:
    with farcall.Executor(endpoint.endpoint_id, client=client) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the ends of the logs to the report of a test that failed."""
    report = yield
    fixtures = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed:
        for each in (fixtures.get("cloud"), fixtures.get("endpoint")):
            for log in sorted(each.directory.rglob("*.log")) if each else []:
                report.sections.append((str(log), log_tail(log, lines=15)))
    return report
