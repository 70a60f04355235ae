"""Releases: callers use aliases of functions, versions have all settings, and alarms return to the old release."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farcall_infra.profiles import Profile
from tests.contract.templates import OPTIONS, Templates, resources, the_one

#: The longest description of a version.
_DESCRIPTION = 256
#: Resources that belong to a function or name it to change it; all others call it.
_ITS_OWN = ("AWS::Lambda::Alias", "AWS::Lambda::EventInvokeConfig", "AWS::Lambda::Version")
_MIGRATOR = "migration_resource.handle"


def _refers_to(value: Any) -> Iterator[str]:
    """The logical names that a value refers to."""
    if isinstance(value, list):
        for each in value:
            yield from _refers_to(each)
    elif isinstance(value, dict):
        if "Ref" in value:
            yield str(value["Ref"])
        if "Fn::GetAtt" in value:
            yield str(value["Fn::GetAtt"][0])
        for each in value.values():
            yield from _refers_to(each)


def _of_kind(template: dict[str, Any], kind: str) -> dict[str, Any]:
    """Properties by logical name."""
    return {name: each["Properties"] for name, each in template["Resources"].items() if each["Type"] == kind}


def _all_templates(aws: Templates, synthesized: Callable[[str, str], Templates]) -> list[dict[str, Any]]:
    with_functions = [*aws.values(), *(t for name in OPTIONS for t in synthesized("options", name).values())]
    return [template for template in with_functions if _of_kind(template, "AWS::Lambda::Function")]


def test_all_callers_of_a_function_call_its_alias(aws: Templates, synthesized: Callable[[str, str], Templates]) -> None:
    """CloudFormation alone calls the migrator, and refuses another function for an existing resource."""
    for template in _all_templates(aws, synthesized):
        functions = _of_kind(template, "AWS::Lambda::Function")
        callers: dict[str, set[str]] = {}
        for name, resource in template["Resources"].items():
            if resource["Type"] not in _ITS_OWN and not name.startswith("Shift"):
                for function in functions.keys() & set(_refers_to(resource["Properties"])):
                    callers.setdefault(functions[function]["Handler"], set()).add(resource["Type"])
        assert callers in ({_MIGRATOR: {"Custom::FarcallMigration"}}, {})
        serving = {name for name, each in functions.items() if each["Handler"] != _MIGRATOR}
        aliases = _of_kind(template, "AWS::Lambda::Alias").values()
        assert {each["FunctionName"]["Ref"] for each in aliases} == serving
        assert {each["Name"] for each in aliases} == {"live"}


def test_the_limits_of_retries_are_those_of_the_alias(aws: Templates) -> None:
    """The limits of `$LATEST` are not those of an alias."""
    for template in aws.values():
        functions = _of_kind(template, "AWS::Lambda::Function")
        aliases = _of_kind(template, "AWS::Lambda::Alias")
        for limit in _of_kind(template, "AWS::Lambda::EventInvokeConfig").values():
            is_migrator = functions[limit["FunctionName"]["Ref"]]["Handler"] == _MIGRATOR
            assert (limit["Qualifier"] == "$LATEST") == is_migrator
            assert is_migrator or set(_refers_to(limit["Qualifier"])) <= set(aliases)


@pytest.mark.parametrize("target", ["aws", "localstack"])
def test_a_new_value_of_a_parameter_publishes_a_version(
    synthesized: Callable[[str, str], Templates], profile: str, target: str
) -> None:
    """CDK's name for a version has a digest of the template's text, in which values of parameters are not.
    CloudFormation replaces a version whose description changes."""
    template = synthesized(target, profile)["farcall-api"]
    parameters = set(template["Parameters"])
    functions = _of_kind(template, "AWS::Lambda::Function")
    found = set()
    for version in _of_kind(template, "AWS::Lambda::Version").values():
        function = functions[version["FunctionName"]["Ref"]]
        used = parameters & set(_refers_to(function["Environment"]))
        assert used <= set(_refers_to(version.get("Description")))
        found |= used
    assert found == parameters - {"BootstrapVersion"}


def test_the_parameters_fit_into_the_description_of_a_version(aws: Templates) -> None:
    parameters = aws["farcall-api"]["Parameters"]
    lengths = [parameters[name]["MaxLength"] for name in ("GlobusClientId", "GlobusScope")]
    pattern = re.compile(parameters["GlobusCredentialsArn"]["AllowedPattern"])
    prefix = "arn:aws-us-gov:secretsmanager:us-gov-west-1:123456789012:secret:"
    longest = max(length for length in range(_DESCRIPTION) if pattern.fullmatch(prefix + "n" * length))
    assert sum(lengths) + longest + len("  ") <= _DESCRIPTION
    assert pattern.fullmatch(parameters["GlobusCredentialsArn"]["Default"])


def _alarms(templates: Templates) -> dict[str, dict[str, Any]]:
    return {each["AlarmName"]: each for _, each in resources(templates, "AWS::CloudWatch::Alarm")}


def test_gradual_releases_of_the_gateways_functions_return_after_an_alarm(aws: Templates, size: Profile) -> None:
    api = aws["farcall-api"]["Resources"]
    functions = _of_kind(aws["farcall-api"], "AWS::Lambda::Function")
    shifted = {
        functions[each["Properties"]["FunctionName"]["Ref"]]["Handler"].split(".")[-2]: each["UpdatePolicy"]
        for each in api.values()
        if each["Type"] == "AWS::Lambda::Alias" and "UpdatePolicy" in each
    }
    assert shifted.keys() == ({"api", "authorizer"} if size.api.gradual else set())
    for policy in shifted.values():
        group = api[policy["CodeDeployLambdaAliasUpdate"]["DeploymentGroupName"]["Ref"]]["Properties"]
        assert set(group["AutoRollbackConfiguration"]["Events"]) == {"DEPLOYMENT_FAILURE", "DEPLOYMENT_STOP_ON_ALARM"}
        (minutes,) = re.findall(r"Canary10Percent(\d+)Minutes$", group["DeploymentConfigName"])
        (watched,) = group["AlarmConfiguration"]["Alarms"]
        alarm = _alarms(aws)[watched["Name"]]
        (period_s,) = {each["Period"] for each in alarm["Metrics"] if "Period" in each} | {
            each["MetricStat"]["Period"] for each in alarm["Metrics"] if "MetricStat" in each
        }
        # A release may start within a period.
        assert (alarm["EvaluationPeriods"] + 1) * period_s <= 60 * int(minutes)


def test_profiles_release_gradually_or_at_once(synthesized: Callable[[str, str], Templates]) -> None:
    groups = {
        profile: len(list(resources(synthesized("aws", profile), "AWS::CodeDeploy::DeploymentGroup")))
        for profile in ("hobby", "lab", "facility")
    }
    assert groups == {"hobby": 0, "lab": 0, "facility": 2}


def test_codedeploy_may_move_only_the_aliases_of_its_releases(synthesized: Callable[[str, str], Templates]) -> None:
    template = synthesized("aws", "facility")["farcall-api"]
    role = next(name for name in _of_kind(template, "AWS::IAM::Role") if name.startswith("ShiftRole"))
    assert "ManagedPolicyArns" not in template["Resources"][role]["Properties"]
    (policy,) = (each for each in _of_kind(template, "AWS::IAM::Policy").values() if each["Roles"] == [{"Ref": role}])
    move, describe = policy["PolicyDocument"]["Statement"]
    assert describe["Action"] == "cloudwatch:DescribeAlarms"
    functions = _of_kind(template, "AWS::Lambda::Function")
    moved = {functions[name]["Handler"].split(".")[-2] for name in _refers_to(move["Resource"])}
    assert moved == {"api", "authorizer"}
    assert not [on for on in move["Resource"] if json.dumps(on) == '"*"']


def test_a_rolling_deployment_of_forwarders_returns_after_an_alarm(aws: Templates, size: Profile) -> None:
    configuration = the_one(aws, "AWS::ECS::Service")["DeploymentConfiguration"]
    assert configuration["DeploymentCircuitBreaker"] == {"Enable": True, "Rollback": True}
    alarms = configuration["Alarms"]
    assert (alarms["Enable"], alarms["Rollback"]) == (True, True)
    assert set(alarms["AlarmNames"]) <= set(_alarms(aws))
    balanced = {"farcall-forwarder-unhealthy"} if size.network.load_balancer else set()
    assert set(alarms["AlarmNames"]) == {"farcall-leases-expiring", "farcall-results-late"} | balanced


def test_a_new_alias_is_part_of_the_gateways_deployment(synthesized: Callable[[str, str], Templates]) -> None:
    """A stage serves the integration of its deployment, which CloudFormation replaces only under another name."""
    template = synthesized("aws", "lab")["farcall-api"]
    uris = [each["Integration"]["Uri"] for each in _of_kind(template, "AWS::ApiGateway::Method").values()]
    aliases = set(_of_kind(template, "AWS::Lambda::Alias"))
    assert uris
    assert all(aliases & set(_refers_to(uri)) for uri in uris)
