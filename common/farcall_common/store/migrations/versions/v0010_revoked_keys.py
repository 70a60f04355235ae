"""When a key of an endpoint was revoked: it stays in its row, so that it is not added again."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.execute("ALTER TABLE endpoint_key ADD COLUMN IF NOT EXISTS revoked_at timestamptz")
