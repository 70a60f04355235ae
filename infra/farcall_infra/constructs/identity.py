"""Authentication settings of the authorizer function, and the keys that sign callers on their way to the API.

Credentials of endpoints have the form of a JWT, so that both expressions for tokens accept them.

On AWS the identity provider is an OpenID Connect issuer, if the profile names one, otherwise Globus Auth, with three
parameters of the stack; the authorizer reads the client's secret from Secrets Manager. The offline tier has fixed
tokens, also from a parameter. The profile names those who may use the deployment.
"""

from __future__ import annotations

from typing import Final

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.deployment import NO_GLOBUS_SECRET, Deployment
from farcall_infra.profiles import EVERYONE

#: Tokens of OAuth 2.0 (RFC 6750, section 2.1), and JWTs.
_TOKEN: Final = r"[A-Za-z0-9._~+/=-]{16,8192}"  # noqa: S105 - an expression
# Lengths of the parameters of Globus Auth. The description of a version has all three, and takes 256 characters.
_CLIENT_LENGTH: Final = 40
_SCOPE_LENGTH: Final = 96
_SECRET_LENGTH: Final = 118
_JWT: Final = r"[A-Za-z0-9_-]{8,1024}\.[A-Za-z0-9_-]{8,6144}\.[A-Za-z0-9_-]{8,1024}"


class CallerKey(Construct):
    """The key with which the authorizer signs callers, or the canary itself. The API verifies it: who may invoke its
    function without this key names no caller. With the authorizer's key, the API also signs credentials of endpoints,
    which the authorizer verifies."""

    _LENGTH = 64  # characters

    def __init__(self, scope: Construct, construct_id: str, *, signer: str) -> None:
        super().__init__(scope, construct_id)
        self._secret = secretsmanager.Secret(
            self,
            "Secret",
            description=f"Signs callers of the API's function, for the {signer}",
            generate_secret_string=secretsmanager.SecretStringGenerator(
                secret_string_template="{}",  # noqa: S106 - the key is generated into this object
                generate_string_key="key",
                password_length=self._LENGTH,
                exclude_punctuation=True,
            ),
            removal_policy=cdk.RemovalPolicy.DESTROY,  # without the deployment, what it signs is worthless
        )
        suppress(
            self._secret,
            "SMG4",
            "With a new key, callers are refused until the gateway has forgotten those that the old one signed, and "
            "endpoints need their owners' logins to get new credentials, so it is replaced only when it may have "
            "leaked; docs/operations/keys.md says how.",
        )

    def environment(self, name: str = "FARCALL_CALLER_SECRET_ARN") -> dict[str, str]:
        """The variable with the ARN of the key's secret."""
        return {name: self._secret.secret_arn}

    def grant(self, role: iam.IRole) -> None:
        """Let ``role`` read the key."""
        _grant_value(role, self._secret.secret_arn)


def _grant_value(role: iam.IRole, secret_arn: str) -> None:
    role.add_to_principal_policy(iam.PolicyStatement(actions=["secretsmanager:GetSecretValue"], resources=[secret_arn]))


class Identity(Construct):
    """The environment of the authorizer, and its permission to read the secret of the Globus client. ``token_pattern``
    is an expression for the provider's tokens. ``parameters`` is the text of the stack's parameters in the
    environment."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment) -> None:
        super().__init__(scope, construct_id)
        stack = cdk.Stack.of(self)
        self._secret_arn = ""
        self.token_pattern = _TOKEN
        self.parameters = ""
        source = deployment.profile.identity
        if deployment.target.dev_tokens:
            tokens = cdk.CfnParameter(
                stack, "DevTokens", no_echo=True, description="JSON object of token to identity_id and username"
            )
            # All who have one of the tokens may use the tier, unless the profile names others.
            everyone = {"FARCALL_ALLOWED_IDENTITIES": EVERYONE} if source.allows_no_one else {}
            self.parameters = tokens.value_as_string
            self._environment = {
                "FARCALL_AUTH_PROVIDER": "dev",
                "FARCALL_DEV_TOKENS": tokens.value_as_string,
                **source.environment(),
                **everyone,
            }
            return
        if source.oidc_issuer:
            self.token_pattern = _JWT
            self._environment = {
                "FARCALL_AUTH_PROVIDER": "oidc",
                "FARCALL_OIDC_ISSUER": source.oidc_issuer,
                "FARCALL_OIDC_AUDIENCE": source.oidc_audience,
                "FARCALL_OIDC_CLIENTS": ",".join(source.oidc_clients),
                "FARCALL_OIDC_SCOPE": source.oidc_scope,
                "FARCALL_OIDC_GROUPS_CLAIM": source.oidc_groups_claim,
                **source.environment(),
            }
            return
        # With the defaults, a deployment can be created before the client, and admits no one.
        client_id = cdk.CfnParameter(
            stack,
            "GlobusClientId",
            default="",
            max_length=_CLIENT_LENGTH,
            description="Client id of this service in Globus Auth",
        )
        scope_name = cdk.CfnParameter(
            stack,
            "GlobusScope",
            default="",
            max_length=_SCOPE_LENGTH,
            description="Scope that callers' tokens must carry",
        )
        secret = cdk.CfnParameter(
            stack,
            "GlobusCredentialsArn",
            default=NO_GLOBUS_SECRET,
            allowed_pattern=rf"arn:[^:]+:secretsmanager:[^:]+:\d*:secret:[^:]{{1,{_SECRET_LENGTH}}}",
            description="Secret in Secrets Manager: a JSON object whose client_secret is the Globus client's secret",
        )
        self._secret_arn = secret.value_as_string
        secret_name = cdk.Fn.select(6, cdk.Fn.split(":", self._secret_arn))
        self.parameters = " ".join((client_id.value_as_string, scope_name.value_as_string, secret_name))
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

    def api_environment(self) -> dict[str, str]:
        """The API's environment variable with the scope of the deployment, which Globus Flows asks for; none without
        Globus Auth."""
        return {name: value for name, value in self._environment.items() if name == "FARCALL_GLOBUS_SCOPE"}

    def grant(self, role: iam.IRole) -> None:
        """Let ``role`` read the secret, if there is one."""
        if self._secret_arn:
            _grant_value(role, self._secret_arn)
