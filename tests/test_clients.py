"""Real clients, unmodified and each in a process of its own, do a task with two tool turns; what they say stays one row.

The engine is scripted. `make clients` installs the clients into .clients/ and runs this file. A client sees loopback only: its
environment is empty but for what it is told, its home is a temporary folder, and its proxy refuses all and keeps the names.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_forest import Engine, chat  # noqa: F401
from test_http import parse, texts

from agent import Result, digest
from server import Forest, Server

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
CLIENTS = HERE.parent / ".clients"
LIMIT = 60  # seconds of one client; they need two to eight
TASK = "What are 1200+34, 5600+78 and 9000+9?"
SUMS = ("1234", "5678", "9009")  # no script says them, so each stands in a row only if a tool's output got there
FINAL = "All sums are done \u2713 \u00fc."
TITLE = "Adding numbers"
WINDOW = 1 << 20  # a coding agent's first prompt has 80 kB, and the test's tokenizer knows few words


def call(name: str, **arguments) -> str:
    # blanks and an order that no client would choose itself, so that an echo that was written anew shows
    inner = ",  ".join(f"{json.dumps(k)}:   {json.dumps(v)}" for k, v in reversed(arguments.items()))
    return f"<call>{name} {{{inner}}}</call>"


def adds(a: int, b: int) -> str:
    return call("add", a=a, b=b)


def script(add=adds, final: str = FINAL) -> list[str]:
    """A call, two calls at once, the end."""
    return [f"<think>one\n by one</think>I add.\n{add(1200, 34)}", f"{add(5600, 78)}{add(9000, 9)}", final]


class Policy(Engine):
    """Follows its script where the request has tools; a request without any wants a title."""

    async def generate(self, ids, max_tokens, known, stop):
        tools = re.match(r"tools ([^\n]*)\n", self.chat.tokenizer.decode(ids[:8192]))
        if not tools:
            self.script.insert(0, TITLE)
        return await super().generate(ids, max_tokens, known, stop)


@dataclass
class Ran:
    """What a client's process left."""

    forest: Forest
    out: str
    outside: list[str]  # hosts beyond loopback that it wanted to reach


async def proxy(names: list[str]) -> asyncio.Server:
    """Refuses every connection to the outside and keeps the host's name."""

    async def refuse(reader, writer):
        line = (await reader.readline()).decode("latin-1").split()
        names.append(line[1] if len(line) > 1 else "?")
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    return await asyncio.start_server(refuse, "127.0.0.1", 0)


async def process(command: list[str], env: dict, cwd: Path) -> tuple[int, str, str]:
    """Run a client to its end: (exit code, stdout, stderr). One that hangs is killed with its children, and fails by name."""
    run = await asyncio.create_subprocess_exec(
        *command,
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    collect = asyncio.ensure_future(run.communicate())
    done, _ = await asyncio.wait([collect], timeout=LIMIT)
    if not done:
        os.killpg(run.pid, signal.SIGKILL)
    out, err = (data.decode(errors="replace") for data in await collect)
    if not done:
        pytest.fail(f"{Path(command[-1] if len(command) < 2 else command[1]).name} hangs: {out[-2000:]}{err[-2000:]}")
    return run.returncode, out, err


def drive(chat, folder: Path, say: list[str], command, env=None, files=None) -> Ran:  # noqa: F811
    """Run a client against a server whose policy says `say`. In command, env and files {url} is the rollout's base URL."""
    if not (CLIENTS / "ready").exists():
        pytest.fail("the clients are not installed: run make clients")

    async def go():
        app, names = Server("policy", linger=5), []
        forest = Forest(chat, Policy(chat, *say).generate, parse, 4096, WINDOW, {})
        key, outside = app.open(forest), await proxy(names)
        app.start()
        url = f"http://127.0.0.1:{app.port}/r/{key}"

        def fill(text):
            return str(text).replace("{url}", url).replace("{task}", TASK)

        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        for name, text in (files or {}).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(fill(text))
        refused = f"http://127.0.0.1:{outside.sockets[0].getsockname()[1]}"
        plain = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb", "HOME": str(home), "CI": "1"}
        plain |= {f"{k}_PROXY": refused for k in ("HTTP", "HTTPS", "ALL")}
        plain |= {k.lower(): v for k, v in plain.items() if k.endswith("_PROXY")}
        plain |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        try:
            argv = [fill(part) for part in command]
            code, out, err = await process(argv, plain | {k: fill(v) for k, v in (env or {}).items()}, work)
        finally:
            outside.close()
            app.task.cancel()
            await asyncio.gather(app.task, return_exceptions=True)
            await forest.close()
        assert code == 0, f"exit code {code}\n{out[-3000:]}\n{err[-3000:]}"
        return Ran(forest, out, sorted(set(names)))

    return asyncio.run(go())


def holds(ran: Ran, say: list[str], echoes: set[str], titles: int = 0, final: str = FINAL, sums=SUMS) -> None:
    """The rule of this file: one row with all replies and all tool outputs, each id as it was sampled, nothing else."""
    forest, tokenizer = ran.forest, ran.forest.chat.tokenizer
    assert final in ran.out
    rows = forest.segments(Result(), 0, 0)
    trained = texts(forest)
    assert trained.count(say) == 1, trained
    assert all(t == [TITLE] for t in trained if t != say) and len(forest.nodes) - len(say) <= titles, trained
    row = rows[trained.index(say)]
    for a, b, mark in row.replies:
        assert mark == digest(row.tokens[:a], row.tokens[a:b], row.logprobs[a:b], row.versions[a:b])
    assert sum(r.mask.sum() for r in rows) == sum(b - a for r in rows for a, b, _ in r.replies)
    last, between = row.replies[0][1], []
    for a, b, _ in row.replies[1:]:
        between.append(tokenizer.decode(row.tokens[last:a]))
        last = b
    assert sums[0] in between[0] and all(s in between[1] for s in sums[1:]), between
    assert TASK in tokenizer.decode(row.tokens[: row.replies[0][0]])
    counts = forest.counts
    tiers = {k.removeprefix("server/echo_"): n for k, n in counts.items() if k.startswith("server/echo_") and n}
    # each later request shows all replies before it, and each of them was found
    assert set(tiers) == echoes and sum(tiers.values()) == len(say) * (len(say) - 1) / 2, tiers
    assert not any(counts[f"server/{k}"] for k in ("rewritten", "replayed", "constrained")), counts


def python(name: str, *arguments: str) -> list[str]:
    return [CLIENTS / "bin/python", HERE / "clients" / name, TASK, *arguments]


OPENAI = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "any"}
ANTHROPIC = {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "any"}


@pytest.mark.parametrize("mode", [[], ["stream"]], ids=["whole", "stream"])
def test_openai_chat_is_one_row(chat, tmp_path, mode):  # noqa: F811
    ran = drive(chat, tmp_path, script(), python("openai_chat.py", *mode), OPENAI)
    holds(ran, script(), {"T0"})
    assert ran.outside == []


@pytest.mark.parametrize("mode", ["whole", "stream", "previous"])
def test_openai_responses_are_one_row(chat, tmp_path, mode):  # noqa: F811
    ran = drive(chat, tmp_path, script(), python("openai_responses.py", mode), OPENAI)
    holds(ran, script(), {"T0"})
    assert ran.outside == []


@pytest.mark.parametrize("mode", [[], ["stream"]], ids=["whole", "stream"])
def test_anthropic_messages_are_one_row(chat, tmp_path, mode):  # noqa: F811
    ran = drive(chat, tmp_path, script(), python("anthropic_messages.py", *mode), ANTHROPIC)
    holds(ran, script(), {"T1"})
    assert ran.outside == []


def test_anthropic_tool_runner_is_one_row(chat, tmp_path):  # noqa: F811
    ran = drive(chat, tmp_path, script(), python("anthropic_runner.py"), ANTHROPIC)
    holds(ran, script(), {"T1"})
    assert ran.outside == []


# over Chat Completions it drops the reasoning
@pytest.mark.parametrize("mode,echoes", [("chat", {"T0", "T1"}), ("responses", {"T0"}), ("previous", {"T0"})])
def test_openai_agents_is_one_row(chat, tmp_path, mode, echoes):  # noqa: F811
    env = OPENAI | {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
    ran = drive(chat, tmp_path, script(), python("agents_runner.py", mode), env)
    holds(ran, script(), echoes)
    assert ran.outside == []


def test_langgraph_is_one_row(chat, tmp_path):  # noqa: F811
    ran = drive(chat, tmp_path, script(), python("langgraph_react.py"), OPENAI | {"LANGSMITH_TRACING": "false"})
    holds(ran, script(), {"T1"})
    assert ran.outside == []


LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.mark.parametrize(
    "model,env,echoes",
    [
        ("openai/policy", {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "any"}, {"T0"}),
        ("hosted_vllm/policy", {"HOSTED_VLLM_API_BASE": "{url}/v1"}, {"T0"}),
        ("anthropic/policy", {"ANTHROPIC_API_BASE": "{url}", "ANTHROPIC_API_KEY": "any"}, {"T1"}),
    ],
)
def test_litellm_is_one_row(chat, tmp_path, model, env, echoes):  # noqa: F811
    ran = drive(chat, tmp_path, script(), python("litellm_loop.py", model), LITELLM | env)
    holds(ran, script(), echoes)
    assert ran.outside == []


def shell(name: str, key: str, **more):
    """`adds` by a shell tool of this name whose command is the argument `key`."""
    return lambda a, b: call(name, **{key: f"expr {a} + {b}"}, **more)


def test_mini_swe_agent_is_one_row(chat, tmp_path):  # noqa: F811
    add = shell("bash", "command")
    end = call("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{FINAL}'")
    say = script(add, f"Done.{end}")
    env = OPENAI | LITELLM | {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    env |= {"MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
    command = [CLIENTS / "bin/mini", "-y", "--exit-immediately", "-m", "openai/policy", "-t", TASK]
    ran = drive(chat, tmp_path, say, [*command, "-c", "mini.yaml", "-o", tmp_path / "out.json"], env)
    holds(ran, say, {"T0"})
    assert ran.outside == []


@dataclass
class Agent:
    """A coding agent as it is started; {task} in its command is what it is asked, and `more` goes on with it."""

    command: list
    add: object  # the call of its shell that adds two numbers
    echoes: set[str]  # how it echoes replies
    env: dict
    files: dict
    outside: int = 0  # hosts beyond loopback that no setting keeps it from asking for
    titles: int = 0  # calls beside the conversation
    more: tuple = ()


BIN = CLIENTS / "node_modules/.bin"
CODEX = """
model = "policy"
model_provider = "rollout"
[model_providers.rollout]
name = "rollout"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
[features]
plugins = false
"""


def opencode(package: str, **change) -> Agent:
    provider = {"npm": package, "options": {"baseURL": "{url}/v1", "apiKey": "any"}}
    provider["models"] = {"policy": {"limit": {"context": WINDOW, "output": 4096}}}
    config = {"provider": {"rollout": provider}, "model": "rollout/policy", "autoupdate": False, "share": "disabled"}
    env = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_PURE": "1", "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    add = shell("bash", "command", description="Adds")
    # it installs its plugins' types in the background, and goes on when it cannot
    return Agent([BIN / "opencode", "run", "{task}"], add, {"T1"}, env, {}, 1, 1, ("-c",))


AGENTS = {
    "claude": Agent(
        [BIN / "claude", "-p", "{task}", "--model", "policy", "--allowedTools", "Bash"],
        shell("Bash", "command", description="Adds"),
        {"T1"},
        ANTHROPIC | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        {},
        more=("--continue",),
    ),
    "codex": Agent(
        [BIN / "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"],
        shell("exec_command", "cmd"),
        {"T0"},
        {"OPENAI_API_KEY": "any"},
        {".codex/config.toml": CODEX},
        more=("resume", "--last"),
    ),
    "opencode-chat": opencode("@ai-sdk/openai-compatible"),
    "opencode-responses": opencode("@ai-sdk/openai"),
    "opencode-messages": opencode("@ai-sdk/anthropic"),
}


@pytest.mark.parametrize("name", AGENTS)
def test_coding_agent_is_one_row(chat, tmp_path, name):  # noqa: F811
    agent = AGENTS[name]
    say = script(agent.add)
    ran = drive(chat, tmp_path, say, agent.command, agent.env, agent.files)
    holds(ran, say, agent.echoes, agent.titles)
    assert len(ran.outside) <= agent.outside, ran.outside
