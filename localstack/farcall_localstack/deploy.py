"""Deployment of a cloud assembly to any CloudFormation endpoint with boto3: no CDK command line, no bootstrap, no Node.

Stacks are deployed in the order of their dependencies, because one imports the exports of another. The deployment fails
for a resource that the endpoint did not really create: LocalStack gives unknown types the physical id ``unknown``.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
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

_CAPABILITIES: Final = ("CAPABILITY_IAM", "CAPABILITY_NAMED_IAM")
_BOOTSTRAP_VERSION: Final = "30"
_POLL_S: Final = 0.1
_COMPLETE: Final = ("CREATE_COMPLETE", "UPDATE_COMPLETE")
_UNFINISHED: Final = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED")
_PLANNED: Final = "REVIEW_IN_PROGRESS"  # its first change set was never executed

#: Called with a line of text at each step of something that takes a while.
Progress = Callable[[str], None]


def no_progress(_line: str) -> None:
    """A :data:`Progress` that shows nothing."""


class DeployFailed(FarcallError):
    """A stack could not be deployed; the message has the reason of each failed resource."""

    code = "LOCALSTACK_DEPLOYMENT_FAILED"
    default_hint = "See the logs of LocalStack and of its processes. Is the disk full?"


class Deployer:
    """Deploys to the endpoint at ``endpoint_url``; no step may take longer than ``timeout_s`` seconds. ``progress`` is
    called before each stack."""

    def __init__(self, endpoint_url: str, *, timeout_s: float = 300.0, progress: Progress = no_progress) -> None:
        self._endpoint_url = endpoint_url
        self._timeout_s = timeout_s
        self._progress = progress
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
                self._progress(f"deploying {stack.name}")
                self._upload(assembly, stack)
                outputs |= self._apply(stack, parameters)
        return outputs

    def delete(self, assembly: Path) -> None:
        """Delete the stacks of ``assembly``, dependents first.

        :raises DeployFailed: if one cannot be deleted.
        """
        self.delete_stacks(reversed(stack_names(assembly)))

    def delete_stacks(self, names: Iterable[str]) -> None:
        """Delete the stacks with these names, one after the other. A missing stack is no error.

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
        """Convert the endpoint's errors to ours."""
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise DeployFailed(f"{self._endpoint_url}: {error}") from error

    def _pretend_bootstrap(self) -> None:
        """Set the version of the bootstrap stack, which the templates read although there is none."""
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
        self._require(stack.name, *_COMPLETE)
        self._require_real(stack.name, template)
        return self._outputs(stack.name, template)

    def _outputs(self, name: str, template: Mapping[str, Any]) -> dict[str, str]:
        """The outputs of a stable stack. LocalStack reports the final status a moment before the outputs.

        :raises DeployFailed: if outputs are missing after the time limit.
        """
        declared = {key for key, output in template.get("Outputs", {}).items() if "Condition" not in output}
        deadline = time.monotonic() + self._timeout_s
        while True:
            described = self._cloudformation.describe_stacks(StackName=name)["Stacks"][0]
            outputs = {output["OutputKey"]: output["OutputValue"] for output in described.get("Outputs", [])}
            if declared <= outputs.keys():
                return outputs
            if time.monotonic() > deadline:
                raise DeployFailed(f"{name} lacks the outputs {', '.join(sorted(declared - outputs.keys()))}")
            time.sleep(_POLL_S)

    def _can_be_updated(self, name: str) -> bool:
        """Whether the stack exists. Waits for an interrupted deployment, and deletes the stack if that failed."""
        status = self._stable_status(name, or_planned=True)
        if status in _UNFINISHED:
            self._delete(name)
        return status not in (None, "DELETE_COMPLETE", _PLANNED, *_UNFINISHED)

    def _has_changes(self, name: str, change_set: str) -> bool:
        """Whether the change set has changes. Change sets are used instead of plain updates, as in the CDK's command
        line: when LocalStack deletes a stack, it leaves resources that a plain update had added.

        :raises DeployFailed: if the change set cannot be created.
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

    def _stable_status(self, name: str, *, or_planned: bool = False) -> str | None:
        """Wait until the stack does not change any more; returns its status, None if there is no such stack. With
        ``or_planned`` a stack whose first change set was never executed counts as stable.

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
        """:raises DeployFailed: if the stack gets another status than ``wanted``, or too late."""
        status = self._stable_status(name)
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
        """:raises DeployFailed: if a resource of the template was not really created."""
        described = self._cloudformation.describe_stack_resources(StackName=name)["StackResources"]
        physical = {resource["LogicalResourceId"]: resource.get("PhysicalResourceId") for resource in described}
        conditional = {key for key, resource in template["Resources"].items() if "Condition" in resource}
        missing = [
            f"{key} ({resource['Type']})"
            for key, resource in template["Resources"].items()
            if physical.get(key) in (None, "", "unknown") and key not in conditional
        ]
        if missing:
            raise DeployFailed(f"{name}: the endpoint does not support these resources: {', '.join(sorted(missing))}")
