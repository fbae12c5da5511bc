"""Fixtures. Engines are real, start once a session and are shared; each test leaves them as it found them."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: F401  now: after a RecursionError, as of nested JSON, Python 3.11 cannot parse a module
import pytest
import ray

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)


def pytest_collection_modifyitems(items):
    named = {"slow": "make test-all", "real_model": "make real-model", "clients": "make clients"}
    for item in items:  # what takes minutes or a download is asked for by name
        wanted = item.config.getoption("-m") or ""
        for name, target in named.items():
            if item.get_closest_marker(name) and not any(n in wanted for n in named):
                item.add_marker(pytest.mark.skip(reason=f"only in {target}"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder with the tiny models dense, tied and moe."""
    import tiny

    folder = str(tmp_path_factory.mktemp("tiny"))
    tiny.make(folder)
    return folder


@pytest.fixture(scope="session")
def cluster():
    """A local Ray; its actors can import the project and the tests."""
    path = os.pathsep.join([os.path.dirname(HERE), HERE])
    env = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": env},
        log_to_driver=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ray, "shutdown", lambda: None
        )  # of a main() that a test calls in this process
        yield
    ray.shutdown()


@pytest.fixture(scope="session")
def process_group():
    """This process as the one trainer rank."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def engines_without_names():
    """A Runner finds its engines by their names in Ray. A test without Ray gives it the engine itself."""
    real = ray.get_actor

    def find(of, *args, **how):
        return real(of, *args, **how) if isinstance(of, str) else of

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get_actor", find)
        yield


class Stage:
    """One model on both sides: a real engine in Ray and the FSDP2 trainer in this process, refitted to version 0."""

    def __init__(self, model: str, **flags):
        from planted import Engine
        from transformers import AutoConfig, AutoTokenizer

        from refit import Refit
        from replay import build_policy, experts_of
        from server import Chat
        from train import Config

        moe = bool(experts_of(AutoConfig.from_pretrained(model)))
        defaults = dict(
            dtype="float32",
            max_gap=1e-5,
            replay_experts=moe,
            partial=True,
            minibatches=1,
            max_context=512,
            max_tokens=512,
            refit_bucket_mb=1,
            refit_timeout=120.0,
        )
        self.cfg = Config(model=model, **defaults | flags)
        place = dict(num_cpus=1, max_concurrency=1000)
        self.engine = (
            ray.remote(Engine).options(**place).remote(SimpleNamespace(**vars(self.cfg)), 0, True)
        )
        self.chat = Chat(AutoTokenizer.from_pretrained(model))
        self.policy = build_policy(self.cfg, "cpu")
        self.replay, self.optimizer = self.policy.replay, self.policy.optimizer
        self.model = self.replay.model
        self.refit = Refit(self.cfg, self.model, [self.engine])
        self.version = -1
        self.weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.molt()

    def ask(self, method: str, *args):
        return ray.get(getattr(self.engine, method).remote(*args), timeout=120)

    def molt(self, release: bool = True):
        """Refit to the next version and probe; returns the largest probe gap."""
        from train import PROBE, probe

        self.refit.connect()
        self.version += 1
        self.refit(self.version)
        ids = self.chat.encode(PROBE)
        meter = probe(self.cfg, self.replay, [self.ask("score", ids)], ids, self.version)
        if release:
            self.ask("release")
        return meter["gap/on_version_max"]

    def learn(self, scale: float = 0.05, seed: int = 0):
        """Move every weight a little, as an optimizer step would."""
        import torch

        torch.manual_seed(seed)
        with torch.no_grad():
            for p in self.model.parameters():
                p += scale * p.std() * torch.randn_like(p)

    def reset(self):
        """The first weights again, on both sides."""
        import torch

        with torch.no_grad():
            for n, p in self.model.named_parameters():
                p.copy_(self.weights[n])
        self.molt()

    def rollouts(self, n: int = 4, turns: int = 3, tokens: int = 24):
        """n rows of real multi-turn episodes through `play`, with an environment that talks on."""
        import asyncio

        from rollout import play

        cfg = SimpleNamespace(max_turns=turns, max_tokens=tokens, max_context=self.cfg.max_context)

        async def call(method, *args, read):
            return read(method(*args))

        async def one(i):
            from agent import Task

            async def generate(ids, max_tokens, known):
                one.count += 1
                return await self.engine.generate.remote(
                    f"test-{one.count}", ids, max_tokens, known
                )

            task = Task([{"role": "user", "content": f"What is {i}+{3 * i}?"}], label=4 * i)
            return await play(Talker(), task, self.chat, generate, cfg, call, i, i)

        async def all_of_them():
            return await asyncio.gather(*[one(i) for i in range(n)])

        one.count = id(object())
        return [s for r in asyncio.run(all_of_them()) for s in r.segments]

    def check(self, segments, **flags):
        """The trainer's side of a step: identity, old log-probs, gates; returns the metrics."""
        import dataclasses

        from replay import pack, plan
        from train import Meter, check_gates, score, verify

        cfg, meter = dataclasses.replace(self.cfg, **flags), Meter()
        micros = [
            pack(segments, m)
            for m in plan([len(s) for s in segments], 1, cfg.tokens_per_microbatch)[0]
        ]
        verify(cfg, micros, segments, self.version, "cpu", meter)
        score(self.replay, micros, meter)
        check_gates(cfg, metrics := meter.local())
        return metrics

    def update(self, segments, rewards=None, optimizer=None, **flags):
        """One batch through the trainer's own steps, with a step size of 0 unless an optimizer is given; returns (metrics, the
        gradient as one vector, None where an optimizer took it)."""
        import dataclasses

        import torch

        import train
        from agent import Result

        cfg, gradient = dataclasses.replace(self.cfg, max_grad_norm=1e9, **flags), []
        rewards = rewards or [float(i % 3) for i in range(len(segments))]
        batch = {
            "rollouts": [
                {"group": i // 2, "result": Result(reward=r)} for i, r in enumerate(rewards)
            ],
            "rows": [{"id": i, "rollout": i, "tokens": len(s)} for i, s in enumerate(segments)],
        }

        class Keep:  # an optimizer that keeps the gradient and moves nothing
            def step(_):
                gradient.append(
                    torch.cat([p.grad.flatten().clone() for p in self.model.parameters()])
                )

            def zero_grad(_):
                self.model.zero_grad()

        still = SimpleNamespace(step=lambda: None)
        policy = dataclasses.replace(self.policy, optimizer=optimizer or Keep(), scheduler=still)
        pool = SimpleNamespace(
            fetch=SimpleNamespace(remote=lambda ids: ray.put([segments[i] for i in ids]))
        )
        r = train.Run(
            cfg,
            "cpu",
            None,
            None,
            None,
            {"policy": policy},
            None,
            self.chat,
            pool,
            [],
            "",
            self.refit,
        )
        train.deal(cfg, batch, 1)
        meter = train.Meter()
        parts, _ = train.fetch(r, batch, self.version, meter)
        self.model.zero_grad()  # a test may have stopped an update half-way
        train.update(r, batch, parts, meter, warm=True)
        train.check_mass(metrics := meter.local())
        return metrics, gradient[-1] if gradient else None


class Talker:
    """An environment that never ends an episode by itself."""

    def reset(self, task):
        return task.messages

    def step(self, reply):
        return (
            f"You said {len(reply)} letters. Go on, 12+{len(reply)}?",
            0.5,
            False,
            {"letters": len(reply)},
        )


@pytest.fixture(scope="session")
def dense(cluster, process_group, tiny):
    return Stage(f"{tiny}/dense")


@pytest.fixture(scope="session")
def tied(cluster, process_group, tiny):
    return Stage(f"{tiny}/tied")


@pytest.fixture(scope="session")
def moe(cluster, process_group, tiny):
    return Stage(f"{tiny}/moe")


@pytest.fixture(scope="session")
def adapted(cluster, process_group, tiny):
    """A mixture of experts, its layer 0 dense, that learns through adapters."""
    return Stage(f"{tiny}/moe", lora_rank=4)


@pytest.fixture
def traces(monkeypatch):
    """After the test nothing may be left of what it started, see `traced`."""
    with traced(monkeypatch):
        yield


@contextlib.contextmanager
def traced(monkeypatch, patience: float = 90.0):
    """Nothing may be left of the processes that are started within: none of them (so no port), no
    shared memory and no folder that one of them had. What other programs do is not looked at.

    A mark in the environment tells them from others, and they have a folder for temporary files of
    their own. Of a head that was killed Ray's agent waits for a minute, hence the patience.
    """
    mark, had, over = uuid.uuid4().hex, set(), threading.Event()
    there = {f"{at}/{name}" for at in ("/tmp", "/dev/shm") for name in os.listdir(at)}
    scratch = Path(tempfile.mkdtemp(dir="/tmp"))  # a short name, for sockets
    monkeypatch.setenv("INSTAR_TEST", mark)
    monkeypatch.setenv("TMPDIR", str(scratch))

    def watch() -> None:
        while not over.wait(0.2):
            for pid in marked(mark):
                had.update(places(pid))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield had
        deadline = time.monotonic() + patience
        while left := marked(mark):
            assert time.monotonic() < deadline, list(left.values())
            time.sleep(0.2)
    finally:
        over.set()
        watcher.join()
    kept = [Path(p) for p in had if Path(p).name.startswith("instar-")]
    own = {str(p) for p in scratch.iterdir() if not p.name.startswith(("torchelastic", "tmp"))}
    other = {str(scratch), *map(str, kept), *there}  # its output may go to a file that was there
    left = {p for p in had - other if os.path.exists(p)} | own
    for folder in [scratch, *kept]:  # of a run that has failed its folder is left, as documented
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, left


def marked(mark: str) -> dict[int, str]:
    """Process id -> command line of those, but this one, that have the mark in their environment."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_text(
                errors="replace"
            ):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return found


def places(pid: int) -> set[str]:
    """The entries of /dev/shm and /tmp, but pytest's, in which a process has a file or is itself."""
    paths = []
    with contextlib.suppress(OSError):  # it has just ended
        paths = Path(f"/proc/{pid}/maps").read_text().split()
        folder = Path(f"/proc/{pid}/fd")
        for link in [Path(f"/proc/{pid}/cwd"), *folder.iterdir()]:
            with contextlib.suppress(OSError):  # it has just been closed
                paths.append(os.readlink(link))
    found = {m[0] for p in paths if (m := re.match(r"/(dev/shm|tmp)/[^/]+", p))}
    return {p for p in found if not p.startswith("/tmp/pytest-")}
