"""Migrator command: ``python -m farcall_lambdas.migrator`` upgrades the database to the newest schema."""

from __future__ import annotations

import os
import sys

from farcall_common.errors import FarcallError
from farcall_lambdas.handlers.migrator import migrate
from farcall_lambdas.logs import logger


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
