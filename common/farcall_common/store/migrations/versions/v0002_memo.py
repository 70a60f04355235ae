"""What makes two calls the same call, so that a result may be remembered.

The index holds ended tasks with a key and no others: it costs a task without one nothing. It asks for ``finished_at``
as ``task_open`` does, so that a move still updates its row in place (HOT).
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

MEMO = """
ALTER TABLE task ADD COLUMN memo_key text COLLATE "C";
CREATE INDEX task_memo ON task (owner_id, memo_key, finished_at DESC)
    WHERE memo_key IS NOT NULL AND finished_at IS NOT NULL;
"""


def upgrade() -> None:
    """Add the column and its index."""
    op.execute(MEMO)
