"""What happens to tasks after their end: dead letters, retries, and an account of who did what.

Dead letters that are listed have a table of their own: an index on ``task.state`` would end updates in place (HOT).
A check is replaced by a wider one before the old one goes, and validated while the table is in use; so the statements
commit one by one, and each is harmless to repeat.
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

STEPS = (
    'ALTER TABLE task ADD COLUMN IF NOT EXISTS retry_of text COLLATE "C"',
    "ALTER TABLE task DROP CONSTRAINT IF EXISTS task_ended_check",
    """
    ALTER TABLE task ADD CONSTRAINT task_ended_check CHECK (
        (finished_at IS NULL) = (state NOT IN ('success', 'failed', 'cancelled', 'lost', 'dead-lettered'))
    ) NOT VALID
    """,
    "ALTER TABLE task VALIDATE CONSTRAINT task_ended_check",
    "ALTER TABLE task DROP CONSTRAINT IF EXISTS task_check1",
    "ALTER TABLE task DROP CONSTRAINT IF EXISTS task_payload_check",
    # A dead letter that was discarded has no payload any more.
    """
    ALTER TABLE task ADD CONSTRAINT task_payload_check CHECK (
        (payload IS NULL) <> (payload_ref IS NULL)
        OR (state = 'dead-lettered' AND payload IS NULL AND payload_ref IS NULL)
    ) NOT VALID
    """,
    "ALTER TABLE task VALIDATE CONSTRAINT task_payload_check",
    "ALTER TABLE task DROP CONSTRAINT IF EXISTS task_check",
    """
    CREATE TABLE IF NOT EXISTS dead_letter (
        task_id      text COLLATE "C" PRIMARY KEY,
        owner_id     text COLLATE "C" NOT NULL,
        endpoint_id  text COLLATE "C" NOT NULL,
        submitted_at timestamptz NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS dead_letter_of_owner ON dead_letter (owner_id, submitted_at DESC)",
    "CREATE INDEX IF NOT EXISTS dead_letter_of_endpoint ON dead_letter (endpoint_id, submitted_at DESC)",
    """
    CREATE TABLE IF NOT EXISTS audit (
        audit_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at           timestamptz NOT NULL,
        identity_id  text COLLATE "C" NOT NULL,
        owner_id     text COLLATE "C" NOT NULL,
        action       text NOT NULL,
        object_id    text COLLATE "C" NOT NULL,
        detail       json NOT NULL DEFAULT '{}'
    )
    """,
    "CREATE INDEX IF NOT EXISTS audit_of_identity ON audit (identity_id, at, audit_id)",
    "CREATE INDEX IF NOT EXISTS audit_of_owner ON audit (owner_id, at, audit_id) WHERE owner_id <> identity_id",
    # In the order of their time as they are, so that this costs a write next to nothing; it finds what is too old.
    "CREATE INDEX IF NOT EXISTS audit_by_time ON audit USING brin (at)",
    """
    CREATE OR REPLACE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'the audit is append-only'; END $$
    """,
    """
    CREATE OR REPLACE TRIGGER audit_append_only BEFORE UPDATE ON audit
    EXECUTE FUNCTION audit_is_append_only()
    """,
)


def upgrade() -> None:
    """Add columns and tables, and let a task end as a dead letter."""
    with op.get_context().autocommit_block():
        for step in STEPS:
            op.execute(step)
