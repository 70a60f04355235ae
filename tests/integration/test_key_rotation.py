"""Keys are replaced in a deployment at work, as ``docs/operations/keys.md`` says: new ones, and a restart."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import farcall
from farcall_local.control import wipe
from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier
from tests.waiting import WAIT_S


def test_endpoints_and_clients_go_on_with_new_keys(tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    try:
        with LocalTier(directory, users=("ada",)) as tier:
            endpoint = LocalEndpoint("own", home=tmp_path / "home", environment=tier.environment())
            with endpoint, farcall.Client(tier.api_url, tier.token) as client:
                with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
                    assert executor.submit(pow, 2, 3).result(WAIT_S) == 8
                agent, address = endpoint.agent(), tier.api_url
                _replace_keys(tier)
                tier.__exit__(None, None, None)
                tier.__enter__()
                assert tier.api_url == address
                with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
                    assert executor.submit(pow, 2, 4).result(WAIT_S) == 16
                assert endpoint.agent() == agent
            log = endpoint.log_path.read_text()
            assert log.count("connected to forwarder") == 2
    finally:
        wipe(directory)


def _replace_keys(tier: LocalTier) -> None:
    """The ticket key, and the password of the database. A forwarder without a load balancer has a new key anyway."""
    path = tier.directory / "secrets.json"
    secrets = json.loads(path.read_text())
    former = dict(secrets)
    secrets["ticket_key"] = former["ticket_key"][::-1]
    secrets["database_password"] = former["database_password"][::-1]
    address = tier.state.database_url
    with psycopg.connect(address, autocommit=True) as database:
        role = sql.Identifier(database.info.user)
        database.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(role, secrets["database_password"]))
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(address)
    path.write_text(json.dumps(secrets))
