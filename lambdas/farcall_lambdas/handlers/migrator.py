"""Migrator: upgrades the database to the newest schema.

It is a function, run once by every deployment before the new code serves, and a command:
``python -m farcall_lambdas.handlers.migrator``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.errors import FarcallError
from farcall_common.store import DatabaseSettings
from farcall_common.store.migrate import HEAD, upgrade
from farcall_common.store.roles import prepare_roles
from farcall_common.store.settings import read_connections, read_roles
from farcall_lambdas.logs import configure, log_ids, logger


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:  # noqa: ARG001  # Lambda's signature
    """Upgrade the database to the newest schema. An error fails the deployment, which then rolls back."""
    log_ids(function_request_id=context.aws_request_id)
    return migrate(os.environ)


def migrate(environ: Mapping[str, str]) -> dict[str, Any]:
    """Upgrade the database that the environment names, and prepare the programs' roles in it.

    Returns its revision, and whether it changed.
    """
    configure(environ.get("FARCALL_LOG_LEVEL", "INFO"))
    database = DatabaseSettings.from_environment(environ).conninfo()
    changed = upgrade(database)
    credentials = read_roles(environ)
    prepare_roles(database, credentials, max_connections=read_connections(environ))
    logins = sorted({each["username"] for each in credentials})
    logger.info("database is up to date", revision=HEAD, changed=changed, logins=logins)
    return {"revision": HEAD, "changed": changed}


def main() -> int:
    """Run the migration. Returns the exit status."""
    try:
        migrate(os.environ)
    except FarcallError as error:
        logger.error("cannot migrate", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
