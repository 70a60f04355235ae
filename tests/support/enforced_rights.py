"""IAM on moto: requests are checked against the policies of synthesised templates, and the rights that they use are
recorded.

moto evaluates policies, but knows the resource of a request for S3, IAM, STS and SQS only, and no values of conditions.
Here it learns the resources of the other services that Farcall calls, and the rights that have another name than their
operation. Conditions are left out, except of a denial, which then always holds. What AWS itself does with a role (logs,
network interfaces, the endpoint of a cache) is not checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import boto3
import httpx
from moto.core.authorization import ActionAuthenticatorMixin
from moto.core.responses import BaseResponse
from moto.iam.access_control import IAMRequestBase
from moto.s3.models import s3_backends

from tests.contract.templates import Resource, Templates

ACCOUNT = "123456789012"
REGION = "us-east-1"
_ANYONE = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*", "Action": "sts:AssumeRole"}]}
)
#: Operations whose right has another name.
_RIGHTS = {
    "lambda:Invoke": "lambda:InvokeFunction",
    "monitoring:DescribeAlarms": "cloudwatch:DescribeAlarms",
    "monitoring:GetMetricData": "cloudwatch:GetMetricData",
    "s3:HeadBucket": "s3:ListBucket",
    "tagging:GetResources": "tag:GetResources",
}
_PRESIGNED = "X-Presigned"


@dataclasses.dataclass(frozen=True)
class Use:
    """A request that a role made: the right that it needed, and the resource."""

    role: str
    action: str
    resource: str


class Account:
    """moto's account with the secrets, buckets and roles of ``templates``; ``uses`` has all requests of these roles.

    ``address`` is that of moto's server.
    """

    def __init__(self, address: str, templates: Templates, parameters: Mapping[str, str]) -> None:
        self.address = address
        self.uses: list[Use] = []
        self._resources = {
            name: each for template in templates.values() for name, each in template["Resources"].items()
        }
        self._exports = {
            output["Export"]["Name"]: output["Value"]
            for template in templates.values()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }
        self._arns: dict[str, str] = {}
        self._names: dict[str, str] = dict(parameters)
        self._suffix = uuid.uuid4().hex[:8]
        for name, resource in self._resources.items():
            self._create(name, resource["Type"], resource.get("Properties", {}))
        self.outputs = {
            name: self.resolve(output["Value"])
            for template in templates.values()
            for name, output in template.get("Outputs", {}).items()
        }

    def _create(self, name: str, kind: str, properties: Resource) -> None:
        if kind == "AWS::SecretsManager::Secret":
            made = properties["GenerateSecretString"]
            value = json.loads(made["SecretStringTemplate"]) | {made["GenerateStringKey"]: uuid.uuid4().hex}
            created = boto3.client("secretsmanager").create_secret(
                Name=f"{name}-{self._suffix}", SecretString=json.dumps(value)
            )
            self._arns[name] = self._names[name] = created["ARN"]
        elif kind == "AWS::S3::Bucket":
            self._names[name] = f"{name.lower()}-{self._suffix}"
            self._arns[name] = f"arn:aws:s3:::{self._names[name]}"
            boto3.client("s3").create_bucket(Bucket=self._names[name])
        elif kind == "AWS::Lambda::Function":
            self._names[name] = f"{name}-{self._suffix}"
            self._arns[name] = f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{self._names[name]}"
        elif kind == "AWS::Lambda::Alias":
            self._names[name] = f"{self._arns[properties['FunctionName']['Ref']]}:{properties['Name']}"

    def resolve(self, value: Any) -> Any:
        """A value of a template, without functions of CloudFormation. Resources that are not in the account have
        attributes made of their names."""
        if isinstance(value, list):
            return [self.resolve(each) for each in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"Ref": "AWS::Partition"}:
                return "aws"
            case {"Ref": "AWS::Region"}:
                return REGION
            case {"Ref": "AWS::AccountId"}:
                return ACCOUNT
            case {"Ref": name}:
                resource = self._resources.get(name, {})
                if resource.get("Type") == "AWS::SecretsManager::SecretTargetAttachment":
                    return self.resolve(resource["Properties"]["SecretId"])
                return self._names.get(name, name)
            case {"Fn::GetAtt": [name, "Arn"]}:
                return self._arns.get(name, f"arn:aws:other:{REGION}:{ACCOUNT}:{name}")
            case {"Fn::GetAtt": [name, _]}:
                return self._names.get(name, name)
            case {"Fn::ImportValue": name}:
                return self.resolve(self._exports[name])
            case {"Fn::Join": [separator, parts]}:
                return separator.join(map(str, self.resolve(parts)))
            case {"Fn::Sub": text}:
                return text.replace("${AWS::AccountId}", ACCOUNT).replace("${AWS::Region}", REGION)
        return {key: self.resolve(each) for key, each in value.items()}

    def roles(self) -> dict[str, list[Resource]]:
        """The statements of each role, by the role's name in the templates."""
        found: dict[str, list[Resource]] = {}
        for resource in self._resources.values():
            if resource["Type"] == "AWS::IAM::Policy":
                statements = self.resolve(resource["Properties"]["PolicyDocument"]["Statement"])
                for role in resource["Properties"]["Roles"]:
                    found.setdefault(role["Ref"], []).extend(statements)
            if resource["Type"] == "AWS::IAM::ManagedPolicy":
                found["users"] = self.resolve(resource["Properties"]["PolicyDocument"]["Statement"])
        return found

    def programs(self) -> dict[str, tuple[str, dict[str, str]]]:
        """Role and environment of each program: functions by the last part of their module, and the forwarder."""
        found: dict[str, tuple[str, dict[str, str]]] = {}
        for resource in self._resources.values():
            if resource["Type"] == "AWS::Lambda::Function":
                properties = resource["Properties"]
                name = properties["Handler"].split(".")[-2]
                environment = self.resolve(properties["Environment"]["Variables"])
                found[name] = (properties["Role"]["Fn::GetAtt"][0], environment)
            if resource["Type"] == "AWS::ECS::TaskDefinition":
                (container,) = resource["Properties"]["ContainerDefinitions"]
                environment = {each["Name"]: self.resolve(each["Value"]) for each in container["Environment"]}
                found["forwarder"] = (resource["Properties"]["TaskRoleArn"]["Fn::GetAtt"][0], environment)
        return found

    def credentials(self, role: str) -> dict[str, str]:
        """Variables with credentials of a role, which is created with the policy of the templates."""
        statements = [
            {key: each for key, each in statement.items() if key != "Condition"} for statement in self.roles()[role]
        ]
        iam, name = boto3.client("iam"), f"{role[:40]}-{uuid.uuid4().hex[:8]}"
        arn = iam.create_role(RoleName=name, AssumeRolePolicyDocument=_ANYONE)["Role"]["Arn"]
        iam.put_role_policy(
            RoleName=name,
            PolicyName="template",
            PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": statements}),
        )
        self._names[name] = role
        made = boto3.client("sts").assume_role(RoleArn=arn, RoleSessionName="test")["Credentials"]
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": made["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"],
            "AWS_SESSION_TOKEN": made["SessionToken"],
        }

    def unused(self, role: str) -> set[str]:
        """The rights of a role that no request has used."""
        used = {use.action for use in self.uses if use.role == role}
        granted = set[str]()
        for statement in self.roles()[role]:
            if statement["Effect"] == "Allow":
                actions = statement["Action"]
                granted |= {actions} if isinstance(actions, str) else set(actions)
        return granted - used

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Check every request until the end of the block. The test's own credentials have no rights then."""
        switch = f"{self.address}/moto-api/reset-auth"
        with (
            mock.patch.object(BaseResponse, "_determine_resource", _resource_of, create=True),
            mock.patch.object(IAMRequestBase, "check_action_permitted", self._recorded()),
            mock.patch.object(IAMRequestBase, "check_signature", _check_signature(IAMRequestBase.check_signature)),
            mock.patch.object(
                ActionAuthenticatorMixin,
                "_authenticate_and_authorize_s3_action",
                _with_signed_urls(ActionAuthenticatorMixin._authenticate_and_authorize_s3_action),
            ),
        ):
            httpx.post(switch, content=b"0").raise_for_status()
            try:
                yield
            finally:
                httpx.post(switch, content=b"inf").raise_for_status()

    def _recorded(self) -> Callable[[Any, str], None]:
        original = IAMRequestBase.check_action_permitted

        def check(request: Any, resource: str) -> None:
            role = self._names.get(request._access_key._owner_role_name, "")
            request._action = _RIGHTS.get(request._action, request._action)
            original(request, resource)
            self.uses.append(Use(role, request._action, resource))
            bucket, _, key = resource.removeprefix("arn:aws:s3:::").partition("/")
            if request._action == "s3:GetObject" and key not in s3_backends[ACCOUNT]["aws"].buckets[bucket].keys:
                # S3 tells only those who may list the bucket that an object does not exist.
                request._action = "s3:ListBucket"
                check(request, f"arn:aws:s3:::{bucket}")

        return check


def _resource_of(response: Any) -> str:
    """The resource of a request to a service whose policies name one."""
    service = type(response).__module__.split(".")[1]
    arn = f"arn:aws:{{}}:{REGION}:{ACCOUNT}:{{}}"
    match service:
        case "secretsmanager":
            return str(response._get_param("SecretId"))
        case "ecs" if services := response._get_param("services"):
            return str(services[0])
        case "ecs":
            return arn.format("ecs", f"service/{response._get_param('cluster')}/{response._get_param('service')}")
        case "awslambda":
            called = urllib.parse.unquote(response.path.rsplit("/", 2)[-2])
            return called if called.startswith("arn:") else arn.format("lambda", f"function:{called}")
        case "cloudformation":
            return arn.format("cloudformation", f"stack/{response._get_param('StackName')}/id")
        case "rds":
            return arn.format("rds", f"db:{response._get_param('DBInstanceIdentifier')}")
        case "ssm":
            return arn.format("ssm", f"parameter{response._get_param('Name')}")
        case "elasticache":
            return arn.format("elasticache", f"serverlesscache:{response._get_param('ServerlessCacheName')}")
    return "*"


def _with_signed_urls(original: Callable[..., None]) -> Callable[..., None]:
    """The check of S3 with the signer of a URL as the caller. moto has no check of the signature of a URL."""

    def check(response: Any, *arguments: Any, **named: Any) -> None:
        query = {
            key: values[0] for key, values in urllib.parse.parse_qs(urllib.parse.urlsplit(response.uri).query).items()
        }
        if "X-Amz-Credential" in query:
            response.headers = {
                **response.headers,
                "Authorization": f"Credential={query['X-Amz-Credential']}, ",
                "X-Amz-Security-Token": query["X-Amz-Security-Token"],
                _PRESIGNED: "true",
            }
        original(response, *arguments, **named)

    return check


def _check_signature(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def check(request: Any) -> None:
        if _PRESIGNED not in request._headers:
            original(request)

    return check
