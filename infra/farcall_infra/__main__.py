"""Entry point of the CDK app: ``cdk.json`` runs this module."""

from farcall_infra.app import synthesize

synthesize()
