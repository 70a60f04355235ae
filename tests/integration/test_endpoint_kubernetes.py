"""Blocks from Kubernetes: the real client and Parsl's provider, against an API server with pods in a dictionary."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from farcall_common.environments import Environment
from farcall_endpoint.config.providers import KubernetesProviderConfig
from farcall_endpoint.providers.base import Phase
from farcall_endpoint.providers.batch import BatchProvider, SchedulerError
from farcall_endpoint.providers.schedulers import make_scheduler
from tests.support.endpoint import running_endpoint, wait_gone
from tests.support.endpoint.endpoint_command import EndpointCommand
from tests.waiting import WAIT_S, wait_until


class Cluster:
    """As much of the API as a provider uses: create, read and delete pods of one namespace, and create Secrets, which
    are deleted with the pods that own them.

    :param runs_pods: whether the command of a pod runs, as a process of this machine, once its Secret is there. The
        variable ``POD_IMAGE`` has the name of its image.
    """

    def __init__(self, *, runs_pods: bool = False) -> None:
        self.runs_pods = runs_pods
        self.images: list[str] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.allows_secrets = True
        cluster = self

        class Handler(_Handler):
            owner = cluster

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def run(self, name: str) -> None:
        """Run the command of a pod."""
        container = self.pods[name]["spec"]["containers"][0]
        values = self.secrets[name]["stringData"]
        variables = {each["name"]: values[each["name"]] for each in container["env"] if "valueFrom" in each}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.processes[name] = subprocess.Popen(
            [*container["command"], *container["args"]],
            env={**os.environ, **variables, "PATH": path, "POD_IMAGE": container["image"]},
            start_new_session=True,
        )
        self.pods[name]["status"]["phase"] = "Running"

    def end(self, name: str) -> None:
        """End the process of a pod."""
        process = self.processes.pop(name, None)
        if process is not None:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            process.wait(WAIT_S)
            wait_gone(family)

    def close(self) -> None:
        for name in list(self.processes):
            self.end(name)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: Cluster
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        pod = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/secrets"):
            if self.owner.allows_secrets:
                self.owner.secrets[pod["metadata"]["name"]] = pod
                if self.owner.runs_pods:
                    self.owner.run(pod["metadata"]["name"])
            self._answer(*((201, pod) if self.owner.allows_secrets else (403, {"message": "secrets is forbidden"})))
            return
        if "quota" in pod["spec"]["containers"][0]["image"]:
            self._answer(403, {"message": "pods is forbidden: exceeded quota"})
            return
        pod["status"] = {"phase": "Pending"}
        pod["metadata"]["uid"] = f"uid of {pod['metadata']['name']}"
        self.owner.pods[pod["metadata"]["name"]] = pod
        self.owner.images.append(pod["spec"]["containers"][0]["image"])
        self._answer(201, pod)

    def do_GET(self) -> None:
        pod = self.owner.pods.get(self.path.rsplit("/", 1)[1])
        process = self.owner.processes.get(self.path.rsplit("/", 1)[1])
        if pod and process and process.poll() is not None:
            pod["status"]["phase"] = "Failed" if process.returncode else "Succeeded"
        self._answer(200 if pod else 404, pod or {"message": "not found"})

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pod = self.owner.pods.pop(self.path.rsplit("/", 1)[1], None)
        if pod:
            self.owner.end(pod["metadata"]["name"])
        for name, secret in list(self.owner.secrets.items()):
            if pod and pod["metadata"]["uid"] in [each["uid"] for each in secret["metadata"]["ownerReferences"]]:
                del self.owner.secrets[name]
        self._answer(200 if pod else 404, pod or {"message": "not found"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster()
    file = write_kubeconfig(tmp_path, cluster)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    yield cluster
    cluster.close()


def write_kubeconfig(directory: Path, cluster: Cluster) -> Path:
    context = {"cluster": "test", "user": "test", "namespace": "farcall"}
    file = directory / "kubeconfig"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": {"server": cluster.url}}],
                "users": [{"name": "test", "user": {}}],
                "contexts": [{"name": "test", "context": context}],
                "current-context": "test",
            }
        )
    )
    return file


CONFIG = KubernetesProviderConfig(
    image="registry.example/farcall:1", namespace="farcall", max_cpu=4, max_mem="8Gi", worker_init="source /opt/env"
)


def test_a_block_is_a_self_contained_pod(cluster: Cluster, tmp_path: Path) -> None:
    provider = BatchProvider(
        make_scheduler(CONFIG, script_dir=tmp_path),
        name="Lab",
        script_dir=tmp_path,
        walltime_s=None,
        worker_init=CONFIG.worker_init,
        poll_s=0.1,
    )
    command = ["/home/me/.venv/bin/python", "-P", "-m", "farcall_endpoint.manager", "--block-id", "block-1"]
    keys = {"FARCALL_FLEET_SERVER_KEY": "k$y", "FARCALL_FLEET_SECRET_KEY": "hidden"}
    block = provider.start(command, block_id="block-1", environment={**keys, "PLAIN": "p$"})
    wait_until(lambda: cluster.secrets)
    [(name, pod)] = cluster.pods.items()
    assert name.startswith("farcall-lab-1")
    [container] = pod["spec"]["containers"]
    assert container["image"] == "registry.example/farcall:1"
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "8Gi"}
    script = container["args"][1]
    assert "source /opt/env" in script
    assert "export PLAIN='p$'" in script
    assert "k$y" not in json.dumps(pod), "keys are in the Secret only"
    assert "hidden" not in json.dumps(pod)
    references = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each}
    assert references == {variable: {"name": name, "key": variable} for variable in keys}
    [(secret_name, secret)] = cluster.secrets.items()
    assert (secret_name, secret["stringData"], secret["immutable"]) == (name, keys, True)
    assert "hidden" not in repr(block)
    assert "exec python3 -P -m farcall_endpoint.manager --block-id block-1" in script, "the image's own Python"
    assert not list(tmp_path.glob("*.sh")), "nothing is expected to be shared"

    pod["status"]["phase"] = "Running"
    wait_until(lambda: block.status().phase is Phase.RUNNING)
    block.kill()
    wait_until(lambda: block.status().phase is Phase.ENDED)
    assert not cluster.pods
    assert not cluster.secrets
    provider.close()


def test_without_the_right_to_make_secrets_no_pod_remains(cluster: Cluster, tmp_path: Path) -> None:
    cluster.allows_secrets = False
    scheduler = make_scheduler(CONFIG, script_dir=tmp_path)
    with pytest.raises(SchedulerError, match="secrets is forbidden"):
        scheduler.submit("true", name="block-1", secrets={"KEY": "hidden"})
    assert not cluster.pods


def test_a_refusal_has_the_message_of_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    scheduler = make_scheduler(KubernetesProviderConfig(image="over-quota"), script_dir=tmp_path)
    with pytest.raises(SchedulerError, match="exceeded quota"):
        scheduler.submit("true", name="block-1")


# -- an endpoint whose pods run ----------------------------------------------------------------------------------------


def image_of_pod() -> str:
    import os

    return os.environ["POD_IMAGE"]


def image(name: str) -> Environment:
    return Environment(type="docker", location=f"registry.example/{name}:1", name=name)


def test_each_task_runs_in_a_pod_of_its_image_and_idle_pods_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(runs_pods=True)
    try:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, cluster)))
        provider: dict[str, object] = {"type": "KubernetesProvider", "image": "registry.example/farcall:1"}
        provider |= {"namespace": "farcall", "init_blocks": 0, "max_blocks": 2}
        engine: dict[str, object] = {"provider": provider, "address": "127.0.0.1", "max_workers_per_node": 1}
        engine["environments"] = {"types": ["docker"]}
        with running_endpoint(tmp_path / "home", engine=engine) as endpoint:
            cloud = endpoint.cloud
            tasks = {name: cloud.submit(image_of_pod, environment=image(name)) for name in ("sci", "ml")}
            assert {name: cloud.end(task).value for name, task in tasks.items()} == {
                name: f"registry.example/{name}:1" for name in tasks
            }
            assert sorted(cluster.images) == ["registry.example/ml:1", "registry.example/sci:1"]
            third = cloud.submit(image_of_pod, environment=image("third"))
            own = cloud.submit(image_of_pod)
            assert cloud.end(third).value == "registry.example/third:1", "an idle pod made room"
            assert cloud.end(own).value == "registry.example/farcall:1"
            refused = cloud.end(cloud.submit(image_of_pod, environment=Environment(type="venv", location="/opt/x")))
            assert refused.error is not None
            assert refused.error["code"] == "CONTAINER_UNSUPPORTED"
            command = EndpointCommand(endpoint.environment, endpoint.home)
            warmed = command.run("prewarm", "test", "docker:registry.example/warm:1", "--timeout", "60")
            assert "1 warm" in warmed.stdout, warmed.stderr
            assert cluster.images[-1] == "registry.example/warm:1"
            denied = command.run("prewarm", "test", "podman:registry.example/warm:1", "--timeout", "60")
            assert "do not allow podman" in " ".join(denied.stderr.split())
        assert all(process.poll() is not None for process in cluster.processes.values())
    finally:
        cluster.close()
