"""The synthesised templates, for every test that looks at them: each profile, for AWS and for the offline tier.

They are made once per run of the tests, also when several workers share it, by one process per target: starting the CDK
library takes as long as a synth.
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

PROFILES = ("hobby", "lab", "facility")
TARGETS = ("aws", "localstack")

Resource = dict[str, Any]
Templates = dict[str, dict[str, Any]]

_WORKSPACE = Path(__file__).resolve().parents[2]


def ensure_assemblies(directory: Path) -> None:
    """Synthesise into ``directory``, as ``TARGET/PROFILE``, unless another worker has done so."""
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
                # CDK and cdk-nag look at what goes to AWS; a second look at the same would only cost time.
                env=os.environ | ({} if target == "aws" else {"CDK_VALIDATION": "false"}),
            )
            for target in TARGETS
        ]
        assert [process.wait() for process in running] == [0] * len(running), "the app does not synthesise"
        done.touch()


def synthesize_apart(directory: Path, values: Mapping[str, object]) -> None:
    """Synthesise one deployment, with cdk-nag, in a process of its own."""
    variables = {"CDK_OUTDIR": str(directory), "CDK_CONTEXT_JSON": json.dumps(values)}
    subprocess.run([sys.executable, "-m", "farcall_infra"], check=True, env=os.environ | variables)


def read_templates(assembly: Path) -> Templates:
    """The templates of an assembly by stack."""
    return {
        path.name.removesuffix(".template.json"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(assembly.glob("*.template.json"))
    }


def context(**values: object) -> dict[str, object]:
    """The context of ``cdk.json`` with ``values``, and no bundles: they take long and are in no template."""
    committed: Mapping[str, object] = json.loads((_WORKSPACE / "cdk.json").read_text(encoding="utf-8"))["context"]
    return {**committed, "aws:cdk:bundling-stacks": [], **values}


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
    """How many resources of each type a template has."""
    counts: dict[str, int] = {}
    for resource in template["Resources"].values():
        counts[resource["Type"]] = counts.get(resource["Type"], 0) + 1
    return counts


def _main(directory: Path, target: str) -> None:
    from farcall_infra.app import synthesize  # starts Node, which the tests themselves must not

    for profile in PROFILES:
        synthesize(outdir=directory / target / profile, context=context(target=target, profile=profile))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
