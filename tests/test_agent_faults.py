"""Whatever an agent does costs its own rollout, and is told with its file and line: by the real
Runner with a scripted engine."""

import asyncio
import copy
import dataclasses
import fractions
import functools
import json
import math
import os
import pickle
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_rollout import RUNNER, Remote, Scripted, pool
from test_run import finish, metrics, start

import agent as agents
import estimator
import replay
import rollout
import train
from agent import BadInput, ChatAgent, CommandAgent, Env, Result, Single, Task
from rollout import Rollout, Runner
from train import Config, Meter

HERE = os.path.basename(__file__)


@pytest.fixture(scope="module")
def runner():
    return Runner(SimpleNamespace(**RUNNER | dict(episode_timeout=60.0)), [Remote(Scripted())])


@pytest.fixture
def quick(monkeypatch):
    """For what hangs by intent: short limits of everything."""
    monkeypatch.setattr(agents, "GRACE", 0.3)
    monkeypatch.setattr(agents, "CLOSING", 0.5)
    return Runner(SimpleNamespace(**RUNNER | dict(episode_timeout=0.5)), [Remote(Scripted())])


def playing(runner, *kinds):
    """A rollout of each kind of agent, all at once, which end in time, each as it comes back from
    a Ray actor."""

    async def all_of_them():
        runner.lines = [rollout.Line(Remote(Scripted()))]  # its queues are of one event loop
        runner.parse, runner.grammar = rollout.parser(runner.cfg, runner.chat)
        runner.server.start()
        plays = []
        for i, kind in enumerate(kinds):
            one = copy.copy(runner)
            one.agent = kind
            plays.append(one.rollout(Task([{"role": "user", "content": "x"}], label=1), 0, i, 0))
        outs = await asyncio.gather(*plays)
        assert runner.server.forests == {}
        runner.server.task.cancel()
        return outs

    return pickle.loads(pickle.dumps(asyncio.run(asyncio.wait_for(all_of_them(), 120))))


class Fine(Env):
    def step(self, reply):
        return None, 1.0, True, {}


class FineChat(ChatAgent):
    def run(self, task):
        return 1.0


# ---- what ends a rollout, and nothing else


class Unshown(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Unpickled(Exception):
    def __init__(self):
        super().__init__("it holds a lock", threading.Lock())

    def __reduce__(self):
        raise TypeError("cannot pickle it")


class Exits(Exception):
    def __str__(self):
        sys.exit(7)


def chained():
    try:
        json.loads("{")
    except ValueError as e:
        raise KeyError("tool") from e


def several():
    raise BaseExceptionGroup("several", [ValueError("one"), SystemExit(2)])


def thrown(e):
    raise e


def shut():
    loop = asyncio.new_event_loop()
    loop.close()
    loop.call_soon(print)


WAYS = {  # how user code may be left, and the word that has to be told
    "SystemExit": lambda: sys.exit("argparse"),
    "KeyboardInterrupt": lambda: thrown(KeyboardInterrupt()),
    "CancelledError": lambda: thrown(asyncio.CancelledError("by a client")),
    "StopIteration": lambda: next(iter(())),
    "StopAsyncIteration": lambda: thrown(StopAsyncIteration()),
    "GeneratorExit": lambda: thrown(GeneratorExit()),
    "Failed": lambda: pytest.fail("a check of the agent's"),
    "RecursionError": lambda: thrown(RecursionError("too deep")),
    "MemoryError": lambda: thrown(MemoryError()),
    "BaseException": lambda: thrown(BaseException("bare")),
    "TimeoutError": lambda: thrown(TimeoutError()),
    "Unshown": lambda: thrown(Unshown()),
    "Unpickled": lambda: thrown(Unpickled()),
    "Exits": lambda: thrown(Exits()),
    "KeyError": chained,
    "several": several,
    "UnicodeDecodeError": lambda: b"\xff".decode(),
    "a half": lambda: thrown(ValueError("a half \ud83d")),
    "Event loop is closed": shut,
    "AssertionError": lambda: thrown(AssertionError("x" * 1_000_000)),
}


def leaving(way):
    """Agents that are left this way in each of their methods, sync and async, and in what they
    wait for."""

    async def later(*_):
        await asyncio.sleep(0)
        way()

    async def child(*_):
        await asyncio.gather(later(), asyncio.sleep(0))

    async def waits(*_):
        await asyncio.wait_for(later(), 60)

    def now(*_):
        return way()

    for how in (now, later, child, waits):
        yield type("Resets", (Fine,), {"reset": how})
        yield type("Steps", (Env,), {"step": how})
        yield type("Runs", (ChatAgent,), {"run": how})
        yield type("Closes", (Fine,), {"close": how})
        yield lambda how=how: Single(how)
        yield lambda how=how: CommandAgent("true", how)
    yield type("Makes", (Fine,), {"__init__": now})
    yield type("MakesThere", (FineChat,), {"__init__": now, "run": later})


@pytest.mark.parametrize("word", WAYS)
def test_every_way_to_leave_user_code_costs_that_rollout_and_is_told_with_file_and_line(
    runner, word
):
    kinds = list(leaving(WAYS[word]))
    outs = playing(runner, *kinds, Fine, FineChat)
    for kind, out in zip(kinds, outs):
        assert word in out.error and f'{HERE}", line' in out.error, (kind, out.error)
        assert out.segments == [] and "--episode_timeout" not in out.error
        assert "rollout.py" not in out.error and len(out.error) < 20_000
        out.error.encode()
    assert [out.error for out in outs[-2:]] == ["", ""]


def test_a_command_that_exits_by_itself_is_told_with_its_code_and_output(runner):
    code = "import os; print(7 * 6, flush=True); os._exit(9)"
    (out,) = playing(runner, lambda: CommandAgent(f'{sys.executable} -c "{code}"', lambda *_: 1.0))
    assert "exit code 9" in out.error and "42" in out.error


def test_a_task_that_an_agent_leaves_behind_may_exit_and_no_one_else_does(runner):
    class Leaves(Env):
        async def step(self, reply):
            async def tool():
                sys.exit(1)

            self.tool = asyncio.create_task(tool())
            await asyncio.sleep(0)
            return None, 1.0, True, {}

    assert [out.error for out in playing(runner, *[Leaves] * 8)] == [""] * 8


def test_the_traceback_shows_the_agent_s_lines_and_not_the_libraries_between(runner):
    class Raises(ChatAgent):
        def run(self, task):
            return float(json.loads("{"))

    (out,) = playing(runner, Raises)
    files = [line for line in out.error.splitlines() if line.startswith('  File "')]
    assert HERE in files[0] and len(files) == 2 and "return float(json.loads" in out.error
    assert "json/decoder.py" in files[1] and "JSONDecodeError" in out.error


def test_a_method_that_takes_other_arguments_is_told_where_it_stands(runner):
    class Short(Env):
        def step(self):
            return None, 1.0, True, {}

    (out,) = playing(runner, Short)
    line = Short.step.__code__.co_firstlineno
    assert f'{HERE}", line {line}, in step' in out.error and "positional argument" in out.error


# ---- what hangs


def test_a_blocked_thread_costs_its_rollout_and_however_many_hang_later_ones_play(quick):
    free = threading.Event()

    class Hangs(Fine):
        def step(self, reply):
            free.wait()

    quick.cfg.episode_timeout = 3.0
    outs = playing(quick, *[Hangs] * 300)
    assert all("--episode_timeout 3.0 s" in out.error for out in outs)
    # on a busy machine some have not come to their step by then: they name where it is defined
    assert all(f'{HERE}", line' in out.error for out in outs)
    assert any("free.wait()" in out.error for out in outs)
    quick.cfg.episode_timeout = 60.0
    assert [out.error for out in playing(quick, *[Fine] * 4)] == [""] * 4
    free.set()


@pytest.mark.parametrize("method", ["__init__", "reset", "step", "run", "close", "reward"])
@pytest.mark.parametrize("how", ["blocked thread", "blocked loop", "coroutine", "shut to cancels"])
def test_a_hang_in_any_method_ends_at_the_limit_with_its_line(quick, method, how):
    ended = threading.Event()

    def block(*_):
        ended.wait()

    async def block_there(*_):
        ended.wait()

    async def sleep(*_):
        await asyncio.sleep(1e6)

    async def stay(*_):
        while not ended.is_set():
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                pass

    hang = dict(
        zip(
            ("blocked thread", "blocked loop", "coroutine", "shut to cancels"),
            (block, block_there, sleep, stay),
        )
    )[how]
    if method == "__init__":
        base = Fine if how == "blocked thread" else FineChat
        there = {} if base is Fine else {"run": sleep}
        kind = type("Hangs", (base,), {"__init__": lambda self: ended.wait()} | there)
    elif method == "reward":
        kind = lambda: Single(hang)  # noqa: E731
    else:
        kind = type("Hangs", (ChatAgent if method == "run" else Fine,), {method: hang})
    (out,) = playing(quick, kind)
    limit = "close did not end within" if method == "close" else "--episode_timeout 0.5 s"
    assert limit in out.error and f'{HERE}", line' in out.error, out.error
    quick.cfg.episode_timeout = 60.0
    assert playing(quick, FineChat)[0].error == ""
    ended.set()


def test_a_coroutine_that_blocks_the_loop_of_all_costs_its_own_rollout_alone(monkeypatch):
    """The others begin anew on another loop."""
    monkeypatch.setattr(agents, "GRACE", 0.5)
    runner = Runner(SimpleNamespace(**RUNNER | dict(episode_timeout=5.0)), [Remote(Scripted())])
    free, made = threading.Event(), []

    class Mixed(Env):
        def __init__(self):
            made.append(self)
            self.blocks = len(made) == 3

        async def step(self, reply):
            await asyncio.sleep(0.2)
            await asyncio.gather(self.tool())
            return None, 1.0, True, {}

        async def tool(self):
            if self.blocks:
                free.wait()
            await asyncio.sleep(0.2)

    outs = playing(runner, *[Mixed] * 8)
    failed = [out.error for out in outs if out.error]
    assert len(failed) == 1 and "free.wait()" in failed[0] and "--episode_timeout" in failed[0]
    assert len(made) == 15
    free.set()


def test_an_agent_may_stop_the_loop_of_all_and_they_go_on(runner):
    class Stops(Env):
        async def step(self, reply):
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0.01)
            return None, 1.0, True, {}

    assert [out.error for out in playing(runner, *[Stops] * 5)] == [""] * 5


def test_a_sync_client_in_a_coroutine_does_not_stop_the_server_that_it_asks(runner):
    import openai

    class Asks(ChatAgent):
        async def run(self, task):
            client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
            client.chat.completions.create(model=task.model, messages=task.messages)
            return 1.0

    outs = playing(runner, *[Asks] * 3)
    assert [(out.error, out.replies) for out in outs] == [("", 1)] * 3


# ---- whatever comes back awaitable


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


async def grade(prompt, label, output, folder):
    await asyncio.sleep(0)
    return 0.25


def test_whatever_comes_back_awaitable_is_awaited(runner):
    class Env1(Env):
        @decorated
        async def reset(self, task):
            return task.messages

        @decorated
        async def step(self, reply):
            return None, 0.25, True, {}

    class Env2(Env):
        def step(self, reply):
            return None, grade("", 1, reply, ""), True, {}

    class Chat1(ChatAgent):
        run = decorated(FineChat.run)

        async def later(self, task):
            return 0.25

        def run(self, task):
            return self.later(task)

    class Chat2(ChatAgent):
        run = lambda self, task: asyncio.sleep(0, 0.25)  # noqa: E731

    class Twice(ChatAgent):
        async def run(self, task):
            return grade("", 1, "", "")

    kinds = [
        Env1,
        Env2,
        Chat1,
        Chat2,
        Twice,
        lambda: Single(grade),
        lambda: CommandAgent("true", grade),
    ]
    kinds += [lambda: Single(decorated(grade)), lambda: CommandAgent("true", lambda *a: grade(*a))]
    outs = playing(runner, *kinds)
    assert [(out.error, out.result.reward) for out in outs] == [("", 0.25)] * len(kinds)


# ---- close


def closer(seen, base=Fine, **methods):
    class Closes(base):
        def close(self):
            seen.append(self)

    for name, method in methods.items():
        setattr(Closes, name, method)
    return Closes


async def forever(*_):
    await asyncio.sleep(1e6)


def test_close_is_called_however_a_rollout_ends(runner, quick):
    free, seen = threading.Event(), []

    def goes_on(self, reply):
        return "Go on.", 0.0, False, {}

    def raises(self, *_):
        raise KeyError("tool")

    for how in ({}, {"step": goes_on}, {"step": raises}, {"reset": raises}):
        playing(runner, closer(seen, **how))
    playing(runner, closer(seen, FineChat))
    assert len(seen) == 5
    for how in (forever, lambda *_: free.wait()):
        (out,) = playing(quick, closer(seen, step=how))
        assert "--episode_timeout" in out.error
    assert len(seen) == 7
    free.set()


def test_an_async_close_is_awaited_and_all_methods_of_an_env_are_called_in_one_thread(runner):
    seen = []

    class Threads(Env):
        def __init__(self):
            seen.append(threading.get_ident())

        def reset(self, task):
            seen.append(threading.get_ident())
            return "hello"

        def step(self, reply):
            seen.append(threading.get_ident())
            return None, 1.0, True, {}

        async def close(self):
            await asyncio.sleep(0.01)
            seen.append("closed")

    (out,) = playing(runner, Threads)
    assert out.error == "" and len(set(seen[:3])) == 1 and seen[3:] == ["closed"]
    assert seen[0] != threading.get_ident()


def test_a_fault_of_close_is_told_and_hides_no_other(runner):
    def breaks(self):
        raise OSError("browser gone")

    def raises(self, reply):
        raise KeyError("tool")

    (alone,) = playing(runner, type("A", (Fine,), {"close": breaks}))
    (both,) = playing(runner, type("B", (Fine,), {"close": breaks, "step": raises}))
    assert "browser gone" in alone.error and f'{HERE}", line' in alone.error
    assert "KeyError: 'tool'" in both.error and "browser gone" not in both.error


def test_a_cancelled_coroutine_ends_before_it_is_closed(quick):
    seen = []

    class Ends(Env):
        async def step(self, reply):
            try:
                await asyncio.sleep(1e6)
            finally:
                seen.append("step")

        async def close(self):
            seen.append("close")

    playing(quick, Ends)
    assert seen == ["step", "close"]


# ---- the cancellation of a group


@pytest.mark.parametrize("kind", ["thread", "coroutine", "shut to cancels"])
def test_a_cancelled_group_ends_at_once_and_its_agents_are_closed(runner, kind, monkeypatch):
    """Nobody waits for agents that hang: the limit of an episode is a minute."""
    monkeypatch.setattr(agents, "GRACE", 0.3)
    seen, free, begun = [], threading.Event(), []

    def thread(self, reply):
        begun.append(1)
        free.wait()

    async def coroutine(self, reply):
        begun.append(1)
        await asyncio.sleep(1e6)

    async def stays(self, reply):
        begun.append(1)
        while not free.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                pass

    step = {"thread": thread, "coroutine": coroutine, "shut to cancels": stays}[kind]
    runner.agent = closer(seen, step=step)

    runner.lines = [rollout.Line(Remote(Scripted()))]

    async def group():
        tasks = [Task([{"role": "user", "content": "x"}]) for _ in range(4)]
        playing = asyncio.create_task(runner.rollouts(tasks, 0, [0, 1, 2, 3], 0))
        while len(begun) < 4:
            await asyncio.sleep(0.01)
        playing.cancel()
        turns = 0
        while not playing.done():  # turns of the loop, not seconds
            await asyncio.sleep(0)
            turns += 1
        assert playing.cancelled() and turns < 50
        while len(seen) < 4:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(group(), 60))
    free.set()


def test_a_cancelled_error_of_an_agent_is_no_cancellation_of_its_group(runner):
    """Its own task may be cancelled by it as well; the others of the group play on."""
    made = iter(range(8))

    class Cancels(Env):
        def __init__(self):
            self.at = next(made)

        async def step(self, reply):
            if self.at == 0:
                raise asyncio.CancelledError
            if self.at == 1:
                asyncio.current_task().cancel()
                await asyncio.sleep(1)
            return None, 1.0, True, {}

    outs = playing(runner, *[Cancels] * 8)
    assert ["CancelledError" in out.error for out in outs] == [True] * 2 + [False] * 6
    assert all(out.result.reward == 1.0 for out in outs[2:])


def test_an_agent_that_changes_its_task_changes_it_for_no_other(runner):
    seen = []

    class Changes(Env):
        def reset(self, task):
            seen.append(len(task.messages))
            task.messages.append({"role": "user", "content": "more"})
            return task.messages

        def step(self, reply):
            return None, 1.0, True, {}

    runner.lines = [rollout.Line(Remote(Scripted()))]
    runner.agent, task = Changes, Task([{"role": "user", "content": "x"}])
    tasks = [dataclasses.replace(task) for _ in range(4)]  # as the pool makes them
    outs = asyncio.run(runner.rollouts(tasks, 0, [0, 1, 2, 3], 0))
    assert [out.error for out in outs] == [""] * 4 and seen == [1] * 4


# ---- any value in any field


class Odd:
    """What a reader may meet."""

    def __init__(self, **methods):
        self.__class__ = type("Odd", (Odd,), methods)


def refuses(*_):
    raise SystemExit("from a value")


class Word(str):
    """A text whose class nobody else can load."""


class Amount(float):
    pass


endless = []
endless.append(endless)
ODD = [
    None, True, 0, -1, 3.5, 10**400, math.nan, math.inf, -math.inf, 1e15, 1.1e15, 1e160, 1e-320,
    "", "text", "half \ud83d", Word("w"), Amount(0.5), b"1", bytearray(b"1"), 1j, [], [1.0], [[]],
    endless, {}, {"a": 1}, {1: 2}, {"a": None}, {"a": {"b": [math.nan]}}, {"mean": 1.0}, (),
    (1, 2), {1},
    np.float32(1.5), np.int64(3), np.bool_(True), np.array(2.0), np.array([1.0]), np.zeros(3),
    np.str_("s"), np.datetime64("2023-05-01"), np.float64("nan"), torch.tensor(1.5),
    torch.tensor(True),
    torch.zeros(2), torch.tensor(math.inf), torch.tensor(1.0, requires_grad=True),
    fractions.Fraction(1, 2), object(), int, len, Ellipsis, iter([1]), range(3),
    [{"role": "user", "content": "hi"}], [{"role": "user"}], [{}], [None],
    [{"role": "user", "content": object()}],
    Odd(__float__=refuses), Odd(__bool__=refuses), Odd(__repr__=refuses), Odd(__iter__=refuses),
    Odd(__len__=refuses, __getitem__=refuses), Odd(__float__=lambda self: "no"),
    Odd(__eq__=refuses, __hash__=refuses),
]  # fmt: skip


def value(seed):
    """One of the above, or one made of them, by a number: hypothesis shows what it draws, and some
    of these cannot be shown."""
    if seed < len(ODD):
        return ODD[seed]
    draw = random.Random(seed)
    inner = [draw.choice(ODD) for _ in range(draw.randrange(4))]
    kinds = [
        list,
        tuple,
        lambda parts: {"a": [{"b": tuple(parts)}]},
        lambda parts: dict(zip("abc", parts)),
        lambda parts: draw.uniform(-1, 1) * 10.0 ** draw.randrange(-300, 300),
        lambda parts: draw.randbytes(3),
        lambda parts: np.array(draw.random()).astype(draw.choice("fdehi?FDSU")),
        lambda parts: torch.tensor(draw.random()).to(draw.choice([torch.bfloat16, torch.int8])),
    ]
    return draw.choice(kinds)(inner)


# each of the above, and 200 that are drawn
seeds = st.lists(st.integers(0, 2**32 - 1), min_size=50, max_size=50)
few = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))


def check(out, name):
    """Failed by name with file and line, or plain data that metrics and files take; both come back
    from a Ray actor."""
    out = pickle.loads(pickle.dumps(out))
    if out.error:
        assert f'{HERE}", line' in out.error and "--episode_timeout" not in out.error, out.error
        known = name, "from a value", "refuses these messages"
        assert any(word in out.error for word in known), out.error
        return
    result = out.result
    numbers = [result.reward, *result.turn_rewards, *result.rewards.values()]
    assert all(type(x) is float and abs(x) <= 1e15 for x in numbers)
    assert all(
        type(x) is str or type(x) is float and math.isfinite(x) for x in result.info.values()
    )
    assert {type(x) for x in [*result.info, *result.rewards]} <= {str}
    assert type(result.truncated) is bool
    json.dumps(vars(result), allow_nan=False)
    told = vars(out) | {"group": 0, "id": 0}
    found = train.batch_metrics({"rollouts": [told, told], "rows": [], "counts": {}})
    assert all(type(v) in (int, float) and math.isfinite(v) for v in found.values())


@pytest.mark.parametrize("field", ["reward", "turn_rewards", "rewards", "info", "truncated", "all"])
def test_any_value_in_any_field_of_a_result_fails_by_name_or_is_plain_data(runner, field):
    @few
    @example(list(range(len(ODD))))
    @given(seeds)
    def holds(found):
        def kind(value):
            answer = value if field == "all" else Result(**{field: value})
            return type("Runs", (ChatAgent,), {"run": lambda self, task: answer})

        for out in playing(runner, *[kind(value(seed)) for seed in found]):
            check(out, "Runs.run returned")

    holds()


@pytest.mark.parametrize(
    "field", ["observation", "reward", "done", "info", "rewards", "step", "reset"]
)
def test_any_value_in_any_field_of_a_step_or_reset_fails_by_name_or_is_plain_data(runner, field):
    @few
    @example(list(range(len(ODD))))
    @given(seeds)
    def holds(found):
        def kind(value):
            whole = {"observation": "Go on.", "reward": 1.0, "done": False, "info": {}}
            whole |= {"info": {"rewards": value}} if field == "rewards" else {field: value}
            answer = value if field == "step" else tuple(whole[k] for k in list(whole)[:4])
            methods = {"step": lambda self, reply: answer}
            methods |= {"reset": lambda self, task: value} if field == "reset" else {}
            return type("Steps", (Env,), methods)

        for out in playing(runner, *[kind(value(seed)) for seed in found]):
            check(out, f"Steps.{'reset' if field == 'reset' else 'step'} returned")

    holds()


@pytest.mark.parametrize("reward", [1e160, -1e16, 10**400, math.nan, math.inf])
def test_a_reward_whose_square_overflows_fails_with_the_bound_or_its_kind(runner, reward):
    kinds = [type("A", (ChatAgent,), {"run": lambda self, task: reward})]
    kinds += [type("B", (Env,), {"step": lambda self, reply: (None, reward, True, {})})]
    kinds += [lambda: Single(lambda *_: reward), lambda: CommandAgent("true", lambda *_: reward)]
    for out in playing(runner, *kinds):
        finite = isinstance(reward, float) and math.isfinite(reward)
        assert ("not between -1e+15 and 1e+15" if finite else "not finite") in out.error


def test_what_is_returned_is_refused_by_its_name_with_the_line_of_the_method(runner):
    def kind(answer):
        return type("Steps", (Env,), {"step": lambda self, reply: answer})

    cases = {
        "not (observation, reward, done, info)": ("Go on.", 0.0, False, False, {}),
        "the info None, which is no dict": (None, 1.0, True, None),
        "info['why'] None, which is no number": (None, 1.0, True, {"why": None}),
        "rewards['a'] nan, which is not finite": (None, 1.0, True, {"rewards": {"a": math.nan}}),
        "rewards['a'] None, which is no number": (None, 1.0, True, {"rewards": {"a": None}}),
        "a reward named 'mean'": (None, 1.0, True, {"rewards": {"mean": 1.0}}),
        "the name 1, which is no text": (None, 1.0, True, {1: 1.0}),
        "messages that do not fit: None is neither": (None, 1.0, False, {}),
        "done as 'no', which is neither true nor false": (None, 1.0, "no", {}),
        "the reward b'1', which is no number": (None, b"1", True, {}),
    }
    outs = playing(runner, *map(kind, cases.values()))
    for word, out in zip(cases, outs):
        assert f"Steps.step returned {word}" in out.error or word in out.error, out.error
        assert f'{HERE}", line' in out.error and "in <lambda>" in out.error


def test_numbers_of_numpy_and_torch_are_numbers_and_texts_of_info_stay_out_of_the_metrics(runner):
    info = {"why": "timeout", "n": np.int64(3), "ok": True}
    steps = type(
        "A", (Env,), {"step": lambda self, reply: (None, np.float32(0.5), np.bool_(1), info)}
    )
    result = Result(torch.tensor(0.5), info=info, rewards={"a": torch.tensor(2)})
    runs = type("B", (ChatAgent,), {"run": lambda self, task: result})
    outs = playing(runner, steps, runs)
    assert [out.result.info for out in outs] == [{"why": "timeout", "n": 3.0, "ok": 1.0}] * 2
    told = [vars(out) | {"group": 0, "id": i} for i, out in enumerate(outs)]
    found = train.batch_metrics({"rollouts": told, "rows": [], "counts": {}})
    assert (found["info/n"], found["info/ok"], found["reward/a"]) == (3.0, 1.0, 2.0)
    assert "info/why" not in found and found["reward/mean"] == 0.5


def test_texts_of_info_are_in_the_saved_rollouts(tmp_path):
    result = Result(info={"why": "timeout \ud83d", "n": 1.0})
    batch = {"version": 0, "counts": {}, "first_error": "", "rows": []}
    batch["rollouts"] = [{"group": 0, "id": 0, "result": result}]
    rollout.write_batch(tmp_path / "saved" / "1.jsonl", batch, [])
    assert rollout.read_batch(tmp_path / "saved" / "1.jsonl")[0]["rollouts"][0]["result"] == result


# ---- named rewards that some lack


def test_a_named_reward_that_some_lack_counts_in_those_that_have_it():
    results = [
        Result(rewards=r) for r in ({"a": 1.0, "b": 0.0}, {"a": 3.0}, {"b": 1.0}, {"a": 2.0})
    ]
    told = [vars(Rollout(0, i, r)) | {"group": 0} for i, r in enumerate(results)]
    found = train.batch_metrics({"rollouts": told, "rows": [], "counts": {}})
    assert (found["reward/a"], found["reward/b"]) == (2.0, 0.5)


def test_gdpo_leaves_a_rollout_out_of_the_reward_that_it_lacks():
    """It gets nothing of it, and the others what they would get without that rollout."""
    nan = math.nan

    def advantages(named, groups):
        n = len(groups)
        batch = estimator.Batch(
            mask=torch.ones(n, 1, dtype=torch.bool),
            rollout=torch.arange(n),
            rewards=torch.zeros(n),
            groups=torch.tensor(groups),
            named_rewards=torch.tensor(named, dtype=torch.float64),
        )
        return estimator.gdpo(batch, Config())[0][:, 0]

    some = advantages([[1.0], [nan], [3.0], [nan], [2.0], [4.0]], [0, 0, 0, 1, 1, 1])
    without = advantages([[1.0], [3.0], [2.0], [4.0]], [0, 0, 1, 1])
    assert some[[1, 3]].tolist() == [0.0, 0.0]
    scale = some[0] / without[0]  # of the std over the batch, which has two zeros more
    assert torch.allclose(some[[0, 2, 4, 5]], without * scale) and scale > 1
    assert advantages([[nan], [nan]], [0, 0]).tolist() == [0.0, 0.0]


# ---- batches without anything to train on, and losses that are not finite


def ended(counts, n=4, rows=()):
    rollouts = [{"group": 0, "result": Result()} for _ in range(n)]
    return {"rollouts": rollouts, "rows": list(rows), "counts": counts}


def test_a_batch_without_a_trainable_token_ends_the_run_with_counts_and_what_to_do():
    counts = {"rollouts/too_long": 1, "rollouts/no_request": 2, "rollouts/constrained": 1}
    for rows in ([], [{"rollout": 0, "tokens": 5, "trained": 0}]):
        with pytest.raises(BadInput) as e:
            train.check_rows(Config(max_context=77), ended(counts, rows=rows), 3)
        said = str(e.value)
        assert said.startswith("step 3: none of the 4 rollouts has a token to train on")
        assert "1 had a prompt longer than --max_context 77" in said
        assert "2 made no request" in said and "--constrained free" in said
    train.check_rows(Config(), ended(counts, rows=[{"rollout": 0, "tokens": 5, "trained": 1}]), 3)


def test_rollouts_without_a_row_are_counted_by_their_reason(runner, monkeypatch):
    import openai

    class Asks(ChatAgent):
        words, how = "hi", {}

        def run(self, task):
            client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
            told = [{"role": "user", "content": self.words}]
            client.chat.completions.create(model=task.model, messages=told, **self.how)
            return 1.0

    class Long(Asks):
        words = "long " * 300

    class Form(Asks):
        form = {"name": "x", "schema": {"type": "object"}}
        how = {"response_format": {"type": "json_schema", "json_schema": form}}

    class Prompt(Fine):
        def reset(self, task):
            return "long " * 300

    real = rollout.parser
    grammar = lambda req: {"json": "{}"} if req.schema else None  # noqa: E731
    monkeypatch.setattr(rollout, "parser", lambda *args: (real(*args)[0], grammar))
    outs = playing(runner, FineChat, Long, Form, Prompt, Asks)
    reasons = ["no_request", "too_long", "constrained", "too_long"]
    assert [out.error for out in outs] == [""] * 5
    for reason, out in zip(reasons, outs):
        assert out.counts[f"rollouts/{reason}"] == 1 and not out.segments
    assert outs[4].segments and not [k for k in outs[4].counts if k.startswith("rollouts/")]


def test_a_pool_hands_out_a_batch_without_rows_with_its_reasons(runner):
    """As it is for any --max_lag, since the trainer is who ends the run."""

    class Runs:
        started = []
        rollouts = SimpleNamespace()

    def remote(tasks, group, ids, attempt):
        found = {"rollouts/no_request": 1}
        outs = [Rollout(group, i, Result(), counts=dict(found)) for i in ids]
        return asyncio.sleep(0, outs)

    Runs.rollouts.remote = remote
    for lag in (0, 2):
        batch = asyncio.run(pool(4, Runs(), max_lag=lag).next_batch())
        with pytest.raises(BadInput, match="step 1: none of the 8 .* 8 made no request"):
            train.check_rows(Config(), batch, 1)


def test_a_step_whose_loss_is_not_finite_is_left_out_though_its_gradient_is(
    process_group, monkeypatch
):
    steps = []
    step = SimpleNamespace(step=lambda: steps.append(1), zero_grad=lambda: None)
    monkeypatch.setattr(replay, "clip_gradients", lambda *_: 1.0)
    learner = train.Learner(None, None, step, None)
    assert train.take(Config(), learner, torch.zeros(())) == 1.0 and steps == [1]
    for bad in (math.nan, math.inf):
        lost = torch.zeros(()) + torch.tensor(bad) * 0
        assert math.isnan(train.take(Config(), learner, lost)) and steps == [1]


def test_steps_that_were_left_out_are_told_and_batch_after_batch_of_them_ends_the_run():
    said = []
    console = SimpleNamespace(print=lambda text, **_: said.append(text))
    r = SimpleNamespace(cfg=Config(steps=9), console=console, lost=0)
    train.check_taken(r, {"optim/skipped": 1.0}, 1, 1)
    train.check_taken(r, {"optim/skipped": 2.0}, 0, 2)
    train.check_taken(r, {"optim/skipped": 0.0}, 2, 3)
    assert len(said) == 2 and "step 2: 2 optimizer steps were left out (optim/skipped)" in said[1]
    train.check_taken(r, {"optim/critic_skipped": 2.0}, 2, 4)
    assert "optim/critic_skipped" in said[2] and r.lost == 0
    with pytest.raises(train.Diverged, match="3 batches, .* --lr 0.001"):
        for step in (5, 6, 7):
            train.check_taken(r, {"optim/skipped": 2.0}, 0, step)
    short = SimpleNamespace(cfg=Config(steps=1), console=console, lost=0)
    with pytest.raises(train.Diverged, match="^1 batch"):
        train.check_taken(short, {"optim/skipped": 2.0}, 0, 1)
    assert Meter().local() == {}


@pytest.mark.e2e
def test_a_run_goes_on_whatever_its_agents_do(tmp_path):
    """Of the four rollouts of each prompt one fails, in eight ways, one of them a thread that
    hangs; the others are trained."""
    flags = ["--agent", "tests/faulty_agent.py", "--prompts", 4, "--samples", 4, "--steps", 2]
    flags += ["--episode_timeout", 12, "--show_every", 0, "--out", tmp_path / "run"]
    code, text = finish(start(*flags))
    assert code == 0, text[-3000:]
    assert "a rollout failed; the first traceback:" in text and "faulty_agent.py" in text
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rollouts/failed"] >= 4 and row["optim/skipped"] == 0 for row in rows)
    assert all(row["rollouts/finished"] + row["rollouts/failed"] == 16 for row in rows)
    assert all(math.isfinite(row["loss/policy"]) for row in rows)
