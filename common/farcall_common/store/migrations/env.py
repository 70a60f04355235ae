"""Alembic's entry: runs the revisions on the connection that :mod:`farcall_common.store.migrate` opened.

Each revision is a transaction of its own. One that must run outside of one says so with Alembic's
``op.get_context().autocommit_block()``; :func:`farcall_common.store.migrations.create_index` does for indexes.
"""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
