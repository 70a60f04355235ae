"""AWS regions: which of them have the resource types that only some have."""

from __future__ import annotations

from typing import Final

BUDGET_TYPE: Final = "AWS::Budgets::Budget"

#: Regions whose CloudFormation has :data:`BUDGET_TYPE`. Elsewhere a template with a budget is refused, even if a
#: condition leaves the budget out. A test compares the list with the schemas that AWS publishes.
BUDGET_REGIONS: Final = frozenset(
    {
        "ap-northeast-1",
        "ap-northeast-2",
        "ap-south-1",
        "ap-southeast-1",
        "ap-southeast-2",
        "ca-central-1",
        "eu-central-1",
        "eu-west-1",
        "eu-west-2",
        "eu-west-3",
        "sa-east-1",
        "us-east-1",
        "us-east-2",
        "us-west-1",
        "us-west-2",
    }
)
