"""Rotation of a program's database login: PostgreSQL, Secrets Manager (moto), the deployed handler and ``farcall cloud
rotate``. However far a rotation gets, programs can log in."""

from __future__ import annotations

import itertools
import json
import math
import runpy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import boto3
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from farcall_common.database_logins import ROLES, other_login
from farcall_common.errors import ConfigurationError, Unavailable
from farcall_common.store import DatabaseSettings, Records, open_records
from farcall_common.store.postgres import ConnectionString
from farcall_infra.bundles import RUNTIME
from farcall_infra.cloud.account import Stack
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.errors import DeploymentUnknown
from farcall_infra.cloud.rotation import Program, rotate
from tests.unit.infra_account import invoke

#: Calls of a rotation: read the secret, add a value, prepare its login, make it current, withdraw the old login.
STEPS = 5
HANDLE = runpy.run_path(str(RUNTIME / "migration_resource.py"))["handle"]
CONTEXT = SimpleNamespace(aws_request_id="an-invocation")


class Interrupted(Exception):
    """The rotation ends here."""


class Account(Aws):
    """A deployment whose programs have a secret each, and whose migrator runs in this process.

    The change number ``last`` is the last one that succeeds: a call of Secrets Manager or of the migrator.
    """

    def __init__(self, arns: Mapping[str, str]) -> None:
        super().__init__(lambda service: boto3.client(service), region="us-east-1")  # type: ignore[call-overload]
        self.outputs = {f"Login{program.capitalize()}": arn for program, arn in arns.items()} | {"Migrator": "migrator"}
        self.last: float = math.inf
        self._client("secretsmanager").meta.events.register("before-call.secretsmanager", self._step)

    def stack(self, name: str) -> Stack | None:
        return Stack(name, "UPDATE_COMPLETE", self.outputs, is_protected=False) if name == "farcall-data" else None

    def invoke(self, function: str, event: Mapping[str, str]) -> Mapping[str, str]:
        assert function == "migrator"
        self._step()
        answer: Mapping[str, str] = HANDLE(dict(event), CONTEXT)
        return answer

    def _step(self, **_event: Any) -> None:
        if self.last <= 0:
            raise Interrupted
        self.last -= 1


@pytest.fixture
def secrets(postgres_url: str, s3_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The secret of each program, whose logins are in the database."""
    client = boto3.client("secretsmanager")
    arns = {}
    for role in ROLES:
        value = json.dumps({"username": role, "password": f"first of {role}"})
        arns[role.removeprefix("farcall_")] = client.create_secret(Name=role, SecretString=value)["ARN"]
    monkeypatch.setenv("FARCALL_DATABASE_URL", postgres_url)
    monkeypatch.setenv("FARCALL_DATABASE_ROLE_SECRET_ARNS", ",".join(arns.values()))
    assert HANDLE({}, CONTEXT)["changed"] is False  # as a person runs the migrator by hand
    yield arns
    for arn in arns.values():
        client.delete_secret(SecretId=arn, ForceDeleteWithoutRecovery=True)


@pytest.fixture
def account(secrets: dict[str, str]) -> Account:
    return Account(secrets)


def _source(postgres_url: str, arn: str) -> ConnectionString:
    """Connection strings of a program with that secret."""
    where = conninfo_to_dict(postgres_url)
    settings = DatabaseSettings(
        host=str(where["host"]), port=str(where["port"]), name=str(where["dbname"]), secret_arn=arn
    )
    return settings.source()


def _opened(postgres_url: str, arn: str) -> Records:
    return open_records(_source(postgres_url, arn), min_connections=0, timeout_s=600)


def _accepts(postgres_url: str, credentials: Mapping[str, str]) -> bool:
    try:
        psycopg.connect(postgres_url, user=credentials["username"], password=credentials["password"]).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.parametrize("program", Program)
def test_interrupted_rotation_leaves_a_valid_login(
    account: Account, secrets: dict[str, str], postgres_url: str, program: Program
) -> None:
    arn = secrets[program]
    passwords = [account.secret_value(arn)[0]]
    for steps in itertools.count():
        warm = _opened(postgres_url, arn)
        warm.database.ping()  # it has read the secret
        done = _rotate(account, program, steps=steps)
        fresh = _opened(postgres_url, arn)
        for each in (warm, fresh):
            each.database.ping()
            each.close()
        passwords.append(account.secret_value(arn)[0])
        if done:
            break
    assert steps == STEPS
    assert _accepts(postgres_url, passwords[-1])
    assert not any(_accepts(postgres_url, each) for each in passwords if each != passwords[-1])


def _rotate(account: Account, program: Program, *, steps: int) -> bool:
    """Rotate until a number of steps have succeeded; whether that was all."""
    account.last = steps
    try:
        rotate(account, "farcall", program, echo=lambda _: None)
    except Interrupted:
        return False
    finally:
        account.last = math.inf
    return True


def test_program_that_knows_the_old_login_reads_its_secret_again(
    account: Account, secrets: dict[str, str], postgres_url: str
) -> None:
    source = _source(postgres_url, secrets["api"])
    known = source(False)
    rotate(account, "farcall", Program.API, echo=lambda _: None)
    assert source(False) == known
    records = open_records(source, timeout_s=600)
    records.database.ping()
    records.close()
    assert conninfo_to_dict(source(False))["user"] == "farcall_api_b"


def test_second_of_two_rotations_at_once_is_refused(
    account: Account, secrets: dict[str, str], postgres_url: str
) -> None:
    arn = secrets["api"]
    value, version = account.secret_value(arn)
    first = account.add_pending_value(arn, {**value, "password": "first"})
    rotate(account, "farcall", Program.API, echo=lambda _: None)
    with pytest.raises(Unavailable, match="version"):
        account.make_current(arn, first, instead_of=version)
    assert _accepts(postgres_url, account.secret_value(arn)[0])


def test_deployment_of_an_older_release_has_no_rotation(account: Account) -> None:
    del account.outputs["Migrator"]
    with pytest.raises(DeploymentUnknown, match="Migrator") as caught:
        rotate(account, "farcall", Program.API, echo=lambda _: None)
    assert "farcall cloud deploy" in caught.value.hint


def test_command_shows_each_step(account: Account) -> None:
    done = invoke(account, "rotate", "api")  # type: ignore[arg-type]  # a real client of AWS
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "database: farcall_api_b can log in",
        "secret: the api logs in as farcall_api_b from now on",
        "database: farcall_api cannot log in any more",
    ]


def test_only_programs_have_logins() -> None:
    with pytest.raises(ConfigurationError, match="postgres"):
        other_login("postgres")
