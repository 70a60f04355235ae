"""Versions of functions that tasks name, aliases, containers by name, and task groups as a list of their own."""

from __future__ import annotations

from alembic import op

from farcall_common.store.migrations import create_index

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

CATALOGUE = """
ALTER TABLE task ADD COLUMN IF NOT EXISTS function_version integer NOT NULL DEFAULT 1;

CREATE TABLE IF NOT EXISTS function_alias (
    owner_id     text NOT NULL,
    name         text COLLATE "C" NOT NULL,
    function_id  text COLLATE "C" NOT NULL REFERENCES function ON DELETE CASCADE,
    version      integer,
    PRIMARY KEY (owner_id, name)
);
CREATE INDEX IF NOT EXISTS function_alias_of_function ON function_alias (function_id);

ALTER TABLE container ADD COLUMN IF NOT EXISTS description text;
CREATE UNIQUE INDEX IF NOT EXISTS container_by_name ON container (owner_id, name);
"""


def upgrade() -> None:
    """Add columns, table and indexes."""
    op.execute(CATALOGUE)
    create_index("task_group_of_owner", "task_group (owner_id, created_at DESC, task_group_id DESC)")
