"""uv installs packages on a node: from a local index, with the real uv, confined and not."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.uv import Refused, UvRunner, install
from farcall_endpoint.host.isolation import bubblewrap, landlock
from tests.support.endpoint import running_endpoint
from tests.support.packages import make_sdist, make_wheel
from tests.waiting import WAIT_S, wait_until

CONFINEMENTS = ["bubblewrap", "landlock", "none"]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A directory of packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    make_wheel(folder, "stone", "1.0")
    make_wheel(folder, "stone", "2.0")
    make_wheel(folder, "bridge", "3.0", requires=["stone<2"])
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(params=CONFINEMENTS)
def confinement(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What keeps uv off other files; bubblewrap is used where it is found."""
    kind = str(request.param)
    missing = {"bubblewrap": bubblewrap.missing, "landlock": landlock.missing_alone}.get(kind, str)()
    if missing:
        pytest.skip(missing)
    if kind != "bubblewrap":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "env").symlink_to("/usr/bin/env")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return kind


def packages(*requirements: str) -> Environment:
    return Environment.of({"type": "uv", "requirements": requirements})


def run(runner: UvRunner, environment: Environment, cache: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Prepare an environment as a manager does."""
    preparation = runner.prepare(environment, cache=cache)
    [command] = preparation.commands
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    return Path(preparation.image), done


def prepared(runner: UvRunner, environment: Environment, cache: Path) -> Path:
    image, done = run(runner, environment, cache)
    assert (done.returncode, done.stderr) == (0, "")
    return image


def refusal(runner: UvRunner, environment: Environment, cache: Path) -> str:
    image, done = run(runner, environment, cache)
    assert done.returncode != 0
    assert not image.exists()
    assert left_in(cache) == []
    return done.stderr


def left_in(cache: Path) -> list[str]:
    """What an installation that did not succeed left, besides uv's own cache and locks."""
    names = {path.name for path in cache.iterdir()} if cache.exists() else set()
    return sorted(name for name in names if name != "uv-packages" and not name.endswith((".lock", ".use")))


def answer(image: Path, code: str) -> str:
    """What the Python of an environment prints."""
    command = [str(image / "bin" / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout.strip()


def test_packages_and_what_they_require_are_installed(index: Path, cache: Path, confinement: str) -> None:
    runner = UvRunner(index_url=str(index), confine=confinement != "none")
    image = prepared(runner, packages("bridge"), cache)
    assert answer(image, "import bridge, stone; print(bridge.version, stone.version)") == "3.0 1.0"
    compiled = [path.name for path in image.rglob("bridge.*.pyc")]
    assert compiled == [f"bridge.{sys.implementation.cache_tag}.pyc"], "tasks may only read it"
    assert answer(image, "import bridge; print(bridge.__loader__.get_code('bridge').co_filename)") == str(
        next(image.rglob("bridge.py"))
    )
    shutil.rmtree(index)
    assert prepared(runner, packages("bridge", "bridge"), cache) == image, "it is there already"
    assert left_in(cache) == [image.name]


def test_wheels_are_linked_into_environments(index: Path, cache: Path) -> None:
    runner = UvRunner(index_url=str(index))
    one, two = prepared(runner, packages("stone==1.*"), cache), prepared(runner, packages("stone<2"), cache)
    files = [next(image.rglob("stone.py")).stat() for image in (one, two)]
    assert files[0].st_ino == files[1].st_ino, "one copy on the disk"


def test_a_package_does_not_replace_the_python_of_its_environment(index: Path, cache: Path, tmp_path: Path) -> None:
    runner, trace = UvRunner(index_url=str(index)), tmp_path / "trace"
    image = Path(runner.prepare(packages("evil"), cache=cache).image)
    code = f"import posix; posix.mkdir({str(trace)!r})"
    library = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}"
    files = {
        "pyvenv.cfg": f"home = {image}/bin",
        f"{library}/os.py": "",
        f"{library}/encodings/__init__.py": code,
        "bin/python3._pth": "../other",
        "bin/python._pth": "../other",
        "other/encodings/__init__.py": code,
    }
    make_wheel(index, "evil", "1.0", files={f"evil-1.0.data/data/{name}": text for name, text in files.items()})
    assert prepared(runner, packages("evil"), cache) == image
    assert answer(image, "import evil, sys; print(evil.version, sys.prefix)") == f"1.0 {image}"
    assert not trace.exists()
    assert left_in(cache) == [image.name]


def test_a_package_without_a_version_that_fits_fails_in_words_of_uv(index: Path, cache: Path) -> None:
    runner = UvRunner(index_url=str(index))
    unknown = refusal(runner, packages("granite"), cache)
    assert "granite was not found in the provided package locations" in unknown
    conflict = refusal(runner, packages("bridge==3.0", "stone==2.0"), cache)
    assert "stone<2" in conflict
    assert "requirements are unsatisfiable" in " ".join(conflict.split())


def test_variables_of_the_owner_are_used(
    index: Path, cache: Path, confinement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(index))
    image = prepared(UvRunner(confine=confinement != "none"), packages("stone"), cache)
    assert answer(image, "import stone; print(stone.version)") == "2.0"


def test_an_index_that_does_not_answer_fails_in_words_of_uv(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    said = refusal(UvRunner(index_url="http://127.0.0.1:9/simple"), packages("stone"), cache)
    assert "http://127.0.0.1:9/simple/stone/" in said
    assert "onnect" in said


def test_a_dangerous_requirement_never_reaches_uv(index: Path, cache: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "own", "1.0")
    for requirement in (str(wheel), f"own @ {wheel.as_uri()}", "git+https://example.org/x", f"{wheel.name}"):
        unchecked = Environment(type="uv", requirements=("stone", requirement))
        said = refusal(UvRunner(index_url=str(index)), unchecked, cache)
        assert f"{requirement!r} is refused: a requirement is the name of a package" in said
    assert not cache.exists()


# -- packages without a wheel ------------------------------------------------------------------------------------------


def test_nothing_is_built_unless_the_owner_allows_it(index: Path, cache: Path, tmp_path: Path) -> None:
    built = tmp_path / "built"
    make_sdist(index, "clay", "1.0", when_built=f"open({str(built)!r}, 'w').close()")
    said = refusal(UvRunner(index_url=str(index)), packages("clay"), cache)
    assert "clay" in said
    assert "no usable wheels" in said
    assert not built.exists()


def test_code_that_builds_reaches_nothing_of_others(index: Path, cache: Path, tmp_path: Path, confinement: str) -> None:
    secret, stolen = tmp_path / "secret", tmp_path / "stolen"
    secret.write_text("key")
    tries = f"""
found = []
import os
for what in (lambda: open({str(secret)!r}), lambda: open({str(stolen)!r}, "w"), lambda: os.environ["MY_PASSWORD"]):
    try:
        what()
        found.append("reached")
    except (OSError, KeyError):
        found.append("refused")
raise SystemExit("tries: " + " ".join(found))
"""
    make_sdist(index, "clay", "1.0", when_built=tries)
    runner = UvRunner(index_url=str(index), source_builds=True, confine=confinement != "none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_PASSWORD", "x")
        said = refusal(runner, packages("clay"), cache)
    done = {"none": "reached reached", "bubblewrap": "refused reached", "landlock": "refused refused"}
    assert f"tries: {done[confinement]} refused" in said, "in namespaces it writes to a /tmp of its own"
    assert stolen.exists() == (confinement == "none")


def test_a_package_is_built_where_that_is_allowed(index: Path, cache: Path, confinement: str) -> None:
    make_sdist(index, "clay", "1.5", when_built="")
    runner = UvRunner(index_url=str(index), source_builds=True, confine=confinement != "none")
    image = prepared(runner, packages("clay", "stone<2"), cache)
    assert answer(image, "import clay, stone; print(clay.version, stone.version)") == "1.5 1.0"
    assert left_in(cache) == [image.name]
    assert not (cache / "uv-packages").exists(), "what others install is not within reach of the build"


def test_nothing_is_built_where_nothing_confines_it(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "missing", lambda: "bubblewrap: no")
    monkeypatch.setattr(landlock, "missing_alone", lambda: "Landlock: no")
    with pytest.raises(Refused, match=r"nothing can confine their code \(bubblewrap: no; Landlock: no\). Fix:"):
        install(cache / "uv-1", ["stone"], index=str(index), source_builds=True)
    assert left_in(cache) == []
    assert install(cache / "uv-1", ["stone"], index=str(index)) == 0, "wheels run no code"


# -- faults ------------------------------------------------------------------------------------------------------------


class _Index(http.server.ThreadingHTTPServer):
    """A package index; downloads wait until ``open`` is set."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = threading.Event()
        self.asked = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Index

    def do_HEAD(self) -> None:
        self._send(200, "application/octet-stream", b"")

    def do_GET(self) -> None:
        name = self.path.strip("/").split("/")[-1]
        if self.path.startswith("/simple/"):
            files = sorted(path.name for path in self.server.folder.glob(f"{name}-*"))
            body = "".join(f'<a href="/files/{file}">{file}</a>' for file in files).encode()
            self._send(200 if files else 404, "text/html", body)
            return
        self.server.asked.set()
        self.server.open.wait(WAIT_S)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._send(200, "application/octet-stream", (self.server.folder / name).read_bytes())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing to report."""


@pytest.fixture
def server(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Index]:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with _Index(index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.open.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("signal_name", ["kill", "terminate"])
def test_an_installation_that_is_killed_begins_again(server: _Index, cache: Path, signal_name: str) -> None:
    runner = UvRunner(index_url=server.url)
    preparation = runner.prepare(packages("stone==2.0"), cache=cache)
    with subprocess.Popen(preparation.commands[0], stderr=subprocess.DEVNULL) as process:
        assert server.asked.wait(WAIT_S)
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
        getattr(process, signal_name)()
        assert process.wait(WAIT_S) != 0
    wait_until(lambda: not any(map(is_alive, below)), "uv ends with the process that started it")
    assert not Path(preparation.image).exists()
    assert bool(left_in(cache)) == (signal_name == "kill")
    server.open.set()
    image = prepared(runner, packages("stone==2.0"), cache)
    assert answer(image, "import stone; print(stone.version)") == "2.0"
    assert left_in(cache) == [image.name]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_at_once_install_once(server: _Index, cache: Path) -> None:
    command = UvRunner(index_url=server.url).prepare(packages("stone==2.0"), cache=cache).commands[0]
    with subprocess.Popen(command) as one:
        assert server.asked.wait(WAIT_S)
        with subprocess.Popen(command) as two:
            locked = cache / f".uv-{UvRunner(index_url=server.url).digest(packages('stone==2.0'))}.lock"
            wait_until(lambda: waits_for_lock(two.pid, locked), "the second waits for the first")
            server.open.set()
            assert (one.wait(WAIT_S), two.wait(WAIT_S)) == (0, 0)
    assert len(left_in(cache)) == 1


def waits_for_lock(pid: int, path: Path) -> bool:
    """Whether a process has a file open, and the kernel lists it as waiting for a lock of it."""
    try:
        has_it = any(each.samefile(path) for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    waiting = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return has_it and any(f" {pid} " in line for line in waiting)


def test_a_full_disk_fails_in_words_of_the_system(index: Path, volume: Path) -> None:
    make_wheel(index, "rock", "1.0", padding_bytes=30_000_000)
    cache = volume / "cache"
    said = refusal(UvRunner(index_url=str(index)), packages("rock"), cache)
    assert "No space left on device" in said
    shutil.rmtree(cache)
    image = prepared(UvRunner(index_url=str(index)), packages("stone"), cache)
    assert answer(image, "import stone; print(stone.version)") == "2.0"


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    path = tmp_path / "volume"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_what_was_deleted_from_the_cache_is_installed_again(index: Path, cache: Path) -> None:
    runner = UvRunner(index_url=str(index))
    shutil.rmtree(prepared(runner, packages("stone"), cache))
    assert answer(prepared(runner, packages("stone"), cache), "import stone; print(stone.version)") == "2.0"
    shutil.rmtree(cache / "uv-packages")
    assert answer(prepared(runner, packages("stone<2"), cache), "import stone; print(stone.version)") == "1.0"


# -- tasks -------------------------------------------------------------------------------------------------------------

SUBMITTER = "33333333-2222-4333-8444-555555555555"


def version_of_stone() -> str:
    import stone  # type: ignore[import-not-found]

    return str(stone.version)


def who_runs() -> tuple[str, int]:
    import os
    import sys

    return sys.prefix, os.getpid()


def change_packages() -> str:
    import stone

    with open(stone.__file__, "a") as file:  # noqa: PTH123 - the function is alone
        return file.name


@pytest.mark.parametrize("level", [bubblewrap, landlock])
def test_tasks_use_packages_that_they_name(index: Path, tmp_path: Path, level: ModuleType) -> None:
    if missing := level.missing():
        pytest.skip(missing)
    own = tmp_path / "own"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", own], check=True)
    engine = {
        "container_type": "venv",
        "container_uri": str(own),
        "max_tasks_per_worker": 1,
        "isolation": level.__name__.rpartition(".")[2],
        "environments": {"index_url": str(index), "cache_dir": "cache"},
    }
    with running_endpoint(tmp_path / "home", engine=engine, reachable=[tmp_path, index]) as endpoint:
        cloud = endpoint.cloud
        first = cloud.submit(version_of_stone, environment=packages("stone<2"))
        others = cloud.submit(version_of_stone, environment=packages("stone<2"), submitter=SUBMITTER)
        changed = cloud.submit(change_packages, environment=packages("stone<2"), submitter=SUBMITTER)
        unknown = cloud.submit(version_of_stone, environment=packages("granite"))
        plain = [cloud.submit(who_runs) for _ in range(2)]
        used = [cloud.end(each) for each in (first, others)]
        assert [each.value for each in used] == ["1.0", "1.0"], [each.error for each in used]
        assert cloud.end(changed).error["code"] == "TASK_FAILED"
        failed = cloud.end(unknown).error
        assert failed["code"] == "REQUIREMENTS_FAILED"
        assert "granite was not found" in failed["message"]
        ends: list[Any] = [cloud.end(each).value for each in plain]
        assert [prefix for prefix, _ in ends] == [str(own)] * 2, "tasks that name none run in the endpoint's own"
        assert len({pid for _, pid in ends}) == 2, "each in a process of its own"
        assert [path.name for path in (endpoint.directory.path / "cache").glob("uv-*[0-9a-f]")]


def test_an_endpoint_whose_environment_cannot_work_says_so_at_its_start(tmp_path: Path) -> None:
    engine = {"container_type": "venv", "container_uri": str(tmp_path / "nowhere")}
    with running_endpoint(tmp_path / "home", engine=engine, start=False) as endpoint:
        endpoint.start(connected=False)
        assert endpoint.wait() == os.EX_CONFIG
        assert f"container_uri: {tmp_path}/nowhere does not exist on this machine." in endpoint.log()
