"""Notifications: the SNS topic of alarms, and the budget for the account's real bill."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from farcall_infra.profiles import Budget

_SHARES = (50, 80, 100)  # percent of the budget


class Notifications(Construct):
    """``topic`` receives alarms and the budget's warnings; the profile's ``emails`` get them after they have confirmed.

    The budget covers the whole account: a filter by tag would show nothing, and never warn, until an administrator
    activates the tag in the billing console. With ``budget.monthly_usd`` 0 there is no budget.
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
        # Other warnings need another name: CloudFormation creates a new budget for them before it deletes the old one.
        kinds = [("ACTUAL", share) for share in _SHARES] + [("FORECASTED", _SHARES[-1])]
        created = budgets.CfnBudget(
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
        created.node.add_dependency(topic)  # a new budget publishes at once, so the topic's policy must exist
