"""Graphs: calls of stages in the usage, and open tasks that may call other functions."""

from __future__ import annotations

from alembic import op

from farcall_common.store.migrations import create_index

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

STEPS = """
ALTER TABLE usage ADD COLUMN IF NOT EXISTS stages bigint NOT NULL DEFAULT 0;
ALTER TABLE usage_part ADD COLUMN IF NOT EXISTS stages bigint NOT NULL DEFAULT 0;
"""


def upgrade() -> None:
    """Add columns and index."""
    op.execute(STEPS)
    create_index(
        "task_open_callees",
        """task (task_id) WHERE finished_at IS NULL AND strpos(options::text, '"callees":[[') > 0""",
    )
