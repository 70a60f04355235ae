"""Findings of cdk-nag that we know and accept, each with its reason, next to the construct that it is about."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import IConstruct

__all__ = ["accept"]


def accept(construct: IConstruct, rule: str, reason: str) -> None:
    """Accept the finding ``rule`` of the pack AwsSolutions (``VPC7``, ``IAM5[Resource::*]``) on ``construct`` and
    everything below it. The reason is for whoever reviews the security of a deployment."""
    cdk.Validations.of(construct).acknowledge(
        cdk.Acknowledgment(id=f"AwsSolutions::AwsSolutions-{rule}", reason=reason)
    )
