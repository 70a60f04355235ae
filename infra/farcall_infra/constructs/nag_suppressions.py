"""Suppression of cdk-nag findings, each with a reason, next to the construct that it concerns."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import IConstruct


def suppress(construct: IConstruct, rule: str, reason: str) -> None:
    """Suppress the finding ``rule`` of the pack AwsSolutions (``VPC7``, ``IAM5[Resource::*]``) on ``construct`` and its
    children. The reason is for reviewers of a deployment's security."""
    cdk.Validations.of(construct).acknowledge(
        cdk.Acknowledgment(id=f"AwsSolutions::AwsSolutions-{rule}", reason=reason)
    )
