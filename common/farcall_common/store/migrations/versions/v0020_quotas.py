"""Quotas by person: service accounts count for their creators, also after they were deleted."""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

STEPS = """
ALTER TABLE task ADD COLUMN IF NOT EXISTS quota_key text;
ALTER TABLE service_account ADD COLUMN IF NOT EXISTS deleted_at timestamptz;
"""


def upgrade() -> None:
    """Add the columns."""
    op.execute(STEPS)
