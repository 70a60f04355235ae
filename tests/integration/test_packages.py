"""Each published wheel, installed alone, imports whole: a dependency that is not declared fails here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")

#: wheel with extras -> packages that must import, module by module.
PUBLISHED = {
    "farcall-common": ["farcall_common.errors", "farcall_common.wire"],
    "farcall-common[payload]": ["farcall_common.payload"],
    "farcall-common[store]": ["farcall_common.store"],
    "farcall": ["farcall"],
    "farcall[globus]": ["farcall.cli._globus"],
    "farcall[otel]": ["farcall._tracing"],
    "farcall-endpoint": ["farcall_endpoint"],
}

IMPORT_ALL = """
import importlib, pkgutil, sys
of_extras = {"farcall.cli._globus"}  # what needs an extra is named to be imported
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), name + "."):
        if module.name.endswith((".__main__", ".env")) or ".versions." in module.name:
            continue
        if module.name not in of_extras:
            importlib.import_module(module.name)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    for member in ("common", "sdk", "endpoint"):
        build = [UV, "build", "--quiet", "--wheel", "--out-dir", str(directory), str(ROOT / member)]
        subprocess.run(build, check=True, capture_output=True, text=True)
    return directory


def test_the_wheel_of_the_endpoint_has_the_site_templates(wheels: Path) -> None:
    [wheel] = wheels.glob("farcall_endpoint-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {Path(name).stem for name in archive.namelist() if name.startswith("farcall_endpoint/config/sites/")}
    assert found == {path.stem for path in (ROOT / "docs" / "endpoint" / "sites").glob("*.yaml")}


@pytest.mark.parametrize("requirement", sorted(PUBLISHED))
def test_an_isolated_install_imports(requirement: str, wheels: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", str(python), "--find-links", str(wheels), requirement]
    subprocess.run(install, check=True)
    modules = PUBLISHED[requirement]
    done = subprocess.run(
        [python, "-W", "error", "-c", IMPORT_ALL, *modules], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
