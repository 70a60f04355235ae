"""Environments: packages of a container, and modules that its workers load."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

STEPS = """
ALTER TABLE container ADD COLUMN IF NOT EXISTS requirements text[] NOT NULL DEFAULT '{}';
ALTER TABLE container ADD COLUMN IF NOT EXISTS preload text[];
"""


def upgrade() -> None:
    """Add the columns."""
    op.execute(STEPS)
