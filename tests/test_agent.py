"""agent.py: the default game, segments, digests, loading a user's file."""

import asyncio
import os
import signal
import sys
import time

import numpy as np
import pytest
import uvloop

from agent import Agent, Segment, Task, digest, load_agent


def play(label, *replies):
    env = Agent()
    env.reset(Task([{"role": "user", "content": "?"}], label=label))
    return [env.step(r) for r in replies]


def test_the_calculator_answers_one_operation_a_call():
    (seven, reward, done, info), (_, final, over, _) = play(
        21, "<calc>3+4</calc>", "<answer>21</answer>"
    )
    assert (seven, reward, done, info["calls"]) == ("7", 0.0, False, 1)
    assert (final, over) == (1.0, True)
    assert play(0, "<calc>-14+5</calc>", "<calc>12*7</calc>", "<calc>1-9</calc>")[0][0] == "-9"


def test_only_the_right_number_is_rewarded_and_a_malformed_reply_gets_a_hint():
    assert play(21, "<answer>22</answer>")[0][1:3] == (0.0, True)
    for reply in (
        "",
        "21",
        "<calc>1+2+3</calc>",
        "<answer>x</answer>",
        "<calc>1/2</calc>",
        "<answer>21",
        "<answer>21</answer>>>",
    ):
        observation, reward, done, _ = play(21, reply)[0]
        assert "<calc>" in observation and reward == 0 and not done


def row(n=10, replies=((3, 5), (7, 10))):
    mask = np.zeros(n, bool)
    for a, b in replies:
        mask[a:b] = True
    return Segment(
        np.arange(n, dtype=np.int32),
        mask,
        np.where(mask, -1.0, 0.0).astype(np.float32),
        np.where(mask, 3, -1).astype(np.int32),
        np.zeros((n, 2, 2), np.uint8),
        np.arange(n) < n - 1,
        [(a, b, b"x") for a, b in replies],
    )


def test_a_row_is_cut_between_replies_and_every_field_with_it():
    cut = row().cut(9)
    assert len(cut) == 5 and cut.truncated and cut.replies == [(3, 5, b"x")]
    assert {
        len(getattr(cut, f))
        for f in ("tokens", "mask", "logprobs", "versions", "experts", "experts_ok")
    } == {5}
    assert not cut.experts_ok[-1] and cut.experts_ok[:-1].all()
    assert len(row().cut(10)) == 10 and not row().cut(10).truncated
    assert len(row().cut(4)) == 0


def test_a_digest_covers_prompt_reply_logprobs_versions_and_their_borders():
    args = [np.array([1, 2]), np.array([3, 4]), np.array([-0.5, -1.0]), np.array([0, 0])]
    one = digest(*args)
    assert one == digest(*[a.copy() for a in args]) and len(one) == 16
    for i in range(4):
        changed = [a.copy() for a in args]
        changed[i][-1] += 1
        assert digest(*changed) != one
    assert digest(np.array([1]), np.array([2, 3, 4]), *args[2:]) != digest(
        np.array([1, 2]), np.array([3, 4]), *args[2:]
    )
    nudged = np.nextafter(args[2].astype(np.float32), 0)
    assert digest(args[0], args[1], nudged, args[3]) != one


def test_an_agent_file_may_import_its_siblings_and_use_dataclasses(tmp_path):
    (tmp_path / "my_helper.py").write_text("VALUE = 41\n")
    (tmp_path / "my_agent.py").write_text(
        "from dataclasses import dataclass\nfrom my_helper import VALUE\nfrom agent import Env\n\n"
        "@dataclass\nclass Point:\n    x: 'int' = VALUE + 1\n\nclass Agent(Env):\n    point = Point()\n"
    )
    assert load_agent(str(tmp_path / "my_agent.py"))().point.x == 42
    assert load_agent("agent.py") is Agent


def test_a_missing_file_or_class_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--agent .*nope.py"):
        load_agent(str(tmp_path / "nope.py"))
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(AttributeError, match="no class named Agent"):
        load_agent(str(tmp_path / "empty.py"))


GRADE = """
import os
def reward(prompt, label, output, folder):
    return float(f"{prompt} {label}" in output and os.path.exists(os.path.join(folder, "made")))
"""
SHOWS = """
import os, sys
names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "INSTAR_MODEL")
print(sys.argv[1], 7, *[os.environ[n] for n in names])
open("made", "w").write("x")
"""


def command_agent(tmp_path, script, command="{python} {script} '{prompt}'", reward=GRADE):
    (tmp_path / "grade.py").write_text(reward)
    (tmp_path / "script.py").write_text(script)
    command = command.replace("{python}", sys.executable).replace(
        "{script}", str(tmp_path / "script.py")
    )
    return load_agent("agent.py", command, str(tmp_path / "grade.py"))()


TASK = dict(messages=[{"role": "user", "content": "say 'a' && {model}"}], label=7)
TASK |= dict(base_url="http://127.0.0.1:1/r/k/v1", api_key="k", model="m")


def test_a_command_gets_its_prompt_as_one_word_a_folder_and_the_variables_of_the_sdks(tmp_path):
    seen = {}

    def grade(prompt, label, output, folder):
        seen.update(
            prompt=prompt,
            label=label,
            output=output,
            made=os.path.exists(os.path.join(folder, "made")),
            folder=folder,
        )
        return 1.0

    agent = command_agent(tmp_path, SHOWS)
    agent.reward = grade
    assert asyncio.run(agent.run(Task(**TASK))) == 1.0
    assert seen["output"].startswith(
        "say 'a' && {model} 7 http://127.0.0.1:1/r/k/v1 k http://127.0.0.1:1/r/k k m"
    )
    assert (
        seen["made"]
        and not os.path.exists(seen["folder"])
        and (seen["prompt"], seen["label"]) == (TASK["messages"][0]["content"], 7)
    )


def test_the_reward_file_grades_a_command(tmp_path):
    assert asyncio.run(command_agent(tmp_path, SHOWS).run(Task(**TASK))) == 1.0


def test_a_command_that_fails_shows_the_end_of_its_output(tmp_path):
    agent = command_agent(tmp_path, "import sys; print('tail of it'); sys.exit(3)")
    with pytest.raises(RuntimeError, match="(?s)exit code 3.*tail of it"):
        asyncio.run(agent.run(Task(**TASK)))


SLEEPS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, file=open(sys.argv[1], "w"))
time.sleep(600)
"""


def written(path, seconds=120):
    """The number in a file, once a process has written it and a line's end."""
    for _ in range(seconds * 20):
        if path.exists() and path.read_text().endswith("\n"):
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError("the command has not started")


def check_ended(pid):
    for _ in range(1200):
        if not os.path.exists(f"/proc/{pid}") or open(f"/proc/{pid}/stat").read().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what the command started still runs")


@pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop]
)  # Ray's actors have uvloop's
def test_a_time_limit_ends_a_command_and_all_that_it_started(tmp_path, loop):
    agent = command_agent(tmp_path, SLEEPS, "{python} {script} " + str(tmp_path / "pid"))
    handles = []

    async def twice():
        for _ in range(2):
            (tmp_path / "pid").unlink(missing_ok=True)
            run = asyncio.create_task(agent.run(Task(**TASK)))
            started = await asyncio.to_thread(written, tmp_path / "pid")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(run, 0.1)
            check_ended(started)
            await asyncio.sleep(0.2)
            handles.append(len(os.listdir("/proc/self/fd")))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(twice())
    assert handles[0] == handles[1]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_command_that_leaves_processes_behind_ends_with_them(tmp_path, loop):
    script = (
        SHOWS
        + "import subprocess\nquiet = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL)\n"
    )
    script += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '600'], **quiet).pid))\n"
    begun = time.monotonic()
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(command_agent(tmp_path, script).run(Task(**TASK))) == 1.0
    assert time.monotonic() - begun < 300  # of the 600 seconds that what it left would take
    check_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_command_ends_with_all_that_it_started_when_its_runner_is_killed(tmp_path, loop):
    agent = command_agent(tmp_path, SLEEPS, "{python} {script} " + str(tmp_path / "pid"))
    runner = os.fork()
    if not runner:
        try:
            with asyncio.Runner(loop_factory=loop) as r:
                r.run(agent.run(Task(**TASK)))
        finally:
            os._exit(0)  # never back into pytest, whatever was raised
    started = written(tmp_path / "pid")
    os.kill(runner, signal.SIGKILL)
    os.waitpid(runner, 0)
    check_ended(started)


def test_a_reward_file_alone_grades_one_reply_to_each_prompt(tmp_path):
    (tmp_path / "grade.py").write_text(
        "def reward(prompt, label, output, folder):\n    return float(output == label)\n"
    )
    env = load_agent("agent.py", "", str(tmp_path / "grade.py"))()
    assert env.reset(Task([{"role": "user", "content": "x"}], label="y"))[0]["content"] == "x"
    assert env.step("y") == (None, 1.0, True, {}) and env.step("z")[1] == 0.0


def test_a_reward_file_without_the_function_is_named(tmp_path):
    (tmp_path / "grade.py").write_text("x = 1\n")
    with pytest.raises(AttributeError, match="--reward .*no function named reward"):
        load_agent("agent.py", "true", str(tmp_path / "grade.py"))
