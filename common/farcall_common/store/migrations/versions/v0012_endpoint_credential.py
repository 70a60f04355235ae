"""The id of the credential with which an endpoint's agent may connect; empty without one."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.execute("ALTER TABLE endpoint ADD COLUMN IF NOT EXISTS credential_id text NOT NULL DEFAULT ''")
