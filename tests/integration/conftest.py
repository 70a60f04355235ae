"""The servers that integration tests may ask for."""

from __future__ import annotations

from tests.integration.store_servers import (
    postgres_server,
    postgres_url,
    s3_environment,
    s3_server,
    valkey,
    valkey_server,
)

__all__ = ["postgres_server", "postgres_url", "s3_environment", "s3_server", "valkey", "valkey_server"]
