"""What a run finds around it: the environment, the console, a user's own files, a command line, limits of the system, signals."""

import asyncio
import io
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from conftest import marked
from test_rollout import FakeRay

import rollout
import train
from agent import BadInput, Env, Task, load, load_agent, rooted
from refit import LOCK
from train import Config

ROOT = Path(train.__file__).resolve().parent
MODULES = ["agent", "server", "rollout", "replay", "estimator", "loss", "refit", "train"]


# ---- a user's own files


@pytest.fixture
def imports():
    """After a test the modules and the path are those of before."""
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    sys.modules.clear()
    sys.modules.update(modules)


USERS = """
from __future__ import annotations

import pickle
from dataclasses import dataclass

from agent import Env
from my_sibling import VALUE


@dataclass
class Point:
    x: int = VALUE


class Agent(Env):
    def point(self):
        return pickle.loads(pickle.dumps(Point()))


def reward(prompt, label, output, folder):
    return 1.0
"""


@pytest.mark.parametrize("name", [*MODULES, "json", "my.agent", "my-agent", "__main__", "time"])
def test_a_user_s_file_of_any_name_is_loaded_and_takes_no_module_s_place(tmp_path, imports, name):
    taken = sys.modules.get(name)
    (tmp_path / f"{name}.py").write_text(USERS)
    (tmp_path / "my_sibling.py").write_text("VALUE = 41\n")
    made = load_agent(str(tmp_path / f"{name}.py"))()
    assert isinstance(made, Env) and made.point().x == 41
    assert sys.modules.get(name) is taken or name == "my-agent"
    assert load(str(tmp_path / f"{name}.py"), "reward", "--reward")("", "", "", "") == 1.0


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path, imports):
    made = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(USERS)
        (tmp_path / folder / "my_sibling.py").write_text("VALUE = 41\n")
        made.append(load_agent(str(tmp_path / folder / "mine.py"))())
    points = [pickle.loads(pickle.dumps(m.point())) for m in made]
    assert type(points[0]) is not type(points[1])


def test_the_files_beside_a_user_s_file_import_it_by_its_name(tmp_path, imports):
    (tmp_path / "mine.py").write_text(
        "from agent import Env\nclass Point: pass\nimport beside\nclass Agent(Env): told = beside.Point\n"
    )
    (tmp_path / "beside.py").write_text("from mine import Point\n")
    made = load_agent(str(tmp_path / "mine.py"))()
    assert made.told is sys.modules[type(made).__module__].Point


@pytest.mark.parametrize("name", MODULES)
def test_a_file_with_the_name_of_a_module_is_not_imported_by_it_and_the_error_says_why(
    tmp_path, imports, name
):
    sys.modules.pop(name)  # it is not imported in every process that plays agents
    (tmp_path / f"{name}.py").write_text("MINE = 1\n")
    (tmp_path / "mine.py").write_text(f"from {name} import MINE\n")
    with pytest.raises(ImportError) as e:
        load(str(tmp_path / "mine.py"), "Agent", "--agent")
    assert str(tmp_path / f"{name}.py") in str(e.value) and "another name" in str(e.value)
    assert Path(sys.modules[name].__file__).parent == ROOT and "mine" not in sys.modules


def test_another_import_error_of_a_user_s_file_is_as_it_is(tmp_path, imports):
    (tmp_path / "loss.py").write_text("")
    (tmp_path / "mine.py").write_text("import no_such_module_of_anyone\n")
    with pytest.raises(ModuleNotFoundError, match="^No module named 'no_such_module_of_anyone'$"):
        load(str(tmp_path / "mine.py"), "Agent", "--agent")


def test_the_project_s_folder_stays_before_a_user_s_in_the_path(tmp_path, imports):
    (tmp_path / "mine.py").write_text(USERS)
    (tmp_path / "my_sibling.py").write_text("VALUE = 41\n")
    sys.path.insert(0, str(tmp_path))
    load(str(tmp_path / "mine.py"), "Agent", "--agent")
    assert sys.path[:2] == [str(ROOT), str(tmp_path)]


# ---- a command line


SHOWS = """
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), os.listdir(".")]))
for path in sys.argv[1:]:
    if os.path.exists(path):
        print(open(path, encoding="utf-8").read())
"""


def ask(tmp_path, monkeypatch, command, messages):
    """What a command printed: its arguments, variables, folder and files in it, then the texts of its arguments' files."""
    (tmp_path / "grade.py").write_text("def reward(prompt, label, output, folder): return 1.0\n")
    (tmp_path / "shows.py").write_text(SHOWS)
    monkeypatch.chdir(tmp_path)
    made, said = load_agent("", rooted(command), "grade.py")(), []
    made.reward = lambda prompt, label, output, folder: said.append((prompt, output)) or 1.0
    assert asyncio.run(made.run(Task(messages, base_url="http://h/v1", model="m"))) == 1.0
    first, *texts = said[0][1].split("\n", 1)
    return (*json.loads(first), texts[0], said[0][0])


def user(text):
    return [{"role": "user", "content": text}]


PYTHON = shlex.quote(sys.executable)


def test_a_command_s_relative_files_are_those_of_the_folder_where_training_was_started(
    tmp_path, monkeypatch
):
    argv, env, folder, files, _, _ = ask(
        tmp_path, monkeypatch, f"{PYTHON} shows.py {{prompt}} grade", user("a 'b' $c")
    )
    assert argv == ["a 'b' $c", "grade"] and files == []
    assert not os.path.exists(folder) and folder != str(tmp_path)


def test_paths_in_a_command_become_absolute_where_they_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path in ("run.sh", "conf/a.yaml", "home/tool", "fix/x"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    command = (
        "run.sh run.sh ./run.sh --config=conf/a.yaml conf/ ~/tool fix no/such {prompt} /bin/ls"
    )
    at = str(tmp_path)
    assert shlex.split(rooted(command)) == [
        "run.sh",
        f"{at}/run.sh",
        f"{at}/run.sh",
        f"--config={at}/conf/a.yaml",
        f"{at}/conf",
        f"{at}/home/tool",
        "fix",
        "no/such",
        "{prompt}",
        "/bin/ls",
    ]
    assert shlex.split(rooted("./run.sh 'a b' \"it's\"")) == [f"{at}/run.sh", "a b", "it's"]
    assert rooted("") == ""


@pytest.mark.parametrize(
    "command,word",
    [
        ("python 'my_script.py {prompt}", "quote"),
        ("no-such-program-of-anyone {prompt}", "PATH"),
        ("./README.md {prompt}", "PATH"),
        (" ", "is empty"),
    ],
)
def test_a_command_that_cannot_start_is_refused_before_the_start(tmp_path, capsys, command, word):
    flags = ["--agent_cmd", command, "--reward", "tests/grade.py", "--out", str(tmp_path / "out")]
    assert train.main(flags) == 2
    told = capsys.readouterr().err
    assert told.startswith("instar: --agent_cmd") and word in told and "Traceback" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [1, 131_000, 132_000, 3_000_000])
def test_a_prompt_of_any_length_is_given_in_a_file(tmp_path, monkeypatch, size):
    text = "é" + "x" * (size - 1)
    argv, env, _, _, texts, _ = ask(
        tmp_path, monkeypatch, f"{PYTHON} shows.py {{prompt_file}} {{messages_file}}", user(text)
    )
    assert argv == [env["INSTAR_PROMPT_FILE"], env["INSTAR_MESSAGES_FILE"]]
    prompt, messages = texts.split("\n", 1)
    assert prompt == text and json.loads(messages) == user(text)
    assert env.get("INSTAR_PROMPT") == (text if size < 131_001 else None)


def test_a_prompt_that_is_too_long_for_a_word_costs_its_rollout_and_says_what_to_do(
    tmp_path, monkeypatch
):
    with pytest.raises(ValueError, match=r"132001 bytes.*131071.*use \{prompt_file\}"):
        ask(tmp_path, monkeypatch, f"{PYTHON} shows.py {{prompt}}", user("é" + "x" * 131_999))


@pytest.mark.parametrize("text", ["a\0b", "half \ud83d of a pair", ""])
def test_a_prompt_that_no_variable_can_hold_is_given_in_the_files(tmp_path, monkeypatch, text):
    *_, texts, _ = ask(
        tmp_path, monkeypatch, f"{PYTHON} shows.py {{prompt_file}} {{messages_file}}", user(text)
    )
    assert json.loads(texts.split("\n")[1]) == user(text)


def test_a_command_is_given_the_system_prompt_and_the_reward_the_last_message(
    tmp_path, monkeypatch
):
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    argv, env, _, _, _, graded = ask(
        tmp_path, monkeypatch, f"{PYTHON} shows.py {{prompt}}", messages
    )
    assert argv == ["Be brief.\n\nWhat now?"] == [env["INSTAR_PROMPT"]] and graded == "What now?"


def test_a_history_is_refused_where_the_command_would_not_get_it(tmp_path, monkeypatch, capsys):
    said = [{"role": "assistant", "content": "Two."}]
    messages = [{"role": "system", "content": "s"}, *user("1+1?"), *said, *user("+1?")]
    with pytest.raises(BadInput, match=r"leaves out 2 of the 4 messages.*\{messages_file\}"):
        ask(tmp_path, monkeypatch, f"{PYTHON} shows.py {{prompt}}", messages)
    for command in ("shows.py", "shows.py {prompt} {messages_file}"):
        _, env, *_ = ask(tmp_path, monkeypatch, f"{PYTHON} {command}", messages)
        assert env["INSTAR_PROMPT"] == "s\n\n+1?"

    monkeypatch.chdir(ROOT)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "x"}) + "\n" + json.dumps({"prompt": messages}) + "\n")
    flags = ["--agent_cmd", "true {prompt}", "--reward", "tests/grade.py", "--data", str(data)]
    assert train.main([*flags, "--out", str(tmp_path / "out")]) == 2
    assert "row 1" in (told := capsys.readouterr().err) and "{messages_file}" in told


# ---- variables of Ray and of torchrun


class Ray(FakeRay):
    """Takes down the surroundings in which it was started."""

    exceptions = ray.exceptions

    def init(self, **how):
        super().init(**how)
        self.env, self.cwd = dict(os.environ), os.getcwd()


@pytest.mark.parametrize("address", ["", "auto"])
def test_variables_of_another_cluster_reach_a_ray_that_is_joined_and_none_that_is_started(
    monkeypatch, tmp_path, address
):
    monkeypatch.setattr(rollout, "ray", fake := Ray())
    monkeypatch.setattr(rollout, "visible_gpus", list)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    for name in rollout.OTHER_RAY:
        monkeypatch.setenv(name, "theirs")
    rollout.launch(Config(ray_address=address), [], None, 2, "/x")
    left = [name for name in rollout.OTHER_RAY if name in fake.env]
    assert left == (list(rollout.OTHER_RAY) if address else [])
    assert all(os.environ[name] == "theirs" for name in rollout.OTHER_RAY)
    if address:  # the job's own variables do not stand against ours
        assert fake.env["RAY_OVERRIDE_JOB_RUNTIME_ENV"] == "1"
    env = fake.joined["runtime_env"]["env_vars"]
    assert env["PYTHONPATH"] == f"{ROOT}:/mine" and env["INSTAR_START"] == str(tmp_path)
    assert fake.cwd == str(ROOT) and os.getcwd() == str(tmp_path)  # Ray puts it first into the path


def test_an_actor_goes_to_the_folder_of_the_start_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("INSTAR_START", str(tmp_path / "nowhere"))
    rollout.enter()
    assert os.getcwd() == str(ROOT)
    monkeypatch.setenv("INSTAR_START", str(tmp_path))
    rollout.enter()
    assert os.getcwd() == str(tmp_path)


ACTOR = """
import rollout, sys, time
rollout.enter()
print("entered", flush=True)
time.sleep(600)
"""
RAYLET = """
import subprocess, sys
open("/proc/self/comm", "w").write(sys.argv[1])
subprocess.Popen([sys.executable, "-c", sys.argv[2]]).wait()
"""


@pytest.mark.parametrize("parent,ends", [("raylet", True), ("pytest", False)])
def test_an_actor_ends_with_its_raylet_however_that_ends(tmp_path, parent, ends):
    command = [sys.executable, "-c", RAYLET, parent, ACTOR]
    env = os.environ | {"INSTAR_TEST": str(tmp_path)}
    raylet = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert raylet.stdout.readline() == "entered\n"
    (actor,) = Path(f"/proc/{raylet.pid}/task/{raylet.pid}/children").read_text().split()
    raylet.kill()
    raylet.wait()
    if not ends:
        assert "rollout.enter" in Path(f"/proc/{actor}/cmdline").read_text()
        os.kill(int(actor), signal.SIGKILL)
    wait_for_none(tmp_path)
    raylet.stdout.close()


def test_a_cluster_that_is_not_there_is_bad_input(monkeypatch):
    def init(**how):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(rollout, "ray", fake := Ray())
    fake.init = init
    with pytest.raises(BadInput, match="--ray_address 10.0.0.1:6379: .*nobody answers"):
        rollout.launch(Config(ray_address="10.0.0.1:6379"), [], None, 2, "/x")


TORCHRUN = dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="5", LOCAL_RANK="1")


@pytest.mark.parametrize(
    "given,found",
    [
        ({}, (0, 1)),
        (dict(MASTER_ADDR="gone", MASTER_PORT="29500", LOCAL_RANK="3"), (0, 1)),
        (TORCHRUN | dict(RANK="0", WORLD_SIZE="1", TORCHELASTIC_USE_AGENT_STORE="True"), (0, 1)),
        (TORCHRUN, (1, 2)),
        (dict(RANK="0"), "RANK=0"),
        (dict(RANK="3", MASTER_PORT="1"), "RANK=3 MASTER_PORT=1"),
        (dict(WORLD_SIZE="8"), "WORLD_SIZE=8"),
        (TORCHRUN | dict(RANK="2"), "RANK=2 WORLD_SIZE=2"),
        (TORCHRUN | dict(RANK="one"), "RANK=one"),
        (TORCHRUN | dict(WORLD_SIZE=""), "RANK=1"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_PORT=5"),
    ],
)
def test_variables_of_torchrun_are_whole_or_refused_by_name(monkeypatch, given, found):
    for name in {*TORCHRUN, "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy() | given)
    if isinstance(found, str):
        with pytest.raises(BadInput, match=found):
            train.ranks()
        return
    assert train.ranks() == found
    assert (os.environ["MASTER_PORT"] == "0") == (found == (0, 1))
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


# ---- the console


def test_a_console_that_cannot_print_a_character_prints_another(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", None)
    assert train.main(["--steps", "0"]) == 2
    train.Screen(markup=False).print("naïve 東京 \ud800", soft_wrap=True)
    told = screen.buffer.getvalue().decode().splitlines()
    assert told == ["instar: --steps 0: must be positive", "na?ve ?? ?"]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("full", [False, True])
def test_a_console_that_has_gone_or_is_full_does_not_end_a_run(monkeypatch, name, full):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") if full else os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, name, gone)
        screen = train.Screen(markup=False)
        for _ in range(2):
            screen.print("a line") if name == "stdout" else train.say("a line")
        assert os.readlink(f"/proc/self/fd/{gone.fileno()}") == os.devnull


# ---- limits of the system


def test_a_home_that_cannot_be_written_has_a_folder_in_its_place(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "environ", os.environ.copy() | dict(HOME=str(tmp_path)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.environ.pop("HF_HUB_CACHE", None)
    os.environ.pop("HF_HOME", None)
    train.find_home()
    assert os.environ["HOME"] == str(tmp_path) and not capsys.readouterr().err

    (tmp_path / ".cache/huggingface/hub").mkdir(parents=True)
    with monkeypatch.context() as m:
        m.setattr(tempfile, "TemporaryFile", lambda dir: open(Path(dir, "no", "such"), "w"))
        train.find_home()
    home = tmp_path / f"instar-home-{os.getuid()}"
    assert os.environ["HOME"] == str(home) and home.stat().st_mode & 0o777 == 0o700
    assert os.environ["HF_HUB_CACHE"] == str(tmp_path / ".cache/huggingface/hub")
    told = capsys.readouterr().err
    assert f"HOME={tmp_path} cannot be written" in told and str(home) in told

    os.environ["HOME"] = "/proc/nowhere"
    monkeypatch.setattr(os, "getuid", lambda: home.stat().st_uid + 1)
    (tmp_path / f"instar-home-{home.stat().st_uid + 1}").mkdir()
    with pytest.raises(BadInput, match="HOME=/proc/nowhere cannot be written.*another user's"):
        train.find_home()


def test_too_few_open_files_and_too_little_shared_memory_are_refused_by_name(monkeypatch):
    free = SimpleNamespace(free=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1024))
    train.check_limits(Config(engine_tp=2))
    free.free = 63 << 20
    train.check_limits(Config())
    with pytest.raises(BadInput, match="/dev/shm has 63 MB free, --engine_tp 2"):
        train.check_limits(Config(engine_tp=2))
    with monkeypatch.context() as m:
        m.setattr(tempfile, "TemporaryFile", lambda dir: open(Path(dir, "no", "such"), "w"))
        with pytest.raises(BadInput, match="/tmp, where Ray has its sockets, cannot be written"):
            train.check_limits(Config())
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 256))
    with pytest.raises(BadInput, match="`ulimit -n` is 256.*ulimit -n 1024"):
        train.check_limits(Config())


# ---- signals, and what a run leaves


def test_a_signal_waits_until_ray_has_started_and_is_then_raised(monkeypatch):
    seen = []
    for kind in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(kind, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt), rollout.undisturbed():
                signal.signal(kind, signal.SIG_IGN)  # as Ray does with its own handler
                signal.raise_signal(kind)
                seen.append(kind)
            assert signal.getsignal(kind) is signal.default_int_handler
        finally:
            signal.signal(kind, before)
    assert seen == [signal.SIGINT, signal.SIGTERM]


def test_of_a_run_without_a_step_nothing_is_left_and_of_another_all(tmp_path):
    cfg = Config(out=str(tmp_path / "a" / "b"))
    made = [tmp_path / "a" / "b", tmp_path / "a"]

    def fill(metrics):
        made[0].mkdir(parents=True, exist_ok=True)
        (made[0] / "metrics.jsonl").write_text(metrics)
        (made[0] / "config.json").write_text("{}")

    fill("")
    train.sweep(cfg, made)
    assert os.listdir(tmp_path) == []
    fill("")
    (made[0] / "mine").touch()
    train.sweep(cfg, made)
    assert os.listdir(made[0]) == ["mine"]
    fill('{"step": 1}\n')
    train.sweep(cfg, made)
    kept = [LOCK, "config.json", "metrics.jsonl", "mine"]
    assert sorted(os.listdir(made[0])) == kept


@pytest.mark.parametrize(
    "ending,code,kept",
    [
        (KeyboardInterrupt(), 1, False),
        (BadInput("no room"), 2, False),
        (train.InvariantError("refit: lost"), 3, True),
        (None, 0, False),
    ],
)
def test_the_folder_of_temporary_files_is_kept_for_the_logs_of_a_fault_alone(
    monkeypatch, tmp_path, capsys, ending, code, kept
):
    seen = []

    def run(cfg, rows):
        seen.append(Path(tempfile.gettempdir()))
        (seen[0] / "log").touch()
        if ending:
            raise ending

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    assert train.main(["--out", str(tmp_path / "new" / "out")]) == code
    assert seen[0].exists() == kept and os.listdir(tmp_path) == []
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before
    told = capsys.readouterr().err
    assert "Traceback" not in told and told.count("\n") == (ending is not None)
    shutil.rmtree(seen[0], ignore_errors=True)


def start(folder, *flags, agent=ROOT / "agent.py", env=None, **how):
    """`python train.py` in a folder of its own, whose name marks all its processes."""
    inputs = "--agent", agent, "--data", ROOT / "examples/starter/train.jsonl"
    command = [sys.executable, ROOT / "train.py", "--model", ROOT / "examples/starter", *inputs]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    environ = os.environ | {"INSTAR_TEST": str(folder)} | (env or {})
    return subprocess.Popen([*command, *flags], cwd=folder, env=environ, **pipes | how)


def wait_for_none(folder):
    """Until no process that was started there is left."""
    deadline = time.monotonic() + 90
    while left := marked(str(folder)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_is_one_line(tmp_path, kind):
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while "libtorch" not in Path("/proc", str(process.pid), "maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(kind)
    assert process.communicate(timeout=60)[0] == "instar: stopped by a signal\n"
    assert process.returncode == 1 and os.listdir(tmp_path) == []


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("begun", ["gcs_server", "ray::Engine", "VLLM::EngineCore"])
def test_a_signal_during_the_start_leaves_nothing(tmp_path, begun, kind):
    process, deadline = start(tmp_path, start_new_session=True), time.monotonic() + 120
    while not any(begun in command for command in marked(str(tmp_path))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    scratch = re.search("/tmp/instar-[^/]+", "".join(marked(str(tmp_path))))[0]
    assert os.path.isdir(scratch)
    if kind == signal.SIGINT:  # a terminal sends it to all of them
        os.killpg(process.pid, kind)
    else:
        process.send_signal(kind)
    assert process.communicate(timeout=60)[0] == "instar: stopped by a signal\n"
    assert process.returncode == 1
    wait_for_none(tmp_path)
    assert os.listdir(tmp_path) == [] and not os.path.exists(scratch)


HOSTILE = {
    "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://x.zip"}, "metadata": {}}',
    "RAY_ADDRESS": "127.0.0.1:1",
    "RAY_REDIS_ADDRESS": "127.0.0.1:1",
    "RAY_NAMESPACE": "x",
    "RAY_TMPDIR": "/nowhere",
    "RAY_RUNTIME_ENV_HOOK": "no.such",
    "PYTHONSAFEPATH": "1",
    "PYTHONIOENCODING": "ascii",
    "LANG": "C",
    "HOME": "/proc/nowhere",
    "MASTER_PORT": "1",
    "LOCAL_RANK": "3",
}


BESIDE = """
import os

from agent import Env
from my_sibling import VALUE


class Agent(Env):
    def step(self, reply):
        assert os.path.exists("my_sibling.py")
        return None, float(VALUE), True, {}
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_takes_its_step_in_hostile_surroundings(tmp_path):
    """Variables of other programs, files with the names of modules, a console whose reader goes, 1,024 open files."""
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the user has a {name}.py')\n")
    (tmp_path / "agent.py").write_text(BESIDE)
    (tmp_path / "my_sibling.py").write_text("VALUE = 41\n")
    (tmp_path / "tmp").mkdir()
    reader, writer = os.pipe()
    os.close(reader)
    process = start(
        tmp_path,
        *("--steps", "1", "--prompts", "2", "--minibatches", "1", "--samples", "2", "--out", "out"),
        agent="agent.py",
        env=HOSTILE | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(tmp_path)},
        stdout=writer,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024)),
    )
    os.close(writer)
    told = process.communicate(timeout=200)[1]
    assert process.returncode == 0, told
    assert told.count("\n") == 1 and "HOME=/proc/nowhere cannot be written" in told, told
    (line,) = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward/mean"] == 41 and metrics["rollouts/failed"] == 0
    wait_for_none(tmp_path)
