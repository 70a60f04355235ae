"""Service accounts, and tokens of identities and accounts."""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

STEPS = """
CREATE TABLE IF NOT EXISTS service_account (
    account_id  text COLLATE "C" PRIMARY KEY,
    owner_id    text NOT NULL,
    name        text NOT NULL,
    created_at  timestamptz NOT NULL,
    UNIQUE (owner_id, name)
);
CREATE TABLE IF NOT EXISTS api_token (
    token_id      text COLLATE "C" PRIMARY KEY,
    identity_id   text NOT NULL,
    owner_id      text NOT NULL,
    name          text NOT NULL,
    scopes        text[] NOT NULL,
    endpoints     text[],
    functions     text[],
    created_at    timestamptz NOT NULL,
    expires_at    timestamptz NOT NULL,
    revoked_at    timestamptz,
    last_used_at  timestamptz
);
CREATE INDEX IF NOT EXISTS api_token_owner ON api_token (owner_id);
CREATE INDEX IF NOT EXISTS api_token_identity ON api_token (identity_id);
"""


def upgrade() -> None:
    """Add the tables."""
    op.execute(STEPS)
