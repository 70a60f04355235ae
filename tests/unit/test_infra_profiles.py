"""Profiles and deployments: what is in the files is taken as it is, and what is wrong stops the synth."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall_common.errors import ConfigurationError
from farcall_infra.deployment import TARGETS, deployment_from_context
from farcall_infra.profiles import DEFAULT_PROFILES, load_profile


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


def test_lab_is_complete() -> None:
    lab = load_profile("lab")
    assert lab.name == "lab"
    assert lab.database.instance_type == "t4g.micro"
    assert lab.forwarder.tasks >= 1


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_profile("lab").queue.nodes = 2


def test_an_unknown_profile_names_the_known_ones() -> None:
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
        ("log_days", "31", "retention.log_days"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, key: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        load_profile("lab", path=_profiles(tmp_path, **{key: value}))


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(DEFAULT_PROFILES.read_text(encoding="utf-8") + "\nspeed = 3\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"retention\.speed"):
        load_profile("lab", path=path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text("[lab", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"cannot read the profiles in .*profiles\.toml"):
        load_profile("lab", path=path)


def test_a_deployment_comes_from_the_context() -> None:
    deployment = deployment_from_context({"name": "physics", "target": "localstack"}.get)
    assert deployment.name == "physics"
    assert deployment.profile.name == "lab"
    assert deployment.target is TARGETS["localstack"]


def test_aws_is_the_target_unless_told_otherwise_and_it_keeps_data() -> None:
    deployment = deployment_from_context(lambda _key: None)
    assert deployment.target is TARGETS["aws"]
    assert deployment.keeps_data
    assert not deployment.target.dev_tokens


@pytest.mark.parametrize("context", [{"name": "My Lab"}, {"target": "moon"}, {"profile": "planet"}])
def test_a_wrong_context_is_refused(context: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        deployment_from_context(context.get)
