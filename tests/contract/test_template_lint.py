"""cfn-lint on every template for AWS, in several regions: types, properties and values that CloudFormation refuses,
sizes that a region does not have, and IAM actions that do not exist or do not fit their resources.

Each run is a separate process and takes some seconds, so one run checks all templates. ``make test-regions`` checks
every profile in every commercial region; the gate does so for a few regions, and for resource types in all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from farcall_infra.regions import BUDGET_REGIONS, BUDGET_TYPE
from tests.contract.templates import OPTIONS, PROFILES, Templates, resources, the_one

_REGIONS = ("eu-central-1", "us-east-1", "us-west-2")
#: Regions that lack both a resource type and a size, for the gate.
_SMALLER = ("ca-west-1",)
_OTHER_PARTITIONS = ("cn-", "us-gov-", "us-iso", "eu-iso", "eusc-")
#: cfn-lint has no schemas of this region's own, and takes it for us-east-1.
_UNKNOWN = "me-south-1"
#: Sizes that a region lacks, by rule and property. The doctor asks AWS for them.
_NOT_OFFERED = {("ca-west-1", "E3025", "DBInstanceClass")}

_MAJOR_VERSION = (
    "The major version alone is RDS' newest minor one, and goes on being it when RDS upgrades by itself. That there is "
    "one is a test of its own."
)
#: Findings that are known and left, by rule and the beginning of what it says, each with its reason.
_ACCEPTED = {
    ("I1022", "Prefer using Fn::Sub"): "CloudFormation treats both alike, and the templates are generated.",
    ("W3010", "Avoid hardcoding availability zones"): "They are in a template only if network.zones names them.",
    ("W3005", ""): "CDK writes down every dependency on a construct, also where a reference says the same.",
    ("W3691", "Engine version '16' for"): _MAJOR_VERSION,
    ("W3691", "Engine version '17' for"): _MAJOR_VERSION,
}


def _lint(
    directory: Path, templates: Iterable[tuple[str, dict[str, Any]]], regions: Iterable[str] = _REGIONS
) -> list[dict[str, Any]]:
    """cfn-lint's findings in the templates, information included."""
    paths = []
    for name, template in templates:
        path = directory / f"{name}.json"
        path.write_text(json.dumps(template), encoding="utf-8")
        paths.append(str(path))
    arguments = ["--format", "json", "--include-checks", "I", "--regions", *regions, "--template", *paths]
    program = str(Path(sys.executable).with_name("cfn-lint"))
    done = subprocess.run([program, *arguments], cwd=directory, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr  # its status only says whether it found something
    findings: list[dict[str, Any]] = json.loads(done.stdout)
    return findings


def _reason(finding: dict[str, Any]) -> tuple[str, str] | None:
    """The key under which the finding is accepted."""
    return next(
        (key for key in _ACCEPTED if finding["Rule"]["Id"] == key[0] and finding["Message"].startswith(key[1])), None
    )


def test_all_findings_are_accepted_with_a_reason(synthesized: Callable[[str, str], Templates], tmp_path: Path) -> None:
    kinds = [("aws", profile) for profile in PROFILES] + [("options", name) for name in OPTIONS]
    findings = _lint(
        tmp_path,
        ((f"{name}-{stack}", template) for kind, name in kinds for stack, template in synthesized(kind, name).items()),
    )
    found = [(_reason(each), each) for each in findings]
    assert [
        f"{Path(each['Filename']).stem}: {each['Rule']['Id']} {each['Message']}" for key, each in found if key is None
    ] == []
    assert {key for key, _ in found} == set(_ACCEPTED), "a reason that is no longer needed"


def _commercial_regions() -> list[str]:
    from cfnlint.helpers import REGIONS

    return [region for region in REGIONS if not region.startswith(_OTHER_PARTITIONS)]


def test_budgets_are_in_exactly_the_regions_that_have_the_type() -> None:
    from cfnlint.schema import PROVIDER_SCHEMA_MANAGER

    types = {region: PROVIDER_SCHEMA_MANAGER.get_resource_types(region) for region in _commercial_regions()}
    assert types[_UNKNOWN] == types["us-east-1"]
    assert {region for region, known in types.items() if BUDGET_TYPE in known} - {_UNKNOWN} == BUDGET_REGIONS


def test_every_region_has_the_types_of_its_templates(synthesized: Callable[[str, str], Templates]) -> None:
    from cfnlint.schema import PROVIDER_SCHEMA_MANAGER

    for region in _commercial_regions():
        known = set(PROVIDER_SCHEMA_MANAGER.get_resource_types(region))
        for name in ("hobby", "lab", "facility"):
            for template in _templates_for(region, name, synthesized).values():
                used = {each["Type"] for each in template["Resources"].values()}
                assert {each for each in used if not each.startswith("Custom::")} <= known, region


def test_a_region_without_budgets_has_everything_else(
    synthesized: Callable[[str, str], Templates], assemblies: Path
) -> None:
    without = synthesized("options", "no-budget")
    assert without == _templates_for("eu-north-1", "facility", synthesized)
    assert without != synthesized("aws", "facility")
    warnings = {
        name: text.count("eu-north-1 has no AWS::Budgets::Budget, so there is no budget.")
        for name in ("aws/facility", "options/no-budget")
        for text in ["".join(path.read_text("utf-8") for path in (assemblies / name).glob("*.json"))]
    }
    assert warnings == {"aws/facility": 0, "options/no-budget": 1}


@pytest.mark.parametrize("region", _commercial_regions() if os.environ.get("FARCALL_ALL_REGIONS") else _SMALLER)
def test_every_profile_can_be_deployed_in_every_region(
    region: str, synthesized: Callable[[str, str], Templates], tmp_path: Path
) -> None:
    templates = {
        f"{profile}-{stack}": template
        for profile in PROFILES
        for stack, template in _templates_for(region, profile, synthesized).items()
    }
    found = [each for each in _lint(tmp_path, templates.items(), [region]) if _reason(each) is None]
    missing = {(region, each["Rule"]["Id"], each["Location"]["Path"][-1]) for each in found}
    assert missing == {each for each in _NOT_OFFERED if each[0] == region}, found


def _templates_for(region: str, profile: str, synthesized: Callable[[str, str], Templates]) -> Templates:
    """The templates of a profile for a region, made of those for regions with budgets."""
    templates = synthesized("aws", profile)
    if region in BUDGET_REGIONS:
        return templates
    return {
        stack: template
        | {"Resources": {key: each for key, each in template["Resources"].items() if each["Type"] != BUDGET_TYPE}}
        for stack, template in templates.items()
    }


def test_store_versions_and_sizes_are_still_offered_by_aws(
    synthesized: Callable[[str, str], Templates], tmp_path: Path
) -> None:
    """cfn-lint knows versions and sizes of single cache nodes only, and no minor versions of a major one."""
    scratch: dict[str, Any] = {}
    for profile in PROFILES:
        queue = the_one(synthesized("aws", profile), "AWS::ElastiCache::ReplicationGroup")
        node = {key: queue[key] for key in ("CacheNodeType", "Engine", "EngineVersion")} | {"NumCacheNodes": 1}
        scratch[f"Queue{profile}"] = {"Type": "AWS::ElastiCache::CacheCluster", "Properties": node}
    database = the_one(synthesized("aws", "lab"), "AWS::RDS::DBInstance")
    assert database["EngineVersion"].isdigit()
    for minor in range(1, 40):
        properties = {key: database[key] for key in ("DBInstanceClass", "Engine")}
        properties["EngineVersion"] = f"{database['EngineVersion']}.{minor}"
        scratch[f"Minor{minor}"] = {"Type": "AWS::RDS::DBInstance", "Properties": properties}
    findings = _lint(tmp_path, [("stores", {"Resources": scratch})])
    refused = {
        each["Location"]["Path"][1]
        for each in findings
        if each["Level"] != "Informational" and each["Location"]["Path"]
    }
    assert not [name for name in refused if name.startswith("Queue")]
    offered = {name for name in scratch if name.startswith("Minor")} - refused
    assert 0 < len(offered) < 39  # some are too old, and some are not available yet


def test_growing_a_deployment_replaces_no_resource(synthesized: Callable[[str, str], Templates]) -> None:
    """CloudFormation creates a replacement before it deletes the old resource: that fails for fixed names, and data
    would be lost. CloudFormation's schemas, which cfn-lint contains, list the properties that cannot be changed in
    place."""
    from cfnlint.schema import PROVIDER_SCHEMA_MANAGER  # takes five seconds, which no other test should wait for

    replaced = set()
    for smaller, larger in itertools.pairwise(PROFILES):
        for stack, template in synthesized("aws", smaller).items():
            for name, before in template["Resources"].items():
                after = synthesized("aws", larger)[stack]["Resources"].get(name)
                if after is None or before["Type"].startswith("Custom::"):
                    continue
                schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema(_REGIONS[0], before["Type"]).schema
                for pointer in schema.get("createOnlyProperties", []):
                    if _at(before.get("Properties", {}), pointer) != _at(after.get("Properties", {}), pointer):
                        replaced.add(before["Type"])
    assert replaced == {"AWS::ECS::TaskDefinition"}  # each is a revision of its own, whatever changes


def _at(properties: dict[str, Any], pointer: str) -> object:
    """The value of a property by its pointer in a schema, ``/properties/A/B``."""
    found: Any = properties
    for key in pointer.split("/")[2:]:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def test_invalid_templates_are_found(synthesized: Callable[[str, str], Templates], tmp_path: Path) -> None:
    """Mistakes that LocalStack deploys without an error."""
    templates: Templates = json.loads(json.dumps(synthesized("aws", "lab")))
    the_one(templates, "AWS::RDS::DBInstance")["DBInstanceClass"] = "db.t4g.nano"
    the_one(templates, "AWS::ECS::TaskDefinition")["Memory"] = "300"
    the_one(templates, "AWS::ECS::Service")["TaskDefinition"] = {"Ref": "Nothing"}
    rules = [each for _, each in resources(templates, "AWS::Events::Rule") if "ScheduleExpression" in each]
    rules[0]["ScheduleExpression"] = "rate(1 minutes)"
    function = next(properties for _, properties in resources(templates, "AWS::Lambda::Function"))
    function["Runtime"] = "python3.7"
    statements = [
        statement
        for _, policy in resources(templates, "AWS::IAM::Policy")
        for statement in policy["PolicyDocument"]["Statement"]
    ]
    for statement in statements:
        if statement["Action"] == "s3:ListBucket":
            statement["Action"] = "s3:ListBuckets"
        if statement["Action"] == ["s3:GetObject", "s3:PutObject"]:
            statement["Resource"] = "arn:aws:sqs:us-east-1:123456789012:queue"
    found = {each["Rule"]["Id"] for each in _lint(tmp_path, templates.items()) if _reason(each) is None}
    assert found >= {"E1020", "E2531", "E3025", "E3027", "E3047", "I3510", "W3037"}
