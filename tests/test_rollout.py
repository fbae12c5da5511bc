"""rollout.py without engines: episodes with a scripted policy, the pool with scripted runners, the data."""

import asyncio
import json
import os
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

import rollout
from agent import Agent, BadInput, ChatAgent, Env, Reply, Result, Segment, Task, digest
from rollout import (
    Engine,
    EngineFault,
    Line,
    Rollout,
    Rollouts,
    Runner,
    launch,
    load_rows,
    order,
    play,
    stamp,
)
from server import Chat
from train import Config


@pytest.fixture(scope="module")
def chat():
    return Chat(AutoTokenizer.from_pretrained("examples/starter"))


def scripted(chat, *texts):
    """A policy that says `texts` in order, each ended by the end-of-turn token; records what it was asked."""
    left = iter(texts)

    async def generate(ids, max_tokens, known):
        generate.asked.append((list(ids), max_tokens))
        ids_out = [*chat.encode(next(left)), chat.tokenizer.eos_token_id][:max_tokens]
        out = np.asarray(ids_out, np.int32)
        logprobs, versions = -np.ones(len(out), np.float32), np.zeros(len(out), np.int32)
        return Reply(
            out, logprobs, versions, digest(np.asarray(ids), out, logprobs, versions), "stop"
        )

    generate.asked = []
    return generate


def episode(chat, env, generate, **limits):
    async def call(method, *args, read):
        answer = method(*args)
        return read(await answer if asyncio.iscoroutine(answer) else answer)

    cfg = SimpleNamespace(**dict(max_turns=4, max_tokens=32, max_context=256) | limits)
    task = Task([{"role": "user", "content": "What is 17+25?"}], label=42)
    return asyncio.run(play(env, task, chat, generate, cfg, call, 3, 25))


def test_an_episode_is_one_row_that_ends_with_the_last_reply(chat):
    generate = scripted(chat, "<calc>17+25</calc>", "<answer>42</answer>")
    out = episode(chat, Agent(), generate)
    (row,) = out.segments
    assert (out.result.reward, out.result.turn_rewards, out.result.truncated) == (
        1.0,
        [0.0, 1.0],
        False,
    )
    assert (row.group_id, row.rollout_id, row.reward, row.info) == (3, 25, 1.0, {"calls": 1.0})
    assert row.tokens.tolist() == generate.asked[1][0] + [
        *chat.encode("<answer>42</answer>"),
        chat.tokenizer.eos_token_id,
    ]
    assert generate.asked[1][0][: len(generate.asked[0][0])] == generate.asked[0][0]
    assert row.mask.sum() == sum(end - start for start, end, _ in row.replies)


def test_an_async_environment_may_give_several_messages(chat):
    class Waits(Env):
        async def reset(self, task):
            await asyncio.sleep(0)
            return [{"role": "system", "content": "Be brief."}, *task.messages]

        async def step(self, reply):
            await asyncio.sleep(0)
            return (
                [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}],
                0.25,
                reply == "no",
                {},
            )

    out = episode(chat, Waits(), scripted(chat, "yes", "yes", "no"))
    text = chat.tokenizer.decode(out.segments[0].tokens)
    assert (
        out.result.reward == 0.75
        and text.count("<|im_start|>tool\na<|im_end|>\n<|im_start|>user\nb<|im_end|>") == 2
    )


def test_limits_on_turns_and_context_truncate_and_a_long_prompt_makes_no_row(chat):
    out = episode(chat, Agent(), scripted(chat, "a", "b"), max_turns=2)
    assert out.result.truncated and len(out.result.turn_rewards) == 2
    prompt = len(chat.opening([{"role": "user", "content": "What is 17+25?"}]))
    out = episode(chat, Agent(), scripted(chat, "<calc>17+25</calc>"), max_context=prompt + 3)
    assert out.result.truncated and len(out.segments[0]) == prompt + 3
    out = episode(chat, Agent(), scripted(chat), max_context=prompt)
    assert out.result.truncated and out.segments == [] and out.result.reward == 0.0


@pytest.mark.parametrize("reward", [None, "1", float("nan"), [1.0]])
def test_a_reward_that_is_no_number_is_refused(chat, reward):
    class Bad(Agent):
        def step(self, reply):
            return None, reward, True, {}

    with pytest.raises((TypeError, ValueError), match="Bad.step returned the reward"):
        episode(chat, Bad(), scripted(chat, "x"))


RUNNER = vars(Config(episode_timeout=0.5, max_turns=2, max_tokens=4, max_context=99, linger=1.0))


class Scripted(Engine):
    """An Engine without vLLM: a prompt's first id says what happens to it."""

    def __init__(self):
        self.tasks, self.replies, self.batches, self.cancelled = (
            {},
            defaultdict(asyncio.Queue),
            [],
            [],
        )
        self.llm = SimpleNamespace(errored=False)

    async def submit(self, runner, requests):
        self.batches.append(len(requests))
        await asyncio.sleep(0.001)  # as long as a call takes
        await super().submit(runner, requests)

    async def generate(
        self, name, ids, max_tokens, known=0, temperature=None, stop=(), grammar=None
    ):
        try:
            await asyncio.sleep({0: 0.001, 1: 0.02, 2: 60, 3: 0}[ids[0]] if ids[0] < 4 else 0)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if ids[0] == 3:
            raise RuntimeError("no such token")
        return Reply(*[np.asarray(ids, d) for d in (np.int32, np.float32, np.int32)], b"", "stop")


class Remote:
    """An actor handle whose calls run in this process; they raise ActorDiedError once it is `dead`."""

    def __init__(self, actor):
        self.actor, self.dead = actor, False

    def __getattr__(self, method):
        async def call(args):
            answer = asyncio.ensure_future(getattr(self.actor, method)(*args))
            while not answer.done():
                if self.dead:
                    raise rollout.ray.exceptions.ActorDiedError()
                await asyncio.wait([answer], timeout=0.002)
            return answer.result()

        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(call(args)))


def test_requests_travel_in_batches_and_each_gets_its_own_reply():
    async def run():
        engine = Scripted()
        line = Line(Remote(engine))
        replies = await asyncio.gather(
            *[line.generate(f"{i}", [i % 2, i], 4, 0) for i in range(200)]
        )
        assert [r.tokens.tolist() for r in replies] == [[i % 2, i] for i in range(200)]
        assert engine.batches == [200] and not line.waiting and not engine.tasks
        again = [line.generate(f"a{i}", [0, i], 4, 0) for i in range(3)]
        assert [r.tokens.tolist() for r in await asyncio.gather(*again)] == [[0, 0], [0, 1], [0, 2]]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_request_that_fails_fails_alone_and_a_cancelled_one_stops_its_engine():
    async def run():
        engine = Scripted()
        line = Line(Remote(engine))
        slow = asyncio.create_task(line.generate("slow", [2], 4, 0))
        bad, good = await asyncio.gather(
            line.generate("bad", [3], 4, 0),
            line.generate("good", [1], 4, 0),
            return_exceptions=True,
        )
        assert (
            isinstance(bad, EngineFault)
            and "no such token" in str(bad)
            and good.tokens.tolist() == [1]
        )
        slow.cancel()
        await asyncio.wait([slow])
        await asyncio.sleep(0.02)
        assert (
            slow.cancelled()
            and engine.cancelled == ["slow"]
            and not engine.tasks
            and not line.waiting
        )
        unsent = asyncio.create_task(line.generate("unsent", [2], 4, 0))
        line.sender = asyncio.create_task(asyncio.sleep(0.01))  # a call is on its way
        await asyncio.sleep(0)
        unsent.cancel()
        await asyncio.gather(unsent, line.sender, return_exceptions=True)
        await line.generate("next", [0], 4, 0)
        assert engine.batches[-1] == 1 and not engine.tasks and not line.outbox

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_dead_engine_fails_all_that_wait_for_it_and_all_that_come_later():
    async def run():
        engine = Remote(Scripted())
        line = Line(engine)
        waiting = [asyncio.create_task(line.generate(f"{i}", [2], 4, 0)) for i in range(5)]
        await asyncio.sleep(0.01)
        engine.dead = True
        for task in [*waiting, asyncio.create_task(line.generate("late", [0], 4, 0))]:
            with pytest.raises(EngineFault):
                await asyncio.wait_for(task, 5)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_fault_of_an_engine_is_raised_and_not_charged_to_the_agent():
    cfg = SimpleNamespace(**RUNNER | dict(episode_timeout=5))
    engine = Remote(Scripted())
    runner, engine.dead = Runner(cfg, [engine]), True
    task = Task([{"role": "user", "content": "x"}], label=1)
    with pytest.raises(EngineFault):
        asyncio.run(runner.rollouts([task, task], 0, [0, 1], 0))


def test_faults_of_an_agent_cost_its_rollout_only():
    class Slow(Env):
        async def step(self, reply):
            await asyncio.sleep(60)

    class Raises(Env):
        def step(self, reply):
            raise KeyError("tool")

    cfg = SimpleNamespace(**RUNNER)
    for agent, word in ((Slow, "--episode_timeout 0.5"), (Raises, "KeyError: 'tool'")):
        runner = Runner(cfg, [Remote(Scripted())])
        runner.agent = agent
        out = asyncio.run(runner.rollout(Task([{"role": "user", "content": "x"}]), 0, 0, 0))
        assert word in out.error and out.segments == []


class FakeRunner:
    """Ends each rollout after a while; `fails(group, attempt, i)` tells which ones fail."""

    def __init__(self, samples, fails=lambda group, attempt, i: False):
        self.samples, self.fails, self.started, self.rollouts = samples, fails, [], self

    def remote(self, tasks, group_id, rollout_ids, attempt):
        async def run(rollout_id):
            self.started.append((group_id, rollout_id, attempt))
            await asyncio.sleep((rollout_id * 7919 % 5) / 1000)
            error = (
                "Traceback: boom"
                if self.fails(group_id, attempt, rollout_id % self.samples)
                else ""
            )
            return Rollout(group_id, rollout_id, Result(), [], error)

        return asyncio.gather(*map(run, rollout_ids))


def pool(n_rows, runner, least=2, state=None, **flags):
    cfg = Config(**dict(prompts=4, samples=2, data_epochs=1) | flags)
    return Rollouts(cfg, [{"prompt": f"p{i}"} for i in range(n_rows)], [runner], least, state)


def drain(p, steps=100):
    async def run():
        batches = []
        while len(batches) < steps and (batch := await p.next_batch()):
            batches.append(batch)
            started = len(p.runners[0].started)
            await asyncio.sleep(0.01)
            assert (
                len(p.runners[0].started) == started
            )  # nothing runs between a batch and its refit
            p.refitted(p.version + 1)
        return batches

    return asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    "n_rows,prompts,epochs", [(10, 4, 1), (3, 4, 1), (8, 4, 2), (1, 1, 3), (5, 16, 2)]
)
def test_every_prompt_is_trained_once_a_pass_and_the_run_ends_by_itself(n_rows, prompts, epochs):
    runner = FakeRunner(2)
    batches = drain(pool(n_rows, runner, prompts=prompts, data_epochs=epochs))
    groups = [g for b in batches for g in sorted({r["group"] for r in b["rollouts"]})]
    assert groups == list(range(n_rows * epochs))
    assert [len({r["group"] for r in b["rollouts"]}) for b in batches][:-1] == [prompts] * (
        len(batches) - 1
    )


def test_the_order_of_prompts_comes_from_the_seed_and_goes_on_from_a_checkpoint():
    def prompts(state=None, steps=9, seed=0):
        runner, asked = FakeRunner(2), []
        remote = runner.remote
        runner.rollouts = SimpleNamespace(
            remote=lambda *a: asked.append((a[1], a[0][0].messages)) or remote(*a)
        )
        p = pool(20, runner, state=state, seed=seed, data_epochs=2, prompts=5)
        drain(p, steps)
        return [messages[0]["content"] for _, messages in sorted(asked, key=lambda x: x[0])], p

    whole, _ = prompts()
    assert sorted(whole[:20]) == sorted(whole[20:]) and whole[:20] != whole[20:]
    _, p = prompts(steps=3)
    assert prompts(p.snapshot())[0] == whole[15:] and prompts(seed=1)[0] != whole


def test_without_shuffle_rows_come_as_they_stand_in_the_file_in_every_pass():
    assert [order(Config(shuffle=False), 5, at) for at in range(10)] == [0, 1, 2, 3, 4] * 2
    assert [order(Config(), 5, at) for at in range(10)] != [0, 1, 2, 3, 4] * 2


def test_the_columns_of_prompt_and_label_have_the_names_that_the_flags_give():
    runner, seen = FakeRunner(2), []
    p = pool(1, runner, prompt_key="question", label_key="answer")
    p.rows, runner.rollouts = (
        [{"question": "q", "answer": 7}],
        SimpleNamespace(remote=lambda *a: seen.append(a) or remote(*a)),
    )
    remote = runner.remote
    drain(p)
    tasks = seen[0][0]
    assert [(t.messages[0]["content"], t.label) for t in tasks] == [("q", 7)] * 2


def test_a_group_with_two_left_trains_and_a_smaller_one_is_queued_once_more():
    runner = FakeRunner(
        3,
        fails=lambda group, attempt, i: (
            (group == 1 and i == 0) or (group == 2 and attempt == 0 and i < 2)
        ),
    )
    (first, *_) = drain(pool(4, runner, samples=3), 1)
    sizes = {g: sum(r["group"] == g for r in first["rollouts"]) for g in range(4)}
    assert sizes == {0: 3, 1: 2, 2: 3, 3: 3}
    none = dict.fromkeys(
        ("groups/lost", "groups/filtered", "groups/rerun", "requests/rerun", "lag/dropped"), 0
    )
    assert (
        first["counts"]
        == {"rollouts/finished": 11, "rollouts/failed": 3, "groups/retried": 1} | none
    )
    assert "boom" in first["first_error"]


def test_a_group_that_fails_twice_is_lost_counted_and_replaced():
    runner = FakeRunner(2, fails=lambda group, attempt, i: group == 1)
    batches = drain(pool(9, runner, max_failed=1.0))
    assert [sorted({r["group"] for r in b["rollouts"]}) for b in batches] == [
        [0, 2, 3, 4],
        [5, 6, 7, 8],
    ]
    assert batches[0]["counts"]["groups/lost"] == 1


def test_a_batch_with_too_many_failures_stops_with_the_first_traceback():
    with pytest.raises(RuntimeError, match="(?s)--max_failed 0.5.*boom"):
        drain(pool(50, FakeRunner(2, fails=lambda group, attempt, i: group % 4 > 0)))


def test_a_stamp_gives_each_token_the_version_of_its_span():
    assert stamp([(0, 3)], 4).tolist() == [3, 3, 3, 3]
    assert stamp([(0, 3), (2, 4)], 5).tolist() == [3, 3, 4, 4, 4]
    assert stamp([(0, 3), (0, 4), (3, 5)], 4).tolist() == [4, 4, 4, 5]


@pytest.mark.parametrize(
    "lines,word",
    [
        ([], "empty"),
        ([{"question": "x"}], "row 0 has no 'prompt'"),
        ([{"prompt": "x"}, {"prompt": "y"}, {"prompt": None}], "row 2 has no 'prompt'"),
        ([{"prompt": "x"}, {"label": 3}], "row 1 has no 'prompt'"),
    ],
)
def test_bad_data_names_the_flag_and_the_row(tmp_path, lines, word):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=f"--data .*{word}"):
        load_rows(str(path), "prompt")


def test_rows_come_from_jsonl_and_parquet_alike(tmp_path):
    from datasets import Dataset

    rows = [{"prompt": f"p{i}", "label": i} for i in range(3)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")
    assert (
        load_rows(str(tmp_path / "rows.parquet"), "prompt")
        == load_rows(str(tmp_path / "rows.jsonl"), "prompt")
        == rows
    )


def test_rows_are_fetched_in_the_order_in_which_they_are_asked_for():
    p = pool(4, FakeRunner(2))
    rows = [
        Segment(*[np.zeros(n, d) for d in (np.int32, bool, np.float32, np.int32)])
        for n in (100, 30_000, 7)
    ]
    assert [p.keep(r)["tokens"] for r in rows] == [100, 30_000, 7]
    assert p.fetch([2, 0, 1]) == [rows[2], rows[0], rows[1]]


class Asks(ChatAgent):
    """A plain function on OpenAI's SDK."""

    text = "hello"

    def run(self, task):
        client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
        client.chat.completions.create(
            model=task.model, messages=[{"role": "user", "content": self.text}]
        )
        return self.end()

    def end(self):
        return 0.5


def converse(agent, engine=None):
    runner = Runner(
        SimpleNamespace(**RUNNER | dict(episode_timeout=20)), [engine or Remote(Scripted())]
    )
    runner.agent = agent

    async def run():
        out = await runner.rollout(Task([{"role": "user", "content": "x"}], label=1), 3, 25, 0)
        assert runner.server.forests == {}  # the rollout's key has ended with it
        runner.server.task.cancel()
        return out

    return asyncio.run(run())


def test_a_chat_agent_s_rollout_holds_what_it_sampled_and_its_reward():
    out = converse(Asks)
    (row,) = out.segments
    assert (out.error, out.result.reward, out.replies, row.group_id, row.rollout_id) == (
        "",
        0.5,
        1,
        3,
        25,
    )
    assert row.reward == 0.5 and row.mask.sum() == len(row) - row.replies[0][0]


def test_a_chat_agent_that_raises_fails_and_one_that_met_a_limit_is_truncated():
    class Raises(Asks):
        def end(self):
            raise KeyError("tool")

    class Long(Asks):
        text = "long " * 200

    class Nothing(Asks):
        def end(self):
            return None

    assert "KeyError: 'tool'" in converse(Raises).error
    out = converse(Long)
    assert (out.error, out.result.truncated, out.result.reward, out.segments) == ("", True, 0.0, [])
    assert "Nothing.run returned the reward None" in converse(Nothing).error


def test_a_dead_engine_is_not_the_chat_agent_s_fault():
    engine = Remote(Scripted())
    engine.dead = True
    with pytest.raises(EngineFault):
        converse(Asks, engine)


def test_the_capture_server_listens_where_its_flags_say():
    runner = Runner(SimpleNamespace(**RUNNER | dict(server_host="0.0.0.0", linger=7.0)), [])
    assert (runner.server.host, runner.server.linger) == ("0.0.0.0", 7.0)


def test_an_engine_is_made_of_its_flags(monkeypatch):
    """With vLLM's names in place of vLLM; --engine_args overrides all of them."""
    made = dict(AsyncEngineArgs=dict, AsyncLLM=SimpleNamespace(from_engine_args=lambda args: args))
    fakes = SimpleNamespace(**made, WeightTransferConfig=dict)
    for name in ("vllm", "vllm.config", "vllm.engine", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    for name in (
        "vllm.config.weight_transfer",
        "vllm.engine.arg_utils",
        "vllm.v1.engine.async_llm",
    ):
        monkeypatch.setitem(sys.modules, name, fakes)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    monkeypatch.setattr(
        rollout, "bound", lambda group: None
    )  # else this process dies with its first engine
    cfg = Config(
        model="m", dtype="float32", seed=5, max_context=77, engine_memory=0.3, replay_experts=True
    )
    on_gpu, on_cpu = Engine(cfg, 2, cpu=False).llm, Engine(cfg, 2, cpu=True).llm
    assert on_gpu["gpu_memory_utilization"] == 0.3 and "gpu_memory_utilization" not in on_cpu
    said = [
        on_gpu[k]
        for k in ("model", "dtype", "seed", "max_model_len", "enable_return_routed_experts")
    ]
    assert said == ["m", "float32", 7, 77, True]
    cfg = Config(engine_args='{"seed": 9, "block_size": 32}', engine_tp=2)
    llm = Engine(cfg, 0, cpu=False).llm
    assert (llm["seed"], llm["block_size"], llm["tensor_parallel_size"]) == (9, 32, 2)
    assert llm["distributed_executor_backend"] == "mp"


class FakeRay:
    """Counts what `launch` asks of Ray."""

    def __init__(self):
        self.joined, self.made, self.util = None, [], self
        self.reserved, self.room = [], True

    def init(self, **args):
        self.joined = args

    def cluster_resources(self):
        return {"CPU": 64}

    def placement_group(self, bundles):
        self.reserved = bundles
        return SimpleNamespace(wait=lambda seconds: self.room)

    def available_resources(self):
        return {"CPU": 3.0}

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": n}} for n in (4, 60)] + [{"Alive": False}]

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="here:1")

    def remote(self, actor):
        def options(**place):
            return SimpleNamespace(
                remote=lambda *args: self.made.append((actor.__name__, place)) or actor.__name__
            )

        return SimpleNamespace(options=options)


@pytest.mark.parametrize("address", ["", "auto"])
def test_there_are_as_many_engines_and_runners_as_asked_on_a_cluster_or_on_this_node(
    monkeypatch, address
):
    monkeypatch.setattr(rollout, "ray", ray := FakeRay())
    monkeypatch.setattr(rollout, "visible_gpus", list)
    engines, _, joining = launch(
        Config(engines=3, engine_tp=2, runners=4, ray_address=address), [], None, 2, "/x"
    )
    assert engines == ["Engine"] * 3 and [name for name, _ in ray.made].count("Runner") == 4
    assert {place["num_cpus"] for name, place in ray.made if name == "Engine"} == {2}
    assert joining["address"] == "here:1"
    assert ray.reserved == [{"CPU": 2}] * 3 + [{"CPU": 1}] * 5
    assert [p["scheduling_strategy"].placement_group_bundle_index for _, p in ray.made] == list(
        range(8)
    )
    if address:
        assert ray.joined["address"] == "auto" and "num_cpus" not in ray.joined
    else:
        assert "address" not in ray.joined and ray.joined["num_cpus"] == 3 * 2 + 4 + 2


def test_a_cluster_without_room_is_refused_with_what_is_asked_and_what_is_free(monkeypatch):
    monkeypatch.setattr(rollout, "ray", ray := FakeRay())
    ray.room = False
    with pytest.raises(BadInput) as e:
        launch(Config(engines=3, engine_tp=2, runners=4, ray_address="auto"), [], None, 2, "/x")
    assert not ray.made and "--engines" in str(e.value) and "within 60 s" in str(e.value)
    assert str(e.value).splitlines()[-1].split() == ["CPU", "11", "3", "[4,", "60]"]
