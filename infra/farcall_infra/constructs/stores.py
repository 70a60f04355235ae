"""The stores of the cloud tier: records (PostgreSQL), queue (Valkey), blobs (S3), and the key that signs tickets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Final

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_elasticache as elasticache
from aws_cdk import aws_iam as iam
from aws_cdk import aws_rds as rds
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from farcall_infra.ca_bundle import CA_BUNDLE_FILE
from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.constructs.network import POSTGRES_PORT, VALKEY_PORT, Network
from farcall_infra.profiles import DatabaseSize, QueueSize

#: The programs with their own database role, ``farcall_<program>``.
PROGRAMS: Final = ("api", _RECONCILER := "reconciler", _FORWARDER := "forwarder")
#: Keys of pieces of files begin with it: ``PIECES`` of :mod:`farcall_common.store.model`.
_PIECES: Final = "piece/"
_MASTER = "farcall"
_PASSWORD_LENGTH = 40
# Lambda ends frozen functions without closing their connections: the server finds out within a minute, not in six.
_KEEPALIVES = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3"}
_VERSIONS = {"16": rds.PostgresEngineVersion.VER_16, "17": rds.PostgresEngineVersion.VER_17}


class Database(Construct):
    """PostgreSQL, encrypted, in the private subnets, with generated passwords in Secrets Manager: one for the master
    user and one for the role of each of :data:`PROGRAMS`. The migration creates the roles and limits their connections.
    """

    _NAME = "farcall"

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        network: Network,
        size: DatabaseSize,
        tls: bool,
        verified: bool,
        keep: bool,
    ) -> None:
        super().__init__(scope, construct_id)
        self._tls = tls
        self._verified = verified
        self._connections = size.connections
        engine = rds.DatabaseInstanceEngine.postgres(version=_VERSIONS[size.version])
        parameters = rds.ParameterGroup(
            self,
            "Parameters",
            engine=engine,
            parameters={
                # Also RDS's default, but a default can change and this must not.
                **({"rds.force_ssl": "1"} if tls else {}),
                "max_connections": str(size.connections),
                **_KEEPALIVES,
            },
        )
        shared: dict[str, Any] = {
            "engine": engine,
            "parameter_group": parameters,
            "instance_type": ec2.InstanceType(size.instance_type),
            "allocated_storage": size.storage_gib,
            "max_allocated_storage": size.max_storage_gib or None,
            "storage_type": rds.StorageType.GP3,
            "multi_az": size.multi_az,
            "vpc": network.vpc,
            "vpc_subnets": network.private,
            "security_groups": [network.database],
            "publicly_accessible": False,
            "port": POSTGRES_PORT,
            "backup_retention": cdk.Duration.days(size.backup_days),
            "delete_automated_backups": not keep,
            "auto_minor_version_upgrade": True,
            "allow_major_version_upgrade": size.major_upgrade,
            # Otherwise AWS charges for RDS Extended Support when the version's standard support ends.
            "engine_lifecycle_support": rds.EngineLifecycleSupport.OPEN_SOURCE_RDS_EXTENDED_SUPPORT_DISABLED,
            "deletion_protection": keep,
            "removal_policy": cdk.RemovalPolicy.SNAPSHOT if keep else cdk.RemovalPolicy.DESTROY,
        }
        self.instance: rds.DatabaseInstance | rds.DatabaseInstanceFromSnapshot
        if size.snapshot:
            self.instance = rds.DatabaseInstanceFromSnapshot(
                self,
                "Instance",
                snapshot_identifier=size.snapshot,
                credentials=rds.SnapshotCredentials.from_generated_secret(_MASTER),  # a new password for it
                **shared,
            )
            suppress(
                self.instance,
                "RDS2",
                "An instance has the encryption of the snapshot that it is made of, and the snapshots of our databases "
                "are encrypted because these are.",
            )
        else:
            self.instance = rds.DatabaseInstance(
                self,
                "Instance",
                storage_encrypted=True,
                credentials=rds.Credentials.from_generated_secret(_MASTER),
                database_name=self._NAME,
                **shared,
            )
        assert self.instance.secret is not None  # from_generated_secret makes one
        self._secret = self.instance.secret
        self._logins = {program: self._login(program) for program in PROGRAMS}
        suppress(
            self.instance,
            "SMG4",
            "Rotation runs a function of AWS' in the VPC that calls services over IPv4, which nothing here can (there "
            "is no NAT). docs/operations/keys.md says how to replace the password.",
        )
        suppress(
            self.instance,
            "RDS11",
            "Only the cloud tier's own two groups can reach the port, so another port number would add nothing.",
        )
        if not size.multi_az:
            suppress(
                self.instance,
                "RDS3",
                "A standby doubles the price of the database. This profile has daily backups and point-in-time "
                "recovery instead; the one for facilities has the standby.",
            )

    def _login(self, program: str) -> secretsmanager.Secret:
        secret = secretsmanager.Secret(
            self,
            f"{program.capitalize()}Login",
            description=f"Database role of Farcall's {program}",
            generate_secret_string=secretsmanager.SecretStringGenerator(
                secret_string_template=json.dumps({"username": f"farcall_{program}"}),
                generate_string_key="password",
                password_length=_PASSWORD_LENGTH,
                exclude_punctuation=True,
            ),
            removal_policy=cdk.RemovalPolicy.DESTROY,  # the migration sets the password of a new one
        )
        suppress(
            secret,
            "SMG4",
            "Rotation runs a function in the VPC that calls services over IPv4, which nothing here can (there is no "
            "NAT). `farcall cloud rotate` replaces the password.",
        )
        return secret

    def environment(self, program: str) -> dict[str, str]:
        """Variables with the database's address, and the secret of a program's role."""
        return self._address() | {"FARCALL_DATABASE_SECRET_ARN": self._logins[program].secret_arn}

    def migrator_environment(self) -> dict[str, str]:
        """Variables with the database's address, the master user's secret, the secrets of the roles, and the number of
        connections that they share."""
        return self._address() | {
            "FARCALL_DATABASE_SECRET_ARN": self._secret.secret_arn,
            "FARCALL_DATABASE_ROLE_SECRET_ARNS": self.role_secret_arns,
            "FARCALL_DATABASE_CONNECTIONS": str(self._connections),
        }

    @property
    def login_arns(self) -> dict[str, str]:
        """The secret of each program's login."""
        return {program: login.secret_arn for program, login in self._logins.items()}

    @property
    def role_secret_arns(self) -> str:
        """The secrets of the logins, separated by commas."""
        return cdk.Fn.join(",", list(self.login_arns.values()))

    def _address(self) -> dict[str, str]:
        """Variables with the address. The client requires TLS if the target has it, and checks the certificate if it
        can."""
        require = {"PGSSLMODE": "require"} if self._tls else {}
        verify = {"FARCALL_DATABASE_AUTHORITIES": CA_BUNDLE_FILE} if self._verified else {}
        return {
            **require,
            **verify,
            "FARCALL_DATABASE_HOST": self.instance.db_instance_endpoint_address,
            "FARCALL_DATABASE_PORT": self.instance.db_instance_endpoint_port,
            "FARCALL_DATABASE_NAME": self._NAME,
        }

    def grant(self, role: iam.IRole, program: str) -> None:
        """Let ``role`` read the credentials of a program. The security group decides which functions can reach the
        port."""
        _grant_value(self._logins[program], role)

    def grant_migrator(self, role: iam.IRole) -> None:
        """Let ``role`` read the master user's credentials and those of the roles."""
        for secret in (self._secret, *self._logins.values()):
            _grant_value(secret, role)


class Queue(Construct):
    """Valkey on nodes, not serverless: the same template then runs on the offline tier."""

    def __init__(self, scope: Construct, construct_id: str, *, network: Network, size: QueueSize, tls: bool) -> None:
        super().__init__(scope, construct_id)
        self._tls = tls
        self._size = size
        subnets = elasticache.CfnSubnetGroup(
            self,
            "Subnets",
            description="Queue of the Farcall cloud tier",
            subnet_ids=network.vpc.select_subnets(subnet_type=network.private.subnet_type).subnet_ids,
        )
        # A full queue must refuse tasks with an error; an evicted key would be a task that waits for the reconciler.
        parameters = elasticache.CfnParameterGroup(
            self,
            "Parameters",
            cache_parameter_group_family="valkey8",
            description="Queue of the Farcall cloud tier",
            properties={"maxmemory-policy": "noeviction"},
        )
        self._group = elasticache.CfnReplicationGroup(
            self,
            "Group",
            replication_group_description="Queue of the Farcall cloud tier",
            engine="valkey",
            engine_version="8.0",
            cache_node_type=size.node_type,
            num_cache_clusters=size.nodes,
            automatic_failover_enabled=size.failover,
            multi_az_enabled=size.failover,
            at_rest_encryption_enabled=True,
            transit_encryption_enabled=tls,
            port=VALKEY_PORT,
            cache_subnet_group_name=subnets.ref,
            cache_parameter_group_name=parameters.ref,
            security_group_ids=[network.queue.security_group_id],
            auto_minor_version_upgrade=True,
        )
        self._group.apply_removal_policy(cdk.RemovalPolicy.DESTROY)  # all of its data is in the database as well
        suppress(
            self._group,
            "AEC6",
            "Nothing but the cloud tier's own two groups can reach the port, both of which would hold the password "
            "too. All that is in the queue is in the database as well.",
        )
        if not size.failover:
            suppress(
                self._group,
                "AEC4",
                "A second node doubles the price. Losing the only one loses no task: they are rebuilt from the "
                "database.",
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """The ids of the nodes, which ElastiCache derives from the group's id."""
        return tuple(f"{self._group.ref}-{number:03}" for number in range(1, self._size.nodes + 1))

    def environment(self) -> dict[str, str]:
        """Variables with the queue's address."""
        return {
            "FARCALL_QUEUE_HOST": self._group.attr_primary_end_point_address,
            "FARCALL_QUEUE_PORT": self._group.attr_primary_end_point_port,
            "FARCALL_QUEUE_TLS": "true" if self._tls else "false",
        }


def expiring_bucket(scope: Construct, *, days: int, keep: bool, rules: Sequence[s3.LifecycleRule] = ()) -> s3.Bucket:
    """A private bucket whose objects live for so many days. ``rules``: more of its rules."""
    return s3.Bucket(
        scope,
        "Bucket",
        block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
        encryption=s3.BucketEncryption.S3_MANAGED,
        enforce_ssl=True,
        object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
        lifecycle_rules=[
            s3.LifecycleRule(
                id="expire",
                expiration=cdk.Duration.days(days),
                abort_incomplete_multipart_upload_after=cdk.Duration.days(1),
            ),
            *rules,
        ],
        # CloudFormation cannot delete a bucket with objects.
        removal_policy=cdk.RemovalPolicy.RETAIN if keep else cdk.RemovalPolicy.DESTROY,
    )


class BlobStore(Construct):
    """A private bucket for payloads that are too large for a row; they expire by themselves."""

    def __init__(self, scope: Construct, construct_id: str, *, blob_days: int, keep: bool) -> None:
        super().__init__(scope, construct_id)
        # The forwarder deletes pieces of files when they are read; the rule is for those that it could not.
        pieces = s3.LifecycleRule(id="pieces", prefix=_PIECES, expiration=cdk.Duration.days(1))
        self._bucket = expiring_bucket(self, days=blob_days, keep=keep, rules=[pieces])
        suppress(
            self._bucket,
            "S1",
            "Access logs of S3 fill a second bucket without limit. Blobs are read and written through URLs that the "
            "API and the forwarder sign for one object and one hour; both log the caller.",
        )

    def environment(self) -> dict[str, str]:
        """The variable with the bucket's name."""
        return {"FARCALL_BLOB_BUCKET": self._bucket.bucket_name}

    def grant(self, role: iam.IRole, *, deletes_pieces: bool) -> None:
        """Let ``role`` read and write blobs, and sign URLs for that. Blobs expire, so only pieces of files are ever
        deleted."""
        # Without the permission to list, S3 answers "forbidden" for a missing object.
        role.add_to_principal_policy(
            iam.PolicyStatement(actions=["s3:ListBucket"], resources=[self._bucket.bucket_arn])
        )
        role.add_to_principal_policy(
            iam.PolicyStatement(actions=["s3:GetObject", "s3:PutObject"], resources=[self._bucket.arn_for_objects("*")])
        )
        stack = cdk.Stack.of(self)
        exported = stack.resolve(stack.export_value(self._bucket.bucket_arn))["Fn::ImportValue"]
        suppress(
            role,
            f"IAM5[Resource::{exported}/*]",
            "The names of blobs have their owner and hash, unknown in advance; the bucket holds nothing else.",
        )
        if deletes_pieces:
            pieces = self._bucket.arn_for_objects(f"{_PIECES}*")
            role.add_to_principal_policy(iam.PolicyStatement(actions=["s3:DeleteObject"], resources=[pieces]))
            suppress(
                role,
                f"IAM5[Resource::{exported}/{_PIECES}*]",
                "The names of pieces of files have the id of a session, unknown in advance; they live for a day.",
            )


class TicketKey(Construct):
    """The HMAC key that signs connect and stream tickets."""

    _LENGTH = 64  # characters; the key must have at least 32 bytes

    def __init__(self, scope: Construct, construct_id: str) -> None:
        super().__init__(scope, construct_id)
        self._secret = secretsmanager.Secret(
            self,
            "Secret",
            description="Signs the tickets with which endpoints and clients connect to the forwarder",
            generate_secret_string=secretsmanager.SecretStringGenerator(
                secret_string_template="{}",  # noqa: S106 - the key is generated into this object
                generate_string_key="key",
                password_length=self._LENGTH,
                exclude_punctuation=True,
            ),
            removal_policy=cdk.RemovalPolicy.DESTROY,  # tickets are valid for a day and are then replaced
        )
        suppress(
            self._secret,
            "SMG4",
            "A new key invalidates every ticket at once, so it is replaced only when it may have leaked; "
            "docs/operations/keys.md says how.",
        )

    def environment(self) -> dict[str, str]:
        """The variable with the ARN of the key's secret."""
        return {"FARCALL_TICKET_SECRET_ARN": self._secret.secret_arn}

    def grant(self, role: iam.IRole) -> None:
        """Let ``role`` read the key."""
        _grant_value(self._secret, role)


def _grant_value(secret: secretsmanager.ISecret, role: iam.IRole) -> None:
    """Let ``role`` read the secret. CDK's own grant would also allow reading its description."""
    role.add_to_principal_policy(
        iam.PolicyStatement(actions=["secretsmanager:GetSecretValue"], resources=[secret.secret_arn])
    )


@dataclasses.dataclass(frozen=True)
class Stores:
    """All four stores. The reconciler uses database and queue, the other :data:`PROGRAMS` use all of them."""

    database: Database
    queue: Queue
    blobs: BlobStore
    tickets: TicketKey

    def environment(self, program: str) -> dict[str, str]:
        """The environment variables that ``farcall_common.store`` reads, for one of :data:`PROGRAMS`."""
        return {
            **self.database.environment(program),
            **self.queue.environment(),
            **(self.blobs.environment() | self.tickets.environment() if program != _RECONCILER else {}),
        }

    def grant(self, role: iam.IRole, program: str) -> None:
        """Let ``role`` use the stores of one of :data:`PROGRAMS`."""
        self.database.grant(role, program)
        if program != _RECONCILER:
            self.blobs.grant(role, deletes_pieces=program == _FORWARDER)
            self.tickets.grant(role)
