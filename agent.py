"""What runs: the agent program, and the record of what it sampled.

An agent is a class named `Agent` in a file of the user's, given by --agent. An `Env` is the simplest kind: the policy speaks,
the environment answers, as in Gymnasium. A `ChatAgent` is any program that speaks to an OpenAI or Anthropic API; with
--agent_cmd it is a whole command line. The `Agent` at the end of this file is the default, a calculator game to copy and edit.

A run of an agent on one prompt is a rollout. A `Trace` grows from the engine's replies, whose ids are kept as they were sampled,
and ends as a `Segment`, one training row. `write_batch` and `read_batch` are the one format of rows
in files.

This module knows nothing of models, engines or servers. It imports numpy and safetensors only, so
that an agent can be tried by hand:

    python agent.py "What is 17+25-8?"        # play the default game yourself
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import hashlib
import importlib.util
import inspect
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import traceback
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


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
    """Where a file that is neither this project's, Python's nor an installed one raised, " (file, line n)", or empty."""
    here = os.path.dirname(os.path.abspath(__file__))
    frames = [
        f for f in own(traceback.extract_tb(error.__traceback__)) if os.path.isabs(f.filename)
    ]
    frames = [f for f in frames if os.path.dirname(f.filename) != here]
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
    """What a rollout earned. `reward` is the sum of the steps' rewards; named `rewards` and `info`
    go into the metrics.

    A reward is a finite number of at most 1e15 in size. A named reward that some rollouts of a
    batch lack counts in those that
    have it alone. Texts in `info` are kept with the rollout (--save_rollouts), and left out of the
    metrics.
    """

    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    info: dict[str, float | str] = field(default_factory=dict)
    truncated: bool = False  # ended by a limit (turns, context, tokens) and not by the agent


class Env:
    """A multi-turn environment. `reset` and `step` may be coroutines; one object plays one rollout.

    A method `close`, if there is one, is called when the rollout is over, however it ended: by a
    limit, a fault or a time-out too.
    Plain methods of one object are called in one thread, `__init__` too. Where that hangs, `close`
    is called in another one.
    """

    def reset(self, task: Task) -> list[dict]:
        """Start an episode and return the first chat messages."""
        self.task = task
        return task.messages

    def step(self, reply: str) -> tuple[str | list[dict] | None, float, bool, dict]:
        """Answer one reply of the policy.

        Returns (observation, reward, done, info): the observation is a user message's text or a list of chat messages, the
        reward a finite number that counts for this turn, info a dict of numbers and texts;
        info["rewards"] may name partial
        rewards. Numbers of numpy and torch are numbers. What is awaitable is awaited.
        """
        raise NotImplementedError(f"{type(self).__name__}.step")


class ChatAgent:
    """An agent that is an ordinary program: whatever it samples through `task.base_url` is captured and trained. One object
    plays one rollout, and may have a `close`, as an Env."""

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


class Fault(RuntimeError):
    """What an agent did to its rollout, told with the agent's own file and line. It is text, since
    what an agent raises may not
    even survive a pickle."""


class Held(Fault):
    """Another rollout's coroutine has blocked the loop that they share: no fault of this one."""


OURS = {"entered", "settled", "witness", "work"}  # functions below, through which agents are called
LIBRARIES = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
CLOSING = 60.0  # seconds in which an agent has to close when its rollout is over
GRACE = 5.0  # seconds in which the agents' loop has to answer, and a cancelled coroutine to end


def own(frames: list) -> list:
    """The frames that are of an agent or of what lies beside it, and not of libraries or of who
    calls it."""
    callers = [str(Path(__file__).with_name(name)) for name in ("rollout.py", "server.py")]
    found = [
        f
        for f in frames
        if not f.filename.startswith((*LIBRARIES, "<frozen", "<template>", *callers))
    ]
    return [f for f in found if f.filename != __file__ or f.name not in OURS]


def definition(method: Callable) -> list:
    """Where a function or a class stands, as frames of a traceback: one, or none where nobody
    knows."""
    with contextlib.suppress(BaseException):
        method = inspect.unwrap(method)
        file, line = inspect.getsourcefile(method), inspect.getsourcelines(method)[1]
        return [traceback.FrameSummary(file, max(1, line), method.__name__)]
    return []


def told(e: BaseException, method: Callable | None = None) -> str:
    """The traceback of what came out of an agent's `method`: its own frames, and of libraries the
    last one alone."""
    if isinstance(e, Fault):
        return str(e)
    try:
        parts = [whole := traceback.TracebackException.from_exception(e, compact=True)]
        for part in parts:
            mine = own(part.stack)
            part.stack[:] = mine + [f for f in part.stack[-1:] if mine and f is not mine[-1]]
            parts += filter(None, (part.__cause__, part.__context__, *(part.exceptions or ())))
        if not any(part.stack for part in parts):
            whole.stack[:] = definition(method)
        text = "".join(whole.format())
    except BaseException:  # whatever an exception's own methods do
        text = f"{shown(definition(method))}{type(e).__name__}, which cannot be shown"
    text = text if len(text) < 10_000 else f"{text[:5000]}\n...\n{text[-5000:]}"
    return text.encode("utf-8", "replace").decode()  # half a character cannot be printed


def shown(frames: list) -> str:
    return "".join(traceback.StackSummary.from_list(frames).format())


def running(thread: threading.Thread) -> str:
    """Where an agent is in this thread now, as lines of a traceback."""
    frame = sys._current_frames().get(thread.ident)
    frames = [*traceback.walk_stack(frame)][::-1] if frame else []
    return shown(own(traceback.StackSummary.extract(iter(frames))))


def outcome() -> concurrent.futures.Future:
    """What a call of an agent comes to: (value, Fault or None). Who waits for it may leave, and it
    comes all the same."""
    done = concurrent.futures.Future()
    done.set_running_or_notify_cancel()
    return done


def tell(done: concurrent.futures.Future, value: Any = None, fault: Fault | None = None) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was told already
        done.set_result((value, fault))


GUEST = contextvars.ContextVar("guest", default=None)  # of a task: the Guest whose code it runs


class Loop:
    """The event loop of all agents of a process, since they share clients, in a thread apart from
    whoever plays them: agents
    block it, stop it and exit in it."""

    def __init__(self):
        self.loop = self.thread = None
        self.waiting = {}  # Guests that it works for, each with the outcome that it waits for

    def renew(self, why: Held | None = None) -> None:
        """Go on with another loop. Whoever waits for the one before is told why, and may begin
        anew."""
        for done in list(self.waiting.values()):
            tell(done, fault=why)
        self.loop, self.waiting = asyncio.new_event_loop(), {}
        self.loop.set_task_factory(self.create)
        self.thread = threading.Thread(target=self.work, args=[self.loop], daemon=True)
        self.thread.start()

    @staticmethod
    def create(loop, coroutine, **how) -> asyncio.Task:
        task = asyncio.Task(coroutine, loop=loop, **how)
        task.guest = GUEST.get()  # what an agent's task starts is the agent's too
        return task

    @staticmethod
    def work(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while not loop.is_closed():
            # `stop`, or a SystemExit in a task, which its waiter is told as well, ends nothing for
            # others
            with contextlib.suppress(BaseException):
                loop.run_forever()

    def start(self, guest: "Guest", entered: Callable) -> concurrent.futures.Future:
        """Begin a coroutine of a guest."""
        if not self.loop or self.loop.is_closed():
            self.renew()
        loop, method = self.loop, guest.method
        guest.loop, guest.thread = loop, self.thread
        self.waiting[guest] = done = outcome()

        async def witness() -> None:
            try:
                tell(done, await entered())
            except BaseException as e:
                tell(done, fault=Fault(told(e, method)))

        def begin() -> None:
            GUEST.set(guest)
            guest.task = loop.create_task(witness())

        loop.call_soon_threadsafe(begin, context=contextvars.copy_context())
        return done


LOOP = Loop()


class Guest:
    """The agent of one rollout, and the one place where its code is entered: what it raises comes
    out as a Fault, whoever waits
    for it may leave at once, and it is closed in the end.

    Plain functions run in a thread of this rollout's own, coroutines on the agents' loop.
    """

    def __init__(self):
        self.agent = self.method = None
        self.jobs = self.own = self.last = None  # its own thread, and the last outcome there
        self.thread = self.loop = self.task = (
            None  # where it was entered last, in a coroutine or not
        )
        self.left, self.at = (
            None,
            "",
        )  # the outcome that was not waited for, and where the agent was

    async def call(self, method: Callable, *args, read=lambda answer: answer, loop=False) -> Any:
        """What `method` gives: awaited where it can be, as the items of a tuple are, then given to
        `read`, which makes plain
        data of it. loop: call a plain function on the agents' loop too. Raises Fault."""
        self.method, later = method, []

        def entered():
            answer = method(*args)
            parts = answer if isinstance(answer, tuple) else [answer]
            if any(map(inspect.isawaitable, parts)):
                return later.append(answer)
            return read(answer)

        async def settled():
            answer = later.pop() if later else method(*args)
            while inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, tuple):
                answer = tuple([await x if inspect.isawaitable(x) else x for x in answer])
            return read(answer)

        if not loop and not inspect.iscoroutinefunction(method):
            answer = await self.wait(self.start(entered))
            if not later:
                return answer
        return await self.wait(LOOP.start(self, settled))

    def start(self, entered: Callable) -> concurrent.futures.Future:
        """Run a plain function in this rollout's thread, or where that hangs in another one."""
        if not self.jobs or not self.last.done():
            self.end()
            self.jobs = queue.SimpleQueue()
            self.own = threading.Thread(target=self.work, args=[self.jobs], daemon=True)
            self.own.start()
        self.thread, self.loop, self.last = self.own, None, outcome()
        self.jobs.put((self.last, entered, self.method))
        return self.last

    @staticmethod
    def work(jobs: queue.SimpleQueue) -> None:
        for done, entered, method in iter(jobs.get, None):
            try:
                tell(done, entered())
            except BaseException as e:
                tell(done, fault=Fault(told(e, method)))

    async def wait(self, done: concurrent.futures.Future) -> Any:
        try:
            value, fault = await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self.left, self.at = done, self.where()
            if self.loop:
                with contextlib.suppress(RuntimeError):  # it was closed
                    self.loop.call_soon_threadsafe(lambda: self.task.cancel())
            raise
        finally:
            LOOP.waiting.pop(self, None)
        if fault:
            raise fault
        return value

    def where(self) -> str:
        """Where the agent is now, as lines of a traceback."""
        frames, at = [], self.task.get_coro() if self.loop and self.task else None
        if at is None or at.cr_running:
            return running(self.thread) or shown(definition(self.method))
        while at is not None:
            frame = getattr(at, "cr_frame", None) or getattr(at, "gi_frame", None)
            frames += [(frame, frame.f_lineno)] if frame else []
            at = getattr(at, "cr_await", None) or getattr(at, "gi_yieldfrom", None)
        found = own(traceback.StackSummary.extract(iter(frames)))
        return shown(found or definition(self.method))

    async def held(self) -> None:
        """After a time-out: raises Held where the agents' loop stands still and not in this
        agent's code."""
        if not self.loop or not self.left or self.left.done():
            return
        loop, thread, pong = self.loop, self.thread, outcome()
        with contextlib.suppress(RuntimeError):  # it was closed
            loop.call_soon_threadsafe(tell, pong)
        await asyncio.wait([asyncio.wrap_future(pong)], timeout=GRACE)
        task = asyncio.current_task(loop)
        if pong.done():
            return
        if task and task.guest is self:
            self.at = running(thread)  # perhaps in a task that it started
            return
        why = Held(f"another rollout has blocked the loop of all agents, in\n{running(thread)}")
        if LOOP.loop is loop:
            LOOP.renew(why)
        raise why

    async def close(self) -> str:
        """Call the agent's `close`, if it has one. Returns what went wrong there, in good time."""
        try:
            if self.left and self.loop:  # cancelled: what it does in the end comes first
                await asyncio.wait([asyncio.wrap_future(self.left)], timeout=GRACE)
            async with asyncio.timeout(CLOSING):
                if callable(close := getattr(self.agent, "close", None)):
                    await self.call(close)
        except TimeoutError:
            return f"its close did not end within {CLOSING:g} s:\n{self.at}"
        except BaseException as e:
            return told(e)
        finally:
            self.end()
        return ""

    def end(self) -> None:
        """The thread ends when what it does has ended."""
        if self.jobs:
            self.jobs.put(None)


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
            grader = Guest()  # in a thread, since it may take long
            try:
                return await grader.call(self.reward, last, task.label, output, folder)
            finally:
                grader.end()


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


PARTS = (
    "tokens",
    "mask",
    "logprobs",
    "versions",
    "experts",
    "experts_ok",
)  # of a Segment, one entry per token


def write_batch(path: Path, batch: dict, segments: list[Segment]) -> None:
    """A batch as two files that hold no code: <name>.jsonl, a rollout in each line but the first
    one, which has all else, and <name>.safetensors, the fields of all rows' tokens one after the
    other."""
    path.parent.mkdir(exist_ok=True)
    present = [name for name in PARTS if segments and getattr(segments[0], name) is not None]
    arrays = {name: np.concatenate([getattr(s, name) for s in segments]) for name in present}
    save_file(arrays, path.with_suffix(".safetensors"))
    lines = [{k: v for k, v in batch.items() if k not in ("rollouts", "rows")}]
    rows = defaultdict(list)
    for row, s in zip(batch["rows"], segments):
        replies = [(a, b, mark.hex()) for a, b, mark in s.replies]
        rows[row["rollout"]].append({"tokens": len(s), "replies": replies})
    for i, rollout in enumerate(batch["rollouts"]):
        lines.append(rollout | {"result": vars(rollout["result"]), "rows": rows[i]})
    path.write_text("".join(json.dumps(line, default=float) + "\n" for line in lines))


def read_batch(path: Path) -> tuple[dict, list[Segment]]:
    """What `write_batch` was given, without ids of rows. Raises BadInput for files of another."""
    try:
        first, *rollouts = map(json.loads, path.read_text().splitlines())
        arrays, segments, rows, at = load_file(path.with_suffix(".safetensors")), [], [], 0
        for i, rollout in enumerate(rollouts):
            rollout["result"] = Result(**rollout["result"])
            for row in rollout.pop("rows"):
                own = {name: array[at : at + row["tokens"]] for name, array in arrays.items()}
                replies = [(a, b, bytes.fromhex(mark)) for a, b, mark in row["replies"]]
                own |= dict(replies=replies, group_id=rollout["group"], rollout_id=rollout["id"])
                segments.append(Segment(**own, **vars(rollout["result"])))
                rows.append({"rollout": i})
                at += row["tokens"]
        if found := {len(array) for array in arrays.values()} - {at}:
            raise ValueError(f"its rows have {at} tokens, the safetensors beside it {found}")
    except Exception as e:  # another's files may hold anything
        raise BadInput(f"{path}: these are no rows as --save_rollouts writes them: {e!r}") from e
    return first | {"rollouts": rollouts, "rows": rows}, segments


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
