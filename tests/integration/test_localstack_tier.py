"""The offline cloud tier: the synthesised templates on LocalStack with real data stores; all removed afterwards."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from botocore.exceptions import ClientError

import farcall
from farcall_common.database_logins import connection_limit
from farcall_common.errors import Unavailable
from farcall_local.endpoint import LocalEndpoint
from farcall_localstack import DeployFailed, LocalStackTier, Tier
from farcall_localstack.deploy import Deployer
from farcall_localstack.server import group_members
from farcall_localstack.synth import ensure_assembly
from tests.support.runbooks import Shell, block, needs_aws
from tests.waiting import WAIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def assembly() -> Path:
    """The templates and bundles of the current sources, for an administrator and a user."""
    return ensure_assembly(settings={"identity.admins": "ada", "identity.allowed_identities": "grace"})


@pytest.fixture(scope="module")
def tier(assembly: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    """A tier with two users, and the token of another one. Afterwards no processes or files of it may remain."""
    directory = tmp_path_factory.mktemp("tier")
    with LocalStackTier(directory, users=("ada", "grace", "mallory"), assembly=assembly) as running:
        tier = running.tier
        yield tier
    assert tier.localstack_pid is not None
    assert tier.database_directory is not None
    assert group_members(tier.localstack_pid) == set()
    assert not tier.database_directory.exists()
    assert {path.name for path in directory.iterdir() if path.is_dir()} == {"tasks"}


@pytest.fixture
def operator(tier: Tier, tmp_path: Path) -> Shell:
    """A shell with the variables that ``python -m farcall_localstack up`` prints."""
    return Shell(tier.variables(), directory=tmp_path)


def _double(number: int) -> int:
    return 2 * number


def _get(tier: Tier, path: str, token: str | None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{tier.api_url}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_the_api_answers_through_the_gateway(tier: Tier) -> None:
    status, version = _get(tier, "/v2/version", tier.token)
    assert status == 200
    assert isinstance(version, str)


def test_the_identity_comes_from_the_authorizer_and_the_rows_from_postgresql(tier: Tier) -> None:
    for user in ("ada", "grace"):
        status, functions = _get(tier, "/v3/functions", tier.tokens[user])
        assert status == 200, functions


@pytest.mark.parametrize("token", [None, "not-a-token"])
def test_a_request_without_a_valid_token_gets_the_apis_error_format(tier: Tier, token: str | None) -> None:
    status, body = _get(tier, "/v2/version", token)
    assert status == 401
    assert body["status"] == "Failed"
    assert body["code"] == "UNAUTHENTICATED"


def test_a_user_who_may_not_use_the_deployment_is_told_so(tier: Tier) -> None:
    status, body = _get(tier, "/v2/version", tier.tokens["mallory"])
    assert (status, body["code"], body["http_status_code"]) == (403, "USER_NOT_ALLOWED", 403)
    assert body["message"].startswith("mallory (identity ")
    assert body["message"].endswith(" may not use this deployment.")
    assert body["hint"]


def test_an_unknown_route_is_answered_by_the_api(tier: Tier) -> None:
    status, body = _get(tier, "/no/such/route", tier.token)
    assert status == 404
    assert body["status"] == "Failed"


def test_requests_over_lambdas_limit_get_the_apis_error_format(tier: Tier) -> None:
    """The first is within the limits of the API and of the gateway: in the event of the function, quotes take more."""
    for size, text in ((1_700_000, '"'), (11_000_000, "x")):
        body = json.dumps({"function_name": "f", "function_code": text * size})
        answer = httpx.post(
            f"{tier.api_url}/v3/functions",
            content=body,
            headers={"Authorization": f"Bearer {tier.token}", "Content-Type": "application/json"},
            timeout=WAIT_S,
        )
        found = answer.json()
        assert (answer.status_code, found["code"], found["http_status_code"]) == (413, "REQUEST_TOO_LARGE", 413)
        assert found["hint"]


def test_the_gateway_calls_published_versions(tier: Tier) -> None:
    for part in ("-Api", "-Authorizer"):
        assert _get(tier, "/v3/functions", tier.tokens["grace"])[0] == 200
        environments = [psutil.Process(pid).environ() for pid in _function_pids(tier, part)]
        assert environments, part
        assert all(each["AWS_LAMBDA_FUNCTION_VERSION"].isdecimal() for each in environments), part


def test_a_function_is_not_invoked_with_more_than_lambda_takes(tier: Tier) -> None:
    functions = Deployer(tier.endpoint_url).client("lambda")
    name = functions.list_functions()["Functions"][0]["FunctionName"]
    with pytest.raises(ClientError, match="must be smaller than 6291456 bytes"):
        functions.invoke(FunctionName=name, Payload=b'"' + b"x" * 6_291_455 + b'"')


def test_the_migration_ran_on_real_data_stores(tier: Tier) -> None:
    environment = tier.environment()
    programs = {psutil.Process(pid).name() for pid in group_members(tier.localstack_pid or 0)}
    assert "postgres" in programs
    assert any("valkey" in program for program in programs)
    assert environment["FARCALL_DATABASE_HOST"] == "127.0.0.1"
    migrations = list(tier.directory.glob("lambda-*Migrat*.log"))
    assert len(migrations) == 1
    assert '"changed":true' in migrations[0].read_text(encoding="utf-8").replace(" ", "")


def test_the_forwarder_runs_from_its_bundle_and_is_restarted_after_a_kill(tier: Tier) -> None:
    (pid,) = tier.forwarder_pids()
    environment = psutil.Process(pid).environ()
    assert "farcall-bundle-" in environment["PYTHONPATH"]
    (address,) = tier.forwarder_addresses()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: tier.forwarder_pids() not in ([], [pid]))
    assert tier.forwarder_addresses() != [address]
    tier.require_healthy()
    ecs = Deployer(tier.endpoint_url).client("ecs")
    stopped = ecs.list_tasks(cluster="farcall", desiredStatus="STOPPED")["taskArns"]
    *_, task = ecs.describe_tasks(cluster="farcall", tasks=stopped)["tasks"]
    assert (task["lastStatus"], task["stopCode"]) == ("STOPPED", "EssentialContainerExited")
    assert task["containers"][0]["exitCode"] == 128 + signal.SIGKILL


def test_ecs_describes_the_running_forwarder(tier: Tier) -> None:
    ecs = Deployer(tier.endpoint_url).client("ecs")
    (cluster,) = ecs.list_clusters()["clusterArns"]
    described = ecs.describe_clusters(clusters=[cluster, "another"])
    assert [each["clusterName"] for each in described["clusters"]] == ["farcall"]
    assert described["failures"] == [{"arn": "another", "reason": "MISSING"}]
    (service_arn,) = ecs.list_services(cluster=cluster)["serviceArns"]
    (service,) = ecs.describe_services(cluster="farcall", services=["forwarder"], include=["TAGS"])["services"]
    assert service["serviceArn"] == service_arn
    assert (service["desiredCount"], service["runningCount"], service["pendingCount"]) == (1, 1, 0)
    assert {"key": "farcall:deployment", "value": "farcall"} in service["tags"]
    (running,) = ecs.list_tasks(cluster=cluster, serviceName="forwarder")["taskArns"]
    (task,) = ecs.describe_tasks(cluster=cluster, tasks=[running])["tasks"]
    assert (task["lastStatus"], task["taskDefinitionArn"]) == ("RUNNING", service["taskDefinition"])
    (pid,) = tier.forwarder_pids()
    assert (tier.directory / "tasks" / running.rpartition("/")[2] / "pid").read_text(encoding="utf-8") == str(pid)
    definition = ecs.describe_task_definition(taskDefinition=service["taskDefinition"])["taskDefinition"]
    assert [container["name"] for container in definition["containerDefinitions"]] == ["forwarder"]
    assert ecs.list_task_definitions()["taskDefinitionArns"] == [service["taskDefinition"]]
    with pytest.raises(ClientError, match="ClusterNotFoundException"):
        ecs.list_services(cluster="another")


def test_elasticache_describes_the_running_valkey(tier: Tier) -> None:
    elasticache = Deployer(tier.endpoint_url).client("elasticache")
    (group,) = elasticache.describe_replication_groups()["ReplicationGroups"]
    assert group["Status"] == "available"
    endpoint = group["NodeGroups"][0]["PrimaryEndpoint"]
    variables = tier.environment()
    assert endpoint == {"Address": variables["FARCALL_QUEUE_HOST"], "Port": int(variables["FARCALL_QUEUE_PORT"])}
    (node,) = elasticache.describe_cache_clusters(ShowCacheNodeInfo=True)["CacheClusters"]
    assert [node["CacheClusterId"]] == group["MemberClusters"]
    assert (node["CacheClusterStatus"], node["CacheNodes"][0]["Endpoint"]) == ("available", endpoint)
    assert elasticache.describe_serverless_caches()["ServerlessCaches"] == []
    with pytest.raises(ClientError, match="ReplicationGroup another not found"):
        elasticache.describe_replication_groups(ReplicationGroupId="another")


def test_the_end_to_end_suite_runs_with_an_api_url_and_tokens(tier: Tier) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FARCALL_"))}
    environment |= {"FARCALL_API_URL": tier.api_url, "FARCALL_E2E_TOKENS": json.dumps(tier.tokens)}
    wanted = "registered_function or another_owners or five_megabytes or wiped"
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/e2e", "--tier", "aws", "-k", wanted, "-rs", "-p", "no:cacheprovider"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
        check=False,
    )
    assert suite.returncode == 0, suite.stdout[-3000:]
    assert "3 passed" in suite.stdout
    assert "it breaks parts of the cloud, and this one is not ours" in suite.stdout
    tier.require_healthy()


@needs_aws
def test_generated_names_are_found_by_the_command_of_the_runbook(tier: Tier, operator: Shell) -> None:
    (printed,) = operator.run(block("Where to look", 3))
    groups = Deployer(tier.endpoint_url).client("logs").describe_log_groups()["logGroups"]
    assert set(json.loads(printed)) <= {each["logGroupName"] for each in groups}
    assert any("Authorizer" in name for name in json.loads(printed))


@needs_aws
def test_a_program_in_the_network_reads_the_queue_by_the_commands_of_the_runbook(tier: Tier, operator: Shell) -> None:
    (overrides,) = block("Access to PostgreSQL and Valkey by hand", 2).commands
    (operator.directory / "overrides.json").write_text(overrides, encoding="utf-8")
    (printed,) = operator.run(block("Access to PostgreSQL and Valkey by hand", starting="aws ecs describe-services"))
    definition, network = json.loads(printed)
    (printed,) = operator.run(
        block("Access to PostgreSQL and Valkey by hand", starting="aws ecs run-task"),
        {"TASK_DEFINITION": definition, "NETWORK_CONFIGURATION": f"'{json.dumps(network)}'"},
    )
    (task,) = json.loads(printed)["tasks"]
    ecs = Deployer(tier.endpoint_url).client("ecs")

    def ended() -> dict[str, Any] | None:
        (found,) = ecs.describe_tasks(cluster="farcall", tasks=[task["taskArn"]])["tasks"]
        return found if found["lastStatus"] == "STOPPED" else None

    wait_until(ended, "the task ends")
    log = tier.directory / "tasks" / task["taskArn"].rpartition("/")[2] / "forwarder.log"
    assert int(log.read_text(encoding="utf-8")) > 0
    # The runbook for long migrations reads the network of the service, too.
    (printed,) = operator.run(block("A migration that takes long", 2, starting="aws ecs"))
    assert json.loads(printed) == network["awsvpcConfiguration"]


@needs_aws
def test_keys_are_replaced_by_the_commands_of_the_runbook(tier: Tier, operator: Shell) -> None:
    """With another ticket key and other forwarders, tickets are issued and accepted."""
    (secret,) = (
        each["ARN"]
        for each in Deployer(tier.endpoint_url).client("secretsmanager").list_secrets()["SecretList"]
        if "-Tickets" in each["Name"]
    )
    given, before = _secret(tier, secret), tier.forwarder_pids()
    value = json.dumps({"key": secrets.token_hex(32)})
    operator.run(block("Replace keys"), {"SECRET": secret, '{"key": "…"}': value})
    assert _secret(tier, secret) == json.loads(value) != given
    wait_until(lambda: len(tier.forwarder_pids()) == 1 and tier.forwarder_pids() != before, "another forwarder")
    for pid in _function_pids(tier, "-Api"):  # a running one reads the key only after minutes
        os.kill(pid, signal.SIGKILL)
    endpoint = LocalEndpoint("keys", home=operator.directory / "home", environment=tier.variables())
    with endpoint, farcall.Client(tier.api_url, tier.token) as client:
        with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
            assert executor.submit(pow, 2, 3).result(WAIT_S) == 8
        _check_the_runbooks_of_owners(operator, endpoint, client)
    tier.require_healthy()


def _check_the_runbooks_of_owners(operator: Shell, endpoint: LocalEndpoint, client: farcall.Client) -> None:
    """The owner of an endpoint, who is an administrator, reads usage, and withdraws keys, tasks and a token."""
    named = {"ENDPOINT": endpoint.endpoint_id}
    *_, everyone = operator.run(block("Usage"))
    (used,) = (json.loads(line) for line in everyone.splitlines())
    assert used["tasks"] > 0

    (listed,) = operator.run(block("Keys of an endpoint", starting="farcall endpoints keys"), named)
    (key, _) = listed.split("\t")
    revoked = {**named, "KEY": shlex.quote(key)}
    operator.run(block("Keys of an endpoint", starting="farcall endpoints revoke-key"), revoked)
    wait_until(lambda: endpoint.agent() is None, "the session ends, and the key is refused")
    assert "This key was revoked" in endpoint.log_path.read_text(encoding="utf-8")
    stolen = block("Credential of an endpoint, and a stolen host")
    by_command, by_request = operator.run(stolen, {"ENDPOINT-ID": endpoint.endpoint_id})
    assert by_command.startswith("Revoked the credential of")
    assert json.loads(by_request) == {"result": 302}

    token = client.create_token("leaked", scopes=["tasks:submit"])
    batch = client.create_batch()
    task_id = batch.add(client.register_function(_double), (21,))
    with farcall.Client(client.api_url, token["token"]) as thief:
        thief.batch_run(endpoint.endpoint_id, batch)
    identity = client.whoami()["identity_id"]
    before, cancelled = operator.run(block("Withdraw a right"), {**named, "IDENTITY": identity})
    assert [each["task_id"] for each in json.loads(before)["tasks"]] == [task_id]
    assert json.loads(cancelled)["results"][task_id]["outcome"] == "cancelled"
    names, _, used_for = operator.run(block("A token that leaked"), {"TOKEN-ID": token["token_id"]})
    assert token["token_id"] in names
    actions = {json.loads(line)["action"] for line in used_for.splitlines()}
    assert actions >= {"token.create", "token.revoke", "tasks.submit"}


@needs_aws
def test_the_owners_password_is_replaced_by_the_commands_of_the_runbook(tier: Tier, operator: Shell) -> None:
    """The test of the programs' passwords, which comes next, needs it."""
    clients = Deployer(tier.endpoint_url)
    (instance,) = clients.client("rds").describe_db_instances()["DBInstances"]
    (secret,) = (
        each["ARN"]
        for each in clients.client("secretsmanager").list_secrets()["SecretList"]
        if "username" in (value := _secret(tier, each["ARN"])) and value["username"] == instance["MasterUsername"]
    )
    value = _secret(tier, secret) | {"password": secrets.token_hex(16)}
    _, printed, _ = operator.run(
        block("Password of the database's owner"),
        {
            "DATABASE": instance["DBInstanceIdentifier"],
            "NEW": value["password"],
            "SECRET": secret,
            "VALUE": shlex.quote(json.dumps(value)),
        },
    )
    assert json.loads(printed).keys() == value.keys()


def test_passwords_are_rotated_by_the_commands_of_the_runbook(tier: Tier, operator: Shell) -> None:
    """Afterwards new processes log in, with the new passwords only."""
    data = Deployer(tier.endpoint_url).client("cloudformation").describe_stacks(StackName="farcall-data")["Stacks"][0]
    arns = [each["OutputValue"] for each in data["Outputs"] if each["OutputKey"].startswith("Login")]
    given = [_secret(tier, arn) for arn in arns]
    assert len(operator.run(block("Passwords of the database roles"))) == len(arns) == 3
    for pid in (*_function_pids(tier, "-Api"), *tier.forwarder_pids()):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: _get(tier, "/v3/functions", tier.token)[0] == 200, "a new process of the API")
    wait_until(lambda: _is_healthy(tier), "a new forwarder")
    variables = tier.environment()
    for login in given:
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(
                host=variables["FARCALL_DATABASE_HOST"],
                port=variables["FARCALL_DATABASE_PORT"],
                dbname=variables["FARCALL_DATABASE_NAME"],
                user=login["username"],
                password=login["password"],
            )


@needs_aws
def test_raised_connections_reach_the_server_with_a_restart_and_the_roles_at_once(
    tier: Tier, assembly: Path, tmp_path: Path, operator: Shell
) -> None:
    raised = shutil.copytree(
        assembly, tmp_path / "raised", copy_function=os.link, ignore=shutil.ignore_patterns("*.zip")
    )
    for template in raised.glob("*.template.json"):
        text = template.read_text(encoding="utf-8")
        for old, new in (
            ('"max_connections": "100"', '"max_connections": "200"'),
            ('"FARCALL_DATABASE_CONNECTIONS": "100"', '"FARCALL_DATABASE_CONNECTIONS": "200"'),
            ('"Connections": "100"', '"Connections": "200"'),
        ):
            text = text.replace(old, new)
        template.unlink()
        template.write_text(text, encoding="utf-8")
    Deployer(tier.endpoint_url).deploy(raised, parameters=tier.parameters())
    rds = Deployer(tier.endpoint_url).client("rds")

    def found() -> tuple[str, str, int]:
        """The state of the parameters, the server's connections, and the limit of the API."""
        (instance,) = rds.describe_db_instances()["DBInstances"]
        (group,) = instance["DBParameterGroups"]
        variables = tier.environment()
        credentials = _secret(tier, variables["FARCALL_DATABASE_SECRET_ARN"])
        with psycopg.connect(
            host=variables["FARCALL_DATABASE_HOST"],
            port=variables["FARCALL_DATABASE_PORT"],
            dbname=variables["FARCALL_DATABASE_NAME"],
            user=credentials["username"],
            password=credentials["password"],
        ) as connection:
            query = "SELECT current_setting('max_connections'), rolconnlimit FROM pg_roles WHERE rolname = current_user"
            ((permitted, limit),) = connection.execute(query).fetchall()
        return group["ParameterApplyStatus"], permitted, limit

    limit = connection_limit("farcall_api", 200)
    assert found() == ("pending-reboot", "100", limit)
    (instance,) = rds.describe_db_instances()["DBInstances"]
    operator.run(block("database-connections"), {"DATABASE": instance["DBInstanceIdentifier"]})
    assert found() == ("in-sync", "200", limit)
    assert _get(tier, "/v3/functions", tier.token)[0] == 200
    Deployer(tier.endpoint_url).deploy(assembly, parameters=tier.parameters())


def test_the_api_answers_again_after_the_database_was_away(tier: Tier) -> None:
    rds = Deployer(tier.endpoint_url).client("rds")
    (instance,) = rds.describe_db_instances()["DBInstances"]
    named = {"DBInstanceIdentifier": instance["DBInstanceIdentifier"]}
    assert rds.stop_db_instance(**named)["DBInstance"]["DBInstanceStatus"] == "stopping"
    assert rds.describe_db_instances()["DBInstances"][0]["DBInstanceStatus"] == "stopped"
    status, body = _get(tier, "/v3/functions", tier.token)
    assert (status, body["code"]) == (503, "UNAVAILABLE")
    with pytest.raises(ClientError, match="InvalidDBInstanceState"):
        rds.reboot_db_instance(**named)
    rds.start_db_instance(**named)
    assert rds.describe_db_instances()["DBInstances"][0]["DBInstanceStatus"] == "available"
    wait_until(lambda: _get(tier, "/v3/functions", tier.token)[0] == 200, "the API uses the database again")
    wait_until(lambda: _is_healthy(tier), "the forwarder uses the database again")


def _secret(tier: Tier, arn: str) -> dict[str, str]:
    answer = Deployer(tier.endpoint_url).client("secretsmanager").get_secret_value(SecretId=arn)
    value: dict[str, str] = json.loads(answer["SecretString"])
    return value


def _function_pids(tier: Tier, part: str) -> set[int]:
    """The processes of functions with ``part`` in their names."""
    named = f"AWS_LAMBDA_FUNCTION_NAME={tier.name}-api{part}"
    return {
        pid
        for pid in group_members(tier.localstack_pid or 0)
        if any(f"{name}={value}".startswith(named) for name, value in psutil.Process(pid).environ().items())
    }


def _is_healthy(tier: Tier) -> bool:
    try:
        tier.require_healthy()
    except Unavailable:
        return False
    return bool(tier.forwarder_pids())


def test_deploying_the_same_templates_again_changes_nothing(tier: Tier, assembly: Path) -> None:
    pids = tier.forwarder_pids()
    Deployer(tier.endpoint_url).deploy(assembly, parameters=tier.parameters())
    assert tier.forwarder_pids() == pids
    assert _get(tier, "/v2/version", tier.token)[0] == 200


def test_a_second_deployment_can_be_created_and_deleted_without_the_first(tier: Tier) -> None:
    slow = {"api.throttle_rate_per_s": "1", "api.throttle_burst": "10", "limits.rate_per_s": "1"}
    assembly = ensure_assembly(name="second", settings=slow)
    second = LocalStackTier(name="second", mode="endpoint", endpoint_url=tier.endpoint_url, assembly=assembly)
    with second:
        assert _get(second.tier, "/v2/version", second.token)[0] == 200
        assert _get(second.tier, "/v2/version", tier.token)[0] == 401
        assert second.tier.environment()["FARCALL_DATABASE_PORT"] != tier.environment()["FARCALL_DATABASE_PORT"]
        assert len(tier.forwarder_pids()) == 2
        _check_throttle(second.tier)
        assert _get(tier, "/v2/version", None)[0] == 401, "the other stage is not throttled"
    wait_until(lambda: len(tier.forwarder_pids()) == 1)
    tier.require_healthy()


def _check_throttle(tier: Tier) -> None:
    """Requests over the rate of the stage get 429 in the API's format, also without a token."""

    answers: list[tuple[int, Any]] = []

    def is_refused() -> bool:
        answers.append(_get(tier, "/v2/version", None))
        return answers[-1][0] == 429

    wait_until(is_refused, "the gateway throttles")
    assert (answers[-1][1]["code"], answers[-1][1]["retryable"]) == ("LIMIT_EXCEEDED", True)
    with farcall.Client(tier.api_url, tier.token) as client:  # it repeats refused requests
        for _ in range(3):
            assert client.get_endpoints() == []


def _assembly(directory: Path, resources: dict[str, Any]) -> Path:
    """A cloud assembly of one stack without assets."""
    stack = {"type": "aws:cloudformation:stack", "properties": {"templateFile": "odd.template.json"}}
    (directory / "manifest.json").write_text(json.dumps({"artifacts": {"odd": stack}}), encoding="utf-8")
    (directory / "odd.template.json").write_text(json.dumps({"Resources": resources}), encoding="utf-8")
    (directory / "odd.assets.json").write_text(json.dumps({"files": {}}), encoding="utf-8")
    return directory


def test_an_unknown_resource_type_fails_the_deployment(tier: Tier, tmp_path: Path) -> None:
    assembly = _assembly(tmp_path, {"Pool": {"Type": "AWS::Cognito::UserPool", "Properties": {}}})
    deployer = Deployer(tier.endpoint_url)
    with pytest.raises(DeployFailed, match=r"Pool \(AWS::Cognito::UserPool\)"):
        deployer.deploy(assembly, parameters={})
    deployer.delete(assembly)


def test_a_queue_with_tls_is_refused(tier: Tier, tmp_path: Path) -> None:
    group = {"ReplicationGroupDescription": "q", "Engine": "valkey", "TransitEncryptionEnabled": True}
    assembly = _assembly(tmp_path, {"Queue": {"Type": "AWS::ElastiCache::ReplicationGroup", "Properties": group}})
    with pytest.raises(DeployFailed, match="Valkey has no TLS here"):
        Deployer(tier.endpoint_url).deploy(assembly, parameters={})


def test_a_queue_gets_its_replica_before_fail_over_or_is_refused_as_on_aws(tier: Tier, tmp_path: Path) -> None:
    def assembly(nodes: int, *, failover: bool) -> Path:
        group = {"ReplicationGroupDescription": "q", "Engine": "valkey", "NumCacheClusters": nodes}
        properties = {**group, "AutomaticFailoverEnabled": failover}
        resource = {"Type": "AWS::ElastiCache::ReplicationGroup", "Properties": properties}
        return _assembly(tmp_path, {"Queue": resource})

    deployer = Deployer(tier.endpoint_url)
    for nodes, failover in ((1, False), (2, False), (2, True)):
        deployer.deploy(assembly(nodes, failover=failover), parameters={})
    deployer.delete(assembly(2, failover=True))
    refused = "Replication group must have at least one read replica to enable autofailover"
    with pytest.raises(DeployFailed, match=refused):
        deployer.deploy(assembly(1, failover=True), parameters={})
    deployer.deploy(assembly(1, failover=False), parameters={})
    with pytest.raises(DeployFailed, match=refused):
        deployer.deploy(assembly(2, failover=True), parameters={})


def test_a_tier_ends_with_its_driver_even_if_the_driver_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from farcall_localstack.environment import ensure_environment\n"
        "from farcall_localstack.server import LocalStackServer\n"
        "server = LocalStackServer(ensure_environment(), directory=Path(sys.argv[1]))\n"
        "server.start(); print(server.pid, server.database_directory, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid, database_directory = driver.stdout.readline().split()
        driver.kill()
    wait_until(lambda: group_members(int(pid)) == set())
    assert not Path(database_directory).exists()
