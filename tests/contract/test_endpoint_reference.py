"""The committed description of ``config.yaml`` is that of the code, and the site templates are good files."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from farcall_endpoint.config.reader import read_config
from farcall_endpoint.config.reference import FILES, json_schema

DOCS = Path(__file__).parents[2] / "docs" / "endpoint"
SITES = sorted((DOCS / "sites").glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_committed_file_matches_the_code(name: str) -> None:
    committed = (DOCS / name).read_text(encoding="utf-8")

    assert committed == FILES[name](), "run: python -m farcall_endpoint.config.reference docs/endpoint"


def test_there_is_a_template_for_every_kind_of_site() -> None:
    providers = {read_config(path).engine.provider.__struct_config__.tag for path in SITES}

    assert providers >= {
        "LocalProvider",
        "SlurmProvider",
        "PBSProProvider",
        "LSFProvider",
        "CondorProvider",
        "GridEngineProvider",
        "KubernetesProvider",
    }
    index = (DOCS / "sites" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in SITES if path.name not in index] == []


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_a_template_is_valid_for_the_reader_and_for_editors(path: Path) -> None:
    read_config(path)

    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), json.loads(json_schema()))
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=../config.schema.json\n")


def test_the_schema_refuses_what_the_reader_refuses() -> None:
    wrong = {"engine": {"provider": {"type": "SlurmProvider", "walltime": "30"}}}

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json.loads(json_schema()))
