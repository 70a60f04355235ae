"""The chart of the endpoint: what Helm renders is what Kubernetes, the agent and its provider expect."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes.client
import parsl.providers.kubernetes.kube
import pytest
import yaml

import farcall_endpoint.providers.schedulers
from farcall_endpoint.config.providers import KubernetesProviderConfig, LocalProviderConfig
from farcall_endpoint.config.reader import parse_config
from farcall_endpoint.config.schema import Config
from tests.support.chart import CHART, NEEDED, helm, render

ROOT = Path(__file__).parents[2]
PODS = {"blocks": {"pods": True}}
FULL = {
    **PODS,
    "image": {"repository": "registry.example.org/farcall-endpoint", "tag": "lab", "pullSecrets": ["registry"]},
    "endpointName": "cluster",
    "token": {"value": "a token: 'quoted'"},
    "persistence": {"size": "1Gi", "storageClass": "fast"},
    "podAnnotations": {"example.org/owner": "lab"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "science", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "config": {"engine": {"max_workers_per_node": 4, "provider": {"max_blocks": 3, "max_cpu": 4, "max_mem": "8Gi"}}},
}


def _agent(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = objects["StatefulSet/lab"]["spec"]["template"]["spec"]
    return spec


def _config(objects: dict[str, dict[str, Any]]) -> Config:
    return parse_config(objects["ConfigMap/lab"]["data"]["config.yaml"], source="config.yaml")


def test_the_chart_has_no_lint() -> None:
    done = helm("lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_has_no_lint() -> None:
    program = str(Path(sys.executable).with_name("hadolint"))
    lint = [program, "--failure-threshold", "warning", "--no-color", str(ROOT / "endpoint" / "Dockerfile")]
    done = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", [{}, PODS, FULL], ids=["default", "pods", "full"])
def test_objects_are_those_of_kubernetes(values: dict[str, Any]) -> None:
    """Field by field, as the models that are generated from its OpenAPI description have them."""
    for name, rendered in render(**values).items():
        assert rendered["metadata"].get("namespace") == "science"
        check(rendered, f"V1{rendered['kind']}", name)


def check(data: Any, kind: str, where: str) -> None:
    """An ``AssertionError`` if ``data`` has fields that the kind has not, lacks one, or has one of another type."""
    if data is None or kind == "object":
        return
    if found := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        assert isinstance(data, list), where
        for number, each in enumerate(data):
            check(each, found[1], f"{where}[{number}]")
    elif found := re.fullmatch(r"[Dd]ict[(\[]str, (.+)[)\]]", kind):
        assert isinstance(data, dict), where
        for key, each in data.items():
            check(each, found[1], f"{where}.{key}")
    elif model := getattr(kubernetes.client, kind, None):
        assert isinstance(data, dict), where
        fields = {json_name: name for name, json_name in model.attribute_map.items()}
        assert data.keys() - fields.keys() == set(), where
        model(**{fields[key]: value for key, value in data.items()})  # raises if a required one is missing
        for key, value in data.items():
            check(value, model.openapi_types[fields[key]], f"{where}.{key}")
    else:
        assert type(data).__name__ == kind, where


def test_the_check_finds_mistakes() -> None:
    for wrong in ({"spec": {"replicaz": 1}}, {"spec": {"selector": {}, "replicas": "one"}}, {"spec": {"replicas": 1}}):
        with pytest.raises((AssertionError, ValueError)):
            check(wrong, "V1StatefulSet", "")


def test_the_values_of_the_documentation_are_rendered() -> None:
    text = (ROOT / "docs" / "endpoint" / "kubernetes.md").read_text(encoding="utf-8")
    (values,) = re.findall(r'```yaml title="values.yaml"\n(.*?)```', text, re.DOTALL)
    provider = _config(render(**yaml.safe_load(values))).engine.provider
    assert isinstance(provider, KubernetesProviderConfig)
    assert provider.max_blocks == 20


def test_blocks_are_in_the_agents_pod_by_default_without_any_rights() -> None:
    objects = render()
    assert isinstance(_config(objects).engine.provider, LocalProviderConfig)
    assert sorted(objects) == ["ConfigMap/lab", "Service/lab", "ServiceAccount/lab", "StatefulSet/lab"]
    assert _agent(objects)["automountServiceAccountToken"] is False


def test_blocks_in_pods_use_the_image_and_an_account_without_rights() -> None:
    objects = render(**FULL)
    config = _config(objects)
    provider = config.engine.provider
    assert isinstance(provider, KubernetesProviderConfig)
    assert (provider.namespace, provider.image) == ("science", "registry.example.org/farcall-endpoint:lab")
    assert (provider.max_blocks, provider.max_cpu, provider.secret) == (3, 4.0, "registry")
    assert (provider.run_as_non_root, provider.user_id) == (True, "1000")
    assert (config.display_name, config.engine.max_workers_per_node) == ("cluster", 4)
    service = objects["Service/lab"]
    assert config.engine.address == f"{service['metadata']['name']}.science.svc"
    assert (
        service["spec"]["selector"].items()
        <= objects["StatefulSet/lab"]["spec"]["template"]["metadata"]["labels"].items()
    )
    assert objects[f"ServiceAccount/{provider.service_account_name}"]["automountServiceAccountToken"] is False
    bound = [subject["name"] for subject in objects["RoleBinding/lab"]["subjects"]]
    assert bound == [_agent(objects)["serviceAccountName"]]


def test_the_agent_may_do_what_its_provider_calls_and_nothing_else() -> None:
    sources = inspect.getsource(farcall_endpoint.providers.schedulers)
    sources += inspect.getsource(parsl.providers.kubernetes.kube)
    calls = re.findall(r"client\.(\w+)_namespaced_(\w+)\(", sources)
    needed = {({"read": "get"}.get(verb, verb), f"{kind}s") for verb, kind in calls}
    rules = render(**PODS)["Role/lab"]["rules"]
    allowed = {(verb, kind) for rule in rules for kind in rule["resources"] for verb in rule["verbs"]}
    assert allowed == needed == {("create", "pods"), ("get", "pods"), ("delete", "pods"), ("create", "secrets")}


def test_containers_are_confined() -> None:
    pod = _agent(render(**FULL))
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_token_is_in_a_secret_only() -> None:
    objects = render(**FULL)
    assert objects.pop("Secret/lab")["stringData"] == {"token": FULL["token"]["value"]}  # type: ignore[index]
    assert "a token" not in yaml.safe_dump(objects)
    own = render(token={"existingSecret": "mine", "key": "t"})
    assert "Secret/lab" not in own
    (token,) = (each for each in _agent(own)["containers"][0]["env"] if each["name"] == "FARCALL_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "t", "optional": True}


def test_running_tasks_get_their_grace_before_the_pod_is_killed() -> None:
    objects = render(terminationGracePeriodSeconds=120)
    assert _config(objects).shutdown_grace == 105
    assert _agent(objects)["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "apiUrl"),
        ({**NEEDED, "image": {}}, "repository"),
        ({**NEEDED, "blokcs": {"pods": True}}, "blokcs"),
        ({**NEEDED, "blocks": {"pods": "yes"}}, "boolean"),
        ({**NEEDED, "endpointName": "two words"}, "endpointName"),
    ],
    ids=["no address", "no image", "misspelt", "wrong type", "wrong name"],
)
def test_wrong_values_are_refused(values: dict[str, Any], said: str) -> None:
    done = helm("template", "lab", str(CHART), values=values)
    assert done.returncode != 0
    assert said in done.stderr
