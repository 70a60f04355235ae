"""The offline tier: the synthesised CDK app on LocalStack in host mode, with real data stores."""

from farcall_localstack.deploy import DeployFailed
from farcall_localstack.tier import LocalStackTier, Tier

__all__ = ["DeployFailed", "LocalStackTier", "Tier"]
