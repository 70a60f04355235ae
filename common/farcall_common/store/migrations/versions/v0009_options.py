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
#: json and not jsonb, which would write 1e20 as an integer that no message can have.
BEFORE: Final = (
    "ALTER TABLE task ADD COLUMN IF NOT EXISTS options json",
    """
    CREATE OR REPLACE FUNCTION former_task_options(former task) RETURNS json LANGUAGE sql STABLE AS $$
        WITH specified AS (
            SELECT key, value, is_name AND CASE
                WHEN key = 'keep_output' THEN value::text = 'true'
                WHEN value::text ~ '^[1-9][0-9]{0,15}$' THEN value::text::numeric <= 9007199254740992
                ELSE false
            END AS is_option
            FROM (
                SELECT key, value, key IN (
                    'num_nodes', 'ranks_per_node', 'num_ranks', 'memory_bytes', 'max_output_bytes', 'keep_output'
                ) AS is_name
                FROM json_each(former.resource_specification)
            ) AS named
            WHERE NOT (is_name AND value::text IN ('null', 'false'))
        )
        SELECT json_object_agg(key, value) FROM (
            VALUES ('idempotent', to_json(former.idempotent)), ('max_attempts', to_json(former.max_attempts)),
                ('walltime_s', to_json(former.walltime_s)), ('container', to_json(former.container_id)),
                ('result_serializers', former.result_serializers),
                ('resource_specification', (SELECT json_object_agg(key, value) FROM specified WHERE NOT is_option))
            UNION ALL SELECT key, value FROM specified WHERE is_option
        ) AS option (key, value)
        WHERE value IS NOT NULL
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
