"""Constant work for the reconciler: open tasks in the order in which they were committed, and one reconciler at a time.

``added_in`` is the transaction that added a task. The server gives these numbers, so that no clock decides what the
reconciler has checked already. It never changes, so that a transition still updates its row in place (HOT). Tasks from
before this revision have 0: the first round checks them.
"""

from __future__ import annotations

from alembic import op

from farcall_common.store.migrations import create_index

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

STEPS = """
ALTER TABLE task ADD COLUMN IF NOT EXISTS added_in xid8 NOT NULL DEFAULT '0';
ALTER TABLE task ALTER COLUMN added_in SET DEFAULT pg_current_xact_id();

CREATE TABLE IF NOT EXISTS turn (
    name   text COLLATE "C" PRIMARY KEY,
    until  timestamptz NOT NULL
);
"""


def upgrade() -> None:
    """Add column, index and table."""
    op.execute(STEPS)
    create_index("task_open_added", "task (added_in, task_id) WHERE finished_at IS NULL")
