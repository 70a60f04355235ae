"""The options of a task in one column, ``options``; the columns that they had stay, and are not written any more.

Rows that there are get their options from the former columns, page by page, while the table is in use. A release before
this one that still runs adds rows without options: a trigger makes them. One that is put back meets new rows with the
former columns at their defaults, with which it starts no task twice.

The statements commit one by one, and each is harmless to repeat.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

#: Options that the resource specification names become fields. An invalid limit stays there: the endpoint refuses it.
BEFORE: Final = (
    "ALTER TABLE task ADD COLUMN IF NOT EXISTS options jsonb",
    """
    CREATE OR REPLACE FUNCTION former_task_options(former task) RETURNS jsonb LANGUAGE sql STABLE AS $$
        SELECT jsonb_strip_nulls(jsonb_build_object(
                'idempotent', former.idempotent, 'max_attempts', former.max_attempts,
                'walltime_s', former.walltime_s, 'container', former.container_id
            ))
            || jsonb_build_object(
                'result_serializers', former.result_serializers,
                'resource_specification', jsonb_object_agg(key, value) FILTER (WHERE NOT is_option)
            )
            || coalesce(jsonb_object_agg(key, value) FILTER (WHERE is_option), '{}')
        FROM (
            SELECT key, value, is_name AND (value = 'true' OR value::text ~ '^[1-9][0-9]{0,14}$')
                AND (value = 'true') = (key = 'keep_output') AS is_option
            FROM (
                SELECT key, value, key IN (
                    'num_nodes', 'ranks_per_node', 'num_ranks', 'memory_bytes', 'max_output_bytes', 'keep_output'
                ) AS is_name
                FROM jsonb_each(former.resource_specification::jsonb)
            ) AS named
            WHERE NOT (is_name AND value IN ('null', 'false'))
        ) AS said
    $$
    """,
    """
    CREATE OR REPLACE FUNCTION fill_task_options() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN NEW.options := former_task_options(NEW); RETURN NEW; END $$
    """,
    """
    CREATE OR REPLACE TRIGGER task_of_former_release BEFORE INSERT ON task
    FOR EACH ROW WHEN (NEW.options IS NULL) EXECUTE FUNCTION fill_task_options()
    """,
    """
    ALTER TABLE task ALTER COLUMN idempotent SET DEFAULT false, ALTER COLUMN max_attempts SET DEFAULT 1,
        ALTER COLUMN result_serializers SET DEFAULT '[]', ALTER COLUMN resource_specification SET DEFAULT '{}'
    """,
)
PAGE: Final = sa.text("""
    WITH page AS (
        SELECT task_id FROM task WHERE task_id > :last ORDER BY task_id LIMIT 10000
    ), filled AS (
        UPDATE task SET options = former_task_options(task) FROM page
        WHERE task.task_id = page.task_id AND task.options IS NULL
    )
    SELECT max(task_id) FROM page
""")
AFTER: Final = (
    "ALTER TABLE task DROP CONSTRAINT IF EXISTS task_options_check",
    "ALTER TABLE task ADD CONSTRAINT task_options_check CHECK (options IS NOT NULL) NOT VALID",
    "ALTER TABLE task VALIDATE CONSTRAINT task_options_check",
)


def upgrade() -> None:
    """Add the column and fill it."""
    with op.get_context().autocommit_block():
        for step in BEFORE:
            op.execute(step)
        last: str | None = ""
        while last is not None:
            last = op.get_bind().execute(PAGE, {"last": last}).scalar()
        for step in AFTER:
            op.execute(step)
