"""Authentication settings of the authorizer function.

On AWS the identity provider is an OpenID Connect issuer, if the profile names one, otherwise Globus Auth, with three
parameters of the stack; the authorizer reads the client's secret from Secrets Manager. The offline tier has fixed
tokens, also from a parameter. The profile names those who may use the deployment.
"""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from farcall_infra.deployment import Deployment
from farcall_infra.profiles import EVERYONE


class Identity(Construct):
    """The environment of the authorizer, and its permission to read the secret of the Globus client."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment) -> None:
        super().__init__(scope, construct_id)
        stack = cdk.Stack.of(self)
        self._secret_arn = ""
        source = deployment.profile.identity
        if deployment.target.dev_tokens:
            tokens = cdk.CfnParameter(
                stack, "DevTokens", no_echo=True, description="JSON object of token to identity_id and username"
            )
            # Whoever has one of the tokens may use the tier, unless the profile names others.
            everyone = {"FARCALL_ALLOWED_IDENTITIES": EVERYONE} if source.allows_nobody else {}
            self._environment = {
                "FARCALL_AUTH_PROVIDER": "dev",
                "FARCALL_DEV_TOKENS": tokens.value_as_string,
                **source.environment(),
                **everyone,
            }
            return
        if source.oidc_issuer:
            self._environment = {
                "FARCALL_AUTH_PROVIDER": "oidc",
                "FARCALL_OIDC_ISSUER": source.oidc_issuer,
                "FARCALL_OIDC_AUDIENCE": source.oidc_audience,
                "FARCALL_OIDC_CLIENTS": ",".join(source.oidc_clients),
                "FARCALL_OIDC_SCOPE": source.oidc_scope,
                **source.environment(),
            }
            return
        client_id = cdk.CfnParameter(stack, "GlobusClientId", description="Client id of this service in Globus Auth")
        scope_name = cdk.CfnParameter(stack, "GlobusScope", description="Scope that callers' tokens must carry")
        secret = cdk.CfnParameter(
            stack,
            "GlobusCredentialsArn",
            description="Secret in Secrets Manager: a JSON object whose client_secret is the Globus client's secret",
        )
        self._secret_arn = secret.value_as_string
        self._environment = {
            "FARCALL_AUTH_PROVIDER": "globus",
            "FARCALL_GLOBUS_CLIENT_ID": client_id.value_as_string,
            "FARCALL_GLOBUS_SCOPE": scope_name.value_as_string,
            "FARCALL_GLOBUS_SECRET_ARN": self._secret_arn,
            **source.environment(),
        }

    def environment(self) -> dict[str, str]:
        """The authorizer's environment variables."""
        return dict(self._environment)

    def grant(self, role: iam.IRole) -> None:
        """Let ``role`` read the secret, if there is one."""
        if self._secret_arn:
            role.add_to_principal_policy(
                iam.PolicyStatement(actions=["secretsmanager:GetSecretValue"], resources=[self._secret_arn])
            )
