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
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_forest import Engine, chat  # noqa: F401
from test_http import parse, texts

import server
from agent import Result, digest
from server import Forest, Server

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
CLIENTS = HERE.parent / ".clients"
LIMIT = 60  # seconds of one process; they need one to eight
ALIVE = 0.05  # seconds between two keep-alives
TASK = "What are 1200+34, 5600+78 and 9000+9?"
SUMS = (
    "1234",
    "5678",
    "9009",
)  # no script says them, so each stands in a row only if a tool's output got there
FINAL = "All sums are done \u2713 \u00fc."
TITLE = "Adding numbers"
WINDOW = (
    1 << 20
)  # a coding agent's first prompt has 80 kB, and the test's tokenizer knows few words


def call(name: str, **arguments) -> str:
    # blanks and an order that no client would choose itself, so that an echo that was written anew shows
    inner = ",  ".join(
        f"{json.dumps(k)}:   {json.dumps(v)}" for k, v in reversed(arguments.items())
    )
    return f"<call>{name} {{{inner}}}</call>"


def adds(a: int, b: int) -> str:
    return call("add", a=a, b=b)


def script(add=adds, final: str = FINAL) -> list[str]:
    """A call, two calls at once, the end."""
    return [
        f"<think>one\n by one</think>I add.\n{add(1200, 34)}",
        f"{add(5600, 78)}{add(9000, 9)}",
        final,
    ]


class Policy(Engine):
    """Follows its script, slowly enough that each stream is kept alive; an entry may be a function of the prompt's text.

    A request without tools wants a title, unless the client has none. One with a key of `others` in a user message is a
    sub-agent's.
    """

    def __init__(self, chat, *say, others=None, titles=True):
        super().__init__(chat, *say)
        self.others, self.titles = others or {}, titles

    async def generate(self, ids, max_tokens, known, stop, grammar=None):
        await asyncio.sleep(3 * ALIVE)
        text = self.chat.tokenizer.decode(ids)
        users = "".join(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.S))
        other = next((say for task, say in self.others.items() if task in users), None)
        if self.titles and not text.startswith("tools "):
            self.script.insert(0, TITLE)
        elif other:
            self.script.insert(0, other.pop(0))
        elif callable(self.script[0]):
            self.script[0] = self.script[0](text)
        return await super().generate(ids, max_tokens, known, stop)


@dataclass
class Ran:
    """What a client's processes left."""

    forest: Forest
    code: int
    out: str
    err: str
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
    out, err = (data.decode(errors="replace") for data in await asyncio.wait_for(collect, 10))
    if not done:
        pytest.fail(
            f"{Path(command[0]).name} hangs: {' '.join(command)}\n{out[-2000:]}\n{err[-2000:]}"
        )
    return run.returncode, out, err


def drive(chat, folder: Path, say, *commands, env=None, files=None, code=0, **more) -> Ran:
    """Run a client, once for each command and always in the same home, against a server whose policy says `say`.

    In commands, env and files {url} stands for the rollout's base URL, {task} for the task and {work} for the folder that the
    client works in. code: how the last command ends. more: `window` in tokens; `others`, the scripts of sub-agents; `titles`,
    whether requests without tools are for a title; `closes`, to end the rollout while a request waits after which so many
    replies are left.
    """
    if not (CLIENTS / "ready").exists():
        pytest.fail("the clients are not installed: run make clients")
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()

    async def go():
        app, names = Server("policy", linger=5), []
        policy = Policy(chat, *say, others=more.get("others"), titles=more.get("titles", True))
        forest = Forest(chat, policy.generate, parse, 4096, more.get("window", WINDOW), {})
        key, outside = app.open(forest), await proxy(names)
        app.start()
        await asyncio.sleep(0.05)
        marks = {"{url}": f"http://127.0.0.1:{app.port}/r/{key}", "{task}": TASK, "{work}": work}

        def fill(text):
            for mark, value in marks.items():
                text = str(text).replace(mark, str(value))
            return text

        policy.script = [
            fill(entry) if isinstance(entry, str) else entry for entry in policy.script
        ]
        for name, text in (files or {}).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(fill(text))
        refused = f"http://127.0.0.1:{outside.sockets[0].getsockname()[1]}"
        full = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HOME": str(home),
            "CI": "1",
        }
        full |= {
            name: refused
            for kind in ("http", "https", "all")
            for name in (f"{kind}_proxy", f"{kind}_PROXY".upper())
        }
        full |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        full |= {k: fill(v) for k, v in (env or {}).items()}
        if "closes" in more:

            async def close(ids, *_):
                if len(policy.script) > more["closes"] or not chat.tokenizer.decode(
                    ids[:9]
                ).startswith("tools "):
                    return await policy.generate(ids, *_)
                asyncio.get_running_loop().call_later(
                    0.1, lambda: asyncio.ensure_future(app.close(key))
                )
                await asyncio.sleep(LIMIT)

            forest.generate = close
        try:
            for command in commands:
                end, out, err = await process([fill(part) for part in command], full, work)
        finally:
            outside.close()
            app.task.cancel()
            await asyncio.gather(app.task, return_exceptions=True)
            await forest.close()
        assert end == code, f"exit code {end}\n{out[-3000:]}\n{err[-3000:]}"
        return Ran(forest, end, out, err, sorted(set(names)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "ALIVE", ALIVE)
        return asyncio.run(go())


def exact(rows: list) -> None:
    """Each reply's digest is that of its row, and each sampled id is trained once."""
    for row in rows:
        for a, b, mark in row.replies:
            own = (row.tokens[a:b], row.logprobs[a:b], row.versions[a:b])
            assert mark == digest(row.tokens[:a], *own)
    assert sum(r.mask.sum() for r in rows) == sum(b - a for r in rows for a, b, _ in r.replies)


def holds(ran: Ran, say: list[str], echoes: set[str], titles: int = 0) -> None:
    """The rule of this file: one row with all replies and all tool outputs, each id as it was sampled, nothing else.

    echoes: the tiers of server.same_turn that the client's history is found by.
    """
    forest, tokenizer = ran.forest, ran.forest.chat.tokenizer
    assert FINAL in ran.out
    rows = forest.segments(Result(), 0, 0)
    trained = texts(forest)
    assert trained.count(say) == 1, trained
    assert (
        all(t == [TITLE] for t in trained if t != say) and len(forest.nodes) - len(say) <= titles
    ), trained
    row = rows[trained.index(say)]
    exact(rows)
    last, between = row.replies[0][1], []
    for a, b, _ in row.replies[1:]:
        between.append(tokenizer.decode(row.tokens[last:a]))
        last = b
    assert SUMS[0] in between[0] and all(s in between[1] for s in SUMS[1:]), between
    assert TASK in tokenizer.decode(row.tokens[: row.replies[0][0]])
    counts = forest.counts
    tiers = {
        k.removeprefix("server/echo_"): n
        for k, n in counts.items()
        if k.startswith("server/echo_") and n
    }
    # each reply but the last came back and was found; what came back again was known by then
    assert set(tiers) == echoes and sum(tiers.values()) == len(say) - 1, tiers
    assert not any(counts[f"server/{k}"] for k in ("rewritten", "replayed", "constrained")), counts


def python(name: str, *arguments: str, venv: str = "") -> list[str]:
    return [CLIENTS / venv / "bin/python", HERE / "clients" / name, TASK, *arguments]


OPENAI = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "any"}
ANTHROPIC = {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "any"}


@pytest.mark.parametrize("mode", [[], ["stream"]], ids=["whole", "stream"])
def test_openai_chat_is_one_row(chat, tmp_path, mode):
    ran = drive(chat, tmp_path, script(), python("openai_chat.py", *mode), env=OPENAI)
    holds(ran, script(), {"T0"})
    assert ran.outside == []


@pytest.mark.parametrize("mode", ["whole", "stream", "previous"])
def test_openai_responses_are_one_row(chat, tmp_path, mode):
    ran = drive(chat, tmp_path, script(), python("openai_responses.py", mode), env=OPENAI)
    holds(ran, script(), {"T0"})
    assert ran.outside == []


@pytest.mark.parametrize("mode", [[], ["stream"]], ids=["whole", "stream"])
def test_anthropic_messages_are_one_row(chat, tmp_path, mode):
    ran = drive(chat, tmp_path, script(), python("anthropic_messages.py", *mode), env=ANTHROPIC)
    holds(ran, script(), {"T1"})
    assert ran.outside == []


def test_anthropic_tool_runner_is_one_row(chat, tmp_path):
    ran = drive(chat, tmp_path, script(), python("anthropic_runner.py"), env=ANTHROPIC)
    holds(ran, script(), {"T1"})
    assert ran.outside == []


# over Chat Completions it drops the reasoning
@pytest.mark.parametrize(
    "mode,echoes", [("chat", {"T0", "T1"}), ("responses", {"T0"}), ("previous", {"T0"})]
)
def test_openai_agents_is_one_row(chat, tmp_path, mode, echoes):
    env = OPENAI | {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
    ran = drive(chat, tmp_path, script(), python("agents_runner.py", mode), env=env)
    holds(ran, script(), echoes)
    assert ran.outside == []


def test_langgraph_is_one_row(chat, tmp_path):
    ran = drive(
        chat,
        tmp_path,
        script(),
        python("langgraph_react.py"),
        env=OPENAI | {"LANGSMITH_TRACING": "false"},
    )
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
def test_litellm_is_one_row(chat, tmp_path, model, env, echoes):
    ran = drive(chat, tmp_path, script(), python("litellm_loop.py", model), env=LITELLM | env)
    holds(ran, script(), echoes)
    assert ran.outside == []


def test_mini_swe_agent_is_one_row(chat, tmp_path):
    end = call("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{FINAL}'")
    say = script(lambda a, b: call("bash", command=f"expr {a} + {b}"), f"Done.{end}")
    env = OPENAI | LITELLM | {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    env |= {"MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
    command = [CLIENTS / "bin/mini", "-y", "--exit-immediately", "-m", "openai/policy", "-t", TASK]
    ran = drive(
        chat, tmp_path, say, [*command, "-c", "mini.yaml", "-o", tmp_path / "out.json"], env=env
    )
    holds(ran, say, {"T0"})
    assert ran.outside == []


MODES = pytest.mark.parametrize("mode", [[], ["stream"]], ids=["whole", "stream"])


@MODES
@pytest.mark.parametrize(
    "wire,echoes", [("chat", {"T1"}), ("responses", {"T1"}), ("messages", {"T1"})]
)
def test_pydantic_ai_is_one_row(chat, tmp_path, wire, echoes, mode):
    ran = drive(
        chat, tmp_path, script(), python("pydantic_agent.py", wire, *mode), env=OPENAI | ANTHROPIC
    )
    holds(ran, script(), echoes)
    assert ran.outside == []


# its provider of Responses refers to what it believes to be stored, unless it is told otherwise
@MODES
@pytest.mark.parametrize("wire", ["chat", "responses", "stateless", "messages"])
def test_the_ai_sdk_is_one_row(chat, tmp_path, wire, mode):
    command = ["node", HERE / "clients/ai_sdk.mjs", TASK, f"{CLIENTS}/", wire, *mode]
    ran = drive(chat, tmp_path, script(), command, env=OPENAI | ANTHROPIC)
    holds(ran, script(), {"T1"})
    assert ran.outside == []


@MODES
def test_google_adk_is_one_row(chat, tmp_path, mode):
    env = OPENAI | LITELLM | {"OPENAI_API_BASE": "{url}/v1"}
    ran = drive(chat, tmp_path, script(), python("adk_agent.py", *mode), env=env)
    holds(ran, script(), {"T1"})
    assert ran.outside == []


@MODES
def test_autogen_is_one_row(chat, tmp_path, mode):
    command = python("autogen_agent.py", *mode, venv="autogen")
    ran = drive(chat, tmp_path, script(), command, env=OPENAI)
    holds(ran, script(), {"T0", "T1"})  # it drops the reasoning
    assert ran.outside == []


@MODES
@pytest.mark.parametrize("kind", ["tools", "code"])
def test_smolagents_is_a_row_for_each_step(chat, tmp_path, kind, mode):
    """It writes its calls into its history as text: no turn comes back as it was sent, so each is trained in its own prompt."""
    say = script(final=call("final_answer", answer=FINAL))
    if kind == "code":  # in the text, without a tool of the API
        code = ["print(add(1200, 34))", "print(add(5600, 78), add(9000, 9))"]
        say = [f"I add.\n<code>\n{line}\n</code>" for line in (*code, f"final_answer({FINAL!r})")]
    command, calls = python("smol_agent.py", kind, *mode), kind == "tools"
    ran = drive(chat, tmp_path, say, command, env=OPENAI, titles=calls)
    assert FINAL in ran.out and texts(ran.forest) == [[s] for s in say]
    rows = ran.forest.segments(Result(), 0, 0)
    exact(rows)
    last = chat.text(rows[-1].tokens)
    assert all(s in last for s in SUMS) and TASK in last and ran.outside == []


@dataclass
class Agent:
    """A coding agent: how it is started and set up, and what is its own."""

    command: list
    shell: object  # (command) -> a call of its shell
    look: object  # (path) -> a call of its tool that looks at a picture
    delegate: object  # (task) -> a call of its tool that starts a sub-agent
    resume: list  # the command that goes on with its last conversation
    echoes: set[str]  # the tiers of its echoes
    env: dict
    files: dict = field(default_factory=dict)
    outside: int = 0  # hosts beyond loopback that no setting keeps it from asking for
    titles: int = 0  # calls beside each conversation

    def add(self, a: int, b: int) -> str:
        return self.shell(f"expr {a} + {b}")

    def run(self, chat, folder, say, *commands, **more) -> Ran:
        ran = drive(
            chat, folder, say, *(commands or [self.command]), env=self.env, files=self.files, **more
        )
        assert len(ran.outside) <= self.outside, ran.outside
        return ran


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


def opencode(package: str) -> Agent:
    provider = {"npm": package, "options": {"baseURL": "{url}/v1", "apiKey": "any"}}
    provider["models"] = {"policy": {"limit": {"context": WINDOW, "output": 4096}}}
    config = {
        "provider": {"rollout": provider},
        "model": "rollout/policy",
        "autoupdate": False,
        "share": "disabled",
    }
    return Agent(
        [BIN / "opencode", "run", "{task}"],
        lambda command: call("bash", command=command, description="Adds"),
        lambda path: call("read", filePath=path),
        lambda task: call("task", description="Adds", prompt=task, subagent_type="general"),
        [BIN / "opencode", "run", "{task}", "-c"],
        {"T1"},
        {
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_PURE": "1",
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        },
        outside=1,  # it installs the types of plugins in the background, and goes on when it cannot
        titles=1,
    )


CLAUDE = [BIN / "claude", "-p", "{task}", "--model", "policy", "--allowedTools", "Bash"]
EXEC = [
    BIN / "codex",
    "exec",
    "--skip-git-repo-check",
    "--dangerously-bypass-approvals-and-sandbox",
]
AGENTS = {
    "claude": Agent(
        CLAUDE,
        lambda command: call("Bash", command=command, description="Adds"),
        lambda path: call("Read", file_path=path),
        lambda task: call(
            "Agent",
            description="Adds",
            prompt=task,
            subagent_type="general-purpose",
            run_in_background=False,
        ),
        [*CLAUDE, "--continue"],
        {"T1"},
        ANTHROPIC | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    ),
    "codex": Agent(
        [*EXEC, "{task}"],
        lambda command: call("exec_command", cmd=command),
        lambda path: call("view_image", path=path),
        lambda task: call("spawn_agent", message=task),
        [*EXEC, "resume", "--last", "{task}"],
        {"T0"},
        {"OPENAI_API_KEY": "any"},
        {".codex/config.toml": CODEX},
    ),
    "opencode-chat": opencode("@ai-sdk/openai-compatible"),
    "opencode-responses": opencode("@ai-sdk/openai"),
    "opencode-messages": opencode("@ai-sdk/anthropic"),
}
FEW = ["claude", "codex", "opencode-chat"]


@pytest.mark.parametrize("name", AGENTS)
def test_coding_agent_is_one_row(chat, tmp_path, name):
    agent = AGENTS[name]
    say = script(agent.add)
    holds(agent.run(chat, tmp_path, say), say, agent.echoes, agent.titles)


@pytest.mark.parametrize("name", FEW)
def test_a_stream_that_breaks_is_asked_for_again_and_stays_one_row(chat, tmp_path, name):
    """The engine fails after the stream has begun: Claude Code asks again without one, the others as before."""
    agent = AGENTS[name]
    first, *rest = script(agent.add)
    ran = agent.run(chat, tmp_path, [first, RuntimeError("planted"), *rest])
    holds(ran, [first, *rest], agent.echoes, agent.titles)


@pytest.mark.parametrize("name", FEW)
def test_a_conversation_that_a_second_process_takes_up_goes_on_in_its_row(chat, tmp_path, name):
    agent = AGENTS[name]
    say = [*script(agent.add, "Half."), *script(agent.add)]
    ran = agent.run(chat, tmp_path, say, agent.command, agent.resume)
    holds(ran, say, agent.echoes | {"T0"}, agent.titles)


def wait_for(n: int):
    """Codex waits for the agents that it names, by ids that it learns when they start."""
    return lambda text: call(
        "wait_agent", targets=[re.findall(r'"agent_id":"([0-9a-f-]+)"', text)[n]]
    )


@pytest.mark.parametrize("name", FEW)
def test_sub_agents_at_the_same_time_are_rows_of_their_own(chat, tmp_path, name):
    agent = AGENTS[name]
    others = {f"Do part {i}.": [agent.add(i, i), f"Part {i} is ready."] for i in (1, 2)}
    lines = [list(say) for say in others.values()]
    main = [f"Both.{agent.delegate('Do part 1.')}{agent.delegate('Do part 2.')}", FINAL]
    waits = [wait_for(0), wait_for(1)] if name == "codex" else []
    ran = agent.run(chat, tmp_path, [main[0], *waits, main[1]], others=others)
    rows = [row for row in texts(ran.forest) if row != [TITLE]]
    (own,) = [row for row in rows if row[-1] == FINAL]
    assert [own[0], own[-1], len(own)] == [*main, 2 + len(waits)] and FINAL in ran.out
    assert sorted(row for row in rows if row is not own) == sorted(lines)


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC"


@pytest.mark.parametrize("name", ["claude", "codex", "opencode-responses", "opencode-messages"])
def test_an_agent_that_looks_at_a_picture_goes_on(chat, tmp_path, name):
    agent = AGENTS[name]
    say = [
        agent.shell(f"echo {PIXEL} | base64 -d > x.png"),
        agent.look(str(tmp_path / "work/x.png")),
        FINAL,
    ]
    ran = agent.run(chat, tmp_path, say)
    (row,) = [r for r, t in zip(ran.forest.segments(Result(), 0, 0), texts(ran.forest)) if t == say]
    assert "which this model cannot see" in chat.text(row.tokens) and FINAL in ran.out


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_ends_by_itself_when_its_rollout_has_ended(chat, tmp_path, name):
    """Codex asks five times more, within seconds; none waits for a server that will not answer."""
    agent = AGENTS[name]
    began = time.monotonic()
    ran = agent.run(chat, tmp_path, script(agent.add), code=1, closes=1)
    assert "this rollout has ended" in ran.out + ran.err and time.monotonic() - began < 30


def test_claude_code_that_compacts_its_context_goes_on_in_a_second_row(chat, tmp_path):
    """The window is too small for the second long output. The summary is a branch, what follows it is a new beginning."""
    agent = AGENTS["claude"]
    long = agent.shell("seq 1 600")
    summary = "<analysis>a</analysis>\n<summary>Sums were done.</summary>"
    ran = agent.run(
        chat, tmp_path, [agent.add(1, 2), long, long, summary, agent.add(3, 4), FINAL], window=12000
    )
    assert texts(ran.forest) == [[agent.add(1, 2), long, long], [summary], [agent.add(3, 4), FINAL]]
    assert FINAL in ran.out
