"""Ended tasks in the order in which they ended: what a purge looks for.

The index is on an expression so that nothing but the purge can use it. On the bare column the planner took it for the
newest remembered result of a call, and walked over the ends of everybody.

It is built while the table is in use: a deployment that has run for long has many tasks.
"""

from __future__ import annotations

from farcall_common.store.migrations import create_index

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ENDED = "task ((finished_at AT TIME ZONE 'UTC')) WHERE finished_at IS NOT NULL"


def upgrade() -> None:
    """Add the index."""
    create_index("task_ended", ENDED)
