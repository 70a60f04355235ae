"""LocalStack plugin with real processes: Lambda functions under awslambdaric, PostgreSQL for RDS, Valkey for
ElastiCache, tasks for ECS, and a token authorizer for API Gateway.

It runs inside LocalStack's process and environment, never in the project's. All its settings are the variables that
:mod:`farcall_localstack_plugin.settings` reads.
"""

__all__: list[str] = []
