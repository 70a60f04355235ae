"""Synthesised templates for the tests: each profile, for AWS and for the offline tier, and profiles with settings that
change the shape of a template.

They are synthesised once per test run, also with several workers, by one process per target: starting the CDK library
takes as long as a synth.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.certificates import Authority

PROFILES = ("hobby", "lab", "facility")
TARGETS = ("aws", "localstack")
#: Deployments to AWS with settings of their own; between them they have every setting that changes a template's shape.
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "restored": {
        "name": "a-name-as-long-as-a-name-may-be",
        "profile": "lab",
        "budget.emails": "ada@example.org,grace@example.org",
        "database.authorities": "authorities.pem",
        "database.snapshot": "farcall-data-snapshot-1",
        "identity.oidc_issuer": "https://id.example.org",
        "identity.oidc_audience": "farcall",
        "identity.oidc_clients": "farcall-cli,farcall-ci",
        "identity.oidc_scope": "farcall",
        "identity.allowed_identities": "ada@example.org,grace@example.org",
        "identity.allowed_domains": "Lab.example.org",
        "identity.allowed_groups": "/physics/users",
        "identity.admins": "ada@example.org",
        "network.forwarder_cidrs": "192.0.2.0/24,2001:db8::/32",
        "network.zones": "us-east-1b,us-east-1c",
    },
    "own-image": {
        "profile": "facility",
        "canary.minutes": 0,
        "forwarder.code": "image",
        "forwarder.image": f"123456789012.dkr.ecr.eu-central-1.amazonaws.com/farcall-forwarder@sha256:{'0' * 64}",
        "queue.failover": "false",
        "reservable_concurrency": 170,
    },
    "unverified": {"profile": "lab", "canary.minutes": 60, "database.authorities": ""},
    "no-budget": {"profile": "facility", "region": "eu-north-1"},
    "analytics": {
        "profile": "lab",
        "analytics.enabled": "true",
        "analytics.express_zone": "use1-az4",
        "analytics.cache_gb": 250,
        "analytics.cache_ecpu_per_s": 2000000,
        "analytics.idle_minutes": 30,
        "analytics.worker_cidrs": "10.1.0.0/16,fd00::/64",
    },
    "bucket-only": {"profile": "hobby", "analytics.enabled": "true", "analytics.cache_gb": 0},
    "parked": {
        "profile": "hobby",
        "api.concurrency": 0,
        "budget.monthly_usd": 0,
        "database.major_upgrade": "true",
        "database.max_storage_gib": 0,
        "database.version": "16",
        "forwarder.idle_minutes": 0,
        "forwarder.tasks": 0,
        "network.secrets_endpoint": "true",
    },
}

Resource = dict[str, Any]
Templates = dict[str, dict[str, Any]]

_WORKSPACE = Path(__file__).resolve().parents[2]


def ensure_assemblies(directory: Path) -> None:
    """Synthesise into ``directory``, as ``TARGET/PROFILE`` and ``options/NAME``, unless another worker has done so."""
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = directory / "done"
        if done.exists():
            return
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.contract.templates", str(directory), target],
                cwd=_WORKSPACE,
                # CDK and cdk-nag check the templates for AWS; a second check of the same would only take time.
                env=os.environ | ({} if target == "aws" else {"CDK_VALIDATION": "false"}),
            )
            for target in TARGETS
        ]
        assert [process.wait() for process in running] == [0] * len(running), "the app does not synthesise"
        done.touch()


def read_templates(assembly: Path) -> Templates:
    """The templates of an assembly by stack."""
    return {
        path.name.removesuffix(".template.json"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(assembly.glob("*.template.json"))
    }


def context(**values: object) -> dict[str, object]:
    """``values`` as context of the app, without bundles: they take long and are in no template."""
    return {"aws:cdk:bundling-stacks": [], **values}


def resources(templates: Templates, kind: str) -> Iterator[tuple[str, Resource]]:
    """Logical name and properties of every resource of that type."""
    for template in templates.values():
        for name, resource in template["Resources"].items():
            if resource["Type"] == kind:
                yield name, resource.get("Properties", {})


def the_one(templates: Templates, kind: str) -> Resource:
    """The properties of the only resource of that type."""
    found = list(resources(templates, kind))
    assert len(found) == 1, f"{len(found)} resources of type {kind}"
    return found[0][1]


def function_of(templates: Templates, handler: str) -> Resource:
    """The properties of the Lambda function whose handler ends with ``handler``."""
    found = [f for _, f in resources(templates, "AWS::Lambda::Function") if f["Handler"].endswith(handler)]
    assert len(found) == 1
    return found[0]


def count_types(template: dict[str, Any]) -> dict[str, int]:
    """The number of resources of each type in a template."""
    counts: dict[str, int] = {}
    for resource in template["Resources"].values():
        counts[resource["Type"]] = counts.get(resource["Type"], 0) + 1
    return counts


def _main(directory: Path, target: str) -> None:
    from farcall_infra.app import synthesize  # starts Node, which the tests themselves must not

    for profile in PROFILES:
        synthesize(outdir=directory / target / profile, context=context(target=target, profile=profile))
    if target == "localstack":
        offline = context(**OPTIONS["analytics"], target=target)
        synthesize(outdir=directory / target / "analytics", context=offline)
    if target == "aws":
        Authority().write(directory / "authorities.pem")
        os.chdir(directory)
        for name, values in OPTIONS.items():
            synthesize(outdir=directory / "options" / name, context=context(**values))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
