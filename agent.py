"""What runs: the agent program, and the record of what it sampled.

An agent is a class named `Agent` in a file of the user's, given by --agent. An `Env` is the simplest kind: the policy speaks,
the environment answers, as in Gymnasium. A `ChatAgent` is any program that speaks to an OpenAI or Anthropic API; with
--agent_cmd it is a whole command line. The `Agent` at the end of this file is the default, a calculator game to copy and edit.

A run of an agent on one prompt is a rollout. A `Trace` grows from the engine's replies, whose ids are kept as they were sampled,
and ends as a `Segment`, one training row.

This module knows nothing of models, engines or servers. It imports numpy only, so that an agent can be tried by hand:

    python agent.py "What is 17+25-8?"        # play the default game yourself
"""

import asyncio
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


class BadInput(ValueError):
    """A fault of the user's flags, data or agent, which the message names; the run ends with exit code 2."""


class InvariantError(RuntimeError):
    """A property that makes an update valid does not hold: token identity, policy version, forward consistency or refit.

    The message begins with the name of the invariant; the run stops with exit code 3 before the batch is trained on.
    """


@dataclass
class Task:
    """What an agent is asked to do: one data row, as one rollout sees it."""

    messages: list[dict]  # the prompt as chat messages
    label: Any = None  # the row's label, for the reward
    row: dict = field(default_factory=dict)  # the whole data row
    seed: int = 0  # differs between rollouts, the same when a run is repeated
    base_url: str = ""  # of this rollout, for OpenAI's SDK; Anthropic's takes it without the /v1
    api_key: str = ""
    model: str = ""
    tools: list[dict] = field(
        default_factory=list
    )  # the row's tools, if it has a column of that name


@dataclass
class Result:
    """What a rollout earned. `reward` is the sum of the steps' rewards; named `rewards` and `info` go into the metrics."""

    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    info: dict[str, float] = field(default_factory=dict)
    truncated: bool = False  # ended by a limit (turns, context, tokens) and not by the agent


class Env:
    """A multi-turn environment. `reset` and `step` may be coroutines; one object plays one rollout."""

    def reset(self, task: Task) -> list[dict]:
        """Start an episode and return the first chat messages."""
        self.task = task
        return task.messages

    def step(self, reply: str) -> tuple[str | list[dict] | None, float, bool, dict]:
        """Answer one reply of the policy.

        Returns (observation, reward, done, info): the observation is a user message's text or a list of chat messages, the
        reward a finite number that counts for this turn, info a dict of numbers; info["rewards"] may name partial rewards.
        """
        raise NotImplementedError(f"{type(self).__name__}.step")


class ChatAgent:
    """An agent that is an ordinary program: whatever it samples through `task.base_url` is captured and trained. One object
    plays one rollout."""

    async def run(self, task: Task) -> Result | float:
        """Do the task and return what it earned. May be a plain function: it then runs in a thread."""
        raise NotImplementedError(f"{type(self).__name__}.run")


class Single(Env):
    """One prompt, one reply, and the reward function of --reward."""

    def __init__(self, reward: Callable):
        self.reward = reward

    def step(self, reply: str) -> tuple[None, float, bool, dict]:
        return (
            None,
            self.reward(self.task.messages[-1]["content"], self.task.label, reply, ""),
            True,
            {},
        )


def bound(group: int) -> subprocess.Popen:
    """Bind a process group to this process: a watcher, whose pipe closes when the `with` block ends or this process dies, then
    kills the group."""
    return subprocess.Popen(
        ["sh", "-c", f"read _; kill -9 -{group}"],
        stdin=PIPE,
        stderr=DEVNULL,
        start_new_session=True,
    )


WORD = 131_071  # bytes of the longest word or variable that Linux starts a program with


class CommandAgent(ChatAgent):
    """Any program as an agent (--agent_cmd), without a shell, in an empty folder and a process group of its own. --reward
    grades (the last message's text, label, output, folder).

    In its words are filled in: {prompt}, the text of the system messages and of the last one; {prompt_file}, the path of a
    file with that text; {messages_file}, the path of a JSON file with all messages of the row; {model}, {base_url} and
    {api_key}. The variables that SDKs read are set, and INSTAR_PROMPT_FILE, INSTAR_MESSAGES_FILE, INSTAR_MODEL and
    INSTAR_START, the folder where training was started; INSTAR_PROMPT too, where it is no longer than WORD. Relative paths
    in the command are those of that folder (`rooted`). The two files lie beside the command's folder and end with it.
    """

    def __init__(self, command: str, reward: Callable):
        self.words, self.reward = shlex.split(command), reward

    def prompt(self, messages: list[dict]) -> str:
        """What stands for {prompt}. Raises BadInput where messages between would be lost and nothing else carries them."""
        given = [m for m in messages[:-1] if m["role"] in ("system", "developer")] + messages[-1:]
        words, lost = " ".join(self.words), len(messages) - len(given)
        if lost and "{prompt" in words and "{messages_file}" not in words:
            why = f"{{prompt}} leaves out {lost} of the {len(messages)} messages"
            raise BadInput(f"--agent_cmd: {why}: give the command {{messages_file}} as well")
        return "\n\n".join(map(text_of, given))

    def filled(self, fill: dict[str, str]) -> list[str]:
        """The words to start. Raises ValueError for one that no program can be started with."""
        places = re.compile("|".join(map(re.escape, fill)))
        words = [places.sub(lambda m: fill[m[0]], word) for word in self.words]
        longest = max(len(word.encode()) for word in words)
        if longest > WORD:
            why = f"a word has {longest} bytes, and Linux takes at most {WORD}"
            raise ValueError(f"--agent_cmd: {why}: use {{prompt_file}} in the place of {{prompt}}")
        return words

    async def run(self, task: Task) -> float:
        """Run the command to its end and grade it. Raises RuntimeError, with the end of its output, where it fails."""
        root = task.base_url.removesuffix("/v1")
        # half a surrogate pair is no text that a program can be given
        prompt = self.prompt(task.messages).encode(errors="replace").decode()
        urls = {
            name: task.base_url
            for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "HOSTED_VLLM_API_BASE")
        }
        urls |= {name: root for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE")}
        keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "HOSTED_VLLM_API_KEY")
        quiet = {
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        apart = dict(stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
            folder, texts, rows = (
                os.path.join(top, n) for n in ("work", "prompt", "messages.json")
            )
            os.mkdir(folder)
            Path(texts).write_text(prompt, encoding="utf-8")
            Path(rows).write_text(json.dumps(task.messages))
            own = {"INSTAR_MODEL": task.model, "ANTHROPIC_MODEL": task.model}
            own |= {"INSTAR_PROMPT_FILE": texts, "INSTAR_MESSAGES_FILE": rows}
            if len(f"INSTAR_PROMPT={prompt}".encode()) <= WORD and "\0" not in prompt:
                own["INSTAR_PROMPT"] = prompt
            env = os.environ | urls | dict.fromkeys(keys, task.api_key) | own | quiet
            fill = {"{prompt}": prompt, "{prompt_file}": texts, "{messages_file}": rows}
            fill |= {"{model}": task.model, "{base_url}": task.base_url, "{api_key}": task.api_key}
            words = self.filled(fill)
            process = await asyncio.create_subprocess_exec(*words, cwd=folder, env=env, **apart)
            with bound(process.pid):  # whatever it started ends with it, at a time limit too
                output = (await process.communicate())[0].decode(errors="replace")
            if code := process.returncode:
                raise RuntimeError(
                    f"--agent_cmd ended with exit code {code}; its output ends:\n{output[-2000:]}"
                )
            last = text_of(task.messages[-1])
            return await asyncio.to_thread(self.reward, last, task.label, output, folder)


def text_of(message: dict) -> str:
    """The text of a chat message, whose content is a text or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def rooted(command: str) -> str:
    """--agent_cmd with its relative paths made absolute, since it runs in a folder of its own. Raises BadInput for quotes that
    do not close.

    A word with a slash, or what follows the = of an option, is such a path where it exists; a word without a slash where it
    is a file, but for the first one, which PATH finds. ~ is the user's folder.
    """

    def absolute(word: str, first: bool) -> str:
        option, equals, path = word.partition("=") if word[:1] == "-" else ("", "", word)
        path = os.path.expanduser(path)
        if os.path.exists(path) if "/" in path else os.path.isfile(path) and not first:
            path = os.path.abspath(path)
        return option + equals + path

    try:
        words = shlex.split(command)
    except ValueError as e:
        raise BadInput(f"--agent_cmd {command}: a quote is not closed ({e})") from None
    if command and not words:
        raise BadInput(f"--agent_cmd {command!r}: is empty")
    return shlex.join(absolute(word, i == 0) for i, word in enumerate(words))


@dataclass
class Segment:
    """One unbroken token-exact sequence of a rollout: one training row. T = number of tokens, L = MoE layers, K = top-k.

    Every per-token field is aligned with `tokens`: entry t speaks of tokens[t]. The shift by one between a token and the
    position that predicts it happens once, in replay.py.
    """

    tokens: np.ndarray  # int32 [T], ids exactly as the engine received or sampled them
    mask: np.ndarray  # bool [T], True where the policy sampled this token and this row owns it
    logprobs: (
        np.ndarray
    )  # float32 [T], behaviour log-probs after temperature; 0.0 where mask is False
    versions: np.ndarray  # int32 [T], policy version that sampled the token; -1 where mask is False
    experts: np.ndarray | None = (
        None  # uint8 or uint16 [T, L, K], experts chosen when tokens[t] was the input
    )
    experts_ok: np.ndarray | None = (
        None  # bool [T], False where none were captured, as for a last token never fed back
    )
    replies: list[tuple[int, int, bytes]] = field(
        default_factory=list
    )  # (start, end, digest) of each engine reply
    group_id: int = -1
    rollout_id: int = -1
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    info: dict[str, float] = field(default_factory=dict)
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, limit: int) -> "Segment":
        """Drop whole replies from the end until at most `limit` tokens are left. The only place where a row is shortened."""
        if len(self) <= limit:
            return self
        self.replies = [r for r in self.replies if r[1] <= limit]
        end = self.replies[-1][1] if self.replies else 0
        for name in ("tokens", "mask", "logprobs", "versions", "experts", "experts_ok"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, value[:end])
        if self.experts_ok is not None and end:
            self.experts_ok[-1] = False  # the last token of a row is never an input
        self.truncated = True
        return self


def digest(
    prompt: np.ndarray, reply: np.ndarray, logprobs: np.ndarray, versions: np.ndarray
) -> bytes:
    """16 bytes that name one engine reply: what it saw [P], what it sampled [N], with which log-probs [N], under which
    versions [N]. The engine computes it, replay.py computes it again from the packed batch just before the forward."""
    h = hashlib.blake2b(digest_size=16)
    for array, dtype in (
        (prompt, np.int32),
        (reply, np.int32),
        (logprobs, np.float32),
        (versions, np.int32),
    ):
        h.update(len(array).to_bytes(8, "little"))
        h.update(np.ascontiguousarray(array, dtype).tobytes())
    return h.digest()


@dataclass
class Reply:
    """What an engine sampled for one request. N = sampled tokens, P = prompt tokens, L = MoE layers, K = top-k."""

    tokens: np.ndarray  # int32 [N], the stop token included
    logprobs: np.ndarray  # float32 [N], after temperature
    versions: np.ndarray  # int32 [N]
    digest: bytes  # of (prompt, tokens, logprobs, versions), made where they were sampled
    finish: str  # "stop", "length" or "abort"
    experts: np.ndarray | None = (
        None  # uint8/16 [P + N - 1 - start, L, K], rows from the first token not known before
    )


class Trace:
    """One sequence that only grows: the prompt, then replies and what the environment put between them."""

    def __init__(self, opening: list[int]):
        self.tokens, self.mask, self.logprobs, self.versions = [], [], [], []
        self.experts, self.replies = [], []
        self.context(opening)

    def __len__(self) -> int:
        return len(self.tokens)

    def known(self) -> int:
        """Number of leading tokens whose experts were captured; an engine need not send them again."""
        return sum(len(e) for e in self.experts)

    def context(self, ids: list[int]) -> None:
        """Append tokens that are not the policy's: no mask, no log-prob, no version."""
        self._append(ids, [False] * len(ids), [0.0] * len(ids), [-1] * len(ids))

    def _append(self, *columns: list) -> None:
        for column, values in zip((self.tokens, self.mask, self.logprobs, self.versions), columns):
            column += values

    def reply(self, r: Reply, owned: bool = True) -> None:
        """Append an engine's reply exactly as it was sampled; one that another row owns is context here."""
        if (
            r.experts is not None
        ):  # rows of tokens that are there already replace them: a refit has routed them anew
            first = len(self) + len(r.tokens) - 1 - len(r.experts)
            self.experts = [*([np.concatenate(self.experts)[:first]] if first else []), r.experts]
        if not owned:
            return self.context(r.tokens.tolist())
        self.replies.append((len(self), len(self) + len(r.tokens), r.digest))
        self._append(
            r.tokens.tolist(), [True] * len(r.tokens), r.logprobs.tolist(), r.versions.tolist()
        )

    def segment(self, result: Result, group_id: int, rollout_id: int) -> Segment:
        """The training row, up to the last sampled token."""
        end, experts, ok = self.replies[-1][1], None, None
        if self.experts:
            rows = np.concatenate(self.experts)[:end]  # [known, L, K]
            experts = np.pad(rows, ((0, end - len(rows)), (0, 0), (0, 0)))
            ok = np.arange(end) < len(rows)
        kinds = {"tokens": np.int32, "mask": bool, "logprobs": np.float32, "versions": np.int32}
        rows = {name: np.asarray(getattr(self, name)[:end], kind) for name, kind in kinds.items()}
        rows |= dict(
            experts=experts,
            experts_ok=ok,
            replies=self.replies,
            group_id=group_id,
            rollout_id=rollout_id,
        )
        return Segment(**rows, **vars(result))


def load_agent(path: str, command: str = "", reward: str = "") -> Callable[[], Env | ChatAgent]:
    """What makes an agent for one rollout: a class `Agent` of the file at `path`, or a CommandAgent of `command`, or with a
    `reward` alone, or without anything, a Single. Imports of files beside them work.

    Raises FileNotFoundError when there is no such file or program and AttributeError when a file does not define what is
    looked for.
    """
    if not command and not reward:
        return load(path, "Agent", "--agent") if path else lambda: Single(lambda *_: 0.0)
    grade = load(reward, "reward", "--reward")
    if command and not shutil.which(program := shlex.split(command)[0]):
        why = f"{program!r} is neither a program on PATH nor the path of one"
        raise FileNotFoundError(f"--agent_cmd {command}: {why}")
    return lambda: CommandAgent(command, grade) if command else Single(grade)


def load(path: str, name: str, flag: str) -> Any:
    """The object `name` of the Python file at `path`. Files beside it can be imported; those of this project come first.

    Raises FileNotFoundError, AttributeError, or whatever the file raises.
    """
    file, here = Path(path).resolve(), Path(__file__).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"{flag} {path}: there is no such file")
    ahead = list(dict.fromkeys((str(here.parent), str(file.parent))))
    sys.path[:] = ahead + [entry for entry in sys.path if entry not in ahead]
    module = sys.modules[__name__] if file == here else execute(file)
    kind, right = ("class", type) if name == "Agent" else ("function", Callable)
    if not isinstance(found := getattr(module, name, None), right):
        lack = f"the file has no {kind} named {name}; define one, or import one under that name"
        raise AttributeError(f"{flag} {path}: {lack}")
    return found


def execute(file: Path) -> ModuleType:
    """A user's file as a module. Its name is that of the file where `import` of it finds just this file, so that the files
    beside it and the processes that it starts find it too; else one of its own, since another module has that name."""
    name, loaded = file.stem, sys.modules.get(file.stem)
    found = PathFinder.find_spec(name)
    ours = loaded is None or getattr(loaded, "__file__", "") == str(file)
    if not (ours and found and found.origin == str(file)):
        name = "user" + re.sub(r"\W", "_", str(file.with_suffix("")))
    loader = SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses, pickle ask
    try:
        loader.exec_module(module)
    except BaseException as e:
        sys.modules.pop(name)
        if isinstance(e, ImportError) and (hidden := behind(file.parent, e.name or "")):
            why = f"a module of this project has the name of {hidden}: give that another name"
            raise ImportError(f"{e}; {why}", name=e.name) from e
        raise
    return module


def behind(folder: Path, name: str) -> Path | None:
    """The file or folder of a user's that cannot be imported by its `name`, since a module of this project has it."""
    top, here = name.partition(".")[0], Path(__file__).resolve().parent
    if folder == here or not (here / f"{top}.py").exists():
        return None
    return next((p for p in (folder / f"{top}.py", folder / top) if p.exists()), None)


CALL = re.compile(r"<calc>\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*</calc>\s*$")
ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>\s*$")


class Agent(Env):
    """The default agent: a calculator game of two to four turns.

    The prompt asks for a sum of two or three numbers. The policy calls a pocket calculator, one operation a call, as
    <calc>17+25</calc>; the environment answers with the number; the policy ends with <answer>34</answer>. Reward 1 for the
    right number. A reply that does not end in one of the two gets a hint, and no reward.
    """

    def reset(self, task: Task) -> list[dict]:
        self.label, self.calls = int(task.label), 0
        return task.messages

    def step(self, reply: str) -> tuple[str | None, float, bool, dict]:
        if answer := ANSWER.search(reply):
            return None, float(int(answer[1]) == self.label), True, {"calls": self.calls}
        if call := CALL.search(reply):
            a, op, b = int(call[1]), call[2], int(call[3])
            self.calls += 1
            return str({"+": a + b, "-": a - b, "*": a * b}[op]), 0.0, False, {"calls": self.calls}
        return "Use <calc>1+2</calc> or <answer>3</answer>.", 0.0, False, {"calls": self.calls}


if __name__ == "__main__":
    question = sys.argv[1] if len(sys.argv) > 1 else "What is 17+25-8?"
    env, done = Agent(), False
    env.reset(
        Task([{"role": "user", "content": question}], label=eval(re.sub(r"[^-+*\d]", "", question)))
    )
    print(question)
    while not done:
        observation, reward, done, info = env.step(input("> "))
        print(observation if not done else f"reward {reward}, {info}")
