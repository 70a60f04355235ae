"""Real processes behind LocalStack: Lambdas under awslambdaric, PostgreSQL behind RDS, Valkey behind ElastiCache, tasks
behind ECS, and a token authorizer in front of API Gateway's integrations.

Runs inside LocalStack's process and its own environment, never in the project's; it is told everything by the variables
that :mod:`farcall_localstack_plugin.settings` reads.
"""

__all__: list[str] = []
