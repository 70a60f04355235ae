"""What a worker's runner does around a task: its memory, its environment variables, its limits.

Each test runs the runner in a process of its own, because it takes over standard output and what a task may change.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farcall_endpoint.worker.directories import remove_old_sandboxes

PRELUDE = """
import ctypes, gc, hashlib, json, os, sys, uuid, weakref
from farcall_common.payload import Serializer, parse_allowed
from farcall_common.payload.native import NATIVE
from farcall_common.task_options import TaskOptions
from farcall_endpoint.worker.capture import Capture
from farcall_endpoint.contracts.manager_worker import Order, Run
from farcall_endpoint.worker.runner import Runner
from farcall_endpoint.worker.settings import WorkerSettings

os.makedirs("home", exist_ok=True)
os.chdir("home")
settings = WorkerSettings(
    sandboxed="sandboxed" in sys.argv,
    data_only="data only" in sys.argv,
    native="native" in sys.argv,
    allowed_serializers=tuple(parse_allowed(["*Code", "JSONData"])) if "allowed" in sys.argv else (),
)
runner = Runner(Capture(), endpoint_id="e", settings=settings)
serializer = Serializer()

def run(function, *args, task_id="t", traceparent="", submitter="", data_only=False, payload=None, **options):
    body = serializer.pack_function(function)
    function_hash = hashlib.sha256(body).hexdigest()
    if function_hash not in runner._functions:
        runner.learn(Run((), ((function_hash, len(body)),)), body)
    order = Order(task_id, 1, function_hash, 0, TaskOptions(**options), traceparent, submitter, data_only)
    runner.begin(order)
    return runner.run(order, serializer.pack_call(args) if payload is None else payload)

def code_of(ended):
    return (ended[0].error or {}).get("code")

def tell(answer):
    with open(sys.argv[1], "w") as file:
        json.dump(answer, file)
"""


def answer_of(program: str, tmp_path: Path, *options: str) -> Any:
    """What a program tells that starts with the prelude, in a directory that its runner's tasks share."""
    script, answer = tmp_path / "program.py", tmp_path / "answer.json"
    script.write_text(PRELUDE + program)
    with (tmp_path / "stdout").open("ab+") as stdout, (tmp_path / "stderr").open("ab+") as stderr:
        command = [sys.executable, str(script), str(answer), *options]
        subprocess.run(command, stdout=stdout, stderr=stderr, cwd=tmp_path, check=False)
    assert answer.exists(), (tmp_path / "stderr").read_text()
    return json.loads(answer.read_text())


def test_memory_is_flat_over_many_tasks(tmp_path: Path) -> None:
    """Counted by the allocators themselves: what the C library has given out, and Python's blocks."""
    program = """
class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2

def nothing():
    pass

def rounds(count):
    for number in range(count):
        name = str(uuid.UUID(int=number))
        run(nothing, task_id=name, traceparent=f"00-{number:032x}-{number:016x}-01", memory_bytes=2**40)
    gc.collect()
    return libc.mallinfo2().uordblks, sys.getallocatedblocks()

rounds(300)
before = rounds(300)
after = rounds(1500)
tell([then - now for now, then in zip(before, after)])
"""
    c_bytes, python_blocks = answer_of(program, tmp_path)
    assert c_bytes < 20_000  # a task id alone, kept for each task, would make 1,500 times 190 bytes
    assert python_blocks < 200


def test_environment_variables_are_restored_for_each_task(tmp_path: Path) -> None:
    program = """
def seen(spoil):
    import ctypes, os, subprocess
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    name = "FARCALL_TASK_ID"
    found = [
        os.environ[name],
        os.environ["GC_TASK_UUID"],
        getenv(name.encode()).decode(),
        subprocess.run(["printenv", name], capture_output=True, text=True).stdout.strip(),
        subprocess.run(["printenv", name], capture_output=True, text=True, env=dict(os.environ)).stdout.strip(),
    ]
    if spoil == "remove":
        del os.environ[name]
    elif spoil == "replace":
        os.environ[name] = "mine"
    elif spoil == "clear":
        os.environ.clear()
        os.environ["PATH"] = "/usr/bin:/bin"
    return found

answers = []
for number, spoil in enumerate(["remove", "replace", "clear", ""]):
    done, result = run(seen, spoil, task_id=f"task-{number}" * (1 + 20 * (number == 2)))
    answers.append(serializer.deserialize(b"".join(result)))
tell(answers)
"""
    names = ["task-0", "task-1", "task-2" * 21, "task-3"]
    assert answer_of(program, tmp_path) == [[name] * 5 for name in names]


def test_a_trace_context_ends_with_its_task(tmp_path: Path) -> None:
    program = """
def seen():
    import subprocess
    return subprocess.run(["printenv", "TRACEPARENT"], capture_output=True, text=True).stdout.strip()

def traced(traceparent):
    done, result = run(seen, traceparent=traceparent)
    return serializer.deserialize(b"".join(result))

answers = [traced("00-a-b-01"), traced("")]
os.environ["TRACEPARENT"] = "of-the-endpoint"
tell([*answers, traced("00-c-d-01"), traced("")])
"""
    assert answer_of(program, tmp_path) == ["00-a-b-01", "", "00-c-d-01", "of-the-endpoint"]


@pytest.mark.parametrize("serializers", ["()", "('PickleOutOfBand',)", "NATIVE"])
def test_results_are_freed_without_the_garbage_collector(serializers: str, tmp_path: Path) -> None:
    program = f"""
class Large(bytearray):
    pass

made = []

def large():
    value = Large(1_000_000)
    made.append(weakref.ref(value))
    return value

def refused():
    value = large()
    return [value, (number for number in value)]

runner._functions |= {{"large": large, "refused": refused}}
gc.disable()
codes = []
for name in ["large", "refused"] * 10:
    order = Order("t", 1, name, 0, TaskOptions(result_serializers={serializers}))
    done, result = runner.run(order, serializer.pack_call())
    codes.append((done.error or {{}}).get("code"))
    del result
tell([codes, sum(reference() is not None for reference in made), len(made)])
"""
    codes, alive, made = answer_of(program, tmp_path, "native")
    assert codes == [None, "RESULT_NOT_SERIALIZABLE"] * 10
    assert (alive, made) == (0, 20)


def test_output_of_a_short_task_counts(tmp_path: Path) -> None:
    program = """
def chatter(count, fails):
    import os
    os.write(1, b"x" * count)
    print("the end")
    if fails:
        raise ValueError("of its own")

def limited(*args):
    done, result = run(chatter, *args, max_output_bytes=10_000)
    code, tail = (done.error or {}).get("code"), (done.error or {}).get("stdout_tail", "")[-8:]
    return [code, tail, sum(map(len, result)) - done.printed.tail_bytes]

tell([limited(100, False), limited(20_000, False), limited(20_000, True), limited(9_992, False), limited(9_993, False)])
"""
    assert [[code, tail, bool(size)] for code, tail, size in answer_of(program, tmp_path)] == [
        [None, "", True],
        ["OUTPUT_EXCEEDED", "the end\n", False],
        ["OUTPUT_EXCEEDED", "the end\n", False],
        [None, "", True],
        ["OUTPUT_EXCEEDED", "the end\n", False],
    ]


def test_short_memory_peak_counts_above_the_baseline(tmp_path: Path) -> None:
    program = """
def keep(megabytes):
    import sys
    sys.kept = bytearray(b"x") * (megabytes * 2**20)

def flash(megabytes):
    block = bytearray(b"x") * (megabytes * 2**20)

limit = 50 * 2**20
answers = [code_of(run(flash, 100, memory_bytes=limit)), code_of(run(flash, 1, memory_bytes=limit))]
run(keep, 300)
answers += [code_of(run(flash, 10, memory_bytes=limit)), code_of(run(flash, 100, memory_bytes=limit))]
run(keep, 0)
answers += [code_of(run(flash, 10, memory_bytes=limit)), code_of(run(flash, 100, memory_bytes=limit))]
tell(answers)
"""
    assert answer_of(program, tmp_path) == [
        "MEMORY_EXCEEDED", None, None, "MEMORY_EXCEEDED", None, "MEMORY_EXCEEDED",
    ]  # fmt: skip


def test_heap_is_trimmed_before_a_task_with_a_limit(tmp_path: Path) -> None:
    """A task of 300 MB leaves its blocks free in the heap; the next may not take them all within a limit of 50 MB."""
    program = """
def small_blocks(megabytes):
    import ctypes
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    blocks = [libc.malloc(100_000) for _ in range(megabytes * 10)]
    top = libc.malloc(100)  # above them: without it the heap would shrink by itself
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks:
        libc.free(block)

tell([code_of(run(small_blocks, 300)), code_of(run(small_blocks, 100, memory_bytes=50 * 2**20))])
"""
    assert answer_of(program, tmp_path) == [None, "MEMORY_EXCEEDED"]


def test_exception_uses_the_result_format_of_its_submitter(tmp_path: Path) -> None:
    program = """
def fails():
    raise KeyError("gone")

class Deaf(Exception):
    def __str__(self):
        sys.exit(1)

    def __reduce__(self):
        sys.exit(1)

def deaf():
    raise Deaf

def told(function, *serializers):
    done, result = run(function, result_serializers=serializers)
    data = done.error.get("exception_data")
    known = done.error["builtin_type" if function is fails else "code"]
    return [known, data and repr(serializer.deserialize(data.encode()))]

asked = [("f3",), ("JSONData", "PickleDataBase64"), ("JSONData",), ("nonsense",), ()]
tell([*[told(fails, *names) for names in asked], told(deaf, "f3"), told(deaf, *NATIVE)])
"""
    own, nothing = ["KeyError", "KeyError('gone')"], ["KeyError", None]
    assert answer_of(program, tmp_path) == [own, own, nothing, nothing, nothing, *[["TASK_FAILED", None]] * 2]


DIRECTORIES = """
def write(name):
    import os
    with open(name, "w") as file:
        file.write("x")
    return os.getcwd(), sorted(os.listdir())

def remove():
    import os, shutil
    shutil.rmtree(os.getcwd())

def value_of(ended):
    done, result = ended
    return serializer.deserialize(b"".join(result)) if done.error is None else done.error["code"]
"""


@pytest.mark.parametrize("submitter", ["", "018f0000-0000-7000-8000-000000000001"])
def test_removed_working_directory_is_created_again(submitter: str, tmp_path: Path) -> None:
    program = f"""
submitter = {submitter!r}
answers = [value_of(run(write, "a", submitter=submitter)), value_of(run(remove, submitter=submitter))]
answers += [value_of(run(write, "b", submitter=submitter)), value_of(run(write, "c", submitter=submitter))]
shutil.rmtree(runner._directories.root)
tell([*answers, value_of(run(write, "d", submitter=submitter)), value_of(run(write, "e"))])
"""
    directory = str(tmp_path / "home" / (f"submitters/{submitter}" if submitter else ""))
    *answers, last = answer_of(f"import shutil{DIRECTORIES}{program}", tmp_path)
    assert answers == [
        [directory, ["a"]], None, [directory, ["b"]], [directory, ["b", "c"]], [directory, ["d"]],
    ]  # fmt: skip
    assert last == [str(tmp_path / "home"), ["e", "submitters"] if submitter else ["d", "e"]]


def test_submitter_directories_are_private_and_cannot_be_escaped_by_name(tmp_path: Path) -> None:
    program = """
names = ["018F0000-0000-7000-8000-00000000000A", "../../outside", "/tmp", "..", "", "a" * 300, chr(0xD800)]
tell([value_of(run(write, "f", submitter=name)) for name in names])
"""
    answers = answer_of(DIRECTORIES + program, tmp_path)
    homes = [Path(directory) for directory, _ in answers]
    submitters = tmp_path / "home" / "submitters"
    assert homes[0] == submitters / "018f0000-0000-7000-8000-00000000000a"
    assert homes.pop(4) == tmp_path / "home"
    assert len(set(homes)) == len(homes)
    assert {home.parent for home in homes} == {submitters}
    assert {path.stat().st_mode & 0o777 for path in (submitters, *homes)} == {0o700}
    assert all(files == ["f"] for directory, files in answers if directory != str(tmp_path / "home"))


def test_failed_working_directory_fails_its_task_only(tmp_path: Path) -> None:
    program = """
import shutil
home = runner._directories.root
shutil.rmtree(home)
open(home, "w").close()
answers = [value_of(run(write, "a")), value_of(run(write, "a", submitter="s"))]
os.remove(home)
tell([*answers, value_of(run(write, "a"))])
"""
    *failed, works = answer_of(DIRECTORIES + program, tmp_path)
    assert failed == ["WORKING_DIRECTORY_UNAVAILABLE"] * 2
    assert works == [str(tmp_path / "home"), ["a"]]


def test_sandboxes_expire_and_are_never_removed_in_use(tmp_path: Path) -> None:
    program = """
from pathlib import Path
from farcall_endpoint.worker.directories import remove_old_sandboxes

home = Path(runner._directories.root)

def look(retention_s):
    import pathlib
    from farcall_endpoint.worker.directories import remove_old_sandboxes
    removed = remove_old_sandboxes(pathlib.Path(os.environ["HOME_OF_TASKS"]), retention_s=retention_s)
    return os.getcwd(), os.environ["GC_TASK_SANDBOX_DIR"], len(list(removed)), os.path.exists(os.getcwd())

os.environ["HOME_OF_TASKS"] = str(home)
answers = [value_of(run(write, "a", task_id="t1")), value_of(run(write, "b", task_id="t1", submitter="s"))]
answers += [len(list(remove_old_sandboxes(home, retention_s=60.0))), value_of(run(look, -1.0, task_id="t2"))]
kept = sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
tell([*answers, len(list(remove_old_sandboxes(home, retention_s=-1.0))), kept])
"""
    one, other, early, used, late, files = answer_of(DIRECTORIES + program, tmp_path, "sandboxed")
    assert (one[1], other[1]) == (["a"], ["b"])
    assert one[0] != other[0]
    assert Path(one[0]).parent == tmp_path / "home" / "sandboxes"
    assert early == 0
    assert used == [used[0], used[0], 2, True]  # the two others, not its own
    assert late == 1
    assert [name for name in files if not name.endswith(".lock")] == []


def make_sandbox(sandboxes: Path, name: str = "0" * 32) -> Path:
    """A sandbox as a worker leaves it, with a file in it and its lock."""
    sandbox = sandboxes / name
    sandbox.mkdir(parents=True)
    (sandbox / "file").write_text("kept")
    (sandboxes / f".{name}.lock").touch()
    return sandbox


def removed_from(working_dir: Path) -> list[Path]:
    return list(remove_old_sandboxes(working_dir, retention_s=-1.0))


@pytest.mark.parametrize("link", ["sandboxes", "submitters", "submitters/ID", "submitters/ID/sandboxes"])
def test_retention_does_not_follow_links(tmp_path: Path, link: str) -> None:
    """Each directory on the way to a sandbox, in turn, is a link to one that lies elsewhere."""
    working_dir, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    below = {"sandboxes": "", "submitters": "ID/sandboxes", "submitters/ID": "sandboxes", "submitters/ID/sandboxes": ""}
    kept = make_sandbox(elsewhere / below[link])
    (working_dir / link).parent.mkdir(parents=True)
    (working_dir / link).symlink_to(elsewhere)
    assert removed_from(working_dir) == []
    assert (kept / "file").read_text() == "kept"


@pytest.mark.parametrize("name", [".", "..", "", "other", "../elsewhere", "0" * 31, "0" * 32 + "\n"])
def test_retention_ignores_locks_of_other_names(tmp_path: Path, name: str) -> None:
    working_dir = tmp_path / "home"
    make_sandbox(working_dir / "sandboxes", "other")
    with contextlib.suppress(FileNotFoundError):
        (working_dir / "sandboxes" / f".{name}.lock").touch()
    before = sorted(tmp_path.rglob("*"))
    assert removed_from(working_dir) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_retention_ignores_links_as_locks_or_sandboxes(tmp_path: Path) -> None:
    sandboxes, elsewhere = tmp_path / "home" / "sandboxes", tmp_path / "elsewhere"
    kept = make_sandbox(elsewhere)
    make_sandbox(sandboxes, "1" * 32)
    (sandboxes / ("2" * 32)).symlink_to(kept)
    (sandboxes / f".{'2' * 32}.lock").touch()
    (sandboxes / ("3" * 32)).mkdir()
    (sandboxes / f".{'3' * 32}.lock").symlink_to(elsewhere / "made")
    os.mkfifo(sandboxes / f".{'4' * 32}.lock")
    assert sandboxes / ("1" * 32) in removed_from(tmp_path / "home")
    assert (kept / "file").read_text() == "kept"
    assert (sandboxes / ("3" * 32)).exists()
    assert not (elsewhere / "made").exists()


def test_retention_works_where_the_working_directory_is_a_link(tmp_path: Path) -> None:
    """That one is the administrator's."""
    sandbox = make_sandbox(tmp_path / "scratch" / "sandboxes")
    (tmp_path / "home").symlink_to(tmp_path / "scratch")
    assert removed_from(tmp_path / "home") == [tmp_path / "home" / "sandboxes" / sandbox.name]
    assert not sandbox.exists()


# -- what a worker reads -----------------------------------------------------------------------------------------------

HOSTILE = """
from farcall_common.payload import CloudPickleDataBase64, DillDataBase64, PickleDataBase64, PickleOutOfBand
from farcall_common.payload import AllDataStrategies
from farcall_common.payload.native import dump_call

class Exploit:
    def __reduce__(self):
        return os.mkdir, (os.path.join(runner._directories.root, "exploited"),)

def echo(value):
    return value

STRATEGIES = (CloudPickleDataBase64, DillDataBase64, PickleDataBase64, PickleOutOfBand, AllDataStrategies)

def calls():
    for strategy in (each() for each in STRATEGIES):
        yield serializer.pack_call((Exploit(),), strategies=[strategy])
    yield dump_call((Exploit(),), {})

def outcomes(**options):
    found = []
    for call in calls():
        code = code_of(run(echo, payload=call, **options))
        path = os.path.join(runner._directories.root, "exploited")
        found.append([code, os.path.exists(path)])
        if os.path.exists(path):
            os.rmdir(path)
    return found

plain = run(echo, {"a": [1, 2]}, data_only=True)
"""
"""Calls whose arguments run code when they are read, in each strategy that can carry some."""

REFUSED = ["DESERIALIZATION_FAILED", False]


@pytest.mark.parametrize(
    ("option", "fields"),
    [("data only", ""), ("allowed", ""), ("", "data_only=True")],
    ids=["settings", "list", "order"],
)
def test_an_endpoint_for_certain_functions_reads_arguments_as_data(tmp_path: Path, option: str, fields: str) -> None:
    program = f"tell([outcomes({fields}), code_of(plain), serializer.deserialize(b''.join(plain[1]))])"
    program = HOSTILE + program
    *outcomes, plain, value = answer_of(program, tmp_path, option)
    assert outcomes == [[REFUSED] * 6]
    assert (plain, value) == (None, {"a": [1, 2]})


def test_a_strategy_for_functions_cannot_carry_arguments_past_a_list(tmp_path: Path) -> None:
    """They are read by pickle too, and a list of what may be read needs one of them."""
    program = """
from farcall_common.payload import CloudPickleCode, DillCode, PickleCode
STRATEGIES = (CloudPickleCode, DillCode, PickleCode)
tell([outcomes(), code_of(plain)])
"""
    outcomes, plain = answer_of(HOSTILE + program, tmp_path, "allowed", "data only")
    assert outcomes == [REFUSED] * 4
    assert plain is None


def test_an_argument_that_cannot_be_read_is_no_failure_of_the_function(tmp_path: Path) -> None:
    """Reading it may even exit. An `except TypeError` around `result()` is for what the function raises."""
    program = """
from farcall_common.payload.native import dump_call

class Made:
    def __init__(self, make, *args):
        self.reduced = make, args

    def __reduce__(self):
        return self.reduced

def ends():
    for made in (Made(int, [1]), Made(sys.exit, 3)):
        for call in (serializer.pack_call((made,)), dump_call((made,), {})):
            error = run(len, payload=call)[0].error
            yield error["code"], error.get("builtin_type"), error["message"]

tell([*ends()])
"""
    ends = answer_of(program, tmp_path, "native")
    assert [[code, kind] for code, kind, _ in ends] == [["DESERIALIZATION_FAILED", None]] * 4
    assert ["TypeError" in text for *_, text in ends] == [True, True, False, False]
    assert ["SystemExit" in text for *_, text in ends] == [False, False, True, True]


def test_plain_pickle_is_for_an_engine_only(tmp_path: Path) -> None:
    """A program in the cloud could write it too, and ask for results of any size with it."""
    program = (
        HOSTILE
        + """
large = lambda: code_of(run(lambda: b"x" * 11_000_000, result_serializers=NATIVE))
tell([outcomes()[-1], large()])
"""
    )
    assert answer_of(program, tmp_path) == [REFUSED, "RESULT_NOT_SERIALIZABLE"]
    assert answer_of(program, tmp_path, "native") == [[None, True], None]


def test_a_runner_says_whether_what_was_raised_is_retried_and_which_retry_it_is(tmp_path: Path) -> None:
    program = """
def fail(kind):
    raise {"os": FileNotFoundError, "value": ValueError, "exit": SystemExit}[kind]("no")

def unreadable():
    return open(os.devnull)

def printing():
    print("x" * 5000)
    raise OSError

def retry():
    return os.environ.get("FARCALL_RETRY")

def retried(function, *args, **options):
    return run(function, *args, **options)[0].is_retried

value = lambda **options: serializer.deserialize(b"".join(run(retry, **options)[1]))
tell([
    retried(fail, "os", retries=1),
    retried(fail, "os", retries=1, retry_on=("builtins.OSError",)),
    retried(fail, "value", retries=1, retry_on=("builtins.OSError",)),
    retried(fail, "exit", retries=1),
    retried(fail, "exit", retries=1, retry_on=("builtins.SystemExit",)),
    retried(fail, "os"),
    retried(unreadable, retries=1),
    retried(fail, payload=b"no payload", retries=1),
    retried(printing, retries=1, max_output_bytes=100),
    value(retries=1),
    value(),
])
"""
    assert answer_of(program, tmp_path) == [True, True, False, False, True, *[False] * 4, "0", None]


def test_end_of_what_a_task_printed_comes_behind_its_result(tmp_path: Path) -> None:
    program = """
def talk(text):
    import sys
    if text:
        print(text, end="")
        print("to", "error", file=sys.stderr)
    return 1

def ended(text, **options):
    done, result = run(talk, text, **options)
    printed = done.printed and [done.printed.stdout_tail, done.printed.stderr_tail, done.printed.stdout_end]
    return [printed, b"".join(result)[-12:].decode() if printed else ""]

tell([ended("0123456789", output_bytes=5), ended("", output_bytes=5), ended("x" * 10, output_bytes=0), ended("ab")])
"""
    assert answer_of(program, tmp_path) == [
        [[5, 5, 10], "\n156789rror\n"],
        [None, ""],
        [None, ""],
        [[2, 9, 2], "1abto error\n"],
    ]
