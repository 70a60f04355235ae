"""Reports of latency targets."""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

STEPS = """
CREATE TABLE IF NOT EXISTS endpoint_qos (
    endpoint_id  text COLLATE "C" PRIMARY KEY REFERENCES endpoint ON DELETE CASCADE,
    report       json NOT NULL
);
"""


def upgrade() -> None:
    """Add the table."""
    op.execute(STEPS)
