"""The synthesised CDK app on LocalStack in host mode, with real engines behind it."""

from farcall_localstack.deploy import DeployFailed
from farcall_localstack.tier import LocalStackTier, Tier

__all__ = ["DeployFailed", "LocalStackTier", "Tier"]
