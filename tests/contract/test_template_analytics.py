"""The optional stack of analytics: its storages, who reaches them, and that nothing else changes with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.contract.templates import Templates, count_types, function_of, resources, the_one

STACK = "farcall-analytics"
Synthesized = Callable[[str, str], Templates]


def _only(templates: Templates) -> Templates:
    return {STACK: templates[STACK]}


def test_no_profile_has_the_stack(aws: Templates, localstack: Templates) -> None:
    for templates in (aws, localstack):
        assert STACK not in templates
        assert "SettingsAnalytics" not in templates["farcall-data"]["Outputs"]


def test_the_stack_changes_no_other_one(synthesized: Synthesized) -> None:
    """But for the settings that the data stack records, and the VPC that the network exports."""
    without, with_it = synthesized("aws", "lab"), synthesized("options", "analytics")
    for name, template in without.items():
        changed = json.loads(json.dumps(with_it[name]))
        if name == "farcall-data":
            assert json.loads(changed["Outputs"].pop("SettingsAnalytics")["Value"])["cache_gb"] == 250
            changed["Outputs"].pop("Overrides")
        if name == "farcall-network":
            added = {key: changed["Outputs"].pop(key) for key in changed["Outputs"].keys() - template["Outputs"].keys()}
            assert all("Export" in output for output in added.values())
        assert changed == template
    assert set(with_it) - set(without) == {STACK}


def test_objects_of_exchanges_live_for_a_day_in_private_buckets(synthesized: Synthesized) -> None:
    templates = _only(synthesized("options", "analytics"))
    bucket, express = the_one(templates, "AWS::S3::Bucket"), the_one(templates, "AWS::S3Express::DirectoryBucket")
    for each in (bucket, express):
        (rule,) = each["LifecycleConfiguration"]["Rules"]
        assert (rule["ExpirationInDays"], rule["Status"]) == (1, "Enabled")
        assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
        assert not rule.get("Prefix")
    assert all(bucket["PublicAccessBlockConfiguration"].values())
    assert len(bucket["PublicAccessBlockConfiguration"]) == 4
    assert "BucketEncryption" in bucket
    assert express["LocationName"] == "use1-az4"
    for kind in ("AWS::S3::BucketPolicy", "AWS::S3Express::BucketPolicy"):
        (statement,) = the_one(templates, kind)["PolicyDocument"]["Statement"]
        assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})


def test_only_workers_reach_the_cache(synthesized: Synthesized) -> None:
    templates = _only(synthesized("options", "analytics"))
    groups = dict(resources(templates, "AWS::EC2::SecurityGroup"))
    (cache,) = (group for group in groups.values() if "cache" in group["GroupDescription"])
    (workers,) = (name for name, group in groups.items() if "Workers" in group["GroupDescription"])
    inline = [(rule.get("CidrIp") or rule["CidrIpv6"], rule["FromPort"], rule["ToPort"])
              for rule in cache["SecurityGroupIngress"]]  # fmt: skip
    assert inline == [("10.1.0.0/16", 6379, 6380), ("fd00::/64", 6379, 6380)]
    ingress = the_one(templates, "AWS::EC2::SecurityGroupIngress")
    assert ingress["SourceSecurityGroupId"] == {"Fn::GetAtt": [workers, "GroupId"]}
    assert (ingress["FromPort"], ingress["ToPort"]) == (6379, 6380)
    assert not groups[workers].get("SecurityGroupIngress")


def test_the_function_keeps_the_cache_within_the_settings(synthesized: Synthesized) -> None:
    templates = _only(synthesized("options", "analytics"))
    keeper = function_of(templates, ".exchange_cache.handle")
    variables = keeper["Environment"]["Variables"]
    limits = {name: variables[f"FARCALL_CACHE_{name}"] for name in ("NAME", "GB", "ECPU_PER_S", "IDLE_S")}
    assert limits == {"NAME": "farcall-exchange", "GB": "250", "ECPU_PER_S": "2000000", "IDLE_S": "1800"}
    assert len(variables["FARCALL_CACHE_SUBNETS"]["Fn::Join"][1]) == 2
    assert "VpcConfig" not in keeper  # it calls AWS over IPv4
    rule = the_one(templates, "AWS::Events::Rule")
    assert (rule["ScheduleExpression"], rule["State"]) == ("rate(5 minutes)", "ENABLED")
    assert not list(resources(templates, "AWS::ElastiCache::ServerlessCache"))  # it is not there all the time


def test_the_keeper_may_make_endpoints_of_caches_only(synthesized: Synthesized) -> None:
    templates = _only(synthesized("options", "analytics"))
    (policy,) = (policy for _, policy in resources(templates, "AWS::IAM::Policy"))
    wild = [each for each in policy["PolicyDocument"]["Statement"] if "*" in json.dumps(each["Resource"])]
    read, *made = sorted(wild, key=lambda each: each["Resource"] != "*")
    assert set(read["Action"]) == {
        "cloudwatch:GetMetricData",
        "ec2:DescribeSecurityGroups",
        "ec2:DescribeSubnets",
        "ec2:DescribeVpcs",
    }
    assert [(each["Action"], each["Condition"]) for each in made] == [
        ("ec2:CreateVpcEndpoint", {"StringLike": {"ec2:VpceServiceName": "com.amazonaws.elasticache.serverless.*"}}),
        (
            "ec2:CreateTags",
            {
                "StringEquals": {
                    "ec2:CreateAction": "CreateVpcEndpoint",
                    "aws:RequestTag/AmazonElastiCacheManaged": "true",
                }
            },
        ),
    ]


def test_users_may_use_the_storages_and_start_the_cache_and_nothing_else(synthesized: Synthesized) -> None:
    policy = the_one(synthesized("options", "analytics"), "AWS::IAM::ManagedPolicy")
    allowed = [statement["Action"] for statement in policy["PolicyDocument"]["Statement"]]
    assert allowed == [
        "s3:ListBucket",
        ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
        "s3express:CreateSession",
        "lambda:InvokeFunction",
    ]
    assert all(statement["Resource"] != "*" for statement in policy["PolicyDocument"]["Statement"])


def test_storages_that_are_not_asked_for_are_not_there(synthesized: Synthesized) -> None:
    kinds = {"AWS::S3::Bucket": 1, "AWS::S3::BucketPolicy": 1, "AWS::IAM::ManagedPolicy": 1}
    alone = synthesized("options", "bucket-only")[STACK]
    assert count_types(alone) == kinds
    assert set(alone["Outputs"]) == {"Storage", "UserPolicy", "Release"}
    everything = synthesized("options", "analytics")[STACK]["Outputs"]
    assert set(everything) - set(alone["Outputs"]) == {
        "CacheFunction",
        "CacheName",
        "ExpressStorage",
        "WorkerSecurityGroup",
    }


def test_localstack_has_the_bucket_only(synthesized: Synthesized) -> None:
    stack = synthesized("localstack", "analytics")[STACK]
    assert count_types(stack) == count_types(synthesized("options", "bucket-only")[STACK])
    assert the_one({STACK: stack}, "AWS::S3::Bucket")["LifecycleConfiguration"]
    (bucket,) = (each for each in stack["Resources"].values() if each["Type"] == "AWS::S3::Bucket")
    assert bucket["DeletionPolicy"] == "Delete"


def test_all_cdk_nag_findings_of_the_stack_have_a_reason(assemblies: Path) -> None:
    report = json.loads((assemblies / "options" / "analytics" / "validation-report.json").read_text(encoding="utf-8"))
    (nag,) = (each for each in report["pluginReports"] if each["pluginName"] == "AwsSolutions")
    assert nag["violations"] == []
    ours = [each for each in nag["suppressedViolations"] if each["acknowledgedAt"].startswith(STACK)]
    assert ours
    for finding in ours:
        assert len(finding["reason"].split()) >= 10, finding["acknowledgedId"]
