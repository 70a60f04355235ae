"""What can be wrong between this machine and an AWS account.

::

    FarcallError
    ├── CredentialsMissing    AWS does not know who is calling
    ├── AwsRefused            it does, and says no
    ├── ToolMissing           a program is not here, or in a version that cannot work
    ├── NotReady              the doctor found something that a deployment would fail on
    ├── DeploymentUnknown     there is no deployment of that name in this account and region
    └── DeploymentFailed      CloudFormation could not do it
"""

from __future__ import annotations

from farcall_common.errors import FarcallError, Fault, NotFound, Unauthenticated

__all__ = [
    "AwsRefused",
    "CredentialsMissing",
    "DeploymentFailed",
    "DeploymentUnknown",
    "NotReady",
    "ToolMissing",
]


class CredentialsMissing(Unauthenticated):
    code = "AWS_CREDENTIALS_MISSING"
    default_hint = "Sign in with `aws sso login` or `aws configure`, and choose the account with AWS_PROFILE."


class AwsRefused(FarcallError):
    code = "AWS_REFUSED"
    fault = Fault.CALLER
    default_hint = "Deploying needs the rights of an administrator of the account; ask for them, or change AWS_PROFILE."


class ToolMissing(FarcallError):
    code = "TOOL_MISSING"
    fault = Fault.CALLER


class NotReady(FarcallError):
    code = "ACCOUNT_NOT_READY"
    fault = Fault.CALLER
    default_hint = "`farcall cloud doctor` lists what is missing and how to mend it."


class DeploymentUnknown(NotFound):
    code = "DEPLOYMENT_UNKNOWN"
    default_hint = "Check --name, --region and AWS_PROFILE."


class DeploymentFailed(FarcallError):
    code = "DEPLOYMENT_FAILED"
