"""Handlers, commands and environment variables in the templates exist in the code.

The parts never import one another, so only this test notices a moved handler or an unused variable.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from farcall_common.store.settings import DatabaseSettings, StoreSettings
from farcall_forwarder.settings import Settings as ForwarderSettings
from farcall_infra.bundles import RUNTIME
from farcall_lambdas.settings import ApiSettings, AuthSettings
from tests.certificates import Authority
from tests.contract.templates import Templates

_WORKSPACE = Path(__file__).resolve().parents[2]
_READERS = (
    "common/farcall_common",
    "lambdas/farcall_lambdas",
    "forwarder_fargate/farcall_forwarder",
    "infra/farcall_infra/runtime",
)


@pytest.fixture
def resources(aws: Templates) -> dict[str, dict[str, Any]]:
    """Every resource of the templates for AWS."""
    return {name: resource for template in aws.values() for name, resource in template["Resources"].items()}


def _functions(resources: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Handler name to environment; values known only at deployment are replaced by a number, which is also valid
    text."""
    return {
        r["Properties"]["Handler"]: {
            key: value if isinstance(value, str) else "5432"
            for key, value in r["Properties"]["Environment"]["Variables"].items()
        }
        for r in resources.values()
        if r["Type"] == "AWS::Lambda::Function"
    }


def _container(resources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (task,) = (r for r in resources.values() if r["Type"] == "AWS::ECS::TaskDefinition")
    (container,) = task["Properties"]["ContainerDefinitions"]
    assert isinstance(container, dict)
    return container


def test_every_handler_can_be_imported(resources: dict[str, dict[str, Any]]) -> None:
    handlers = _functions(resources)
    assert len(handlers) in (4, 5)  # not every profile has a canary
    for handler in handlers:
        module_name, _, name = handler.rpartition(".")
        if module_name.startswith("farcall_lambdas."):
            module = importlib.import_module(module_name)
        else:
            path = RUNTIME / f"{module_name}.py"
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        assert callable(getattr(module, name))


def test_the_container_command_is_a_program_of_the_bundle(resources: dict[str, dict[str, Any]]) -> None:
    python, flag, package = _container(resources)["Command"]
    assert (python, flag) == ("python", "-m")
    assert importlib.util.find_spec(f"{package}.__main__") is not None


def test_settings_can_be_read_from_the_environments(resources: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    # In a bundle the file is next to the code.
    authorities = {"FARCALL_DATABASE_AUTHORITIES": str(Authority().write(tmp_path / "authorities.pem"))}
    functions = {
        handler: environment | (authorities if "FARCALL_DATABASE_AUTHORITIES" in environment else {})
        for handler, environment in _functions(resources).items()
    }
    for handler, read in (("api", StoreSettings.from_environment), ("reconciler", StoreSettings.without_blobs)):
        environment = functions[f"farcall_lambdas.handlers.{handler}.handle"]
        assert read(environment).queue_url.startswith("rediss://")
        ApiSettings.from_environment(environment)
    assert DatabaseSettings.from_environment(functions["migration_resource.handle"]).name == "farcall"
    assert AuthSettings.from_environment(functions["farcall_lambdas.handlers.authorizer.handle"]).provider == "globus"
    container = {
        variable["Name"]: variable["Value"] if isinstance(variable["Value"], str) else "5432"
        for variable in _container(resources)["Environment"]
    } | authorities
    blobs = StoreSettings.from_environment(container).blobs
    assert blobs is not None
    assert blobs.bucket
    assert ForwarderSettings.read([], container).port == 443


def test_every_variable_is_read_somewhere(resources: dict[str, dict[str, Any]]) -> None:
    given = {name for environment in _functions(resources).values() for name in environment}
    container = _container(resources)
    given |= {variable["Name"] for variable in container["Environment"] + container.get("Secrets", [])}
    text = "\n".join(
        path.read_text(encoding="utf-8") for reader in _READERS for path in (_WORKSPACE / reader).rglob("*.py")
    )
    read = set(re.findall(r"\bFARCALL_[A-Z_]+\b", text))
    assert {name for name in given if name.startswith("FARCALL_")} - read == set()
