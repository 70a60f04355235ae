"""Deploy a cloud assembly to any CloudFormation endpoint with boto3: no CDK command line, no bootstrap stack, no Node.

Stacks go in the order of their dependencies, so that one finds what another exports. A resource that the endpoint only
pretends to have made fails the deployment: LocalStack gives types it does not know the physical id ``unknown``.
"""

from __future__ import annotations

import dataclasses
import graphlib
import json
import tempfile
import time
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from farcall_common.errors import ConfigurationError

if TYPE_CHECKING:
    from mypy_boto3_cloudformation import CloudFormationClient
    from mypy_boto3_cloudformation.type_defs import ParameterTypeDef
    from mypy_boto3_s3 import S3Client

__all__ = ["ACCOUNT", "REGION", "DeployFailed", "Deployer", "stack_names"]

ACCOUNT: Final = "000000000000"
REGION: Final = "us-east-1"
_CAPABILITIES: Final = ("CAPABILITY_IAM", "CAPABILITY_NAMED_IAM")
_BOOTSTRAP_VERSION: Final = "30"
_POLL_S: Final = 0.1


class DeployFailed(Exception):
    """A stack could not be deployed; the message has the reasons of the resources that failed."""


@dataclasses.dataclass(frozen=True)
class _Stack:
    artifact: str
    name: str
    template: Path
    assets: Path
    dependencies: tuple[str, ...]


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
        self._pretend_bootstrap()
        outputs: dict[str, str] = {}
        for stack in _in_order(assembly):
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
        for name in names:
            self._cloudformation.delete_stack(StackName=name)
            self._wait(name, gone_is_done=True)

    def _pretend_bootstrap(self) -> None:
        """Templates look up the version of the bootstrap stack, which we do without."""
        self.client("ssm").put_parameter(
            Name="/cdk-bootstrap/hnb659fds/version", Value=_BOOTSTRAP_VERSION, Type="String", Overwrite=True
        )

    def _upload(self, assembly: Path, stack: _Stack) -> None:
        s3: S3Client = self.client("s3")
        for source, bucket, key in _assets(assembly, stack):
            s3.create_bucket(Bucket=bucket)
            listed = s3.list_objects_v2(Bucket=bucket, Prefix=key)
            if listed["KeyCount"] == 0:
                with (source if source.is_file() else _zipped(source)).open("rb") as body:
                    s3.put_object(Bucket=bucket, Key=key, Body=body)

    def _apply(self, stack: _Stack, parameters: Mapping[str, str]) -> dict[str, str]:
        body = stack.template.read_text(encoding="utf-8")
        template = json.loads(body)
        declared = template.get("Parameters", {})
        given: list[ParameterTypeDef] = [
            {"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items() if key in declared
        ]
        try:
            change_set = self._cloudformation.create_change_set(
                StackName=stack.name,
                ChangeSetName=f"deploy-{uuid.uuid4().hex}",
                ChangeSetType="UPDATE" if self._exists(stack.name) else "CREATE",
                TemplateBody=body,
                Parameters=given,
                Capabilities=list(_CAPABILITIES),
            )["Id"]
        except ClientError as error:
            raise DeployFailed(f"{stack.name}: {error}") from error
        if self._has_changes(stack.name, change_set):
            self._cloudformation.execute_change_set(ChangeSetName=change_set)
        self._wait(stack.name)
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

    def _exists(self, name: str) -> bool:
        try:
            found = self._cloudformation.describe_stacks(StackName=name)["Stacks"]
        except ClientError:
            return False
        return found[0]["StackStatus"] not in ("DELETE_COMPLETE", "REVIEW_IN_PROGRESS")

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

    def _wait(self, name: str, *, gone_is_done: bool = False) -> None:
        """Wait until the stack is at rest.

        :raises DeployFailed: if it came to rest anywhere but where it should, or too late.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                stack = self._cloudformation.describe_stacks(StackName=name)["Stacks"][0]
            except ClientError:
                if gone_is_done:
                    return
                raise
            status = stack["StackStatus"]
            if not status.endswith("_IN_PROGRESS"):
                break
            if time.monotonic() > deadline:
                raise DeployFailed(f"{name} is still {status} after {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)
        wanted = ("DELETE_COMPLETE",) if gone_is_done else ("CREATE_COMPLETE", "UPDATE_COMPLETE")
        if status not in wanted:
            raise DeployFailed(f"{name} is {status}: {self._reasons(name) or stack.get('StackStatusReason', '')}")

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


def stack_names(assembly: Path) -> tuple[str, ...]:
    """The names of the assembly's stacks in the order in which they are made."""
    return tuple(stack.name for stack in _in_order(assembly))


def _in_order(assembly: Path) -> Iterator[_Stack]:
    """The assembly's stacks, dependencies first."""
    artifacts = json.loads((assembly / "manifest.json").read_text(encoding="utf-8"))["artifacts"]
    stacks = {
        key: _Stack(
            artifact=key,
            name=artifact["properties"].get("stackName", key),
            template=assembly / artifact["properties"]["templateFile"],
            assets=assembly / f"{key}.assets.json",
            dependencies=tuple(artifact.get("dependencies", ())),
        )
        for key, artifact in artifacts.items()
        if artifact["type"] == "aws:cloudformation:stack"
    }
    graph = {key: [name for name in stack.dependencies if name in stacks] for key, stack in stacks.items()}
    for key in graphlib.TopologicalSorter(graph).static_order():
        yield stacks[key]


def _assets(assembly: Path, stack: _Stack) -> Iterator[tuple[Path, str, str]]:
    """What the stack's resources refer to: a file or directory, its bucket and its key. Templates go inline."""
    files = json.loads(stack.assets.read_text(encoding="utf-8"))["files"]
    for file in files.values():
        source = assembly / file["source"]["path"]
        if source != stack.template:
            destination = next(iter(file["destinations"].values()))
            yield source, _resolved(destination["bucketName"]), destination["objectKey"]


def _resolved(name: str) -> str:
    return name.replace("${AWS::AccountId}", ACCOUNT).replace("${AWS::Region}", REGION)


def _zipped(directory: Path) -> Path:
    """The directory as a zip file beside it, made once per assembly."""
    archive = directory.with_name(f"{directory.name}.zip")
    if not archive.exists():
        if not directory.is_dir():
            raise ConfigurationError(f"the assembly has no {directory}", hint=f"Remove {directory.parent}.")
        with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
            made = Path(temporary) / archive.name
            with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as zipped:
                for path in sorted(directory.rglob("*")):
                    if path.is_file():
                        zipped.write(path, path.relative_to(directory))
            made.replace(archive)
    return archive
