"""The spool of an endpoint's agent, and its generation in the last report, so that an old copy of it is refused."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    op.execute("ALTER TABLE endpoint ADD COLUMN IF NOT EXISTS spool_id text COLLATE \"C\" NOT NULL DEFAULT ''")
    op.execute("ALTER TABLE endpoint ADD COLUMN IF NOT EXISTS spool_generation bigint NOT NULL DEFAULT 0")
