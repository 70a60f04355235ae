"""Errors of ``farcall cloud``.

::

    FarcallError
    ├── CredentialsMissing    AWS does not accept the credentials
    ├── AwsRefused            the credentials lack a permission
    ├── ToolMissing           a program is missing, or has an unsuitable version
    ├── NotReady              the doctor found a problem that would make a deployment fail
    ├── DeploymentUnknown     there is no deployment of that name in this account and region
    ├── DeploymentBusy        CloudFormation is changing it: another command runs, or one was interrupted
    ├── DeploymentStuck       CloudFormation stopped half-way and needs a manual step
    └── DeploymentFailed      CloudFormation could not finish it (DeploymentInterrupted: the command was interrupted)
"""

from __future__ import annotations

from farcall_common.errors import ConfigurationError, Conflict, FarcallError, Forbidden, NotFound, Unauthenticated


class CredentialsMissing(Unauthenticated):
    code = "AWS_CREDENTIALS_MISSING"
    default_hint = (
        "Sign in with `aws sso login`, `aws login` or `aws configure`, and choose the account with AWS_PROFILE."
        " If you are signed in, the account may not have enabled this region."
    )


class AwsRefused(Forbidden):
    code = "AWS_REFUSED"
    default_hint = "Deploying needs administrator permissions in the account: request them, or change AWS_PROFILE."


class ToolMissing(ConfigurationError):
    code = "TOOL_MISSING"


class NotReady(ConfigurationError):
    code = "ACCOUNT_NOT_READY"
    default_hint = "`farcall cloud doctor` lists the problems and how to fix them."


class DeploymentUnknown(NotFound):
    code = "DEPLOYMENT_UNKNOWN"
    default_hint = "Check --name, --region and AWS_PROFILE."


class DeploymentBusy(Conflict):
    code = "DEPLOYMENT_BUSY"


class DeploymentStuck(Conflict):
    code = "DEPLOYMENT_STUCK"


class DeploymentFailed(FarcallError):
    code = "DEPLOYMENT_FAILED"


class DeploymentInterrupted(DeploymentFailed):
    code = "DEPLOYMENT_INTERRUPTED"
