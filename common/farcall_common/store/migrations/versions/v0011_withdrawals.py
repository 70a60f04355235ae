"""Withdrawn rights: objects whose open tasks are to be compared with the rights again, and open tasks by function."""

from __future__ import annotations

from alembic import op

from farcall_common.store.migrations import create_index

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

STEPS = """
CREATE TABLE IF NOT EXISTS withdrawal (
    object_id      text COLLATE "C" PRIMARY KEY,
    identity_id    text NOT NULL,
    owner_ids      text[] NOT NULL,
    at             timestamptz NOT NULL,
    cancels_tasks  boolean NOT NULL,
    ends_sessions  boolean NOT NULL
);
"""


def upgrade() -> None:
    """Add table and index."""
    op.execute(STEPS)
    create_index("task_open_function", "task (function_id, task_id) WHERE finished_at IS NULL")
