"""Commands of the runbooks on parts that need no deployment: AWS' services as moto has them, and PostgreSQL."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from farcall_common.store import migrate, open_records
from farcall_common.store.roles import prepare_roles
from tests.certificates import Authority
from tests.integration.store_servers import execute
from tests.integration.tls_front import TlsFront
from tests.support.runbooks import PAGES, Block, Shell, block, blocks, needs_aws
from tests.unit.test_store_records import make_dead, make_entry, make_function, make_task
from tests.waiting import WAIT_S

_QUERIES = [each for page in PAGES for each in blocks(page) if each.language == "sql"]


@pytest.fixture
def account(s3_environment: None, s3_server: str, tmp_path: Path) -> Shell:
    """A shell with an account at moto."""
    variables = {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    return Shell(variables, directory=tmp_path)


@pytest.fixture
def database(account: Shell) -> Iterator[str]:
    """The identifier of a database at moto."""
    rds = boto3.client("rds")
    rds.create_db_instance(
        DBInstanceIdentifier="farcall-data-database",
        DBInstanceClass="db.t4g.micro",
        Engine="postgres",
        EngineVersion="17.4",
        MasterUsername="farcall",
        MasterUserPassword="only-in-memory",
        AllocatedStorage=20,
    )
    yield "farcall-data-database"
    for each in rds.describe_db_instances()["DBInstances"]:
        rds.delete_db_instance(DBInstanceIdentifier=each["DBInstanceIdentifier"], SkipFinalSnapshot=True)


@needs_aws
def test_a_moment_is_restored_into_an_instance_of_its_own(account: Shell, database: str) -> None:
    rds, ec2 = boto3.client("rds"), boto3.client("ec2")
    subnets = [each["SubnetId"] for each in ec2.describe_subnets()["Subnets"][:2]]
    rds.create_db_subnet_group(
        DBSubnetGroupName="farcall-subnets", DBSubnetGroupDescription="of the deployment", SubnetIds=subnets
    )
    account.run(
        block("Backup and restore", starting="aws rds restore-db-instance-to-point-in-time"),
        {"DATABASE": database, "THE_SAME": "farcall-subnets"},
    )
    (restored,) = rds.describe_db_instances(DBInstanceIdentifier="farcall-then")["DBInstances"]
    assert restored["DBSubnetGroup"]["DBSubnetGroupName"] == "farcall-subnets"


@needs_aws
def test_the_database_gets_a_certificate_of_another_authority(account: Shell, database: str) -> None:
    (printed,) = account.run(block("The database's certificate", starting="aws rds describe-db-instances"))
    ((identifier, authority, _),) = json.loads(printed)
    assert (identifier, authority != "rds-ca-ecc384-g1") == (database, True)
    account.run(
        block("The database's certificate", 2, starting="aws rds"),
        {"DATABASE": database, "AUTHORITY": "rds-ca-ecc384-g1"},
    )
    (printed,) = account.run(block("The database's certificate", starting="aws rds describe-db-instances"))
    assert json.loads(printed)[0][:2] == [database, "rds-ca-ecc384-g1"]


@needs_aws
def test_a_machine_for_a_migration_is_started_with_the_script_and_its_log_is_read(account: Shell) -> None:
    ec2 = boto3.client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]
    group = ec2.create_security_group(GroupName="forwarder", Description="its", VpcId=subnet["VpcId"])["GroupId"]
    (account.directory / "migrate.sh").write_text(block("A migration that takes long").body, encoding="utf-8")
    (printed,) = account.run(
        block("A migration that takes long", 2, starting="aws ec2 run-instances"),
        {"SUBNET": subnet["SubnetId"], "GROUP": group},
    )
    (machine,) = json.loads(printed)["Instances"]
    (printed,) = account.run(
        block("A migration that takes long", 2, starting="aws ec2 get-console-output"),
        {"INSTANCE": machine["InstanceId"]},
    )
    assert printed.startswith(machine["InstanceId"])


def test_the_script_for_long_migrations_migrates_the_database(postgres_server: str, tmp_path: Path) -> None:
    """Its last lines, on a machine that the lines before them have prepared."""
    script = block("A migration that takes long")
    (url,) = (line for line in script.body.splitlines() if line.startswith("export FARCALL_DATABASE_URL="))
    (migrator,) = (line for line in script.body.splitlines() if line.startswith(".venv/bin/python"))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    certificate = Authority().certify("127.0.0.1", tmp_path / "server.pem")
    port = urlsplit(postgres_server).port
    assert port is not None
    execute(postgres_server, "CREATE DATABASE farcall")  # the script has the name that the templates give
    try:
        with TlsFront(certificate, target_port=port, postgres=True) as front:
            (printed,) = Shell({}, directory=tmp_path).run(
                dataclasses.replace(script, commands=(url, f"{migrator} 2>&1")),
                {"OWNER": "farcall", "PASSWORD": "only-in-memory", "DATABASE_HOST": f"127.0.0.1:{front.port}"},
            )
            assert front.handshakes > 0
        assert "database is up to date" in printed
        assert not migrate.upgrade(postgres_server.replace("/postgres", "/farcall"))
    finally:
        execute(postgres_server, "DROP DATABASE farcall WITH (FORCE)")


@needs_aws
def test_the_secret_of_the_globus_client_is_created(account: Shell) -> None:
    (printed,) = account.run(block("Globus Auth", 2), {"CLIENT_SECRET": "not-a-secret"})
    answer = boto3.client("secretsmanager").get_secret_value(SecretId=json.loads(printed)["ARN"])
    assert json.loads(answer["SecretString"]) == {"client_secret": "not-a-secret"}


@pytest.mark.parametrize("query", _QUERIES, ids=str)
def test_queries_of_the_pages_find_rows(query: Block, postgres_url: str) -> None:
    """As the forwarder's role, with which an operator logs in; what changes a table as a whole, as the owner."""
    login = {"username": "farcall_forwarder", "password": "only-in-memory"}
    prepare_roles(postgres_url, [login])
    now = dt.datetime.now(dt.UTC)
    records = open_records(postgres_url, max_connections=1, timeout_s=WAIT_S)
    try:
        entry = dataclasses.replace(make_entry("function.register", "f1"), at=now)
        records.functions.audited(entry).add_function(make_function())
        waiting = make_task("waiting", submitted_at=now, idempotent=False, sources=("e2",))
        records.tasks.add_tasks([waiting, make_task("dead", submitted_at=now)])
        records.tasks.record_results([make_dead("dead")], at=now)
    finally:
        records.close()
    (statement,) = query.commands
    is_query = statement.startswith("SELECT")
    url = make_conninfo(postgres_url, user=login["username"], password=login["password"]) if is_query else postgres_url
    moment = (now - dt.timedelta(hours=1)).isoformat()
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(statement.replace("2026-11-21T08:00:00Z", moment).encode())
        assert not is_query or found.fetchall()
