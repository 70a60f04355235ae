"""CloudFormation resource providers that our templates need and LocalStack's core lacks.

Some start a real process (a database, a queue, a migration), the others only keep a record: on one machine, subnets and
security groups have no effect.
"""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import uuid
from typing import Any

import boto3  # type: ignore[import-untyped]  # no stubs in LocalStack's environment
from localstack.services.cloudformation.resource_provider import (
    OperationStatus,
    ProgressEvent,
    ResourceProvider,
    ResourceRequest,
)

from farcall_localstack_plugin import databases
from farcall_localstack_plugin.children import Child
from farcall_localstack_plugin.engines import HOST, start_postgres, start_tls
from farcall_localstack_plugin.settings import settings
from localstack import config

Model = dict[str, Any]
Request = ResourceRequest[Model]
Event = ProgressEvent[Model]

_servers: dict[str, list[Child]] = {}
_databases: dict[str, Model] = {}


def endpoint_url() -> str:
    """LocalStack's own URL for our child processes."""
    return f"http://{HOST}:{config.GATEWAY_LISTEN[0].port}"


class Provider(ResourceProvider[Model]):
    """Base: an update keeps generated properties, and a deletion has no effect."""

    SCHEMA: Model

    def read(self, request: Request) -> Event:
        return done(request.desired_state)

    def update(self, request: Request) -> Event:
        return done(updated(request))

    def delete(self, request: Request) -> Event:
        return done(current(request))


def current(request: Request) -> Model:
    """The properties of an existing resource."""
    return request.previous_state or request.desired_state


def updated(request: Request) -> Model:
    """The properties after an update; generated ones are kept."""
    return {**(request.previous_state or {}), **request.desired_state}


def done(model: Model) -> Event:
    """The event of a successful operation."""
    return ProgressEvent(status=OperationStatus.SUCCESS, resource_model=model)


def failed(model: Model, message: str) -> Event:
    """The event of a failed operation."""
    return ProgressEvent(status=OperationStatus.FAILED, resource_model=model, message=message)


def schema(resource_type: str, identifier: str) -> Model:
    """The part of a resource's schema that LocalStack reads: the property for ``Ref``."""
    return {"typeName": resource_type, "primaryIdentifier": [f"/properties/{identifier}"], "properties": {}}


def new_name(request: Request) -> str:
    """A generated name for a resource without one in the template."""
    return f"{request.stack_name}-{request.logical_resource_id}-{uuid.uuid4().hex[:8]}".lower()


def record_provider(resource_type: str, identifier: str) -> type[Provider]:
    """A provider that keeps a record of the resource and gives it a name."""

    class RecordProvider(Provider):
        TYPE = resource_type
        SCHEMA: Model = schema(resource_type, identifier)

        def create(self, request: Request) -> Event:
            model = request.desired_state
            model.setdefault(identifier, new_name(request))
            return done(model)

    return RecordProvider


# Types that are records only, with the property for ``Ref``.
RECORDS = {
    "AWS::EC2::EIP": "AllocationId",
    "AWS::EC2::SecurityGroupIngress": "Id",
    "AWS::ElastiCache::ParameterGroup": "CacheParameterGroupName",
    "AWS::ElastiCache::SubnetGroup": "CacheSubnetGroupName",
    "AWS::RDS::DBSubnetGroup": "DBSubnetGroupName",
}


class DBParameterGroupProvider(Provider):
    """A parameter group. As on AWS, its instances take a changed static parameter only at their next restart."""

    TYPE = "AWS::RDS::DBParameterGroup"
    SCHEMA: Model = schema(TYPE, "DBParameterGroupName")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        model.setdefault("DBParameterGroupName", new_name(request))
        return self._change(model)

    def update(self, request: Request) -> Event:
        return self._change(updated(request))

    def delete(self, request: Request) -> Event:
        model = current(request)
        databases.parameter_groups.pop(model["DBParameterGroupName"], None)
        return done(model)

    def _change(self, model: Model) -> Event:
        group = model["DBParameterGroupName"]
        databases.parameter_groups[group] = model.get("Parameters", {})
        for instance in databases.databases.values():
            if instance.parameter_group == group:
                instance.take_parameters()
        return done(model)


class DBInstanceProvider(Provider):
    """A PostgreSQL server with the user, password and database of the template, or of the snapshot that it names. The
    wheel has no TLS, so a relay adds it if configured. As on AWS, a protected instance is not deleted, and the deletion
    policy decides about a final snapshot."""

    TYPE = "AWS::RDS::DBInstance"
    SCHEMA: Model = schema(TYPE, "DBInstanceIdentifier")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        if model["Engine"] != "postgres":
            return failed(model, f"only PostgreSQL is supported here, not {model['Engine']}")
        name = model.setdefault("DBInstanceIdentifier", new_name(request))
        snapshot = None
        if wanted := model.get("DBSnapshotIdentifier"):
            snapshot = databases.snapshots.get(wanted)
            if snapshot is None:
                return failed(model, f"DBSnapshot {wanted} not found.")
        user = snapshot.user if snapshot else model["MasterUsername"]
        database = snapshot.database if snapshot else model.get("DBName")
        password = model["MasterUserPassword"]
        server, port, parameter_file = start_postgres(
            name,
            settings=settings(),
            user=user,
            password=password,
            database=database,
            parameters=databases.parameter_groups.get(model.get("DBParameterGroupName", ""), {}),
        )
        _servers[name] = [server]
        instance = databases.Instance(
            name, server, parameter_file, port, user, password, database or "postgres", dict(model)
        )
        if snapshot:
            try:
                databases.restore_snapshot(snapshot, instance)
            except subprocess.CalledProcessError as error:
                _stop(name)
                return failed(model, f"DBSnapshot {wanted} cannot be restored: {error.stderr}")
        databases.databases[name] = instance
        if certificate := settings().database_certificate:
            relay, port = start_tls(name, port, settings=settings(), certificate=certificate)
            _servers[name].append(relay)
        _databases[name] = {"engine": "postgres", "host": HOST, "port": port, "dbname": database}
        model["Endpoint"] = {"Address": HOST, "Port": str(port)}
        return done(model)

    def update(self, request: Request) -> Event:
        model = updated(request)
        instance = databases.databases[model["DBInstanceIdentifier"]]
        major, wanted = (str(each.get("EngineVersion", "")).partition(".")[0] for each in (instance.model, model))
        if major != wanted and str(model.get("AllowMajorVersionUpgrade", False)).lower() != "true":
            return failed(
                model, "The AllowMajorVersionUpgrade flag must be present when upgrading to a new major version."
            )
        group, size = instance.parameter_group, instance.model.get("DBInstanceClass")
        instance.model = dict(model)
        if instance.parameter_group != group:
            instance.take_parameters()
        if instance.model.get("DBInstanceClass") != size:  # the server moves to another machine
            instance.stop()
            instance.start()
        return done(model)

    def delete(self, request: Request) -> Event:
        model = current(request)
        if instance := databases.databases.get(model.get("DBInstanceIdentifier", "")):
            if instance.is_protected:
                return failed(model, "Cannot delete protected DB Instance, please disable deletion protection.")
            if _deletion_policy(request) == "Snapshot":
                name = f"{request.stack_name}-snapshot-{request.logical_resource_id}-{uuid.uuid4().hex[:12]}"
                databases.take_snapshot(name.lower(), instance)
            del databases.databases[instance.identifier]
        _stop(model.get("DBInstanceIdentifier", ""))
        return done(model)


def _deletion_policy(request: Request) -> str:
    """The deletion policy of a resource in the template; the default for a database is Snapshot."""
    body = request.aws_client_factory.cloudformation.get_template(StackName=request.stack_id)["TemplateBody"]
    template = body if isinstance(body, dict) else json.loads(body)
    return str(template["Resources"][request.logical_resource_id].get("DeletionPolicy", "Snapshot"))


def _stop(name: str) -> None:
    for server in reversed(_servers.pop(name, [])):
        server.stop()


def attach_secret(_provider: object, request: Request) -> Event:
    """``AWS::SecretsManager::SecretTargetAttachment`` as on AWS: ``Ref`` is the secret's ARN, and the secret gains the
    database's address."""
    model = request.desired_state
    secrets = request.aws_client_factory.secretsmanager
    value = json.loads(secrets.get_secret_value(SecretId=model["SecretId"])["SecretString"])
    value |= _databases[model["TargetId"]]
    secrets.put_secret_value(SecretId=model["SecretId"], SecretString=json.dumps(value))
    model["Id"] = model["SecretId"]
    return done(model)


def publish_version(_provider: object, request: Request) -> Event:
    """An update of ``AWS::Lambda::Version``: CloudFormation replaces one whose description changes. The core would lose
    the new one at the end of the update. The old one stays until its function is deleted."""
    model = updated(request)
    if model.get("Description") != (request.previous_state or {}).get("Description"):
        published = request.aws_client_factory.lambda_.publish_version(
            FunctionName=model["FunctionName"], Description=model["Description"]
        )
        model |= {"Version": published["Version"], "Id": published["FunctionArn"]}
    return done(model)


def move_alias(_provider: object, request: Request) -> Event:
    """An update of ``AWS::Lambda::Alias``: the alias names another version."""
    model = updated(request)
    request.aws_client_factory.lambda_.update_alias(
        FunctionName=model["FunctionName"], Name=model["Name"], FunctionVersion=model["FunctionVersion"]
    )
    return done(model)


class AuthorizerProvider(Provider):
    """A Lambda authorizer of a REST API; :mod:`farcall_localstack_plugin.authorizer` calls it."""

    TYPE = "AWS::ApiGateway::Authorizer"
    SCHEMA: Model = schema(TYPE, "AuthorizerId")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        created = request.aws_client_factory.apigateway.create_authorizer(
            restApiId=model["RestApiId"],
            name=model["Name"],
            type=model["Type"],
            authorizerUri=model["AuthorizerUri"],
            identitySource=model["IdentitySource"],
            authorizerResultTtlInSeconds=int(model.get("AuthorizerResultTtlInSeconds", 300)),
            identityValidationExpression=model.get("IdentityValidationExpression", ""),
        )
        model["AuthorizerId"] = created["id"]
        return done(model)


class CustomResourceProvider(Provider):
    """A custom resource backed by a Lambda function, by CloudFormation's own protocol: the function is invoked with the
    request and puts its answer to a pre-signed URL in S3."""

    TYPE = "AWS::CloudFormation::CustomResource"
    SCHEMA: Model = schema(TYPE, "PhysicalResourceId")
    _BUCKET = "cloudformation-custom-resource-response"
    _PLUMBING = ("PhysicalResourceId", "ServiceToken", "ServiceTimeout")

    def create(self, request: Request) -> Event:
        return self._call(request, "Create", {})

    def update(self, request: Request) -> Event:
        before = request.previous_state or {}
        old = {"PhysicalResourceId": before["PhysicalResourceId"], "OldResourceProperties": before}
        return self._call(request, "Update", old)

    def delete(self, request: Request) -> Event:
        before = current(request)
        return self._call(request, "Delete", {"PhysicalResourceId": before["PhysicalResourceId"]})

    def _call(self, request: Request, kind: str, extra: Model) -> Event:
        model = updated(request)
        s3 = boto3.client(
            "s3",
            endpoint_url=endpoint_url(),
            region_name=request.region_name,
            aws_access_key_id=request.account_id,
            aws_secret_access_key="test",  # noqa: S106 - not checked
        )
        bucket = f"{self._BUCKET}-{request.account_id}"
        s3.create_bucket(Bucket=bucket)
        answer_at = {"Bucket": bucket, "Key": uuid.uuid4().hex}
        event = {
            "RequestType": kind,
            "ResponseURL": s3.generate_presigned_url("put_object", Params=answer_at),
            "StackId": request.stack_id,
            "RequestId": request.request_token,
            "LogicalResourceId": request.logical_resource_id,
            "ResourceType": request.resource_type,
            "ResourceProperties": model,
            **extra,
        }
        invoked = request.aws_client_factory.lambda_.invoke(
            FunctionName=model["ServiceToken"], Payload=json.dumps(event).encode()
        )
        output = invoked["Payload"].read().decode()
        try:
            answer = json.loads(s3.get_object(**answer_at)["Body"].read())
        except s3.exceptions.NoSuchKey:
            return failed(model, f"{request.logical_resource_id}: the function did not answer: {output}")
        if answer["Status"] != "SUCCESS":
            return failed(model, f"{request.logical_resource_id}: {answer['Reason']}")
        data = answer.get("Data") or {}
        return done({**model, **data, "PhysicalResourceId": answer["PhysicalResourceId"]})


def function_arn(authorizer_uri: str) -> str:
    """The function in ``arn:…:lambda:path/2015-03-31/functions/FUNCTION/invocations``."""
    path = authorizer_uri.partition(":lambda:path/")[2]
    return urllib.parse.unquote(path.split("/functions/")[1].removesuffix("/invocations"))
