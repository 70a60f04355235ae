"""What can be wrong between this machine and an AWS account.

::

    FarcallError
    ├── CredentialsMissing    AWS does not know who is calling
    ├── AwsRefused            it does, and says no
    ├── ToolMissing           a program is not here, or in a version that cannot work
    ├── NotReady              the doctor found something that a deployment would fail on
    ├── DeploymentUnknown     there is no deployment of that name in this account and region
    ├── DeploymentBusy        CloudFormation is still changing it, for somebody else or since an interruption
    ├── DeploymentStuck       CloudFormation gave up half-way, and wants to be told how to go on
    └── DeploymentFailed      CloudFormation could not do it (DeploymentInterrupted: nobody waited for it)
"""

from __future__ import annotations

from farcall_common.errors import ConfigurationError, Conflict, FarcallError, Forbidden, NotFound, Unauthenticated

__all__ = [
    "AwsRefused",
    "CredentialsMissing",
    "DeploymentBusy",
    "DeploymentFailed",
    "DeploymentInterrupted",
    "DeploymentStuck",
    "DeploymentUnknown",
    "NotReady",
    "ToolMissing",
]


class CredentialsMissing(Unauthenticated):
    code = "AWS_CREDENTIALS_MISSING"
    default_hint = (
        "Sign in with `aws sso login`, `aws login` or `aws configure`, and choose the account with AWS_PROFILE."
        " If you are signed in, the account may not have enabled this region."
    )


class AwsRefused(Forbidden):
    code = "AWS_REFUSED"
    default_hint = "Deploying needs the rights of an administrator of the account; ask for them, or change AWS_PROFILE."


class ToolMissing(ConfigurationError):
    code = "TOOL_MISSING"


class NotReady(ConfigurationError):
    code = "ACCOUNT_NOT_READY"
    default_hint = "`farcall cloud doctor` lists what is missing and how to mend it."


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
