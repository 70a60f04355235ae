"""Where users come from: the authorizer function's settings.

On AWS that is an OpenID Connect issuer, if the profile names one, and else Globus Auth, by three parameters of the
stack; the client's secret stays in Secrets Manager. The offline tier has fixed tokens, given by a parameter too.
"""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.deployment import Deployment

__all__ = ["Identity"]


class Identity(Construct):
    """The environment of the authorizer."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment) -> None:
        super().__init__(scope, construct_id)
        stack = cdk.Stack.of(self)
        if deployment.target.dev_tokens:
            tokens = cdk.CfnParameter(
                stack, "DevTokens", no_echo=True, description="JSON object of token to identity_id and username"
            )
            self._environment = {"FARCALL_AUTH_PROVIDER": "dev", "FARCALL_DEV_TOKENS": tokens.value_as_string}
            return
        source = deployment.profile.identity
        if source.oidc_issuer:
            self._environment = {
                "FARCALL_AUTH_PROVIDER": "oidc",
                "FARCALL_OIDC_ISSUER": source.oidc_issuer,
                "FARCALL_OIDC_AUDIENCE": source.oidc_audience,
            }
            return
        client_id = cdk.CfnParameter(stack, "GlobusClientId", description="Client id of this service in Globus Auth")
        scope_name = cdk.CfnParameter(stack, "GlobusScope", description="Scope that callers' tokens must carry")
        secret = cdk.CfnParameter(
            stack,
            "GlobusCredentialsArn",
            description="Secret in Secrets Manager: a JSON object whose client_secret is the Globus client's secret",
        )
        self._environment = {
            "FARCALL_AUTH_PROVIDER": "globus",
            "FARCALL_GLOBUS_CLIENT_ID": client_id.value_as_string,
            "FARCALL_GLOBUS_SCOPE": scope_name.value_as_string,
            "FARCALL_GLOBUS_CLIENT_SECRET": cdk.Fn.join(
                "", ["{{resolve:secretsmanager:", secret.value_as_string, ":SecretString:client_secret}}"]
            ),
        }

    def environment(self) -> dict[str, str]:
        """The authorizer's environment variables."""
        return dict(self._environment)
