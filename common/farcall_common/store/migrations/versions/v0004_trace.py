"""The span below which a task runs. A column that may be null costs a task without one nothing."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.execute('ALTER TABLE task ADD COLUMN traceparent text COLLATE "C";')
