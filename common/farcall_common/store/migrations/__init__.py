"""Migrations of the database, as Alembic revisions: only ever added to, a released revision does not change.

Indexes on large tables in use are built while others write, outside of any transaction. A build that was cut off leaves
an invalid index behind, which costs every write and answers no query: it is dropped and built again.
"""

from __future__ import annotations

from alembic import op

_IS_INVALID = """
    SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = to_regclass('{name}') AND NOT indisvalid)
"""


def create_index(name: str, definition: str) -> None:
    """Build the index ``name``; ``definition`` is what follows ``ON``. Harmless to repeat.

    What the revision did before is committed then: everything in such a revision must be harmless to repeat.
    """
    with op.get_context().autocommit_block():
        if op.get_bind().exec_driver_sql(_IS_INVALID.format(name=name)).scalar():
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
        op.execute(f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {definition}")
