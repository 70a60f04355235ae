"""Actions of Globus Flows."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

STEPS = """
CREATE TABLE IF NOT EXISTS flow_action (
    action_id        text COLLATE "C" PRIMARY KEY,
    owner_id         text NOT NULL,
    request_id       text NOT NULL,
    request_hash     text NOT NULL,
    tasks            integer NOT NULL,
    created_at       timestamptz NOT NULL,
    release_after_s  double precision NOT NULL,
    label            text,
    monitor_by       text[] NOT NULL,
    manage_by        text[] NOT NULL,
    deadline         timestamptz,
    UNIQUE (owner_id, request_id)
);
CREATE INDEX IF NOT EXISTS flow_action_owner ON flow_action (owner_id, action_id);
CREATE INDEX IF NOT EXISTS flow_action_created ON flow_action (created_at);
CREATE INDEX IF NOT EXISTS flow_action_deadline ON flow_action (deadline) WHERE deadline IS NOT NULL;
"""


def upgrade() -> None:
    """Add the table."""
    op.execute(STEPS)
