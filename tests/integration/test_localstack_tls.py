"""TLS to the database on LocalStack: migration, API and forwarder verify its certificate, as on AWS, with the CA bundle
that was deployed with them. With a wrong CA bundle a deployment fails before it changes any program."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import psycopg
import pytest

import farcall
from farcall_infra.ca_bundle import CA_BUNDLE_FILE
from farcall_localstack import DeployFailed, LocalStackTier
from farcall_localstack.deploy import Deployer
from farcall_localstack.environment import ensure_environment
from farcall_localstack.server import LocalStackServer
from farcall_localstack.synth import ensure_assembly
from tests.certificates import Authority

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def _name() -> str:
    return "verified"


def test_the_databases_certificate_is_checked_from_migration_to_forwarder(tmp_path: Path) -> None:
    ours = Authority()
    authorities = ours.write(tmp_path / "authorities.pem")
    assembly = ensure_assembly(settings={"database.authorities": str(authorities)}, directory=_made(tmp_path / "out"))
    server = LocalStackServer(
        ensure_environment(),
        directory=_made(tmp_path / "localstack"),
        database_certificate=ours.certify("127.0.0.1", tmp_path / "server.pem"),
    )
    try:
        server.start()
        # It is not deleted: LocalStack cannot delete a stack after a failed update.
        tier = LocalStackTier(server.directory, assembly=assembly, endpoint_url=server.url).up()
        where = tier.environment()
        assert where["FARCALL_DATABASE_AUTHORITIES"] == CA_BUNDLE_FILE
        with pytest.raises(psycopg.OperationalError):  # connections without TLS are refused
            psycopg.connect(f"{_address(where)} user=farcall sslmode=disable", connect_timeout=10).close()
        with farcall.Client(tier.api_url, tier.token) as client:
            function_id = client.register_function(_name)
            wrong = _with_other_authorities(assembly, tmp_path / "wrong")
            with pytest.raises(DeployFailed, match="DATABASE_UNTRUSTED"):
                Deployer(server.url).deploy(wrong, parameters=tier.parameters())
            assert client.get_function(function_id)["function_uuid"] == function_id
        tier.require_healthy()
    finally:
        server.stop()


def _with_other_authorities(assembly: Path, copy: Path) -> Path:
    """The result of a synth with another file: other bundles with other hashes, on which the migration depends."""
    shutil.copytree(assembly, copy, ignore=shutil.ignore_patterns("*.zip"))
    for file in copy.glob(f"asset.*/{CA_BUNDLE_FILE}"):
        Authority().write(file)
        bundle = file.parent
        digest = bundle.name.removeprefix("asset.")
        bundle.rename(bundle.with_name(f"asset.{digest[::-1]}"))
        for document in copy.glob("*.json"):
            text = document.read_text(encoding="utf-8").replace(digest, digest[::-1])
            document.write_text(re.sub(r'("Bundle": ")[0-9a-f]{64}', r"\g<1>another", text), encoding="utf-8")
    return copy


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def _address(environment: dict[str, str]) -> str:
    return f"host={environment['FARCALL_DATABASE_HOST']} port={environment['FARCALL_DATABASE_PORT']} dbname=farcall"
