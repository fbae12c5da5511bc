"""Generate: vLLM engines in Ray actors, the runners that play episodes, and the pool of groups.

`Engine` wraps one AsyncLLM: ids in; ids, log-probs, versions, experts and a digest out. `Runner` plays agents against engines.
`Rollouts` owns the prompts, the groups in flight, the finished rows and the ledger: with --max_lag 0 a batch is generated,
trained and refitted before the next one starts, else generation goes on while the trainer trains. Only an Engine's process
imports vllm, and a Runner's whose model has parsers. Nothing here knows of losses or of the trainer's model.

    pytest tests/test_rollout.py
"""

import asyncio
import bz2
import contextlib
import copy
import ctypes
import gzip
import inspect
import itertools
import json
import lzma
import math
import os
import re
import reprlib
import signal
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent import (
    BadInput,
    ChatAgent,
    Fault,
    Guest,
    Held,
    Reply,
    Result,
    Segment,
    Task,
    Trace,
    bad_input,
    bound,
    digest,
    load_agent,
    read_batch,
    told,
    write_batch,
)
from estimator import keeps
from server import IMAGES, As, BadRequest, Chat, Forest, In, Request, Server, read_chat, short

DEATHS, RUNNER_DEATHS = (
    5,
    20,
)  # of Engines during one batch, of Runners during one group, before the run ends
HOLDS = 3  # tries of a rollout whose agents' loop another one blocks
PLACE_TIMEOUT = 60  # seconds in which a cluster has to have room for all actors


class Engine:
    """One vLLM engine, a Ray actor. Closed to requests until its first refit has passed the probe (`open`)."""

    def __init__(self, cfg, index: int, cpu: bool):
        resource_tracker.ensure_running()  # in another group: it frees vLLM's shared memory when all that use it are dead
        os.setpgid(0, 0)
        self.bound = bound(os.getpid())  # else vLLM's core and workers outlive this process
        enter()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # with executor "uni": the worker lives inside EngineCore
        )
        if cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            if cfg.engine_tp > 1:  # a core for each worker
                os.environ.setdefault(
                    "VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(cfg.engine_tp)))
                )
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        import refit  # noqa: F401  registers the transport here; the worker imports it through worker_extension_cls

        args = dict(
            model=cfg.model, dtype=cfg.dtype, seed=cfg.seed + index, max_model_len=cfg.max_context
        )
        args |= dict(
            enforce_eager=cpu,
            enable_prefix_caching=True,
            enable_return_routed_experts=cfg.replay_experts,
        )
        args |= dict(logprobs_mode="processed_logprobs")  # what was sampled from, after temperature
        args |= dict(weight_transfer_config=WeightTransferConfig(backend="instar"))
        args |= dict(
            worker_extension_cls="refit.WorkerExtension", tensor_parallel_size=cfg.engine_tp
        )
        args |= dict(distributed_executor_backend="uni" if cfg.engine_tp == 1 else "mp")
        args |= dict(use_tqdm_on_load=False, disable_log_stats=True)  # nobody reads them
        if not cpu:
            args["gpu_memory_utilization"] = cfg.engine_memory
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args | json.loads(cfg.engine_args)))
        self.cfg, self.version, self.spans, self.released, self.in_group = (
            cfg,
            -1,
            {},
            asyncio.Event(),
            False,
        )
        self.tasks, self.replies = (
            {},
            defaultdict(asyncio.Queue),
        )  # running requests; finished ones of each Runner
        self.busy, self.working, self.since = 0.0, False, time.perf_counter()

    async def do(self, method: str, *args):
        """Call a method below. Where vLLM's core has died, so does this process, and Ray starts both again."""
        try:
            return await getattr(self, method)(*args)
        except Exception:
            if self.llm.errored:
                os._exit(1)
            raise

    async def joined(self) -> bool:
        """Whether it is in the refit group, which it is not when it has just been started (again). Asks vLLM's core as well."""
        await self.llm.is_paused()
        return self.in_group

    async def submit(self, runner: str, requests: list[tuple]) -> None:
        """Start requests, each the arguments of `generate`. Their replies are fetched with `collect`."""
        for name, *args in requests:
            self.tasks[name] = asyncio.create_task(self.answer(runner, name, args))

    async def answer(self, runner: str, name: str, args: list) -> None:
        try:
            reply = await self.do("generate", name, *args)
        except Exception as e:
            reply = e
        finally:
            del self.tasks[name]
        self.replies[runner].put_nowait((name, reply))

    async def collect(self, runner: str) -> list[tuple[str, Reply | Exception]]:
        """Wait for a reply to this Runner and return all that have finished since the last call."""
        replies = [await self.replies[runner].get()]
        while not self.replies[runner].empty():
            replies.append(self.replies[runner].get_nowait())
        return replies

    async def cancel(self, name: str) -> None:
        if name in self.tasks:
            self.tasks[name].cancel()

    async def generate(
        self,
        name: str,
        ids: list[int],
        max_tokens: int,
        known=0,
        temperature=None,
        stop=(),
        grammar=None,
    ) -> Reply:
        """Sample one reply to `ids`. Waits while the engine is closed; a pause keeps the request.

        name: unique among running requests; known: leading tokens whose expert rows the caller already has; temperature: None
        for --temperature; grammar: a dict for vLLM's StructuredOutputsParams, which the reply is kept to.
        """
        from vllm.sampling_params import StructuredOutputsParams

        await self.released.wait()
        params = dict(
            max_tokens=max_tokens,
            temperature=self.cfg.temperature if temperature is None else temperature,
            logprobs=0,
            detokenize=bool(stop),  # text is made here only to find the strings that end a reply
            stop=list(stop),
            structured_outputs=StructuredOutputsParams(**grammar) if grammar else None,
            # a refit routes the past anew, so where one may have come between, its rows are sent again
            routed_experts_prompt_start=known
            if self.cfg.replay_experts and not self.cfg.max_lag
            else 0,
        )
        self.spans[name] = [(0, self.version)]
        self.tick(True)
        try:
            done = (await self.output(name, ids, **params)).outputs[0]
        finally:
            spans = self.spans.pop(name)
            self.tick(bool(self.spans))
        tokens = np.asarray(done.token_ids, np.int32)
        logprobs = np.asarray(done.logprobs.logprobs, np.float32)
        versions, experts = stamp(spans, len(tokens)), done.routed_experts
        mark = digest(np.asarray(ids, np.int32), tokens, logprobs, versions)
        if (
            experts is not None and len(spans) > 1
        ):  # the refit routed its past anew, and vLLM gives the rows of before
            experts = (await self.once([*ids, *tokens[:-1].tolist()])).outputs[0].routed_experts
        return Reply(tokens, logprobs, versions, mark, done.finish_reason, experts)

    async def once(self, ids: list[int], **params):
        """vLLM's output of a request for one token after `ids`, at temperature 1."""
        name = f"once-{uuid.uuid4().hex}"
        return await self.output(
            name, ids, max_tokens=1, temperature=1.0, detokenize=False, **params
        )

    async def output(self, name: str, ids: list[int], **params):
        """vLLM's output of one request, when it has ended."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        # merged deltas would lose expert rows and blur versions
        params = SamplingParams(
            flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **params
        )
        # of --stale_kv: what older weights have cached is not for new requests
        salt = str(self.version) if self.cfg.stale_kv else None
        async for out in self.llm.generate(
            tokens_input(list(ids), cache_salt=salt), params, request_id=name
        ):
            pass
        return out

    async def score(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray | None, int]:
        """The probe, answered open or not: log-probs at temperature 1 of ids[1:] (float32 [T-1]), expert rows [T, L, K], and the
        engine's version."""
        out = await self.once(ids, prompt_logprobs=0)
        logprobs = [place[token].logprob for place, token in zip(out.prompt_logprobs[1:], ids[1:])]
        return np.asarray(logprobs, np.float32), out.outputs[0].routed_experts, self.version

    def tick(self, working: bool) -> None:
        """The time since the last tick was busy if the engine was working; from now on it is, or not."""
        now = time.perf_counter()
        self.busy += (now - self.since) * self.working
        self.since, self.working = now, working

    async def take_busy(self) -> float:
        """Seconds with a running request, pauses not counted, since the last call."""
        self.tick(self.working)
        busy, self.busy = self.busy, 0.0
        return busy

    async def join(self, init: dict) -> None:
        """Join the refit group with this engine's workers as ranks `rank`, `rank` + 1, … init: as `refit.group` takes it."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init))
        self.in_group = True

    async def pause(self) -> int:
        """Hold new requests back, let running ones end, or with --partial freeze them and note how many tokens each has; drop
        the KV cache. Returns the tokens of the contexts that it has to build again.

        With --stale_kv the cache stays, and what a frozen request samples later keeps the stamp of its context's version.
        """
        self.released.clear()
        rebuild = not self.cfg.stale_kv
        await self.llm.pause_generation(
            mode="keep" if self.cfg.partial else "wait", clear_cache=rebuild
        )
        if not self.llm.engine_core.outputs_queue.empty():
            raise RuntimeError(
                "engine: outputs were left in the queue at a pause, so token versions would be wrong"
            )
        if rebuild and not await self.llm.reset_prefix_cache():
            raise RuntimeError(
                "engine: the KV cache was not emptied at a pause, so stale entries would be served"
            )
        self.tick(False)
        states = self.llm.output_processor.request_states.values() if rebuild else []
        self.counts = {s.external_req_id: s.detokenizer.num_output_tokens() for s in states}
        return sum(self.counts.values()) + sum(len(s.prompt_token_ids) for s in states)

    async def begin(self) -> None:
        """Start the update. A request that ran meanwhile would be sampled from half of the weights, or end vLLM."""
        if not await self.llm.is_paused():
            raise RuntimeError("engine: it is not paused, so requests would run amid the refit")
        await self.llm.start_weight_update()

    async def receive(self, meta: dict) -> None:
        """Take one bucket from the refit group and load it."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.update_weights(WeightTransferUpdateRequest(meta))

    async def finish(self) -> list[list[int]]:
        """End the update; each worker's report of what it loaded."""
        await self.llm.finish_weight_update()
        return await self.llm.collective_rpc("refit_report")

    async def resume(self, version: int) -> None:
        """Weights are `version` from here on; frozen requests go on, each with a span that begins at its count."""
        self.version = version
        for name, count in self.counts.items():
            if name in self.spans:
                self.spans[name].append((count, version))
        self.tick(bool(self.spans))
        await self.llm.resume_generation()

    async def release(self) -> None:
        """The probe has passed: let new requests in."""
        self.released.set()


def stamp(spans: list[tuple[int, int]], n: int) -> np.ndarray:
    """int32 [n]: the version of each of n sampled tokens, from (first token, version) pairs in order."""
    versions = np.empty(n, np.int32)
    for first, version in spans:
        versions[first:] = version
    return versions


@dataclass
class Rollout:
    """One finished rollout. `segments` may be empty (a prompt too long); `error` is a traceback, else empty."""

    group_id: int
    rollout_id: int
    result: Result = field(default_factory=Result)
    segments: list[Segment] = field(default_factory=list)
    error: str = ""
    replies: int = 0
    other_ids: int = 0  # replies whose text encodes to other ids than were sampled: replay by text trains these wrongly
    counts: dict[str, int] = field(default_factory=dict)  # of the capture server, for the metrics
    seconds: float = 0.0
    rows: list[dict] = field(
        default_factory=list
    )  # in the pool, in the segments' place: what the trainer's plan needs


KNOWN = "result", "seconds", "replies", "other_ids", "counts"  # of a Rollout, in a batch


async def play(
    env, task: Task, chat: Chat, generate, cfg, call, group_id: int = 0, rollout_id: int = 0
) -> Rollout:
    """One episode of an Env. `generate(ids, max_tokens, known) -> Reply`; `call(method, *args,
    read)` as Guest.call."""
    name = type(env).__name__
    opening = await call(env.reset, task, read=partial(read_messages, f"{name}.reset returned"))
    trace = Trace(heard(chat, f"{name}.reset", opening))
    result, other_ids = Result(truncated=True), 0  # by a limit, unless the agent ends it
    for _ in range(cfg.max_turns):
        room = cfg.max_context - len(trace)
        if room < 1:
            break
        reply = await generate(trace.tokens, min(cfg.max_tokens, room), trace.known())
        trace.reply(reply)
        other_ids += chat.encode(chat.tokenizer.decode(reply.tokens)) != reply.tokens.tolist()
        step = partial(read_step, f"{name}.step returned")
        observation, earned = await call(env.step, chat.text(reply.tokens), read=step)
        result.turn_rewards += earned.turn_rewards
        result.info |= earned.info
        result.rewards |= earned.rewards
        if observation is None:
            result.truncated = False
            break
        trace.context(heard(chat, f"{name}.step", observation, trace.tokens[-1]))
    result.reward = number(
        sum(result.turn_rewards), f"{name}.step returned rewards of the sum", MOST
    )
    segments = [trace.segment(result, group_id, rollout_id)] if trace.replies else []
    return Rollout(
        group_id,
        rollout_id,
        result,
        segments,
        replies=len(trace.replies),
        other_ids=other_ids,
        counts={} if segments else {"rollouts/too_long": 1},
    )


# ---- what an agent returns, as plain data; each raises TypeError or ValueError that says what is
# wrong

MOST = 1e15  # of a reward's size: the squares of so many as a batch has still add up in float32
TAKEN = {"mean", "std", "groups_equal", "overlong"}  # metrics reward/…, which no named reward is


def number(value, what: str, most: float = math.inf) -> float:
    """`value` as a finite float of at most `most` in size."""
    try:
        several = getattr(value, "ndim", 0) or isinstance(value, np.complexfloating)
        if several or isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError
        found = float(value)
    except OverflowError:  # of a whole number
        found = math.inf
    except Exception:
        raise TypeError(f"{what} {brief(value)}, which is no number") from None
    if not math.isfinite(found):
        raise ValueError(f"{what} {found}, which is not finite")
    if abs(found) > most:
        raise ValueError(f"{what} {found:g}, which is not between -{most:g} and {most:g}")
    return found


def brief(value) -> str:
    """`value` as a short text, whatever its own methods do."""
    try:
        return reprlib.repr(value)
    except BaseException:
        return f"a {type(value).__name__}"


def truth(value, what: str) -> bool:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return bool(value)
    except Exception:  # as of an array with several entries
        raise TypeError(f"{what} {brief(value)}, which is neither true nor false") from None


def named(values, what: str) -> dict:
    """A dict with texts as names."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} {brief(values)}, which is no dict")
    if wrong := [name for name in values if not isinstance(name, str)]:
        raise TypeError(f"{what} a dict with the name {brief(wrong[0])}, which is no text")
    return {str.__str__(name): values[name] for name in values}


def read_messages(what: str, value) -> list[dict]:
    """Chat messages, or the text of the user's, as JSON's own types."""
    try:
        text = json.dumps(canonical(value)[0], ensure_ascii=False)
    except ValueError as e:
        raise ValueError(f"{what} messages that do not fit: {e}") from None
    return json.loads(text.encode("utf-8", "replace"))  # half a character cannot be encoded


def read_info(what: str, info) -> dict[str, float | str]:
    """Numbers for the metrics, and texts."""
    return {
        name: str.__str__(x) if isinstance(x, str) else number(x, f"{what} info[{name!r}]")
        for name, x in named(info, f"{what} the info").items()
    }


def read_rewards(what: str, rewards) -> dict[str, float]:
    """Named rewards."""
    found = named(rewards, f"{what} the rewards")
    if taken := TAKEN & set(found):
        raise ValueError(f"{what} a reward named {min(taken)!r}, as a metric is: rename it")
    return {name: number(x, f"{what} rewards[{name!r}]", MOST) for name, x in found.items()}


def read_step(what: str, answer) -> tuple[list[dict] | None, Result]:
    """(messages of the observation, None where the episode is done; what the step earned) of what
    Env.step returned."""
    if not isinstance(answer, tuple | list) or len(answer) != 4:
        raise TypeError(f"{what} {brief(answer)}, which is not (observation, reward, done, info)")
    observation, reward, done, info = answer
    reward, info = number(reward, f"{what} the reward", MOST), named(info, f"{what} the info")
    rewards = read_rewards(what, info.pop("rewards", {}))
    earned = Result(reward, [reward], rewards, read_info(what, info))
    if truth(done, f"{what} done as"):
        return None, earned
    return read_messages(what, observation), earned


def read_result(what: str, answer) -> Result:
    """What ChatAgent.run returned."""
    if not isinstance(answer, Result):
        return Result(number(answer, f"{what} the reward", MOST))
    try:
        if isinstance(turns := answer.turn_rewards, str | bytes | Mapping):
            raise TypeError
        turns = list(turns)
    except Exception:
        raise TypeError(f"{what} the turn_rewards {brief(turns)}, which are no list") from None
    return Result(
        number(answer.reward, f"{what} the reward", MOST),
        [number(x, f"{what} turn_rewards[{i}]", MOST) for i, x in enumerate(turns)],
        read_rewards(what, answer.rewards),
        read_info(what, answer.info),
        truth(answer.truncated, f"{what} truncated as"),
    )


class Line:
    """The way of a Runner's requests to one Engine. A Ray call costs more than sampling ten tokens: requests that wait go in one
    call, and one call that is always open brings back whatever has finished."""

    def __init__(self, engine):
        self.engine, self.name = engine, uuid.uuid4().hex
        self.outbox, self.waiting = [], {}
        self.sender = self.receiver = None

    async def generate(self, name: str, *asked) -> Reply:
        """Engine.generate, by place. Raises EngineFault when the engine or the way to it is broken."""
        future = self.waiting[name] = asyncio.get_running_loop().create_future()
        self.outbox.append((name, *asked))
        if not self.sender or self.sender.done():
            self.sender = asyncio.create_task(self.loop(self.send, self.outbox))
        if not self.receiver or self.receiver.done():
            self.receiver = asyncio.create_task(self.loop(self.receive, self.waiting))
        try:
            return await future
        except asyncio.CancelledError:
            self.outbox[:] = [request for request in self.outbox if request[0] != name]
            self.engine.cancel.remote(name)
            raise
        finally:
            del self.waiting[name]

    async def loop(self, step, work) -> None:
        """`step` while there is `work`; a broken engine fails every request that waits."""
        try:
            while work:
                await step()
        except Exception as e:
            self.outbox.clear()
            kind = (
                EngineLost if isinstance(e, ray.exceptions.ActorUnavailableError) else EngineFault
            )
            for future in self.waiting.values():
                if not future.done():
                    future.set_exception(kind(e))

    async def send(self) -> None:
        requests = self.outbox[:]
        self.outbox.clear()
        await self.engine.submit.remote(self.name, requests)

    async def receive(self) -> None:
        for name, reply in await self.engine.collect.remote(self.name):
            future = self.waiting.get(name)
            if future and not future.done():
                future.set_exception(EngineFault(reply)) if isinstance(
                    reply, Exception
                ) else future.set_result(reply)


class EngineFault(RuntimeError):
    """An engine could not answer: no fault of the agent."""


class EngineLost(EngineFault):
    """It has died. Ray starts it again, and it opens when it has the current weights."""


class Runner:
    """Plays many episodes at once, a Ray actor on CPU. engines: their names in Ray."""

    def __init__(self, cfg, engines: list[str]):
        from transformers import AutoTokenizer

        # by name: a handle among the arguments would be an object that Ray may have lost when it starts a Runner again
        self.cfg, self.lines = cfg, [Line(ray.get_actor(name)) for name in engines]
        enter()
        self.chat = Chat(AutoTokenizer.from_pretrained(cfg.model))
        self.agent = load_agent(cfg.agent, cfg.agent_cmd, cfg.reward)
        self.server = Server(os.path.basename(cfg.model), cfg.server_host, cfg.linger)
        self.calls = itertools.count()
        self.parse = self.grammar = None  # made when the first ChatAgent needs them
        self.closing = set()  # agents that close though nobody waits for them

    async def rollouts(
        self, tasks: list[Task], group_id: int, ids: list[int], *how
    ) -> list[Rollout]:
        """One rollout of each task, all at once."""
        return await asyncio.gather(
            *[self.rollout(t, group_id, i, *how) for t, i in zip(tasks, ids)]
        )

    async def rollout(
        self, task: Task, group_id: int, rollout_id: int, attempt: int, temperature=None
    ) -> Rollout:
        """Play one episode. A fault of the agent (it raises, is too slow, gives no number) comes back as `error`; an
        EngineFault is raised. Where another agent has blocked the loop of all it begins anew."""
        start, out = time.perf_counter(), Rollout(group_id, rollout_id)
        for _ in range(HOLDS):
            try:
                out = await self.episode(task, group_id, rollout_id, attempt, temperature)
                break
            except Held as e:
                out.error = str(e)
        out.seconds = time.perf_counter() - start
        return out

    async def episode(
        self, task: Task, group_id: int, rollout_id: int, attempt: int, temperature
    ) -> Rollout:
        """One try of `rollout`. Raises Held."""
        line, guest, out = self.lines[group_id % len(self.lines)], Guest(), None
        limit, broken, rerun = asyncio.timeout(self.cfg.episode_timeout), [], Counter()

        async def generate(ids, max_tokens, known, stop=(), grammar=None):
            for again in itertools.count():
                # of this process: another may have died
                name = f"{line.name}.{rollout_id}.{attempt}.{next(self.calls)}"
                asked = time.perf_counter()
                try:
                    return await line.generate(
                        name, ids, max_tokens, known, temperature, stop, grammar
                    )
                except EngineLost:  # the turn begins anew, and the time is not the agent's
                    rerun["requests/rerun"] += again == 0
                    await asyncio.sleep(1)
                    limit.reschedule(limit.when() + time.perf_counter() - asked)
                except EngineFault as e:
                    broken.append(e)
                    raise

        try:
            async with limit:
                # its methods may change what they are given, which all rollouts of a group share
                out = await self.play(guest, copy.deepcopy(task), generate, group_id, rollout_id)
            out.counts = out.counts | rerun
        except asyncio.CancelledError:
            raise
        except BaseException as e:
            if broken:
                raise broken[0] from None
            if isinstance(e, Held):
                raise
            error = told(e, guest.method)
            if limit.expired():
                await guest.held()
                late = f"it passed --episode_timeout {self.cfg.episode_timeout} s"
                error = (
                    f"{late}, at\n{guest.at}" if guest.at else f"{late} with the engine's replies"
                )
            out = Rollout(group_id, rollout_id, error=error, counts=rerun)
        finally:
            # in a task: an agent is closed also where this one is cancelled, and waits no more
            self.closing.add(closing := asyncio.create_task(guest.close()))
            closing.add_done_callback(self.closing.discard)
        if fault := await asyncio.shield(closing):
            out = Rollout(group_id, rollout_id, error=out.error or fault, counts=rerun)
        return out

    async def play(
        self, guest: Guest, task: Task, generate, group_id: int, rollout_id: int
    ) -> Rollout:
        """Make the agent, where its methods will run, and let it play."""
        methods = [getattr(self.agent, name, None) for name in ("run", "reset", "step")]
        agent = guest.agent = await guest.call(
            self.agent, loop=any(map(inspect.iscoroutinefunction, methods))
        )
        if isinstance(agent, ChatAgent):
            return await self.converse(guest, task, generate, group_id, rollout_id)
        return await play(
            agent, task, self.chat, generate, self.cfg, guest.call, group_id, rollout_id
        )

    async def converse(
        self, guest: Guest, task: Task, generate, group_id: int, rollout_id: int
    ) -> Rollout:
        """One rollout of a ChatAgent: it runs against the server, under a key of its own. What it raises is its fault, unless
        it had been told that a limit was reached."""
        if not self.parse:
            self.parse, self.grammar = parser(self.cfg, self.chat)
            self.server.start()
        cfg = self.cfg
        own = {"temperature": cfg.temperature, "top_p": 1.0, "top_k": -1}
        limits = cfg.max_tokens, cfg.max_context, own, cfg.max_turns
        forest = Forest(self.chat, generate, self.parse, *limits, self.grammar, cfg.preserve)
        task.api_key, task.model = self.server.open(forest), self.server.model
        host = self.server.host if self.server.host != "0.0.0.0" else ray.util.get_node_ip_address()
        task.base_url = f"http://{host}:{self.server.port}/r/{task.api_key}/v1"
        read = partial(read_result, f"{type(guest.agent).__name__}.run returned")
        try:
            result = await guest.call(guest.agent.run, task, read=read)
        except Fault:
            if not forest.truncated:
                raise
            result = Result(truncated=True)
        finally:
            await self.server.close(task.api_key)
        segments = forest.segments(result, group_id, rollout_id)
        sampled = [n.reply.tokens.tolist() for n in forest.nodes]
        other_ids = sum(self.chat.encode(self.chat.tokenizer.decode(ids)) != ids for ids in sampled)
        counts = forest.counts | (Counter() if segments else Counter([rowless(forest)]))
        return Rollout(
            group_id, rollout_id, result, segments, "", len(sampled), other_ids, dict(counts)
        )


def rowless(forest: Forest) -> str:
    """The metric that counts a rollout of a ChatAgent without a row, by its reason."""
    if forest.counts["server/constrained"]:
        return "rollouts/constrained"
    if forest.truncated:
        return "rollouts/too_long"
    return "rollouts/unread" if forest.nodes else "rollouts/no_request"


TOOL_PARSERS = {  # what a chat template holds -> vLLM's name; the first that fits
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|python_tag|>": "llama3_json",
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
}


def parser(cfg, chat: Chat):
    """Two functions, by vLLM's own parsers: (text, tools) -> (reasoning or None, text, [(the model's call id or "", name,
    arguments)]), and Request -> the grammar of its JSON schema or forced call for the engine, None where there is none.

    Importing them takes 14 s, which a model without tools and reasoning need not wait for. Raises ValueError.
    """
    tool, reasoning, template = cfg.tool_parser, cfg.reasoning_parser, chat.tokenizer.chat_template
    if tool == "auto":
        tool = next((name for mark, name in TOOL_PARSERS.items() if mark in template), "none")
    begun = chat.render([{"role": "user", "content": "?"}]).rstrip().endswith("<think>")
    if reasoning == "auto":
        known = "deepseek_r1" if begun else "glm45" if tool == "glm45" else "qwen3"
        reasoning = known if "<think>" in template else "none"

    def grammar(req: Request) -> dict | None:
        """Raises BadRequest for a schema of which no grammar can be made."""
        # where the prompt begins a thought, the thought is not to be JSON
        if cfg.constrained == "free" or begun or not (req.schema or req.tool_choice == "required"):
            return None
        if req.schema:
            import xgrammar

            try:
                xgrammar.Grammar.from_json_schema(text := json.dumps(req.schema))
            except (
                Exception
            ) as e:  # whatever its parser raises; the engine would call it a fault of its own
                raise BadRequest(f"the engine can keep to no such JSON schema: {e}") from e
            return {"json": text}
        tools = [t for t in req.tools if req.forced in ("", t["function"]["name"])]
        asked = (
            calls
            and tools
            and ChatCompletionRequest(messages=[], tools=tools, tool_choice="required")
        )
        tag = asked and calls(chat.tokenizer, asked.tools).get_structural_tag(asked)
        return {"structural_tag": tag.model_dump_json()} if tag else None

    calls = None
    if tool == reasoning == "none":
        return lambda text, tools: (None, text, []), grammar
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    try:
        thinks = (
            None
            if reasoning == "none"
            else ReasoningParserManager.get_reasoning_parser(reasoning)(chat.tokenizer)
        )
        calls = None if tool == "none" else ToolParserManager.get_tool_parser(tool)
    except KeyError as e:
        raise ValueError(
            f"--tool_parser {tool} --reasoning_parser {reasoning}: vLLM has no such parser ({e})"
        ) from e

    def parse(text: str, tools: list[dict]):
        request = ChatCompletionRequest(messages=[], tools=tools or None)
        try:
            # vLLM takes a reply without marks for a thought that was cut; that is so only where the prompt began it
            reads = thinks and (begun or "<think>" not in template or "think>" in text)
            thought, said = thinks.extract_reasoning(text, request) if reads else (None, text)
            if not calls or not tools:
                return thought, said or "", []
            found = calls(chat.tokenizer, request.tools).extract_tool_calls(said or "", request)
            # an id that the model said itself, as Kimi's, is what its template shows again
            named = [(c.id if c.id in said else "", c.function) for c in found.tool_calls]
            return thought, found.content or "", [(own, f.name, f.arguments) for own, f in named]
        except Exception:  # what a policy samples may break a parser: it stays text
            return None, text, []

    return parse, grammar


@dataclass
class Group:
    """A prompt on its way through the pool."""

    id: int  # its place in the endless order of prompts
    tries: int = 0  # times that it was dropped and queued again
    version: int = 0  # the engines', when it started
    rollouts: list[Rollout] = field(default_factory=list)  # once it has finished
    task: asyncio.Task | None = None


class Rollouts:
    """The pool of groups, a Ray actor. It owns the order of prompts, what is in flight, the finished rows and the ledger.

    At most (1 + max_lag) · prompts · oversample groups are running, finished or being trained, so that none can become more
    than max_lag versions old before its turn. A group that ends without being trained is replaced at once.
    """

    def __init__(self, cfg, rows: list[dict], runners: list, least: int, state: dict | None = None):
        """least: rollouts that a group needs to be trained; state: of a checkpoint, as `snapshot` gave it."""
        enter()
        self.cfg, self.rows, self.runners, self.least = cfg, rows, runners, least
        self.capacity = int((1 + cfg.max_lag) * cfg.prompts * cfg.oversample)
        self.version, self.position, self.batches, self.next_row, self.fault = 0, 0, 0, 0, None
        self.queue = []  # groups to start before new ones
        self.groups = {}  # id -> running or finished group
        self.handed = []  # groups that are being trained
        # ids; every other one before position is in the above, or was trained
        self.ended = {"filtered": [], "lost": []}
        self.store = {}  # row id -> row: a dead Runner loses nothing
        self.changed = asyncio.Event()
        if state:
            self.restore(state)
        self.chat = None  # of demonstrations, which no engine samples
        if cfg.estimator == "sft":
            from transformers import AutoTokenizer

            self.chat = Chat(AutoTokenizer.from_pretrained(cfg.model))
        self.files = sorted(Path(cfg.train_from).glob("*.jsonl")) if cfg.train_from else []
        self.new_batch()

    def new_batch(self) -> None:
        self.counts = Counter(
            {"rollouts/failed": 0, "groups/retried": 0, "groups/lost": 0, "groups/filtered": 0}
        )
        self.counts.update(dict.fromkeys(("groups/rerun", "requests/rerun", "lag/dropped"), 0))
        self.first_error = ""

    def fill(self) -> None:
        """Start groups while there is capacity and data."""
        while len(self.groups) + len(self.handed) < self.capacity:
            if self.queue:
                group = self.queue.pop(0)
            elif self.cfg.data_epochs and self.position >= self.cfg.data_epochs * len(self.rows):
                return
            else:
                group = Group(self.position)
                self.position += 1
            self.groups[group.id], group.version = group, self.version
            group.task = asyncio.create_task(self.work(group))

    async def work(self, group: Group) -> None:
        """A group from its start to its end, or to its place among the finished ones."""
        try:
            group.rollouts = await self.play(group)
        except Exception as e:
            self.fault = self.fault or e
        if not group.rollouts:
            self.end(group, "lost")
        elif self.filters(group):
            self.end(group, "filtered")
        self.fill()
        self.changed.set()

    def filters(self, group: Group) -> bool:
        """--dynamic_sampling: whether the group's rewards teach nothing; a batch takes all once --max_filtered is reached."""
        if self.cfg.dynamic_sampling == (-math.inf, math.inf):
            return False
        room = self.counts["groups/filtered"] < self.cfg.max_filtered * self.cfg.prompts
        rewards = [out.result.reward for out in group.rollouts]
        return room and not keeps(rewards, self.cfg.samples, *self.cfg.dynamic_sampling)

    def end(self, group: Group, how: str) -> None:
        """The group will not be trained."""
        self.ended[how].append(group.id)
        self.counts["groups/" + how] += 1
        self.forget(group)

    def forget(self, group: Group) -> None:
        self.groups.pop(group.id, None)
        for row in [row for out in group.rollouts for row in out.rows]:
            del self.store[row["id"]]

    def drop_stale(self, version: int) -> None:
        """Groups that are too old for a batch of this version start again, each at most twice."""
        for group in [g for g in self.groups.values() if version - g.version > self.cfg.max_lag]:
            if not group.rollouts:
                group.task.cancel()
            self.counts["lag/dropped"] += 1
            if group.tries == 2:
                self.end(group, "lost")
            else:
                self.forget(group)
                self.queue.append(Group(group.id, group.tries + 1))

    async def play(self, group: Group) -> list[Rollout]:
        """All rollouts of one prompt that did not fail; none when too few are left, twice. Of sft: its demonstration."""
        cfg, at = self.cfg, order(self.cfg, len(self.rows), group.id)
        row = self.rows[at]
        if self.chat:
            try:
                found = await demonstrate(
                    self.chat, row, cfg.prompt_key, cfg.label_key, cfg.max_context
                )
            except ValueError as e:  # what the template cannot show, for one
                raise BadInput(f"--data: row {at}: {e}") from None
            result = Result(
                truncated=not found or any(s.truncated for s in found)
            )  # --max_context has cut replies off
            replies, rows = sum(len(s.replies) for s in found), [self.keep(s) for s in found]
            counts = {} if found else {"rollouts/too_long": 1}
            return [Rollout(group.id, group.id, result, replies=replies, counts=counts, rows=rows)]
        ids = [group.id * cfg.samples + i for i in range(cfg.samples)]
        for attempt in range(2):
            tasks = self.tasks(row, [i * 2 + attempt for i in ids])
            outs = await self.rollouts(tasks, group.id, ids, 2 * group.tries + attempt)
            good = [o for o in outs if not o.error]
            self.count_failed([o.error for o in outs if o.error])
            if len(good) >= self.least:
                for out in good:
                    out.rows, out.segments = [self.keep(segment) for segment in out.segments], []
                return good
            self.counts["groups/retried"] += attempt == 0
            group.version = self.version  # it begins anew
        return []

    async def rollouts(self, tasks: list[Task], at: int, *how) -> list[Rollout]:
        """Runner.rollouts. Ray starts a Runner that died again, and what it played begins anew."""
        runner = self.runners[at % len(self.runners)]
        for _ in range(RUNNER_DEATHS):
            try:
                return await (outs := runner.rollouts.remote(tasks, at, *how))
            except asyncio.CancelledError:
                if isinstance(outs, ray.ObjectRef):
                    ray.cancel(outs)
                raise
            except ray.exceptions.RayActorError:
                self.counts["groups/rerun"] += 1
                await runner.__ray_ready__.options(max_task_retries=-1).remote()
        raise RuntimeError(f"a Runner has died {RUNNER_DEATHS} times while it played one group")

    def tasks(self, row: dict, seeds: list[int]) -> list[Task]:
        """One task of a row for each seed. Its messages are the row's, with a text for each
        content."""
        cfg, tools, label = self.cfg, tools_of(row), column(row, self.cfg.label_key)
        messages, turns, _ = canonical(column(row, cfg.prompt_key))
        # a tool's picture is for whoever can see it
        messages = [m if t.images else m | {"content": t.text} for m, t in zip(messages, turns)]
        return [
            Task(messages, label, row, cfg.seed * 1_000_003 + seed, tools=tools) for seed in seeds
        ]

    async def evaluate(self, rows: list[dict]) -> list[dict]:
        """Play each row --eval_samples times: the row's place, reward, error and versions of each rollout."""
        cfg, some = self.cfg, asyncio.Semaphore(self.cfg.prompts)

        async def several(at: int, row: dict) -> list[Rollout]:
            # below 0, as no id of a rollout that is trained
            ids = [-1 - at * cfg.eval_samples - i for i in range(cfg.eval_samples)]
            async with some:
                return await self.rollouts(self.tasks(row, ids), at, ids, 0, cfg.eval_temperature)

        outs = [
            o
            for group in await asyncio.gather(*map(several, range(len(rows)), rows))
            for o in group
        ]
        versions = [
            {int(v) for s in o.segments for v in np.unique(s.versions[s.mask])} for o in outs
        ]
        return [
            dict(row=o.group_id, reward=o.result.reward, error=o.error, versions=v)
            for o, v in zip(outs, versions)
        ]

    def count_failed(self, errors: list[str]) -> None:
        self.counts["rollouts/failed"] += len(errors)
        self.first_error = self.first_error or next(iter(errors), "")
        failed = self.counts["rollouts/failed"]
        if failed > self.cfg.max_failed * self.cfg.prompts * self.cfg.samples:
            told = f"{failed} rollouts of one batch failed, --max_failed {self.cfg.max_failed}; the first:"
            raise RuntimeError(f"{told}\n{self.first_error}")

    def keep(self, segment: Segment) -> dict:
        """Keep a row, whose arrays stay where Ray has put what the Runner returned; what the plan needs to know of it."""
        self.store[self.next_row] = segment
        self.next_row += 1
        return {"id": self.next_row - 1, "tokens": len(segment), "trained": int(segment.mask.sum())}

    def choose(self) -> list[Group]:
        """The oldest finished groups, one batch of them, if the others can still be trained in time; else none yet.

        In time: one batch a version from here on, the oldest first. Surplus groups of --oversample are not waited for.
        """
        alive = sorted(self.groups.values(), key=lambda g: (g.version, g.id))
        chosen = [g for g in alive if g.rollouts][: self.cfg.prompts]
        if all(g.rollouts for g in alive):
            return chosen  # nothing is running that could be waited for
        rest = [g for g in alive if g not in chosen]
        turn = [
            self.version + 1 + i // self.cfg.prompts for i in range(len(rest))
        ]  # the version that would train each
        late = sum(at - g.version > self.cfg.max_lag for at, g in zip(turn, rest))
        surplus = self.capacity - (1 + self.cfg.max_lag) * self.cfg.prompts
        return chosen if len(chosen) == self.cfg.prompts and late <= surplus else []

    async def next_batch(self) -> dict | None:
        """Wait for a batch of groups. None when the data has ended.

        Returns rollouts (one entry each: what rewards and statistics need), rows (one per segment: id, rollout, length,
        trained tokens), the counts of what failed and the version. The rows themselves are fetched with `fetch`.
        """
        if self.cfg.train_from:
            return self.read_next()
        self.drop_stale(self.version)
        self.fill()
        while not self.fault and not (groups := self.choose()) and self.groups:
            self.changed.clear()
            await self.changed.wait()
        if self.fault:
            raise self.fault
        if not groups:
            return None
        self.handed = [self.groups.pop(g.id) for g in groups]
        self.drop_stale(self.version + 1)
        batch = self.entries(sorted(groups, key=lambda g: g.id))
        rollouts = batch["rollouts"]
        batch |= {
            "counts": {"rollouts/finished": len(rollouts)} | self.counts,
            "first_error": self.first_error,
            "version": self.version,
        }
        batch["counts"] |= sum((Counter(o["counts"]) for o in rollouts), Counter())
        self.new_batch()
        self.batch, self.batches = batch, self.batches + 1
        if self.cfg.save_rollouts:
            self.save(f"{self.batches:08d}")
        return batch

    def entries(self, groups: list[Group]) -> dict:
        """Groups as `rollouts` and `rows` of a batch."""
        rollouts = [o for g in groups for o in g.rollouts]
        return {
            "rollouts": [
                {"group": o.group_id, "id": o.rollout_id} | {k: vars(o)[k] for k in KNOWN}
                for o in rollouts
            ],
            "rows": [row | {"rollout": i} for i, o in enumerate(rollouts) for row in o.rows],
        }

    def read_next(self) -> dict | None:
        """The next batch of --train_from."""
        if self.position == len(self.files):
            return None
        batch, segments = read_batch(self.files[self.position])
        for row, segment in zip(batch["rows"], segments):
            row |= self.keep(segment)
        self.position += 1
        return batch

    def save(self, name: str) -> str:
        """Write the batch that was handed out last to <out>/rollouts; returns the path of its .jsonl."""
        path = Path(self.cfg.out, "rollouts", f"{name}.jsonl")
        write_batch(path, self.batch, self.fetch([row["id"] for row in self.batch["rows"]]))
        return str(path)

    def fetch(self, ids: list[int]) -> list[Segment]:
        return [self.store[i] for i in ids]

    def refitted(self, version: int) -> None:
        """The batch was trained and the engines have the weights of `version`: forget its rows, start other groups."""
        for group in self.handed:
            self.forget(group)
        self.handed, self.version = [], version
        if self.cfg.train_from:
            self.store.clear()
        else:
            self.fill()

    def snapshot(self) -> dict:
        """The ledger and the finished groups as a batch with their `segments`, for a checkpoint: a
        group is its id, tries and version. What is running starts again after it."""
        again = [g for g in self.groups.values() if not g.rollouts] + self.queue
        # a run may end between a batch and its training
        finished = [g for g in [*self.handed, *self.groups.values()] if g.rollouts]
        found = self.entries(finished)
        return found | {
            "version": self.version,
            "position": self.position,
            "batches": self.batches - bool(self.handed),
            "ended": self.ended,
            "queue": [(g.id, g.tries) for g in again],
            "groups": [(g.id, g.tries, g.version) for g in finished],
            "segments": self.fetch([row["id"] for row in found["rows"]]),
        }

    def restore(self, state: dict) -> None:
        """Go on from a `snapshot`."""
        self.version, self.position, self.batches = (
            state["version"],
            state["position"],
            state["batches"],
        )
        self.ended = state["ended"]
        self.queue = [Group(at, tries) for at, tries in state["queue"]]
        self.groups = {at: Group(at, tries, version) for at, tries, version in state["groups"]}
        rollouts = []
        for entry in state["rollouts"]:
            how = {name: entry[name] for name in KNOWN}
            rollouts.append(Rollout(entry["group"], entry["id"], **how))
            self.groups[entry["group"]].rollouts.append(rollouts[-1])
        for row, segment in zip(state["rows"], state["segments"]):
            rollouts[row["rollout"]].rows.append(self.keep(segment))


PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def load_rows(data: str, prompt_key: str, flag: str = "--data") -> list[dict]:
    """All rows of a file or a hub dataset, just as it has them; raises BadInput naming the flag,
    the file and the bad row.

    jsonl and json arrive as json.loads gives them, parquet and a dataset as their schema says,
    without the nulls that Arrow puts into prompts and tools.
    """
    name = f"{flag} {data}"
    with bad_input(name):
        rows = read_rows(data, {prompt_key, "tools"})
        if not rows:
            raise ValueError("there are no rows")
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadInput(f"{name}: row {i} is no JSON object but {str(row)[:60]!r}")
        if not column(row, prompt_key):
            if i or column(row, prompt_key) is not None:
                fix = "fill it in, or set --prompt_key"
            else:
                fix = f"only {list(row)}; set --prompt_key"
            raise BadInput(f"{name}: row {i} has no {prompt_key!r}; {fix}")
    return rows


def read_rows(data: str, clean: set[str]) -> list:
    """Rows of a file by its suffix, in either case, or of the split "train" of a hub dataset or a
    folder like one."""
    root, kind = os.path.splitext(data.lower())
    packed = PACKED.get(kind)
    kind = os.path.splitext(root)[1] if packed else kind
    text = kind in (".jsonl", ".json")
    if (text or kind == ".parquet" and not packed) and not os.path.isdir(data):
        if not os.path.isfile(data):
            raise ValueError("there is no such file")
        if os.path.getsize(data) == 0:
            raise ValueError("the file is empty")
        return read_json(data, packed or open) if text else read_parquet(data, clean)
    if os.path.isfile(data):
        kinds = "jsonl, json (each also as gz, bz2 or xz) and parquet"
        raise ValueError(f"a file is read by its suffix, which is to be one of {kinds}")
    if not os.path.isdir(data) and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data):
        raise ValueError("there is no such file, and no dataset of the hub has such a name")
    return read_dataset(data, clean)


def read_json(path: str, opened=open) -> list:
    """Rows of a file with a JSON object on each line or with one list of them, as json.loads gives
    them."""
    rows = []
    with opened(path, "rb") as file:
        for n, line in enumerate(file, 1):
            if not rows and line.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
                return json.loads(line + file.read())
            try:
                if line.strip():
                    rows.append(json.loads(line))
            except json.JSONDecodeError as e:
                told = f"line {n} is no JSON object ({e.msg}, column {e.colno})"
                raise ValueError(
                    f"{told}; it takes one on each line, or one list of them"
                ) from None
            except (ValueError, RecursionError) as e:
                raise ValueError(f"line {n}: {e}") from None
    return rows


def read_parquet(path: str, clean: set[str]) -> list[dict]:
    from pyarrow.parquet import read_table

    return arrow_rows(read_table(path, partitioning=None), clean)


def read_dataset(name: str, clean: set[str]) -> list:
    """Rows of a hub dataset, or of a folder that is laid out as one, as the schema that it declares
    says. Of one that is made of json files and declares none the files are read, since `datasets`
    would infer a schema."""
    from datasets import DownloadManager, disable_progress_bars, load_dataset, load_dataset_builder
    from datasets.exceptions import DatasetGenerationError
    from datasets.packaged_modules.json.json import Json

    disable_progress_bars()
    builder = load_dataset_builder(name)
    if isinstance(builder, Json):
        with tempfile.TemporaryDirectory() as fresh:  # without what it once inferred
            builder = load_dataset_builder(name, cache_dir=fresh)
        if not builder.info.features and not builder.config.field:
            splits = builder.config.data_files
            if "train" not in splits:
                raise ValueError(f"it has no split 'train', only {[str(s) for s in splits]}")
            paths = DownloadManager(name).download_and_extract(list(splits["train"]))
            return [row for path in paths for row in read_json(path)]
    try:
        return arrow_rows(load_dataset(name, split="train").with_format("arrow")[:], clean)
    except DatasetGenerationError as e:
        raise (e.__cause__ or e) from None


def arrow_rows(table, clean: set[str]) -> list[dict]:
    """Rows of an Arrow table. clean: dotted names of what loses the nulls that Arrow fills objects
    up with."""
    columns, roots = [], clean | {name.partition(".")[0] for name in clean}
    for kind, values in zip(table.schema, table.columns):
        values = values.to_pylist(maps_as_pydicts="strict")
        if kind.name in roots or "arrow.json" in str(kind.type):
            values = [native(value, kind.type, clean, kind.name) for value in values]
        columns.append(values)
    return [dict(zip(table.column_names, row)) for row in zip(*columns)]


def native(value, kind, clean: set[str], name: str, drop: bool = False):
    """A value of the Arrow type `kind`, its texts of JSON read. Where a null stands for "there is
    none", and not for what somebody has written, it is in an entry of a struct; those are dropped
    in `clean` columns."""
    import pyarrow as pa

    drop = drop or name in clean
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(kind):
        kept = [entry for entry in kind if not drop or value[entry.name] is not None]
        return {
            e.name: native(value[e.name], e.type, clean, f"{name}.{e.name}", drop) for e in kept
        }
    if pa.types.is_map(kind):
        return {k: native(v, kind.item_type, clean, name, drop) for k, v in value.items()}
    if pa.types.is_nested(kind):
        return [native(v, kind.value_type, clean, name, drop) for v in value]
    return value


def column(row: dict, key: str):
    """The value of a column; of a.b, where no column has that name, entry b of column a. None where
    there is none."""
    if key in row:
        return row[key]
    for name in key.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def tools_of(row: dict) -> list[dict]:
    """The function schemas of a row, which may be written as a text of JSON."""
    tools = row.get("tools") or []
    return json.loads(tools) if isinstance(tools, str) else tools


def check_data(cfg, flag: str, data: str, agent: Callable | None = None) -> list[dict]:
    """The rows of --data or --eval_data. agent: what makes an agent, where --agent_cmd has to carry each prompt.

    Raises BadInput with the flag, the file, the row and the fix.
    """
    name, labels, rows = f"--{flag} {data}", 0, load_rows(data, cfg.prompt_key, f"--{flag}")
    for i, row in enumerate(rows):
        labelled = column(row, cfg.label_key) is not None
        labels += labelled
        with bad_input(f"{name}: row {i}"):
            messages, turns, _ = canonical(column(row, cfg.prompt_key), tools_of(row))
            if not any(t.text or t.role == "assistant" and t.calls for t in turns):
                raise ValueError(f"its {cfg.prompt_key!r} has no text; fill it in")
            if cfg.estimator != "sft":
                begun(turns)
            elif not labelled and not any(t.role == "assistant" for t in turns):
                lack = f"no assistant message and no {cfg.label_key!r} to learn"
                raise BadInput(f"{name}: row {i} has {lack}")
        if agent and cfg.agent_cmd:
            try:
                agent().prompt(messages)
            except BadInput as e:
                raise BadInput(f"{name}: row {i}: {e}") from None
    if not labels and cfg.label_key != "label":
        fix = f"the first has only {list(rows[0])}; set --label_key"
        raise BadInput(f"{name}: no row has a {cfg.label_key!r}, {fix}")
    return rows


@lru_cache(4)
def permutation(seed: int, passes: int, n: int) -> np.ndarray:
    return np.random.default_rng([seed, passes]).permutation(n)


def order(cfg, n: int, position: int) -> int:
    """The row at a position of the endless order of n rows: a seeded shuffle of each pass, or without --shuffle the file's."""
    passes, at = divmod(position, n)
    return int(permutation(cfg.seed, passes, n)[at]) if cfg.shuffle else at


def canonical(prompt, tools=()) -> tuple[list[dict], list[In | As], list[dict]]:
    """Messages of a row, an Env or a demonstration, with what `read_chat` makes of them and of the
    tools, as it does of a client's: (messages in JSON's own types, a turn for each, function
    schemas).

    prompt: what a user says, or chat messages. Raises ValueError, which names the message and what
    is wrong with it.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    try:
        messages = None if isinstance(prompt, (dict, bytes)) else list(prompt)
    except TypeError:
        messages = None
    if messages is None:
        raise ValueError(f"{brief(prompt)} is neither a text nor a list of chat messages")
    if messages and not tools and all(map(is_plain, messages)):
        turns = [
            As(m["content"], None, (), ())
            if m["role"] == "assistant"
            else In(m["role"], m["content"])
            for m in messages
        ]
        return messages, turns, []
    try:
        text = json.dumps([messages, tools], default=as_json, ensure_ascii=False)
        messages, tools = json.loads(text.encode(errors="replace"))  # no half of a surrogate pair
    except (TypeError, RecursionError) as e:
        raise ValueError(f"these messages are no JSON: {e}") from None
    for i, m in enumerate(messages):
        parts = m.get("content") if isinstance(m, dict) and m.get("role") != "tool" else None
        parts = parts if isinstance(parts, list) else []
        kinds = [p.get("type") for p in parts if isinstance(p, dict)]
        if any(kind in IMAGES for kind in kinds):
            raise ValueError(f"messages[{i}] holds an image: models read text only so far")
    request = read_chat({"messages": messages, "tools": tools}, {})
    return messages, request.turns, request.tools


def as_json(value):
    """What json does not know: numpy's scalars and arrays, else a text, as of a date that no
    template reads."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def is_plain(m) -> bool:
    """Whether a message is its own canonical form: a text that somebody says."""
    return (
        type(m) is dict
        and m.keys() == {"role", "content"}
        and m["role"] in ("system", "user", "assistant")
        and type(m["content"]) is str
        and (m["content"].isascii() or not re.search("[\ud800-\udfff]", m["content"]))
    )


def begun(turns: list[In | As]) -> str:
    """What the assistant says at the end of messages: the text that the policy goes on from, ""
    where there is none. Raises ValueError where it cannot."""
    *before, last = turns
    if last.role != "assistant":
        return ""
    if last.calls or last.reasoning or not before:
        lack = "holds more than text" if before else "is the only one"
        raise ValueError(f"the last message is the assistant's and {lack}: no reply can follow it")
    return last.text


# of a message, what its canonical form says; all else that a template may ask for stays as it is
READ = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "function_call")
READ += ("tool_call_id", "provider_specific_fields")


def heard(chat: Chat, method: str, prompt, last: int | None = None) -> list[int]:
    """Ids of the messages that a method of an Env returned: a whole prompt, or what follows a reply
    whose `last` id is given. Where they end with the assistant the policy goes on from its text, as
    it does for a client. Raises ValueError that names the method."""
    try:
        messages, turns, _ = canonical(prompt)
        text, forest = begun(turns), Forest(chat, None, None, 0, 0, {})
        told = [
            {k: v for k, v in m.items() if k not in READ and v is not None} | forest.message(t)
            for m, t in zip(messages, turns)
        ]
        told = told[: len(told) - (turns[-1].role == "assistant")]
        ids = chat.opening(told) if last is None else chat.following(told, last)[0]
    except ValueError as e:
        raise ValueError(f"{method} returned messages that do not fit: {e}") from None
    return ids + chat.encode(chat.plain(text))


def spoken(chat: Chat, messages: list[dict], tools: list[dict]) -> str:
    """The text of the assistant's last turn, as the template writes it: all between the prompt and what ends the turn."""
    prompt, whole, last = (
        chat.render(messages[:-1], tools),
        chat.render(messages, tools),
        messages[-1],
    )
    if whole.startswith(prompt):
        return re.sub(rf"(?:{chat.special.pattern})\s*\Z", "", whole[len(prompt) :])
    if last.get("tool_calls"):
        raise BadInput(
            "the chat template changes a prompt that is answered: tool calls cannot be demonstrated"
        )
    if prompt.rstrip().endswith("<think>"):
        return chat.plain(f"{last.get('reasoning_content') or ''}\n</think>\n\n{last['content']}")
    return chat.plain(last["content"])


async def demonstrate(
    chat: Chat, row: dict, prompt_key: str, label_key: str, max_context: int
) -> list[Segment]:
    """Training rows of one demonstration, as if the policy had sampled what the assistant says in it: the text that the chat
    template gives each of its turns, and the token that ends a turn. Several text parts alone are encoded one by one.

    row: chat messages under `prompt_key`; where they end with the user, the label is the reply. A template that rewrites the
    past begins a new row, as in a rollout; whole replies beyond max_context are cut off. Raises ValueError without a reply.
    """
    prompt, label, tools = column(row, prompt_key), column(row, label_key), tools_of(row)
    messages, turns, schemas = canonical(prompt, tools)
    if turns[-1].role != "assistant" and label is not None:
        answer = {"role": "assistant", "content": str(label)}
        messages, turns, schemas = canonical([*messages, answer], tools)
    asked, shown = (
        {"role": "user", "content": "?"},
        {"role": "tool", "content": "?", "tool_call_id": short("")},
    )
    ends = {
        called: chat.following([shown if called else asked], -1)[0][:1] for called in (False, True)
    }  # GLM's differ
    now = None  # the assistant's turn at hand, as a message and in canonical form

    async def generate(ids, *_):
        parts, more = (
            now[0].get("content"),
            now[1].calls or now[1].reasoning,
        )  # which only the template can write
        several = isinstance(parts, list) and len(parts) > 1 and not more
        several = several and all(isinstance(p.get("text"), str) for p in parts)
        texts = [chat.plain(p["text"]) for p in parts] if several else [spoken(chat, *told)]
        tokens = np.asarray(
            [i for text in texts for i in chat.encode(text)] + ends[bool(now[1].calls)], np.int32
        )
        logprobs, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
        return Reply(
            tokens, logprobs, versions, digest(np.asarray(ids), tokens, logprobs, versions), "stop"
        )

    def parse(text, tools):
        return now[1].reasoning, now[1].text, [("", c.name, c.arguments) for c in now[1].calls]

    forest = Forest(chat, generate, parse, 1, 1 << 30, {})
    for at, said in enumerate(turns):
        if said.role == "assistant":
            req = Request("chat", "", turns[:at], {}, False, 0, tools=schemas)
            told = [forest.message(t) for t in turns[: at + 1]], schemas
            now = messages[at], said
            (node,) = forest.answer(req)
            await node.task
            forest.left(node, True, 0)
            node.turn = said  # with the ids that the demonstration's tool results name
            forest.calls |= {c.id: (short(c.id), c.name) for c in said.calls}
    rows = [s.cut(max_context) for s in forest.segments(Result(), 0, 0)]
    if not forest.nodes:
        raise BadInput(f"a demonstration without a reply of the assistant: {str(row)[:200]}")
    return [s for s in rows if len(s)]


# Ray puts its driver's working directory first into the path of the actors, where a user may have an agent.py or a loss.py:
# it is started in this one
HERE = os.path.dirname(os.path.abspath(__file__))
# of Ray's own, what in the environment would make another cluster, or a part of one, of the Ray that is started here
OTHER_RAY = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_REDIS_ADDRESS", "RAY_NAMESPACE")
OTHER_RAY += ("RAY_TMPDIR", "RAY_RUNTIME_ENV_HOOK", "RAY_GCS_SERVER_PORT")


@contextlib.contextmanager
def undisturbed():
    """A signal waits for the end of the block, and nobody else takes it: Ray, interrupted while it starts, leaves processes
    behind, and takes SIGTERM for itself."""
    came, kinds = [], (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda kind, _: came.append(kind)) for kind in kinds]
    try:
        with mock.patch("signal.signal"):
            yield
    finally:
        for kind, handler in zip(kinds, before):
            signal.signal(kind, handler)
    if came:
        signal.raise_signal(came[0])


def start_ray(gpus: list[str], **how) -> None:
    """Start a Ray of this run's own on this node, with these GPUs, whatever the environment says of another one."""
    with undisturbed(), contextlib.chdir(HERE), mock.patch.dict(os.environ):
        for name in OTHER_RAY:
            os.environ.pop(name, None)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        ray.init(**how)


def join_ray(address: str, **how) -> None:
    """Join the Ray cluster at `address`. Raises BadInput where there is none."""
    # of `ray job submit`, whose variables this process has already; Ray would refuse ours beside them
    merged = mock.patch.dict(os.environ, RAY_OVERRIDE_JOB_RUNTIME_ENV="1")
    try:
        with mock.patch("signal.signal"), contextlib.chdir(HERE), merged:
            ray.init(address=address, **how)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as e:
        raise BadInput(f"--ray_address {address}: no cluster to join there ({e})") from e


def enter() -> None:
    """What each actor does first. It ends with its node's raylet, since Ray's own end of a worker may hang for ever. It goes to
    the folder where training was started, if this node has it: relative paths of agents are of there."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{os.getppid()}/comm").read_text() == "raylet\n":  # else a test's process
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.chdir(os.environ.get("INSTAR_START", "."))


def launch(cfg, rows: list[dict], state: dict | None, least: int, scratch: str):
    """Start or join Ray and create the actors; returns (engines, rollouts handle, how other ranks join: ray.init arguments).

    On one node Ray gets the GPUs that torchrun's ranks do not use, and the folder `scratch` for its logs and all temporary files.
    Engines load while the caller builds its model. Raises BadInput where there is no cluster, or no room.
    """
    cfg = SimpleNamespace(
        **vars(cfg)
    )  # actors need the values, not the module that defines the class
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "INSTAR_START": os.getcwd(),
    }
    gpus = visible_gpus()[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :]
    playing = cfg.estimator != "sft" and not cfg.train_from  # else nothing is sampled
    need = playing * cfg.engines * cfg.engine_tp
    shared = dict(
        namespace=f"instar-{os.getpid()}-{time.time_ns()}",
        log_to_driver=False,
        logging_level="error",
    )
    init = shared | {"runtime_env": {"env_vars": env}}
    if cfg.ray_address:
        join_ray(cfg.ray_address, **init)
        cpu = not ray.cluster_resources().get("GPU")
    else:
        cpu = not visible_gpus()
        if not cpu and len(gpus) < need:
            raise BadInput(
                f"--engines {cfg.engines} --engine_tp {cfg.engine_tp}: the trainer leaves {len(gpus)} GPUs"
            )
        env["TMPDIR"] = scratch
        local = dict(include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=scratch)
        local |= dict(num_cpus=need + cfg.runners + 2, num_gpus=len(gpus))
        start_ray(gpus, **local, **init)
    engine = {"CPU": cfg.engine_tp} if cpu else {"CPU": 1, "GPU": cfg.engine_tp}
    served, played = playing * cfg.engines, playing * cfg.runners
    bundles = [engine] * served + [{"CPU": 1}] * (played + 1)
    room = reserve(bundles)

    def actor(kind, i: int, **how):
        size = dict(num_cpus=bundles[i]["CPU"], num_gpus=bundles[i].get("GPU", 0))
        where = PlacementGroupSchedulingStrategy(room, i)
        return ray.remote(kind).options(
            max_concurrency=100_000, scheduling_strategy=where, **size, **how
        )

    names = [f"engine-{i}" for i in range(served)]
    engines = [
        actor(Engine, i, name=name, max_restarts=-1).remote(cfg, i, cpu)
        for i, name in enumerate(names)
    ]
    runners = [actor(Runner, served + i, max_restarts=-1).remote(cfg, names) for i in range(played)]
    rollouts = actor(Rollouts, served + played, name="rollouts").remote(
        cfg, rows, runners, least, state
    )
    return engines, rollouts, shared | {"address": ray.get_runtime_context().gcs_address}


def reserve(bundles: list[dict]):
    """Room in Ray for the actors, each on one node. Raises BadInput with what is asked and free where there is none in time."""
    group = ray.util.placement_group(bundles)
    if not group.wait(PLACE_TIMEOUT):
        table, free = f"{'':6}{'asked':>8}{'free':>8}  each node has", ray.available_resources()
        for name, n in sum(map(Counter, bundles), Counter()).items():
            nodes = [int(node["Resources"].get(name, 0)) for node in ray.nodes() if node["Alive"]]
            table += f"\n{name:6}{n:8}{free.get(name, 0):8.0f}  {nodes}"
        raise BadInput(
            f"--engines --engine_tp --runners: no room in Ray within {PLACE_TIMEOUT} s\n{table}"
        )
    return group


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use, without touching CUDA."""
    import torch

    found = map(str, range(torch.cuda.device_count()))
    return [i for i in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(found)).split(",") if i]
