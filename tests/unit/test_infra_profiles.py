"""Profiles and deployments: values of the files and overrides, and errors for invalid ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farcall_common.errors import ConfigurationError
from farcall_forwarder.settings import Settings
from farcall_infra.deployment import TARGETS, deployment_from_context
from farcall_infra.profiles import DEFAULT_PROFILES, load_profile, profile_names, setting_names
from farcall_lambdas.settings import ApiSettings


def _profiles(directory: Path, **changes: str) -> Path:
    """The committed profiles with some values replaced."""
    text = DEFAULT_PROFILES.read_text(encoding="utf-8")
    for key, value in changes.items():
        lines = [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in text.splitlines()]
        assert lines != text.splitlines(), f"{key} is not in the profiles"
        text = "\n".join(lines)
    path = directory / "profiles.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_three_profiles_are_complete() -> None:
    assert profile_names() == ("hobby", "lab", "facility")
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.retention.keep_data
        assert profile.budget.idle_usd <= profile.budget.monthly_usd


def test_each_profile_is_larger_than_the_one_before() -> None:
    hobby, lab, facility = map(load_profile, profile_names())
    assert hobby.forwarder.spot
    assert not lab.forwarder.spot
    assert [p.network.load_balancer for p in (hobby, lab, facility)] == [False, False, True]
    assert [p.database.multi_az for p in (hobby, lab, facility)] == [False, False, True]
    budgets = [p.budget.idle_usd for p in (hobby, lab, facility)]
    assert budgets == sorted(budgets)


def test_a_profile_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_profile("lab").queue.nodes = 2


def test_the_error_for_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="no profile 'planet'") as caught:
        load_profile("planet")
    assert "lab" in caught.value.record.hint


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("forwarder_cidrs", '["everywhere"]', "network.forwarder_cidrs.0"),
        ("instance_type", '"large"', "database.instance_type"),
        ("storage_gib", "5", "database.storage_gib"),
        ("node_type", '"t4g.micro"', "queue.node_type"),
        ("timeout_s", "60", "api.timeout_s"),
        ("memory_mib", "300", "Fargate has no size"),
        ("health_port", "443", "must differ"),
        ("zones", '["us-east-1a", "us-east-1a"]', "name 2 different zones"),
        ("zones", '["use1-az3"]', "network.zones.0"),
        ("failover", "true", "fail-over needs a second node"),
        ("log_days", "31", "retention.log_days"),
        ("emails", '["no-address"]', "budget.emails.0"),
        ("monthly_usd", "1", "the idle cost alone would exceed the budget"),
        ("max_storage_gib", "21", "max_storage_gib must be 0 or at least"),
        ("version", '"15"', "database.version"),
        ("express_zone", '"us-east-1a"', "analytics.express_zone"),
        ("cache_gb", "5001", "analytics.cache_gb"),
        ("cache_ecpu_per_s", "999", "analytics.cache_ecpu_per_s"),
        ("idle_minutes", "1", "analytics.idle_minutes"),
        ("worker_cidrs", '["0.0.0.0/0"]', "private addresses only"),
        ("authorities", '"http://ca.example.org/rds.pem"', "downloaded over https"),
        ("blob_days", "60", "must be at least 61"),
        ("retention_days", "365", "blobs would expire before their tasks"),
        ("max_wait_days", "30.5", "must be at least 62"),
        ("rate_per_s", "1000", r"limits\.rate_per_s is above"),
        ("rate_per_s", "inf", r"limits\.rate_per_s"),
        ("max_waiting", "0", r"limits\.max_waiting"),
        ("max_stored_bytes_per_day", "0", r"limits\.max_stored_bytes_per_day"),
        ("max_stored_bytes_per_day", "1.5e99", r"limits\.max_stored_bytes_per_day"),
        ("max_relay_bytes", str(2**48 + 1), r"limits\.max_relay_bytes"),
        ("concurrency", "37", "are enough for 36"),
        ("tasks", "3", "need 36 database connections during a rolling deployment, but 100 leave 27"),
        ("database_connections", "14", "need 28 database connections"),
        ("database_connections", "1", "forwarder.database_connections"),
    ],
)
def test_the_error_for_an_invalid_value_names_it(tmp_path: Path, key: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        load_profile("lab", path=_profiles(tmp_path, **{key: value}))


def test_a_budget_of_zero_is_no_budget() -> None:
    assert load_profile("lab", overrides={"budget.monthly_usd": "0"}).budget.monthly_usd == 0


@pytest.mark.parametrize(("reservable", "reserved"), [(None, 36), (47, 36), (46, 0), (0, 0)])
def test_concurrency_is_reserved_where_the_account_has_enough(reservable: int | None, reserved: int) -> None:
    context = {} if reservable is None else {"reservable_concurrency": str(reservable)}
    deployment = deployment_from_context(context)
    assert (deployment.api_concurrency, deployment.authorizer_concurrency) == (reserved, 10 if reserved else 0)


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(DEFAULT_PROFILES.read_text(encoding="utf-8") + "\nspeed = 3\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"budget\.speed"):
        load_profile("facility", path=path)


def test_overrides_replace_single_values() -> None:
    overrides = {
        "database.storage_gib": "50",
        "forwarder.tasks": "0",
        "network.load_balancer": "true",
        "network.forwarder_cidrs": "10.0.0.0/8, 192.168.0.0/16",
        "budget.emails": "ada@example.org",
    }
    profile = load_profile("lab", overrides=overrides)
    assert profile.database.storage_gib == 50
    assert profile.forwarder.tasks == 0
    assert profile.network.load_balancer is True
    assert profile.network.forwarder_cidrs == ("10.0.0.0/8", "192.168.0.0/16")
    assert profile.budget.emails == ("ada@example.org",)
    assert profile.database.instance_type == load_profile("lab").database.instance_type
    assert overrides.keys() <= setting_names()


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("database.storage", "50", "unknown setting 'database.storage'"),
        ("database.storage_gib", "many", "database.storage_gib"),
        ("network.load_balancer", "perhaps", "network.load_balancer"),
        ("network.forwarder_cidrs", "", "network.forwarder_cidrs"),
    ],
)
def test_the_error_for_an_invalid_override_names_it(setting: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        load_profile("lab", overrides={setting: value})


def test_the_error_for_an_invalid_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text("[lab", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"cannot read the profiles in .*profiles\.toml"):
        load_profile("lab", path=path)


def test_a_deployment_comes_from_the_context() -> None:
    deployment = deployment_from_context({"name": "physics", "target": "localstack"})
    assert deployment.name == "physics"
    assert deployment.profile.name == "lab"
    assert deployment.target is TARGETS["localstack"]


def test_aws_is_the_default_target_and_keeps_data() -> None:
    deployment = deployment_from_context({})
    assert deployment.target is TARGETS["aws"]
    assert deployment.keeps_data
    assert not deployment.target.dev_tokens


def test_users_are_named_by_the_profile() -> None:
    assert deployment_from_context({}).profile.identity.allows_no_one
    group = "7c580b9a-4592-11e3-a2a0-12313d2d6e7f"
    named = {
        "identity.allowed_identities": "ada@example.org, a11ce000-0000-4000-8000-000000000001",
        "identity.allowed_domains": "Example.ORG",
        "identity.allowed_groups": group,
        "identity.admins": "grace@example.org",
    }
    identity = deployment_from_context(named).profile.identity
    assert identity.environment() == {
        "FARCALL_ALLOWED_IDENTITIES": "ada@example.org,a11ce000-0000-4000-8000-000000000001",
        "FARCALL_ALLOWED_DOMAINS": "example.org",
        "FARCALL_ALLOWED_GROUPS": group,
        "FARCALL_ADMINS": "grace@example.org",
        "FARCALL_READ_GROUPS": "",
    }
    shares = deployment_from_context({**named, "identity.share_with_groups": "true"}).profile.identity
    assert shares.environment()["FARCALL_READ_GROUPS"] == "true"
    assert not identity.allows_no_one
    assert not identity.allows_everyone
    assert deployment_from_context({"identity.allowed_identities": "*"}).profile.identity.allows_everyone


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("allowed_identities", "ada lovelace", "allowed_identities"),
        ("allowed_identities", "*@example.org", "allowed_identities"),
        ("allowed_domains", "*", "looks like example.org"),
        ("allowed_domains", "ada@example.org", "looks like example.org"),
        ("allowed_groups", "*", "allowed_groups"),
        ("allowed_groups", "physics", "not the id of a group in Globus Groups"),
        ("admins", "*", "admins"),
        ("allowed_identities", ",".join(f"user{number}@example.org" for number in range(200)), "make a group of them"),
    ],
)
def test_users_that_could_mean_others_are_refused(setting: str, value: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        deployment_from_context({f"identity.{setting}": value})


def test_the_identity_provider_is_globus_or_an_issuer_with_an_audience() -> None:
    assert deployment_from_context({}).profile.identity.oidc_issuer == ""
    context = {
        "identity.oidc_issuer": "https://id.example.org",
        "identity.oidc_audience": "farcall",
        "identity.oidc_clients": "farcall-cli",
    }
    assert deployment_from_context(context).profile.identity.oidc_audience == "farcall"
    for wrong in (
        {"identity.oidc_issuer": "https://id.example.org"},
        context | {"identity.oidc_issuer": "http://x"},
        context | {"identity.oidc_clients": ""},
        {"identity.oidc_scope": "farcall"},
    ):
        with pytest.raises(ConfigurationError, match="identity"):
            deployment_from_context(wrong)


def test_the_context_overrides_settings_and_other_keys_are_ignored() -> None:
    context = {"queue.nodes": 2, "@aws-cdk/core:something": True, "aws:cdk:bundling-stacks": [], "tree": "1.2"}
    assert deployment_from_context(context).profile.queue.nodes == 2


@pytest.mark.parametrize(
    "context", [{"name": "My Lab"}, {"target": "moon"}, {"profile": "planet"}, {"queue.node": "3"}]
)
def test_an_invalid_context_is_refused(context: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        deployment_from_context(context)


def test_a_canary_is_refused_where_addresses_keep_it_out() -> None:
    """Its alarm would never end: the function connects from any address of AWS Lambda."""
    narrow = {"network.forwarder_cidrs": "192.0.2.0/24,::/0"}
    with pytest.raises(ConfigurationError, match=r"canary\.minutes to 0, and run `python -m farcall_lambdas\.canary`"):
        load_profile("facility", overrides=narrow)
    assert load_profile("facility", overrides=narrow | {"canary.minutes": "0"}).network.forwarder_cidrs
    assert load_profile("facility", overrides={"network.forwarder_cidrs": "0.0.0.0/0"}).canary.minutes
    assert not load_profile("lab", overrides=narrow).canary.minutes


def test_forwarder_can_sleep_unless_scheduled_checks_keep_it_awake() -> None:
    assert load_profile("hobby").forwarder.sleeps
    assert not load_profile("hobby", overrides={"forwarder.tasks": "0"}).forwarder.sleeps
    assert not load_profile("hobby", overrides={"forwarder.idle_minutes": "0"}).forwarder.sleeps
    assert load_profile("hobby", overrides={"canary.minutes": "20"}).forwarder.sleeps
    with pytest.raises(ConfigurationError, match="keep the forwarder awake"):
        load_profile("hobby", overrides={"canary.minutes": "15"})


def test_the_error_for_a_file_of_an_earlier_release_lists_missing_settings(tmp_path: Path) -> None:
    lines = DEFAULT_PROFILES.read_text(encoding="utf-8").splitlines(keepends=True)
    start = lines.index("[lab.limits]\n")
    end = lines.index("[lab.analytics]\n")
    old = tmp_path / "mine.toml"
    old.write_text("".join(line for line in lines[:start] + lines[end:] if not line.startswith("snapshot =")))
    with pytest.raises(ConfigurationError, match=r"mine\.toml lacks database\.snapshot, limits ") as refused:
        load_profile("lab", path=old)
    assert str(DEFAULT_PROFILES) in refused.value.hint


def test_the_api_and_the_forwarder_read_the_limits_of_a_profile() -> None:
    """Both take bytes of a day from one bucket, so they have one value."""
    defaults = load_profile("lab").limits
    assert defaults.max_stored_bytes_per_day == ApiSettings().max_stored_bytes_per_day
    assert defaults.max_relay_bytes == Settings().max_relayed_file_bytes
    stored, relayed = 2**60, 2**48  # the largest
    given = {"limits.max_stored_bytes_per_day": str(stored), "limits.max_relay_bytes": str(relayed)}
    limits = load_profile("lab", overrides=given).limits
    assert ApiSettings.from_environment(limits.environment()).max_stored_bytes_per_day == stored
    forwarder = Settings.read([], limits.forwarder_environment())
    assert (forwarder.stored_bytes_per_day, forwarder.max_relayed_file_bytes) == (stored, relayed)
