"""Who hears of a deployment: the topic of alarms, and the budget that looks at the account's real bill."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from farcall_infra.profiles import Budget

__all__ = ["News"]

_SHARES = (50, 80, 100)  # percent of the budget


class News(Construct):
    """``topic`` is where alarms and the budget go; the profile's ``emails`` hear of it once they have confirmed.

    The budget is about the whole account: a filter by tag shows nothing, and would never warn, until somebody has
    activated the tag in the billing console. With ``budget.monthly_usd`` 0 there is none.
    """

    def __init__(self, scope: Construct, construct_id: str, *, deployment: str, budget: Budget) -> None:
        super().__init__(scope, construct_id)
        topic = sns.Topic(self, "Topic", display_name=f"Farcall {deployment}", enforce_ssl=True)
        self.topic = topic
        for email in budget.emails:
            topic.add_subscription(subscriptions.EmailSubscription(email))
        for service in ("budgets.amazonaws.com", "cloudwatch.amazonaws.com"):
            topic.add_to_resource_policy(
                iam.PolicyStatement(
                    actions=["sns:Publish"], principals=[iam.ServicePrincipal(service)], resources=[topic.topic_arn]
                )
            )
        if budget.monthly_usd:
            self._add_budget(deployment, budget.monthly_usd)

    def _add_budget(self, deployment: str, monthly_usd: float) -> None:
        topic = self.topic
        subscriber = budgets.CfnBudget.SubscriberProperty(address=topic.topic_arn, subscription_type="SNS")
        # Other warnings need another name: CloudFormation makes a new budget for them, and before the old one goes.
        kinds = [("ACTUAL", share) for share in _SHARES] + [("FORECASTED", _SHARES[-1])]
        made = budgets.CfnBudget(
            self,
            "Budget",
            budget=budgets.CfnBudget.BudgetDataProperty(
                budget_name=f"{deployment}-{cdk.Aws.REGION}-monthly",  # budgets are global in an account
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=budgets.CfnBudget.SpendProperty(amount=monthly_usd, unit="USD"),
            ),
            notifications_with_subscribers=[
                budgets.CfnBudget.NotificationWithSubscribersProperty(
                    notification=budgets.CfnBudget.NotificationProperty(
                        notification_type=kind,
                        comparison_operator="GREATER_THAN",
                        threshold=share,
                        threshold_type="PERCENTAGE",
                    ),
                    subscribers=[subscriber],
                )
                for kind, share in kinds
            ],
        )
        made.node.add_dependency(topic)  # a budget tries its topic at once, so the policy has to be there
