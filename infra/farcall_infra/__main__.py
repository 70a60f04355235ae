"""What ``cdk.json`` runs."""

from farcall_infra.app import synthesize

synthesize()
