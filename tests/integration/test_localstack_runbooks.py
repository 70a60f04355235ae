"""The runbooks that deploy, as an operator types them: the CDK's command line deploys to LocalStack.

They take a quarter of an hour, so they run with FARCALL_ALL_RUNBOOKS=1 only (``make test-runbooks``).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall_infra.jsii_node import choose
from farcall_localstack.assembly import ACCOUNT, REGION
from farcall_localstack.deploy import Deployer
from farcall_localstack.server import LocalStackServer
from tests.certificates import Authority
from tests.support.runbooks import Shell, block, needs_aws
from tests.waiting import WAIT_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    needs_aws,
    pytest.mark.skipif("FARCALL_ALL_RUNBOOKS" not in os.environ, reason="they take a quarter of an hour"),
]

_WORKSPACE = Path(__file__).parents[2]
_CDK = _WORKSPACE / ".tools" / "cdklocal" / "node_modules" / "aws-cdk" / "bin" / "cdk"
_CLIENT = "a11ce000-0000-4000-8000-000000000001"
_TOKEN = "token-of-the-operator"
_IDENTITY = {"identity_id": "5e0d6f5c-7a3b-5c6e-9f43-2d1f6f1c7b9a", "username": "ada"}
_DEPLOY_S = 3 * WAIT_S
#: What an operator answers to `farcall cloud deploy`.
_YES: Any = {"answer": "y\n", "within_s": _DEPLOY_S}
#: ``farcall`` where the server with the certificate authorities of RDS cannot be reached: a file takes its place.
_FARCALL = """
import sys
from pathlib import Path
from farcall.cli import main
from farcall_infra.ca_bundle import read_ca_bundle
from farcall_infra.cloud.cli import CloudEnvironment, app
if sys.argv[1:2] != ["cloud"]:
    main()
fetch = lambda _url, _directory, *, now: read_ca_bundle(Path({file!r}), now=now)
app(args=sys.argv[2:], prog_name="farcall cloud", obj=CloudEnvironment(fetch=fetch))
"""


@pytest.fixture
def operator(localstack: LocalStackServer, tmp_path: Path) -> Shell:
    """A shell in which ``farcall cloud`` uses LocalStack. Databases there have no TLS, and tokens are the test's."""
    choose()  # the Node of our environment: the system's may be too old for the CDK
    variables = {
        "AWS_ENDPOINT_URL": localstack.url,
        "AWS_ENDPOINT_URL_S3": localstack.url,
        "AWS_ACCESS_KEY_ID": ACCOUNT,
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": str(tmp_path / "aws-config"),
        "CDK_HOME": str(tmp_path),
        "JSII_NODE": os.environ["JSII_NODE"],
        "FARCALL_HOME": str(tmp_path / "home"),
        "FARCALL_TOKEN": _TOKEN,
    }
    (tmp_path / "aws-config").write_text("[profile farcall]\n", encoding="utf-8")
    shell = Shell(variables, directory=tmp_path)
    offline = [
        *("--context", "target=localstack", "--context", "database.authorities="),
        *("--parameters", f"DevTokens={json.dumps({_TOKEN: _IDENTITY})}"),
    ]
    cdk = shlex.join([os.environ["JSII_NODE"], str(_CDK)])
    program = shell.add_program(
        "cdk", f'if [ "$1" = deploy ]; then exec {cdk} "$@" {shlex.join(offline)}; fi\nexec {cdk} "$@"'
    )
    shell.environment["FARCALL_CDK"] = str(program)
    authorities = Authority().write(tmp_path / "authorities.pem")
    source = _FARCALL.format(file=str(authorities))
    shell.add_program("farcall", f'exec {shlex.join([sys.executable, "-c", source])} "$@"')
    (tmp_path / "examples").symlink_to(_WORKSPACE / "examples")
    return shell


def _double(number: int) -> int:
    return 2 * number


def test_a_deployment_lives_by_the_runbooks(localstack: LocalStackServer, operator: Shell, tmp_path: Path) -> None:
    """From an empty account: deployed, used, upgraded, grown, shrunk, restored from a snapshot, and destroyed."""
    operator.type("farcall cloud bootstrap", within_s=_DEPLOY_S)
    (printed,) = operator.run(block("Globus Auth", 2), {"CLIENT_SECRET": "not-a-secret"})
    globus = {
        "FARCALL_GLOBUS_CLIENT_ID": _CLIENT,
        "FARCALL_GLOBUS_SCOPE": f"https://auth.globus.org/scopes/{_CLIENT}/all",
        "FARCALL_GLOBUS_CREDENTIALS_ARN": json.loads(printed)["ARN"],
    }
    operator.environment |= globus
    here = {"AWS_PROFILE=…": "AWS_PROFILE=farcall", "eu-central-1": REGION}
    operator.run(block("3. The account"), here)

    # The first deployment has the former version of PostgreSQL, which is upgraded later.
    operator.run(block("5. Deploy", starting="farcall cloud profiles"), _given(globus))
    profiles = tmp_path / "my-profiles.toml"
    of_lab = profiles.read_text(encoding="utf-8").replace("allowed_identities = []", 'allowed_identities = ["ada"]')
    former = of_lab.replace('version = "17"', 'version = "16"')
    assert len({profiles.read_text(encoding="utf-8"), of_lab, former}) == 3
    profiles.write_text(former, encoding="utf-8")
    (printed,) = operator.run(block("5. Deploy", starting="farcall cloud deploy"), _given(globus), **_YES)
    url = _api_url(printed)
    with farcall.Client(url, _TOKEN) as client:
        function_id = client.register_function(_double)
    try:
        (printed,) = operator.run(block("6. The first task"), {"FARCALL_API_URL=…": f"FARCALL_API_URL={url}"})
        assert "hello" in printed.lower()
    finally:
        operator.type("farcall-endpoint stop here")

    # Upgrade PostgreSQL, first in a copy.
    database = _database(localstack)
    assert database["EngineVersion"].startswith("16")
    identifier = {"DATABASE": database["DBInstanceIdentifier"]}
    operator.run(block("Upgrade PostgreSQL", starting="aws rds create-db-snapshot"), identifier)
    operator.run(block("Upgrade PostgreSQL", starting="farcall cloud deploy --name drill"), **_YES)
    assert _database(localstack, "drill")["EngineVersion"].startswith("17")
    operator.run(block("Upgrade PostgreSQL", starting="farcall cloud status"))
    operator.run(block("Upgrade PostgreSQL", starting="farcall cloud destroy"), answer="drill\n", within_s=_DEPLOY_S)
    operator.run(block("Upgrade PostgreSQL", starting="farcall cloud deploy -c"), **_YES)
    assert _database(localstack)["EngineVersion"].startswith("17")

    # Deployments that change no store.
    profiles.write_text(of_lab, encoding="utf-8")
    operator.run(block("Upgrade"), **_YES)
    operator.run(block("A migration that takes long", 2, starting="farcall cloud deploy"), **_YES)
    operator.run(block("The database's certificate", starting="farcall cloud doctor"))
    operator.run(block("The database's certificate", 2, starting="farcall cloud deploy"), **_YES)

    # Change the profile.
    operator.run(block("Change the profile"), **_YES)
    assert _profile(operator) == "facility"
    operator.run(block("Change the profile", 2), **_YES)
    assert _profile(operator) == "lab"
    assert _database(localstack)["DBInstanceIdentifier"] == database["DBInstanceIdentifier"]

    # Restore.
    operator.run(block("Backup and restore", starting="aws rds create-db-snapshot"), identifier)
    options = {
        "--globus-client-id …": f"--globus-client-id {_CLIENT}",
        "--globus-scope …": f"--globus-scope {globus['FARCALL_GLOBUS_SCOPE']}",
        "--globus-credentials-arn …": f"--globus-credentials-arn {globus['FARCALL_GLOBUS_CREDENTIALS_ARN']}",
    }
    (printed,) = operator.run(block("Backup and restore", starting="farcall cloud deploy"), options, **_YES)
    with farcall.Client(_api_url(printed), _TOKEN) as client:
        assert client.get_function(function_id)["function_uuid"] == function_id
    s3 = Deployer(localstack.url).client("s3")
    old, new = _bucket(localstack), _bucket(localstack, "farcall2")
    s3.put_object(Bucket=old, Key="arguments/1", Body=b"big")
    operator.run(block("Backup and restore", starting="aws s3 sync"), {"OLD_BUCKET": old, "NEW_BUCKET": new})
    assert s3.get_object(Bucket=new, Key="arguments/1")["Body"].read() == b"big"

    operator.run(block("8. Destroy"), answer="farcall\n", within_s=_DEPLOY_S)
    status = json.loads(operator.type("farcall cloud status --name farcall2 --json", within_s=_DEPLOY_S))
    assert status["problems"] == []


def _api_url(printed: str) -> str:
    (url,) = re.findall(r"export FARCALL_API_URL=(\S+)", printed)
    return str(url)


def _database(localstack: LocalStackServer, name: str = "farcall") -> dict[str, Any]:
    found = Deployer(localstack.url).client("rds").describe_db_instances()["DBInstances"]
    (database,) = (each for each in found if each["DBInstanceIdentifier"].startswith(f"{name}-data"))
    return dict(database)


def _bucket(localstack: LocalStackServer, name: str = "farcall") -> str:
    resources = Deployer(localstack.url).client("cloudformation").describe_stack_resources(StackName=f"{name}-data")
    (bucket,) = (each for each in resources["StackResources"] if each["ResourceType"] == "AWS::S3::Bucket")
    return str(bucket["PhysicalResourceId"])


def _profile(operator: Shell) -> str:
    return str(json.loads(operator.type("farcall cloud status --json"))["settings"]["profile"])


def _given(globus: dict[str, str]) -> dict[str, str]:
    """What the operator writes in the place of the dots."""
    return {
        "FARCALL_GLOBUS_CLIENT_ID=…": f"FARCALL_GLOBUS_CLIENT_ID={globus['FARCALL_GLOBUS_CLIENT_ID']}",
        "https://auth.globus.org/scopes/…/all": globus["FARCALL_GLOBUS_SCOPE"],
        "arn:aws:secretsmanager:…": globus["FARCALL_GLOBUS_CREDENTIALS_ARN"],
    }


def test_a_tier_on_localstack_is_started_and_asked_as_the_page_says(tmp_path: Path) -> None:
    shell = Shell({"HOME": str(tmp_path)}, directory=tmp_path)
    try:
        (printed,) = shell.run(block("Without AWS: LocalStack"), within_s=_DEPLOY_S)
    finally:
        shell.type("python -m farcall_localstack down")
    assert "Healthy." in printed
    (task,) = json.loads(printed[printed.rindex("\n{") :])["taskArns"]
    assert ":task/farcall/" in task
