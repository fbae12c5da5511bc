"""The agents of examples/ that need a library or a program of their own, each with a scripted engine."""

import asyncio
import inspect
import json
import os
import random
import re
import shlex
import sys
import time

import pytest
from test_clients import CLIENTS, HERE, LIMIT, OPENAI, call, drive, proxy
from test_forest import chat  # noqa: F401
from test_http import serving, texts
from test_rewards import namespaces  # noqa: F401

sys.path.insert(0, str(HERE.parent / "examples"))
import toy_repos

from agent import Result, Task, load_agent

pytestmark = pytest.mark.clients

EXAMPLES = HERE.parent / "examples"


def rollout(chat, folder, name: str, row: dict, say: list, **more):
    """Run an agent of examples/ in the clients' venv: (its Result as a dict, or what it raised as text; the forest)."""
    (folder / "row.json").write_text(json.dumps(row))
    command = [
        CLIENTS / "bin/python",
        HERE / "clients/rollout.py",
        EXAMPLES / name,
        folder / "row.json",
    ]
    ran = drive(chat, folder, say, command, env=OPENAI, **more)
    assert ran.outside == []
    return ran.err if ran.code else json.loads(ran.out.splitlines()[-1]), ran.forest


def bash(command: str) -> str:
    return call("bash", command=command)


def write(text: str) -> str:
    return bash(
        f"cat > solution.py <<'END'\n{text}\nEND\npython3 test_solution.py && echo pass''ed"
    )


SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def task(kind: str, function: str) -> dict:
    return next(
        r
        for i in range(99)
        if (r := toy_repos.make(random.Random(i), kind))["label"]["function"] == function
    )


@pytest.mark.parametrize("right", [True, False])
def test_mini_swe_agent_mends_a_repository_in_the_sandbox(chat, tmp_path, namespaces, right):
    """A fix that fits the visible test only passes it, and earns nothing."""
    row = task("fix", "to_roman")
    shown = re.findall(r"assert to_roman\((\d+)\) == ('\w+')", row["files"]["test_solution.py"])
    learnt_by_heart = f"def to_roman(number):\n    return {{{', '.join(': '.join(pair) for pair in shown)}}}[number]"
    fix = inspect.getsource(toy_repos.to_roman) if right else learnt_by_heart
    say = [bash("pwd; cat solution.py; env; python3 test_solution.py"), write(fix), SUBMIT]
    result, forest = rollout(chat, tmp_path, "swe_agent.py", row, say)
    assert texts(forest) == [say]
    assert result["reward"] == result["rewards"]["solved"] == float(right)
    assert result["info"] == {"steps": 3, "submitted": True}
    read = chat.tokenizer.decode(forest.segments(Result(), 0, 0)[0].tokens)
    assert (
        "/box" in read
        and "AssertionError" in read
        and "ok\\npassed" in read
        and "OPENAI_API_KEY" not in read
    )


@pytest.mark.parametrize("right", [True, False])
def test_claude_code_writes_a_solution_and_is_graded(
    chat, tmp_path, namespaces, right, monkeypatch
):
    """The command is the one of examples/claude_code.sh, started as in a training."""
    row = task("write", "median")
    source = (
        inspect.getsource(toy_repos.median)
        if right
        else "def median(numbers):\n    return numbers[0]"
    )
    tried = bash("python3 -c 'from solution import median; print(median([5]) * 1000 + 1)'").replace(
        "bash", "Bash", 1
    )
    say = [
        bash(f"cat > solution.py <<'END'\n{source}\nEND").replace("bash", "Bash", 1),
        tried,
        "It works.",
    ]
    words = shlex.split((EXAMPLES / "claude_code.sh").read_text().partition("exec python")[2])
    command, reward = (words[words.index(flag) + 1] for flag in ("--agent_cmd", "--reward"))
    assert {"--data", "--max_turns", "--max_tokens", "--max_context"} < set(words)
    monkeypatch.setenv("PATH", f"{CLIENTS / 'node_modules/.bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    async def go():
        outside = []
        refusing = await proxy(outside)
        monkeypatch.setenv(
            "HTTPS_PROXY", f"http://127.0.0.1:{refusing.sockets[0].getsockname()[1]}"
        )
        async with serving(chat, *say, max_tokens=4096, max_context=1 << 20) as (
            _,
            forest,
            engine,
            url,
        ):
            agent = load_agent("", command, reward)()
            messages = [{"role": "user", "content": row["prompt"]}]
            earned = await agent.run(
                Task(messages, row["label"], row, base_url=f"{url}/v1", api_key="k", model="policy")
            )
            assert earned == float(right) and texts(forest) == [say]
            assert "5001" in chat.tokenizer.decode(engine.asked[2][0])
            assert len(chat.tokenizer.decode(engine.asked[0][0])) < 5000
        refusing.close()
        assert outside == [] and os.listdir(tmp_path) == []  # nothing is left in the home

    asyncio.run(asyncio.wait_for(go(), 120))


def sum_row(**arguments) -> dict:
    prompt = [
        {"role": "system", "content": "Be right."},
        {"role": "user", "content": "What is 1200+34+5600?"},
    ]
    return {
        "prompt": prompt,
        "answer": "6834",
        "environment": "verifiers-agent",
        "arguments": json.dumps(arguments),
    }


@pytest.mark.parametrize("final,correct", [("It is 6834", 1.0), ("It is 7", 0.0)])
def test_an_environment_of_verifiers_plays_and_grades_its_own_rollout(
    chat, tmp_path, final, correct
):
    say = [call("add", a=1200, b=34), call("add", a="x", b=1) + call("add", a=1234, b=5600), final]
    result, forest = rollout(chat, tmp_path, "verifiers_agent.py", sum_row(problems=1), say)
    assert texts(forest) == [say]
    assert (result["reward"], result["truncated"]) == (correct, False)
    assert result["rewards"] == {
        "correct": correct,
        "num_turns": 3,
        "total_tool_calls": 3,
        "add_calls": 3,
    }
    assert result["info"]["output_tokens"] == sum(len(node.reply.tokens) for node in forest.nodes)
    read = chat.tokenizer.decode(forest.segments(Result(), 0, 0)[0].tokens)
    assert "system\nBe right." in read and "tool\n1234" in read and "tool\n6834" in read


def test_an_environment_of_verifiers_whose_context_is_full_is_graded_as_truncated(chat, tmp_path):
    """The context is too small for the second turn, which the library knows by the words of the error."""
    say = [call("add", a=1200, b=34) + "x" * 300, "It is 6834"]
    result, forest = rollout(
        chat, tmp_path, "verifiers_agent.py", sum_row(problems=1), say, window=250
    )
    assert (result["reward"], result["truncated"]) == (0.0, True)
    ((said,),) = texts(forest)
    assert say[0].startswith(said) and len(said) > 100 and forest.truncated


@pytest.mark.parametrize("name", ["swe_agent.py", "verifiers_agent.py"])
def test_an_agent_of_the_examples_ends_when_its_rollout_has_ended(chat, tmp_path, namespaces, name):
    row, turn = (
        (task("fix", "median"), bash("ls"))
        if "swe" in name
        else (sum_row(problems=1), call("add", a=1, b=2))
    )
    start = time.monotonic()
    error, forest = rollout(chat, tmp_path, name, row, [turn, turn, "end"], code=1, closes=2)
    assert "this rollout has ended" in error and texts(forest) == [[turn]]
    assert time.monotonic() - start < LIMIT
