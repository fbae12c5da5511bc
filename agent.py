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
import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


class BadInput(ValueError):
    """A fault of the user's flags, data or agent, which the message names; the run ends with exit code 2."""


@contextlib.contextmanager
def bad_input(what: str):
    """Whatever looking at an input of the user's raises is a fault of the input: BadInput that says
    `what` was looked at and the cause in one line, with the place in the user's own Python file. A
    message that names its flag stays; so does Ctrl-C."""
    try:
        yield
    except (BadInput, KeyboardInterrupt):
        raise
    except BaseException as e:
        text = (str(e).strip().splitlines() or [""])[0][:400]
        kind = "" if isinstance(e, ValueError) else type(e).__name__
        parts = [text] if text.startswith("--") else filter(None, (what, kind, text))
        raise BadInput(": ".join(parts) + place(e)) from None


def place(error: BaseException) -> str:
    """Where a file that is neither this project's, Python's nor an installed one raised, " (file,
    line n)", or empty."""
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    here = os.path.dirname(os.path.abspath(__file__))
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if os.path.isabs(f.filename)  # else it is compiled
        and not f.filename.startswith(libraries)
        and os.path.dirname(f.filename) != here
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


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


class CommandAgent(ChatAgent):
    """Any command line as an agent (--agent_cmd), in a folder and a process group of its own. {prompt}, {model}, {base_url}
    and {api_key} in it are filled in; the variables that SDKs read are set. --reward grades (prompt, label, output, folder)."""

    def __init__(self, command: str, reward: Callable):
        self.command, self.reward = command, reward

    async def run(self, task: Task) -> float:
        """Run the command to its end and grade it. Raises RuntimeError, with the end of its output, where it fails."""
        prompt, root = task.messages[-1]["content"], task.base_url.removesuffix("/v1")
        fill = {
            "{prompt}": prompt,
            "{model}": task.model,
            "{base_url}": task.base_url,
            "{api_key}": task.api_key,
        }
        words = [
            re.sub("|".join(map(re.escape, fill)), lambda m: fill[m[0]], w)
            for w in shlex.split(self.command)
        ]
        urls = {
            name: task.base_url
            for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "HOSTED_VLLM_API_BASE")
        }
        urls |= {name: root for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE")}
        keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "HOSTED_VLLM_API_KEY")
        own = {"INSTAR_PROMPT": prompt, "INSTAR_MODEL": task.model, "ANTHROPIC_MODEL": task.model}
        quiet = {
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        env = os.environ | urls | dict.fromkeys(keys, task.api_key) | own | quiet
        apart = dict(stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            process = await asyncio.create_subprocess_exec(*words, cwd=folder, env=env, **apart)
            with bound(process.pid):  # whatever it started ends with it, at a time limit too
                output = (await process.communicate())[0].decode(errors="replace")
            if code := process.returncode:
                raise RuntimeError(
                    f"--agent_cmd ended with exit code {code}; its output ends:\n{output[-2000:]}"
                )
            return await asyncio.to_thread(self.reward, prompt, task.label, output, folder)


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

    Raises FileNotFoundError when there is no such file and AttributeError when it does not define what is looked for.
    """
    if not command and not reward:
        return load(path, "Agent", "--agent") if path else lambda: Single(lambda *_: 0.0)
    grade = load(reward, "reward", "--reward")
    return lambda: CommandAgent(command, grade) if command else Single(grade)


def load(path: str, name: str, flag: str) -> Any:
    """The object `name` of the Python file at `path`."""
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"{flag} {path}: there is no such file")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    if file == Path(__file__).resolve():
        return globals()[name]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickle look a class's module up by name
    spec.loader.exec_module(module)
    kind, right = ("class", type) if name == "Agent" else ("function", Callable)
    if not isinstance(found := getattr(module, name, None), right):
        lack = f"the file has no {kind} named {name}; define one, or import one under that name"
        raise AttributeError(f"{flag} {path}: {lack}")
    return found


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
