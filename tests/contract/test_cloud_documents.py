"""Commands, settings and metrics in the pages about deploying and operating, and in the hints of ``farcall cloud``,
exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import botocore.session
import pytest

from farcall_common.store.blobs_s3 import S3Blobs
from farcall_infra.cloud.account import Queue
from farcall_infra.cloud.cli import app
from farcall_infra.cloud.status import metrics_of
from farcall_infra.profiles import setting_names
from tests.contract.templates import Templates, resources
from tests.contract.test_hints import VARIABLE, fields, sources, texts
from tests.contract.typed import Command, commands_of, problem
from tests.support.runbooks import PAGES

_WORKSPACE = Path(__file__).resolve().parents[2]
_NETWORK = _WORKSPACE / "docs" / "howto" / "network.md"
_PAGES = (*(f"docs/{page}.md" for page in PAGES), "infra/README.md")


@pytest.fixture(params=_PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return (_WORKSPACE / str(request.param)).read_text(encoding="utf-8")


def _commands() -> Iterator[str]:
    for command in app.registered_commands:
        assert command.callback is not None
        yield command.name or command.callback.__name__


def test_commands_in_pages_exist(page: str) -> None:
    named = set(re.findall(r"farcall\s+cloud\s+([a-z]+)", page))
    assert named <= set(_commands())


def test_every_command_is_explained() -> None:
    text = " ".join((_WORKSPACE / path).read_text(encoding="utf-8") for path in _PAGES)
    assert {name for name in _commands() if f"farcall cloud {name}" not in text} == set()


@pytest.mark.parametrize("path", [*_PAGES, "README.md"])
def test_aws_commands_in_pages_are_valid(path: str) -> None:
    commands = list(commands_of((_WORKSPACE / path).read_text(encoding="utf-8")))
    assert len(commands) >= 4 or path.startswith("docs/deploy/")
    assert {str(command): why for command in commands if (why := problem(command))} == {}


def test_aws_commands_in_our_hints_are_valid() -> None:
    sources = sorted((_WORKSPACE / "infra" / "farcall_infra" / "cloud").glob("*.py"))
    said = [text if "`" in text else f"`{text}`" for path in sources for _, text in texts(path) if "aws " in text]
    commands = [command for text in said for command in commands_of(text) if command.words[0] == "aws"]
    assert {command.words[1] for command in commands} >= {"cloudformation", "rds", "s3", "secretsmanager", "sso"}
    assert {str(command): why for command in commands if (why := problem(command))} == {}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("farcall cloud deploy --profil lab", "No such option: --profil"),
        ("farcall cloud upgrade", "no command upgrade"),
        ("farcall-endpoint begin here", "no command begin"),
        ("python -m farcall_localstack up --size lab", "No such option: --size"),
        ("python -m farcall_nothing", "no module farcall_nothing"),
        ("pytest tests/e2e --tier gcp", "invalid choice"),
        ("pytest tests/e3e --tier aws", "no tests/e3e"),
        ("pytest tests/e2e --tiers aws", "no --tiers"),
        ("make test-moon", "no target test-moon"),
        ("npx aws-cdk@2.0.0 deploy", "not the version"),
        ("aws rdss describe-db-snapshots", "no service rdss"),
        ("aws rds describe-snapshots", "no operation describe-snapshots"),
        ("aws rds delete-db-snapshot --snapshot x", "no option --snapshot"),
        ("aws rds delete-db-snapshot --db-snapshot-identifier", "without a value"),
        ("aws rds create-db-snapshot --db-instance-identifier x", "db-snapshot-identifier is missing"),
        ("aws cloudformation wait stack-gone --stack-name x", "nothing to wait for"),
        ("aws ecs update-service --service x --force-new-deployments", "no option --force-new-deployments"),
        ("aws s3 rb --forced s3://x", "no option --forced"),
        ("kubectl apply", "no program 'kubectl'"),
    ],
)
def test_invalid_aws_commands_are_found(typed: str, said: str) -> None:
    command, *_ = commands_of(f"A page.\n\n```\nexport A=b {typed} && farcall cloud status  # and so on\n```\n")
    assert command == Command(4, tuple(typed.split()))
    assert said in problem(command)


def test_commands_are_found_anywhere_in_a_line() -> None:
    text = "Run `farcall cloud\nstatus` or\n\n```console\n$ aws sso \\\n   login | cat\n$ x=$(make docs)\n```\n"
    assert [command.words for command in commands_of(text)] == [
        ("aws", "sso", "login"),
        ("cat",),
        ("make", "docs"),
        ("farcall", "cloud", "status"),
    ]


def test_every_alarm_documents_its_remedy() -> None:
    alarms = (_WORKSPACE / "docs" / "operations.md").read_text(encoding="utf-8")
    alarms = alarms[alarms.index("\n## Alarms\n") : alarms.index("\n## The budget\n")]
    for name, text in re.findall(r"^### `([a-z-]+)`\n(.*?)(?=^### |\Z)", alarms, flags=re.MULTILINE | re.DOTALL):
        assert re.search(r"`[^`]+`", text), f"{name} names no command, metric or setting"


def test_status_reads_metrics_that_exist(aws: Templates, profile: str) -> None:
    made = {
        (each["MetricTransformations"][0]["MetricNamespace"], each["MetricTransformations"][0]["MetricName"])
        for _, each in resources(aws, "AWS::Logs::MetricFilter")
    }
    asked = metrics_of("farcall", database="db", queue=Queue("available", ("node",)))
    ours = {(metric.namespace, metric.name) for metric in asked.values() if metric.namespace.startswith("Farcall/")}
    has_canary = profile == "facility"
    assert ours - made == (set() if has_canary else {("Farcall/farcall", "CanaryTime")})


def test_settings_in_pages_exist(page: str) -> None:
    sections = "|".join(sorted({setting.partition(".")[0] for setting in setting_names()}))
    named = set(re.findall(rf"(?:`|-c )((?:{sections})\.[a-z_]+)", page))
    assert named <= setting_names()


def test_variables_in_pages_exist(page: str) -> None:
    read = {f"FARCALL_{field.upper()}" for path in sources() for field in fields(path)}
    tests = _WORKSPACE / "tests"
    for path in [*sources(), tests / "e2e" / "conftest.py", *(tests / "contract").glob("test_template_*.py")]:
        read |= set(VARIABLE.findall(path.read_text(encoding="utf-8")))
    assert set(VARIABLE.findall(page)) <= read


def test_files_in_pages_exist(page: str, request: pytest.FixtureRequest) -> None:
    here = (_WORKSPACE / request.node.callspec.params["page"]).parent
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page):
        assert (here / link).exists(), link


def test_every_metric_is_explained(aws: Templates) -> None:
    text = (_WORKSPACE / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    for _, each in resources(aws, "AWS::Logs::MetricFilter"):
        (made,) = each["MetricTransformations"]
        assert f"| `{made['MetricName']}` |" in text


@pytest.mark.parametrize("region", botocore.session.get_session().get_available_regions("s3"))
def test_the_page_for_firewalls_names_the_hosts_of_signed_urls(region: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the API's functions, which use names with IPv6, and those of the forwarder."""
    [row] = [line for line in _NETWORK.read_text(encoding="utf-8").splitlines() if "| the blob store" in line]
    named = {name.replace("REGION", region) for name in re.findall(r"`(s3[^`]*)`", row)}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    found = set()
    for dual_stack in ("true", "false"):
        monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", dual_stack)
        found.add(urlsplit(S3Blobs("bucket").download_url("key", ttl_s=60)).hostname)
    assert found <= named
    if region != "us-east-1":
        assert found == named - {"s3.amazonaws.com"}
