"""What a run finds around it: the environment, the console, a user's own files, a command line, limits of the system, signals."""

import asyncio
import io
import json
import os
import pickle
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
from conftest import marked
from test_rollout import FakeRay

import agent
import rollout
import train
from agent import BadInput, Env, Task, load, load_agent, rooted
from train import Config

ROOT = Path(train.__file__).resolve().parent
MODULES = "agent server rollout replay estimator loss refit train".split()


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

    def init(self, **how):
        super().init(**how)
        self.env, self.cwd = dict(os.environ), os.getcwd()


@pytest.mark.parametrize("address", ["", "auto"])
def test_variables_of_another_cluster_reach_a_ray_that_is_joined_and_none_that_is_started(
    monkeypatch, tmp_path, address
):
    monkeypatch.setattr(rollout, "ray", ray := Ray())
    monkeypatch.setattr(rollout, "visible_gpus", list)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    for name in rollout.OTHER_RAY:
        monkeypatch.setenv(name, "theirs")
    rollout.launch(Config(ray_address=address), [], None, 2, "/x")
    left = [name for name in rollout.OTHER_RAY if name in ray.env]
    assert left == (list(rollout.OTHER_RAY) if address else [])
    assert all(os.environ[name] == "theirs" for name in rollout.OTHER_RAY)
    if address:  # the job's own variables do not stand against ours
        assert ray.env["RAY_OVERRIDE_JOB_RUNTIME_ENV"] == "1"
    env = ray.joined["runtime_env"]["env_vars"]
    assert env["PYTHONPATH"] == f"{ROOT}:/mine" and env["INSTAR_START"] == str(tmp_path)
    assert ray.cwd == str(ROOT) and os.getcwd() == str(tmp_path)  # Ray puts it first into the path


def test_an_actor_goes_to_the_folder_of_the_start_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("INSTAR_START", str(tmp_path / "nowhere"))
    rollout.enter()
    assert os.getcwd() == str(ROOT)
    monkeypatch.setenv("INSTAR_START", str(tmp_path))
    rollout.enter()
    assert os.getcwd() == str(tmp_path)


def test_a_cluster_that_is_not_there_is_bad_input(monkeypatch):
    def init(**how):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(rollout, "ray", ray := Ray())
    ray.init = init
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
