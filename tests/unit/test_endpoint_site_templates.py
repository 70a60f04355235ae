"""``config.yaml`` from a template, with a few settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from farcall_common.environments import TYPES, UV
from farcall_common.errors import ConfigurationError
from farcall_endpoint.config.providers import SlurmProviderConfig
from farcall_endpoint.config.reader import parse_config
from farcall_endpoint.config.site_template import SiteTemplate, find_template, list_templates
from farcall_endpoint.environments.launcher import mounts_of
from farcall_endpoint.environments.runners.base import Start
from farcall_endpoint.environments.runners.registry import RUNNERS

DOCS = Path(__file__).parents[2] / "docs" / "endpoint" / "sites"


def test_the_documentation_shows_the_templates_of_the_package() -> None:
    shown = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("*.yaml")}
    assert {each.name: each.text for each in list_templates()} == {
        name: text.partition("\n")[2] for name, text in shown.items()
    }
    assert all(path.is_symlink() for path in DOCS.glob("*.yaml")), "there is one copy of each"


def test_templates_have_a_description() -> None:
    by_name = {each.name: each for each in list_templates()}
    assert by_name["slurm-gpu"].description.startswith("Slurm, GPU nodes: ")
    assert "yaml-language-server" not in by_name["slurm-gpu"].text


@pytest.mark.parametrize("technology", TYPES)
def test_there_is_an_example_of_each_technology_of_environments(technology: str) -> None:
    engine = parse_config(find_template(f"containers-{technology}").text, source="x").engine
    assert technology in (engine.environments.types or ())
    assert engine.container_type == (None if technology == UV else technology)
    settings = engine.environment_settings(Path("/home/me/.farcall/endpoints/lab"))
    if settings.default is not None:
        binds = mounts_of(settings.binds)
        start = Start(settings.default.location, ("python3", "-I"), binds, network=settings.network)
        command = RUNNERS[technology].command(dataclasses.replace(start, options=settings.options))
        assert command[-2:] == ["python3", "-I"] or "--entrypoint" in command
        for option in settings.options:
            assert option in command
        for bind in binds:
            assert any(bind.target in each for each in command), "the container sees it"


def test_settings_change_lines_and_nothing_else() -> None:
    template = find_template("slurm-cpu")
    settings = {"partition": "gpu-long", "account": "0123", "provider.walltime": "01:00:00", "max_blocks": "3"}
    text = template.fill(settings | {"display_name": 'Lab: "A"', "exclusive": "false"})
    provider = parse_config(text, source="x").engine.provider
    assert isinstance(provider, SlurmProviderConfig)
    assert (provider.partition, provider.account, provider.walltime_s) == ("gpu-long", "0123", 3600.0)
    assert (provider.max_blocks, provider.exclusive) == (3, False)
    assert parse_config(text, source="x").display_name == 'Lab: "A"'
    assert "    partition: gpu-long     # sinfo lists the partitions" in text.splitlines()
    changed = [line for line in text.splitlines() if line not in template.text.splitlines()]
    assert len(changed) == 6
    assert len(text.splitlines()) == len(template.text.splitlines())


@pytest.mark.parametrize("template", list_templates(), ids=lambda each: each.name)
def test_every_template_can_be_filled(template: SiteTemplate) -> None:
    text = template.fill({"display_name": "x"})
    assert parse_config(text, source="x").display_name == "x"


def test_fields_of_a_site_are_to_be_reviewed() -> None:
    template = find_template("slurm-cpu")
    assert template.to_review({}) == ["partition", "account", "scheduler_options", "worker_init"]
    assert template.to_review({"provider.partition": "a", "account": "b"}) == ["scheduler_options", "worker_init"]
    assert find_template("laptop").to_review({}) == []
    assert find_template("containers-venv").to_review({}) == ["container_uri", "locations"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("slurmcpu", {}, "Did you mean slurm-cpu"),
        ("slurm-cpu", {"queue": "x"}, "has no field 'queue' to set.*partition, account"),
        ("slurm-cpu", {"walltime": "1"}, "more than once.*engine.limits.walltime, engine.provider.walltime"),
        ("slurm-cpu", {"worker_init": "x"}, "has no field 'worker_init'"),
        ("slurm-cpu", {"max_blocks": "many"}, "max_blocks"),
    ],
)
def test_wrong_names_and_values_are_refused(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        find_template(name).fill(settings)
