"""Where the time goes, and how near each part is to its limit. Ratios within one run, since machines are noisy.

python tests/bench.py                # everything below, into out/bench.json
python tests/bench.py run            # default training: start-up, generate, train, refit, idle
python tests/bench.py overlap        # steps of a run that overlaps against a strictly on-policy one, and the bound; 5 minutes
python tests/bench.py interrupted    # what a refit amid long replies costs: waiting for them, --partial, --stale_kv; 3 minutes
python tests/bench.py generate       # tokens/s of a generate phase against the same requests sent directly to AsyncLLM
python tests/bench.py refit          # GB/s of a refit of 0.1 B parameters against a plain memory copy
python tests/bench.py server         # requests/s of the capture server with a scripted engine, over connections beside vLLM's
                                     # own server and without; cost of turn 128 against turn 2; 2 to 4 minutes
python tests/bench.py logprob        # peak memory of the chunked log-prob against the full one, 8k tokens × 152k vocabulary
python tests/bench.py gae            # seconds of gae on 1,024 rows × 8k tokens against a plain Python loop
"""

import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_worker_niceness", "0")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
os.chdir(ROOT)


def run(*flags: str) -> dict:
    """Default training as a user starts it."""
    out, begun = os.path.abspath(f"out/bench-{time.time_ns()}"), time.perf_counter()
    text = subprocess.run(
        [sys.executable, "train.py", "--out", out, *flags], capture_output=True, text=True
    ).stdout
    wall = time.perf_counter() - begun
    rows = [json.loads(line) for line in open(f"{out}/metrics.jsonl")]
    spent = {
        name: sum(r[f"time/{name}"] for r in rows)
        for name in ("generate", "train", "refit", "engine_idle", "trainer_idle")
    }
    ready = float(re.search(r"ready after (\d+) s", text)[1])
    return {
        "wall_seconds": wall,
        "startup_seconds": ready,
        "end_seconds": wall - ready - sum(r["time/step"] for r in rows),
        **{f"{name}_seconds": value for name, value in spent.items()},
        "steps": len(rows),
        "steps_per_minute": 60 * len(rows) / sum(r["time/step"] for r in rows),
        "sampled_tokens_per_second": sum(r["tokens/trained"] for r in rows) / spent["generate"],
        "reward_first": rows[0]["reward/mean"],
        "reward_last_3": sum(r["reward/mean"] for r in rows[-3:]) / 3,
        "gap_on_version_max": max(r["gap/on_version_max"] for r in rows),
    }


def overlap(steps: int = 12) -> dict:
    """--max_lag 2 --partial against --max_lag 0, with tools that wait so long that both phases take equal time, and without. The
    policy stands still, so that every batch is as much work.

    g and t are the strictly on-policy run's seconds a step in which the trainer and the engines idle; the bound on the speed-up
    is (g + t) / max(g, t). Medians, without the first steps, which fill the pool.
    """

    def seconds(latency: float, *flags: str) -> tuple[float, float]:
        out = os.path.abspath(f"out/bench-{time.time_ns()}")
        flags = [
            "--agent",
            "tests/waiting.py",
            "--is_level",
            "token",
            "--epochs",
            "8",
            "--steps",
            str(steps),
            *flags,
        ]
        flags += ["--lr", "1e-12"]
        command = [sys.executable, "train.py", "--out", out, "--show_every", "0", *flags]
        subprocess.run(
            command,
            env=os.environ | {"INSTAR_LATENCY": str(latency)},
            capture_output=True,
            check=True,
        )
        rows = [json.loads(line) for line in open(f"{out}/metrics.jsonl")][4:]
        return tuple(float(np.median([r[k] for r in rows])) for k in ("time/step", "time/generate"))

    whole, g = seconds(0.5)
    latency = max(
        0.0, 0.5 + (whole - 2 * g) / 4
    )  # of the four turns of the slowest rollout: g is what the rest takes
    found = {"latency": latency}
    for name, wait in (("waiting", latency), ("computing", 0.0)):
        strict, g = seconds(wait)
        lagged, _ = seconds(wait, "--max_lag", "2", "--partial")
        bound = strict / max(g, strict - g)
        found |= {
            f"{name}_generate": g,
            f"{name}_rest": strict - g,
            f"{name}_step": strict,
            f"{name}_overlapped_step": lagged,
        }
        found |= {
            f"{name}_speedup": strict / lagged,
            f"{name}_bound": bound,
            f"{name}_of_bound": strict / lagged / bound,
        }
    return found


def interrupted(steps: int = 14) -> dict:
    """A refit amid replies of 192 tokens: it waits for them, freezes them and builds their context again, or keeps its cache."""
    import tiny

    folder, found = tempfile.mkdtemp(), {}
    tiny.make(folder)
    flags = f"--model {folder}/dense --agent tests/talker.py --max_turns 2 --max_tokens 192 --max_context 512 --max_lag 2"
    for name, more in (
        ("wait", ""),
        ("partial", "--partial"),
        ("stale_kv", "--partial --stale_kv"),
    ):
        out = os.path.abspath(f"out/bench-{time.time_ns()}")
        how = f"{flags} --is_level token --steps {steps} --show_every 0 --out {out} {more}".split()
        subprocess.run([sys.executable, "train.py", *how], capture_output=True, check=True)
        rows = [json.loads(line) for line in open(f"{out}/metrics.jsonl")][4:]
        keys = (
            "time/step",
            "refit/pause_seconds",
            "refit/rebuilt_tokens",
            "gap/on_version_max",
            "gap/off_version_mean",
        )
        found |= {
            f"{name}_{key.split('/')[1]}": float(np.median([r[key] for r in rows])) for key in keys
        }
        on, off = (sum(r[f"gap/{which}_version_tokens"] for r in rows) for which in ("on", "off"))
        found[f"{name}_off_version_share"] = off / (on + off)
    return found


def generate() -> dict:
    """Batches of default training (ten tokens a request: the cost of a call), and of longer replies (the cost of a token)."""
    import tempfile

    import tiny

    folder = tempfile.mkdtemp()
    tiny.make(folder)  # a random model talks until --max_tokens stops it
    long = f"--model {folder}/dense --agent tests/talker.py --max_turns 2 --max_tokens 192 --max_context 512"
    return {
        f"{name}_{k}": v
        for name, flags in (("default", ""), ("long", long))
        for k, v in phase(flags.split()).items()
    }


def phase(flags: list[str]) -> dict:
    """One batch through Runner and Engine, then the same requests, as long and as concurrent, straight to the AsyncLLM."""
    import ray

    import rollout
    import train

    class Engine(rollout.Engine):
        """Records its requests and can replay them without instar."""

        async def generate(self, name, *args):
            reply = await super().generate(name, *args)
            self.__dict__.setdefault("chains", {}).setdefault(name.split(".")[0], []).append(
                (list(args[0]), len(reply.tokens))
            )
            return reply

        async def take(self):
            chains, self.chains = getattr(self, "chains", {}), {}
            return chains

        async def direct(self, chains):
            from vllm import SamplingParams
            from vllm.sampling_params import RequestOutputKind

            async def play(name, chain):
                for i, (ids, n) in enumerate(chain):
                    params = SamplingParams(
                        max_tokens=n,
                        ignore_eos=True,
                        logprobs=0,
                        detokenize=False,
                        flat_logprobs=True,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    )
                    async for _ in self.llm.generate(
                        {"prompt_token_ids": ids}, params, request_id=f"direct-{name}-{i}"
                    ):
                        pass

            await self.llm.reset_prefix_cache()
            begun = time.perf_counter()
            await asyncio.gather(*[play(*item) for item in chains.items()])
            return time.perf_counter() - begun

    cfg = train.parse(flags)
    plain, rollout.Engine = rollout.Engine, Engine
    engines, rollouts, _ = rollout.launch(
        cfg, rollout.load_rows(cfg.data, cfg.prompt_key), None, 2, tempfile.mkdtemp()
    )
    rollout.Engine = plain
    (engine,) = engines
    ray.get(engine.release.remote())
    ratios, rates = [], []
    for i in range(23):
        begun = time.perf_counter()
        ray.get(rollouts.next_batch.remote())
        through = time.perf_counter() - begun
        ray.get(rollouts.refitted.remote(i + 1))
        chains = ray.get(engine.take.remote())
        alone = ray.get(engine.direct.remote(chains))
        if i > 1:  # the first phases of a run warm up
            tokens = sum(n for chain in chains.values() for _, n in chain)
            ratios.append(alone / through)
            rates.append((tokens / through, tokens / alone))
    ray.shutdown()
    middle = sorted(range(21), key=lambda i: ratios[i])[10]  # the median of 21
    return {
        "tokens_per_second": rates[middle][0],
        "direct_tokens_per_second": rates[middle][1],
        "ratio": ratios[middle],
        "ratios": [round(r, 2) for r in ratios],
    }


def refit() -> dict:
    """Refit of a random 0.1 B model in fp32 to one engine; a plain copy of as many bytes beside it."""
    import ray
    import torch
    import torch.distributed as dist
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    import rollout
    import train
    from refit import Refit
    from replay import build_model

    folder = tempfile.mkdtemp()
    tokenizer = AutoTokenizer.from_pretrained("examples/starter")
    shape = dict(
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
    )
    Qwen3ForCausalLM(
        Qwen3Config(vocab_size=32768, max_position_embeddings=1024, **shape)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    cfg = train.parse(["--model", folder])
    engines, _, _ = rollout.launch(cfg, [{"prompt": "x"}], None, 2, tempfile.mkdtemp())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, _ = build_model(cfg, "cpu")
    mover = Refit(cfg, model, engines)
    mover.connect()
    speeds = [mover(i)["refit/gb_per_s"] for i in range(4)][1:]
    size = sum(p.nbytes for p in model.parameters())
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    copies = []
    for _ in range(4):
        begun = time.perf_counter()
        target.copy_(source)
        copies.append(size / (time.perf_counter() - begun) / 1e9)
    ray.shutdown()
    best, copy = max(speeds), max(copies)
    return {
        "model_gb": size / 1e9,
        "refit_gb_per_s": best,
        "memory_copy_gb_per_s": copy,
        "ratio": best / copy,
    }


def server() -> dict:
    """A scripted engine behind the real server: many sessions at once, and one of 128 turns whose client resends all of it."""
    from transformers import AutoTokenizer

    from agent import Reply, Result
    from server import Chat, Forest, Server

    chat = Chat(AutoTokenizer.from_pretrained("examples/starter"))
    said = [*chat.encode("a reply of some words, as agents say them"), chat.tokenizer.eos_token_id]

    async def generate(ids, max_tokens, known, stop, grammar=None):
        out = np.asarray(said, np.int32)
        return Reply(out, np.zeros(len(out), np.float32), np.zeros(len(out), np.int32), b"", "stop")

    def session(app):
        forest = Forest(chat, generate, lambda text, tools: (None, text, []), 99, 10**6, {})
        return app.open(forest), forest

    async def turn(app, key, body):
        """One request to the app, without a connection: what a connection costs is uvicorn's."""
        sent = []
        events = [{"type": "http.request", "body": body}]

        async def receive():
            return events.pop() if events else await asyncio.sleep(3600)

        async def send(event):
            sent.append(event)

        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/r/{key}/v1/chat/completions",
            "headers": [],
        }
        await app(scope, receive, send)
        return json.loads(sent[1]["body"])["choices"][0]["message"]

    async def talk(app, turns):
        (key, forest), messages, seconds = session(app), [], []
        for i in range(turns):
            messages.append({"role": "user", "content": f"question {i}, with a few words more"})
            body = json.dumps({"messages": messages}).encode()  # the client's work
            begun = time.perf_counter()
            messages.append(await turn(app, key, body))
            seconds.append(time.perf_counter() - begun)
        assert len(forest.segments(Result(), 0, 0)) == 1
        await app.close(key)
        return seconds

    async def measure():
        app, rates = Server("policy"), {}
        for sessions in (1, 16, 256):
            begun = time.perf_counter()
            await asyncio.gather(*[talk(app, 4) for _ in range(sessions)])
            rates[f"app_requests_per_second_{sessions}"] = (
                4 * sessions / (time.perf_counter() - begun)
            )
        runs = [await talk(app, 130) for _ in range(9)]
        early, late = (
            sorted(r[i] for r in runs for i in at)[len(runs)] for at in ((1, 2), (127, 128))
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(10):
            await asyncio.gather(*[talk(app, 2) for _ in range(1000)])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        return rates | {
            "turn_2_ms": early * 1e3,
            "turn_128_ms": late * 1e3,
            "grown_mb_10000_sessions": grown,
        }

    import bench_server

    return asyncio.run(measure()) | bench_server.connections()


def logprob(tokens: int = 8192, vocabulary: int = 151_936, hidden: int = 256) -> dict:
    """Growth of the peak memory over forward and backward, each in a process of its own."""
    grown = {}
    for kind in ("chunked", "full"):
        out = subprocess.run(
            [sys.executable, __file__, "_logprob", kind, str(tokens), str(vocabulary), str(hidden)],
            capture_output=True,
            text=True,
        )
        grown[kind] = json.loads(out.stdout.strip().splitlines()[-1])
    return {
        "chunked_gb": grown["chunked"][0],
        "full_gb": grown["full"][0],
        "memory_ratio": grown["full"][0] / grown["chunked"][0],
        "chunked_seconds": grown["chunked"][1],
        "full_seconds": grown["full"][1],
    }


def _logprob(kind: str, *sizes: str) -> None:
    import torch

    from replay import Head

    tokens, vocabulary, hidden = map(int, sizes)
    torch.manual_seed(0)
    head, states = (
        torch.nn.Linear(hidden, vocabulary, bias=False),
        torch.randn(1, tokens, hidden, requires_grad=True),
    )
    targets = torch.randint(vocabulary, (tokens,))
    head.weight.grad, states.grad = torch.zeros_like(head.weight), torch.zeros_like(states)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if kind == "full":
        logprobs = head(states)[0].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    else:
        chunked = Head(head)
        chunked.where, chunked.targets = torch.ones(1, tokens, dtype=torch.bool), targets
        logprobs = head(states)[:, 0]
    logprobs.sum().backward()
    seconds = time.perf_counter() - begun
    print(
        json.dumps([(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6, seconds])
    )


def gae(rows: int = 1024, tokens: int = 8192, looped: int = 16) -> dict:
    """CPU seconds of one thread, a third of the tokens masked. The Python loop runs on a few rows and is scaled to all."""
    from types import SimpleNamespace

    import torch

    from estimator import Batch, gae_advantages

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    mask, values = torch.rand(2, rows, tokens, generator=generator)
    batch = Batch(
        mask < 0.67, torch.arange(rows), torch.rand(rows), torch.arange(rows), values=values
    )
    cfg = SimpleNamespace(gamma=1.0, lam=0.95, bootstrap_truncated=False)
    seconds = []
    for _ in range(3):
        batch.__dict__.pop("after", None)  # made once in a batch: part of the time
        begun = time.process_time()
        advantages = gae_advantages(batch, cfg)
        seconds.append(time.process_time() - begun)
    begun, out = time.process_time(), []
    for row, value, reward in zip(
        batch.mask[:looped].tolist(), values[:looped].tolist(), batch.rewards.tolist()
    ):
        later, following, result = 0.0, 0.0, [0.0] * tokens
        for t in reversed(range(tokens)):
            if row[t]:
                later = reward + cfg.gamma * following - value[t] + cfg.gamma * cfg.lam * later
                following, reward, result[t] = value[t], 0.0, later
        out.append(result)
    out = torch.tensor(out, dtype=torch.float64)
    loop = (time.process_time() - begun) * rows / looped
    return {
        "gae_seconds": min(seconds),
        "python_loop_seconds": loop,
        "python_loop_rows": looped,
        "ratio": loop / min(seconds),
        "largest_difference": float((advantages[:looped] - out).abs().max()),
    }


def main() -> None:
    parts = {
        "run": run,
        "overlap": overlap,
        "interrupted": interrupted,
        "generate": generate,
        "refit": refit,
        "server": server,
    }
    parts |= {"logprob": logprob, "gae": gae}
    if sys.argv[1:2] == ["_logprob"]:
        return _logprob(*sys.argv[2:])
    wanted = sys.argv[1:] or list(parts)
    if (
        len(wanted) > 1
    ):  # each in a process of its own: Ray and process groups start once in a process
        for name in wanted:
            subprocess.run([sys.executable, __file__, name], check=True)
        return None
    (name,) = wanted
    result = parts[name]()
    path = os.path.join("out", "bench.json")
    os.makedirs("out", exist_ok=True)
    everything = json.load(open(path)) if os.path.exists(path) else {}
    everything[name] = result | {
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }
    json.dump(everything, open(path, "w"), indent=1)
    print(f"\n{name}")
    for key, value in result.items():
        print(f"  {key:36} {value:.4g}" if isinstance(value, float) else f"  {key:36} {value}")
    return None


if __name__ == "__main__":
    main()
