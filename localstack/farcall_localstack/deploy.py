"""Deploy a cloud assembly to any CloudFormation endpoint with boto3: no CDK command line, no bootstrap stack, no Node.

Stacks go in the order of their dependencies, so that one finds what another exports. A resource that the endpoint only
pretends to have made fails the deployment: LocalStack gives types it does not know the physical id ``unknown``.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from farcall_common.errors import FarcallError
from farcall_localstack.assembly import ACCOUNT, REGION, Stack, assets, in_order, stack_names, zipped

if TYPE_CHECKING:
    from mypy_boto3_cloudformation import CloudFormationClient
    from mypy_boto3_cloudformation.type_defs import ParameterTypeDef
    from mypy_boto3_s3 import S3Client

__all__ = ["DeployFailed", "Deployer"]

_CAPABILITIES: Final = ("CAPABILITY_IAM", "CAPABILITY_NAMED_IAM")
_BOOTSTRAP_VERSION: Final = "30"
_POLL_S: Final = 0.1
_WHOLE: Final = ("CREATE_COMPLETE", "UPDATE_COMPLETE")
_HALF_MADE: Final = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
_PLANNED: Final = "REVIEW_IN_PROGRESS"  # a change set would make it, and nobody has had it done


class DeployFailed(FarcallError):
    """A stack could not be deployed; the message has the reasons of the resources that failed."""

    code = "LOCALSTACK_DEPLOYMENT_FAILED"
    default_hint = "The logs of LocalStack and of what it runs say more. Is there room on the disk?"


class Deployer:
    """Deploys to the endpoint at ``endpoint_url``; no step may take longer than ``timeout_s`` seconds."""

    def __init__(self, endpoint_url: str, *, timeout_s: float = 300.0) -> None:
        self._endpoint_url = endpoint_url
        self._timeout_s = timeout_s
        self._cloudformation: CloudFormationClient = self.client("cloudformation")

    def client(self, service: str) -> Any:
        """A boto3 client of the endpoint."""
        return boto3.client(
            service,  # type: ignore[call-overload]  # a variable, where the stubs want literals
            endpoint_url=self._endpoint_url,
            region_name=REGION,
            aws_access_key_id=ACCOUNT,
            aws_secret_access_key="test",  # noqa: S106 - emulators do not check it
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}, read_timeout=self._timeout_s),
        )

    def deploy(self, assembly: Path, *, parameters: Mapping[str, str]) -> dict[str, str]:
        """Deploy every stack of ``assembly``; ``parameters`` go to the stacks that declare them.

        Returns the outputs of all stacks in one table.

        :raises DeployFailed: if a stack cannot be created or updated, or has a resource that does not exist.
        """
        outputs: dict[str, str] = {}
        with self._failing_as_ours():
            self._pretend_bootstrap()
            for stack in in_order(assembly):
                self._upload(assembly, stack)
                outputs |= self._apply(stack, parameters)
        return outputs

    def delete(self, assembly: Path) -> None:
        """Delete the stacks of ``assembly``, the ones that others depend on last.

        :raises DeployFailed: if one cannot be deleted.
        """
        self.delete_stacks(reversed(stack_names(assembly)))

    def delete_stacks(self, names: Iterable[str]) -> None:
        """Delete the stacks with these names, one after the other. One that is not there is fine.

        :raises DeployFailed: if one cannot be deleted.
        """
        with self._failing_as_ours():
            for name in names:
                self._delete(name)

    def _delete(self, name: str) -> None:
        self._cloudformation.delete_stack(StackName=name)
        self._require(name, None, "DELETE_COMPLETE")

    @contextlib.contextmanager
    def _failing_as_ours(self) -> Iterator[None]:
        """What the endpoint refuses, and that it has gone, are failures of the deployment."""
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise DeployFailed(f"{self._endpoint_url}: {error}") from error

    def _pretend_bootstrap(self) -> None:
        """Templates look up the version of the bootstrap stack, which we do without."""
        self.client("ssm").put_parameter(
            Name="/cdk-bootstrap/hnb659fds/version", Value=_BOOTSTRAP_VERSION, Type="String", Overwrite=True
        )

    def _upload(self, assembly: Path, stack: Stack) -> None:
        s3: S3Client = self.client("s3")
        for source, bucket, key in assets(assembly, stack):
            s3.create_bucket(Bucket=bucket)
            listed = s3.list_objects_v2(Bucket=bucket, Prefix=key)
            if listed["KeyCount"] == 0:
                with (source if source.is_file() else zipped(source)).open("rb") as body:
                    s3.put_object(Bucket=bucket, Key=key, Body=body)

    def _apply(self, stack: Stack, parameters: Mapping[str, str]) -> dict[str, str]:
        body = stack.template.read_text(encoding="utf-8")
        template = json.loads(body)
        declared = template.get("Parameters", {})
        given: list[ParameterTypeDef] = [
            {"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items() if key in declared
        ]
        change_set = self._cloudformation.create_change_set(
            StackName=stack.name,
            ChangeSetName=f"deploy-{uuid.uuid4().hex}",
            ChangeSetType="UPDATE" if self._can_be_updated(stack.name) else "CREATE",
            TemplateBody=body,
            Parameters=given,
            Capabilities=list(_CAPABILITIES),
        )["Id"]
        if self._has_changes(stack.name, change_set):
            self._cloudformation.execute_change_set(ChangeSetName=change_set)
        self._require(stack.name, *_WHOLE)
        self._require_real(stack.name, template)
        return self._outputs(stack.name, template)

    def _outputs(self, name: str, template: Mapping[str, Any]) -> dict[str, str]:
        """What a stack at rest tells. LocalStack says that it is at rest a moment before it tells.

        :raises DeployFailed: if it does not.
        """
        declared = {key for key, output in template.get("Outputs", {}).items() if "Condition" not in output}
        deadline = time.monotonic() + self._timeout_s
        while True:
            described = self._cloudformation.describe_stacks(StackName=name)["Stacks"][0]
            outputs = {output["OutputKey"]: output["OutputValue"] for output in described.get("Outputs", [])}
            if declared <= outputs.keys():
                return outputs
            if time.monotonic() > deadline:
                raise DeployFailed(f"{name} does not tell {', '.join(sorted(declared - outputs.keys()))}")
            time.sleep(_POLL_S)

    def _can_be_updated(self, name: str) -> bool:
        """Whether the stack is there. One that an interrupted deployment left is waited for, and goes if it failed."""
        status = self._at_rest(name, or_planned=True)
        if status in _HALF_MADE:
            self._delete(name)
        return status not in (None, "DELETE_COMPLETE", _PLANNED, *_HALF_MADE)

    def _has_changes(self, name: str, change_set: str) -> bool:
        """Whether there is anything to do. Change sets and not plain updates, as the CDK's command line does it:
        LocalStack forgets, when it deletes a stack, what a plain update had added.

        :raises DeployFailed: if the change set cannot be made.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            described = self._cloudformation.describe_change_set(ChangeSetName=change_set)
            reason = described.get("StatusReason", "")
            match described["Status"]:
                case "CREATE_COMPLETE":
                    return True
                case "FAILED" if "didn't contain changes" in reason or "No updates" in reason:
                    self._cloudformation.delete_change_set(ChangeSetName=change_set)
                    return False
                case "FAILED":
                    raise DeployFailed(f"{name}: {reason}")
            if time.monotonic() > deadline:
                raise DeployFailed(f"{name}: its change set is not ready after {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def _at_rest(self, name: str, *, or_planned: bool = False) -> str | None:
        """Wait until nothing happens to the stack any more; its status then, None if there is no such stack.
        ``or_planned`` takes one whose making nobody has begun for one at rest.

        :raises DeployFailed: if that takes too long.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                status = self._cloudformation.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"]
            except ClientError:
                return None
            if not status.endswith("_IN_PROGRESS") or (or_planned and status == _PLANNED):
                return status
            if time.monotonic() > deadline:
                raise DeployFailed(f"{name} is still {status} after {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def _require(self, name: str, *wanted: str | None) -> None:
        """:raises DeployFailed: if the stack comes to rest anywhere but there, or too late."""
        status = self._at_rest(name)
        if status not in wanted:
            raise DeployFailed(f"{name} is {status}: {self._reasons(name)}")

    def _reasons(self, name: str) -> str:
        events = self._cloudformation.describe_stack_events(StackName=name)["StackEvents"]
        return "; ".join(
            f"{event['LogicalResourceId']} ({event['ResourceType']}): {event.get('ResourceStatusReason', '')}"
            for event in reversed(events)
            if event.get("ResourceStatus", "").endswith("FAILED") and event["LogicalResourceId"] != name
        )

    def _require_real(self, name: str, template: Mapping[str, Any]) -> None:
        """:raises DeployFailed: if a resource of the template does not exist, or only by name."""
        described = self._cloudformation.describe_stack_resources(StackName=name)["StackResources"]
        physical = {resource["LogicalResourceId"]: resource.get("PhysicalResourceId") for resource in described}
        conditional = {key for key, resource in template["Resources"].items() if "Condition" in resource}
        missing = [
            f"{key} ({resource['Type']})"
            for key, resource in template["Resources"].items()
            if physical.get(key) in (None, "", "unknown") and key not in conditional
        ]
        if missing:
            raise DeployFailed(f"{name}: the endpoint does not know these resources: {', '.join(sorted(missing))}")
