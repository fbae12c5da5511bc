"""The molt: the trainer's weights go into the engines, versioned, in buckets, verified.

Trainer rank 0 and every engine worker (tensor-parallel ranks too) share one broadcast group, gloo on CPU and nccl on GPU, on a
port that the system chose. A refit pauses the engines, sends buckets of named tensors under their Hugging Face names, compares
what each worker handed to its loader with what was sent, and only then moves the version. Each bucket carries a checksum.
What was loaded wrongly raises `InvariantError` and leaves the engines paused; where one has died or hangs all are started again, and the
caller repeats the refit. Either way no token is sampled from half-updated weights.

Weights also leave the trainer for a checkpoint, with all else that a resumed run needs, and as a
Hugging Face folder. A checkpoint says its flags and the digest of each of its files, and reading it
executes nothing.

The probe, the first request after a refit, is in train.py, since it needs the trainer's forward. Nothing here knows of rollouts.

    pytest tests/test_refit.py
"""

import contextlib
import faulthandler
import fcntl
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import huggingface_hub
import ray
import torch
import torch.distributed as dist

from agent import BadInput, InvariantError, read_batch, write_batch
from replay import Learner, adapters

# what is weights, or code, or says what weights there are: not copied beside those of an export
OF_WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.index.json",
    "*.py",
    "README.md",
    ".*",
)
START_TIMEOUT = 1800  # seconds for the engines to load
LOCK_TIMEOUT = 5  # seconds for a killed run to be gone: it frees its memory first
ALIGN, PAGE = (
    16,
    4096,
)  # bytes: a view of another dtype needs an aligned start; buckets are whole pages


def group(host: str, port: int, rank: int, world: int, device: str, seconds: float, store=None):
    """The refit group; rank 0 is the trainer and owns the store. seconds: that one broadcast may take."""
    limit = timedelta(seconds=seconds)
    store = dist.PrefixStore(
        "refit", store or dist.TCPStore(host, port, world, is_master=False, timeout=limit)
    )
    if device == "cpu":
        return dist.ProcessGroupGloo(store, rank, world, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, world, options)


def broadcast(pg, flat: torch.Tensor) -> None:
    """Send `flat` from rank 0 to all, in place. Blocks."""
    pg.broadcast(flat, 0).wait()


def checksum(flat: torch.Tensor) -> int:
    """A 64-bit sum of a bucket (uint8, a multiple of PAGE bytes), computed on the device where it lies: each word of 64 bits
    times an odd number of its own, modulo 2^64. A changed word always changes it; so does a moved one, unless the word in whose
    place it is differs in both halves alike."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for i, words in enumerate(
        flat.view(torch.int64).view(-1, PAGE // 8).split(1024)
    ):  # [pages, 512]
        mixed = words >> 32
        mixed ^= words  # a product may lose a word's high bits, so that the low ones have to tell of them
        columns, pages = mixed.sum(0), mixed.sum(1)
        columns *= torch.arange(1, PAGE // 4, 2, device=flat.device)
        pages *= torch.arange(1024 * i, 1024 * i + len(words), device=flat.device)
        total += columns.sum() + PAGE // 4 * pages.sum()
    return int(total) & (1 << 64) - 1


def offsets(dtypes: list[str], shapes: list[list[int]]) -> tuple[list[tuple[int, int]], int]:
    """(start, end) in bytes of each tensor of a bucket, and the bucket's size. Both sides compute it."""
    spans, at = [], 0
    for dtype, shape in zip(dtypes, shapes):
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        spans.append((at, at + size))
        at += -(-size // ALIGN) * ALIGN
    return spans, -(-at // PAGE) * PAGE


def compute_device(model) -> str:
    """The type of the device that a model computes on; with --offload its sharded weights lie in CPU memory."""
    p = next(model.parameters())
    return p.device_mesh.device_type if isinstance(p, dist.tensor.DTensor) else p.device.type


def merged(model):
    """Yield (weight, function that gives it with its adapter added) of every weight that has an adapter."""

    def added(weight, scale, left, right):
        return weight, lambda: weight + scale * (left @ right)

    for m in model.modules():
        if hasattr(m, "lora_A"):
            yield added(m.weight, m.scale, m.lora_B.weight, m.lora_A.weight)
        elif hasattr(m, "lora_down_A"):  # grouped experts [E, in, out]
            yield added(m.gate_and_up_projs, m.scale, m.lora_gate_and_up_A, m.lora_gate_and_up_B)
            yield added(m.down_projs, m.scale, m.lora_down_A, m.lora_down_B)


@torch.no_grad()
def hf_tensors(model, dtype: torch.dtype):
    """Yield (Hugging Face name, full tensor in `dtype`) of every parameter, adapters added to the weights that they belong to; a
    tied head is a parameter only once.

    Gathering a sharded parameter is a collective: every trainer rank iterates, in the same order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    adapter, sums = getattr(model, "state_dict_adapter", None), dict(merged(model))
    for name, p in model.named_parameters():
        if "lora_" in name:
            continue
        full = sums[p]() if p in sums else p.detach()
        if isinstance(full, dist.tensor.DTensor):
            full = full.to(full.device_mesh.device_type).full_tensor()
        name = name.replace("_checkpoint_wrapped_module.", "")
        if adapter:
            parts = adapter.convert_single_tensor_to_hf(name, full)
        else:
            # transformers keeps some weights otherwise than files do: those of all experts in one
            parts = revert_weight_conversion(model, {name: full}).items()
        for hf_name, tensor in parts:
            yield hf_name, tensor.to(dtype)


def buckets(tensors, limit: int):
    """Group (name, tensor) pairs into lists of at most `limit` bytes (a larger tensor has its own)."""
    bucket, size = [], 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def pack(bucket: list) -> tuple[torch.Tensor, dict]:
    """One bucket as (flat uint8 tensor, the description that the workers unpack it by)."""
    names, tensors = zip(*bucket)
    dtypes, shapes = (
        [str(t.dtype).removeprefix("torch.") for t in tensors],
        [list(t.shape) for t in tensors],
    )
    spans, size = offsets(dtypes, shapes)
    flat = torch.zeros(
        size, dtype=torch.uint8, device=tensors[0].device
    )  # padding has to be equal too
    for (start, end), tensor in zip(spans, tensors):
        flat[start:end] = tensor.contiguous().flatten().view(torch.uint8)
    return flat, dict(names=list(names), dtypes=dtypes, shapes=shapes, checksum=checksum(flat))


class EngineLeft(RuntimeError):
    """An engine has died, or was ended since it did not answer in time. Ray starts it again."""


def answers(engines: list, calls: list, limit: float) -> list:
    """What each engine answered to its call. One that lets `limit` seconds pass is ended, and Ray starts it again.

    Raises EngineLeft when one is away, else what an engine raised; ActorDiedError when it has died too often.
    """
    found, hung = [], ray.wait(calls, num_returns=len(calls), timeout=limit)[1] if calls else []
    for engine, call in zip(engines, calls):
        if call in hung:
            ray.kill(engine, no_restart=False)
        try:
            found.append(ray.get(call, timeout=60))
        except ray.exceptions.RayError as e:
            found.append(e)
    if left := sum(isinstance(x, ray.exceptions.ActorUnavailableError) for x in found):
        raise EngineLeft(
            f"{left} engines died, {len(hung)} of them as they did not answer within {limit:.0f} s"
        )
    for error in [x for x in found if isinstance(x, ray.exceptions.RayError)]:
        raise error
    return found


def ask(engines: list, limit: float, method: str, *args) -> list:
    """`answers` to a method of Engine."""
    return answers(engines, [e.do.remote(method, *args) for e in engines], limit)


class Refit:
    """The trainer's side. Every rank calls it; only rank 0 has engines and the group."""

    def __init__(self, cfg, model, engines: list, host="127.0.0.1"):
        self.cfg, self.model, self.engines, self.host, self.group = cfg, model, engines, host, None

    def connect(self) -> None:
        """Wait until all engines are there and in the group, which is made anew when one has come, or come back."""
        deadline = time.monotonic() + START_TIMEOUT
        while self.engines:
            try:
                if not all(
                    ask(
                        self.engines,
                        self.cfg.engine_timeout if self.group else START_TIMEOUT,
                        "joined",
                    )
                ):
                    self.rendezvous()
                return
            except (EngineLeft, dist.DistError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def rendezvous(self) -> None:
        device, tp = compute_device(self.model), self.cfg.engine_tp
        world, limit = 1 + len(self.engines) * tp, timedelta(seconds=self.cfg.refit_timeout)
        store = dist.TCPStore(
            self.host, 0, world, is_master=True, wait_for_workers=False, timeout=limit
        )
        where = dict(
            host=self.host,
            port=store.port,
            world=world,
            device=device,
            seconds=self.cfg.refit_timeout,
        )
        joins = [
            e.do.remote("join", where | {"rank": 1 + i * tp}) for i, e in enumerate(self.engines)
        ]
        self.group = group(rank=0, store=store, **where)
        answers(self.engines, joins, self.cfg.refit_timeout)

    def __call__(self, version: int) -> dict[str, float]:
        """Send all weights and move the engines to `version`, still closed to requests; returns the refit/… metrics.

        Raises InvariantError when a worker received or loaded something else than what was sent. Raises EngineLeft when an engine
        has died or hangs: then all are started again, so that none goes on with a part of the weights.
        """
        start, self.failed, self.sent, self.pending = time.perf_counter(), None, [], []
        limit, reply = (
            self.cfg.refit_timeout,
            self.cfg.episode_timeout,
        )  # without --partial a pause waits for replies
        rebuilt = self.attempt(ask, self.engines, limit + reply, "pause")
        self.attempt(ask, self.engines, limit, "begin")
        paused = time.perf_counter() - start
        for bucket in buckets(
            hf_tensors(self.model, getattr(torch, self.cfg.dtype)), self.cfg.refit_bucket_mb << 20
        ):
            self.attempt(self.send, bucket)  # every rank gathers them to the last, whatever fails
        self.attempt(self.finish)
        self.attempt(ask, self.engines, limit, "resume", version)
        if self.failed:
            raise self.failed
        seconds, size = time.perf_counter() - start, sum(n for _, n, _ in self.sent)
        speed = {
            "refit/seconds": seconds,
            "refit/pause_seconds": paused,
            "refit/gb_per_s": size / seconds / 1e9,
        }
        return speed | {"refit/rebuilt_tokens": sum(rebuilt)} if self.engines else {}

    def attempt(self, step, *args):
        """A step of rank 0; none after one that has failed."""
        if not self.engines or self.failed:
            return
        try:
            return step(*args)
        except (InvariantError, ray.exceptions.RayTaskError) as e:
            told = f"refit: an engine did not take the weights; the engines stay paused\n{e}"
            self.failed = e if isinstance(e, InvariantError) else InvariantError(told)
        except (
            ray.exceptions.RayError,
            RuntimeError,
        ) as e:  # of an engine, or of the group that it has left
            self.failed = EngineLeft(str(e))
            for engine in self.engines:
                ray.kill(engine, no_restart=False)

    def send(self, bucket: list) -> None:
        flat, meta = pack(bucket)
        # the previous bucket was loaded while this one was gathered
        answers(self.engines, self.pending, self.cfg.refit_timeout)
        self.pending = [e.do.remote("receive", meta) for e in self.engines]
        broadcast(self.group, flat)
        self.sent.append((len(bucket), flat.numel(), meta["checksum"]))

    def finish(self) -> None:
        answers(self.engines, self.pending, self.cfg.refit_timeout)
        self.verify(self.sent, ask(self.engines, self.cfg.refit_timeout, "finish"))

    def verify(self, sent: list, reports: list) -> None:
        """Compare what was sent with what each worker of each engine handed to its loader."""
        want = [sum(n for n, _, _ in sent), sum(c for _, _, c in sent) & (1 << 64) - 1]
        for i, workers in enumerate(reports):
            for rank, got in enumerate(workers):
                if list(got) != want:
                    told = f"refit: engine {i} worker {rank} loaded {got[0]} tensors with checksum {got[1]:x}"
                    raise InvariantError(
                        f"{told}, sent were {want[0]} with {want[1]:x}; the engines stay paused"
                    )


# ---- checkpoints and export

# What --resume does where a flag is another than when the checkpoint was written. A flag is in
# at most one of these. It is refused, since the checkpoint means something else under it:
REFUSED = {
    "model": "the weights and moments in it are of that model and its tokens",
    "critic_model": "the critic in it is of that model",
    "optimizer": "the moments in it are that optimizer's",
    "lora_rank": "the weights in it are adapters of that rank, or with 0 the model's own",
    "lora_alpha": "the adapters in it have learnt under that scale",
    # only where one of both is gae, which has a critic, or sft, whose groups are demonstrations
    "estimator": "it holds a critic only with gae, and demonstrations instead of rollouts with sft",
}
# It is refused without --resume_data, since the ledger counts in these rows, in this order:
ORDERED = "data", "prompt_key", "shuffle", "seed", "train_from"
# It is told. Groups that had finished would be played otherwise now, so they start again:
PLAYED = (
    "agent",
    "agent_cmd",
    "reward",
    "label_key",
    "max_turns",
    "samples",
    "temperature",
    "max_tokens",
    "max_context",
    "engine_args",
    "tool_parser",
    "reasoning_parser",
    "constrained",
    "preserve",
    "replay_experts",
    "dtype",
)
# It is of no consequence. Every other flag may change, and is told:
UNTOLD = "out", "resume", "resume_data", "show_every", "eval_only"

LOCK = ".lock"  # of a folder of a run: the kernel's lock is on it
MANIFEST = "manifest.json"  # of a checkpoint: each other file's size and digest
INCIDENTAL = "_name_or_path", "transformers_version", "dtype"  # says nothing of what a model is


def checkpoints(out: str) -> list[Path]:
    """Checkpoints in `out`, oldest first; a half-written one has another name."""
    found = [p for p in Path(out).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def hold(out: str, wait=LOCK_TIMEOUT) -> None:
    """Be the only run in the folder `out` until this process ends, or raise BadInput after `wait` seconds.

    The kernel frees the lock with the process. Children do not inherit it, so that one which lives
    longer blocks nobody. Where the file system has no locks this is told, and the run goes on.
    """
    path, deadline = Path(out, LOCK), time.monotonic() + wait
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # never closed: that would free it
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                break
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # its holder has removed the other
        except (BlockingIOError, PermissionError):
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            holder = path.read_text(errors="replace") or "another process"
            os.close(file)
            told = f"--out {out} is in use by {holder}: end that run first, or name another folder"
            raise BadInput(told) from None
        except OSError as e:
            told = f"its file system has no locks ({e.strerror}), so nothing keeps a second run out"
            print(f"--out {out}: {told}", file=sys.stderr)
            break
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())


def made_with(cfg, rows: list[dict]) -> dict:
    """What a checkpoint says of its run: its flags, and digests of what is behind some of them."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import cached_file

    def mark(parts) -> str:
        h = hashlib.blake2b(digest_size=16)
        for part in parts:
            h.update(
                part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
            )
        return h.hexdigest()

    def config(path: str) -> dict:
        found = AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()
        return {k: found[k] for k in sorted(found) if k not in INCIDENTAL}

    def samples(path: str):
        """64 KiB at 16 places of each file of weights: to read all takes as long as loading."""
        for shard in sorted(Path(cached_file(path, "config.json")).parent.glob("*.safetensors")):
            with shard.open("rb") as file:
                for place in range(0, size := shard.stat().st_size, size // 16 + 1):
                    file.seek(place)
                    yield file.read(1 << 16)

    vocabulary = AutoTokenizer.from_pretrained(cfg.model, trust_remote_code=False).get_vocab()
    content = {"data": mark(rows), "model": mark([config(cfg.model), sorted(vocabulary.items())])}
    if weights := list(samples(cfg.model)):  # a hub's may not be here yet
        content["weights"] = mark(weights)
    if cfg.critic_model:
        content["critic_model"] = mark([config(cfg.critic_model)])
    return {"flags": json.loads(json.dumps(vars(cfg))), "content": content}


def compare(cfg, was: dict, now: dict) -> tuple[dict[str, str], bool]:
    """The flags that are others than those of a checkpoint, name -> "--name old -> new"; whether a
    group that has finished would be played otherwise now.

    was, now: as `made_with` gives them. Raises BadInput where the checkpoint means something else
    under one of them.
    """

    def shown(value) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value) or "''"

    def differs(name: str) -> bool:
        """What the flag means: the content behind it, where both are known, else its value."""
        marks = [made["content"].get(name) for made in (was, now)]
        if all(marks):
            return marks[0] != marks[1]
        return name in old and old[name] != new[name]

    old, new = was["flags"], now["flags"]
    changed = {
        name: f"--{name} {shown(old[name])} -> {shown(new[name])}"
        for name in new
        if name not in UNTOLD and name in old and old[name] != new[name]
    }
    kept = {name for name in REFUSED if differs(name)}
    weights = {made["content"].get("weights") for made in (was, now)}
    if None in weights and "model" in changed or None not in weights and len(weights) > 1:
        kept.add("model")
    if not {old["estimator"], new["estimator"]} & {"gae", "sft"}:
        kept.discard("estimator")
    moved = {name for name in ORDERED if differs(name)}
    files = [bool(flags["train_from"]) for flags in (old, new)]
    if cfg.eval_only:
        moved = set()
    elif all(files):  # nothing is drawn from --data
        moved &= {"train_from"}
    for name in kept | moved:
        changed.setdefault(name, f"--{name} {shown(new[name])}: not the content that it had")
    refused = [f"{changed[name]}: {REFUSED[name]}" for name in REFUSED if name in kept]
    if "train_from" in moved and not all(files):
        refused.append(f"{changed['train_from']}: the ledger counts files with it, else rows")
    elif not cfg.resume_data:
        ordered = "the ledger counts in the rows of before, in their order; --resume_data goes on"
        refused += [f"{changed[name]}: {ordered} in these" for name in ORDERED if name in moved]
    if refused:
        told = "\n".join(refused)
        raise BadInput(f"--resume with other flags: give those of before, or another --out\n{told}")
    return changed, bool(moved or changed.keys() & {*PLAYED, "estimator"})


def training_state(learners: dict) -> dict:
    """Weights that learn and moments of each learner, under its name."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(ignore_frozen_params=True)
    states = {
        name: get_state_dict(x.replay.model, x.optimizer, options=options)
        for name, x in learners.items()
    }
    return {
        name: dict(model_state_dict=weights, optim_state_dict=m)
        for name, (weights, m) in states.items()
    }


class NotWritten(RuntimeError):
    """A checkpoint or a model could not be written."""


@contextlib.contextmanager
def atomic(cfg, name: str, part: str = ""):
    """A path under which all ranks write the folder `name` of --out, or of it a `part` to keep; it is there when it is complete.
    What a kill leaves behind is <out>/unfinished, until the next one is written.

    Raises NotWritten. After --save_timeout seconds it prints the stacks and ends the process.
    """
    folder, temporary = Path(cfg.out, name), Path(cfg.out, "unfinished")
    faulthandler.dump_traceback_later(cfg.save_timeout, exit=True)
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    try:
        yield temporary
    except BaseException as e:  # as dcp's is
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk has room again
        raise NotWritten(
            f"--out {cfg.out}: {name} was not written, older ones are whole\n{e}"
        ) from e
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        (temporary / part).rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()


def save_checkpoint(cfg, learners: dict[str, Learner], where: dict, rollouts=None) -> None:
    """Write `where` (step, version), the ledger of the pool `rollouts` and all sharded state; atomic, by renaming a finished folder.

    In the ledger's terms every prompt before its position is finished, queued (it starts again), ended, or was trained.
    """
    import torch.distributed.checkpoint as dcp

    rank = dist.get_rank()
    pool = ray.get(rollouts.snapshot.remote()) if rollouts and rank == 0 else None
    with atomic(cfg, f"checkpoint-{where['step']:06d}") as folder:
        dcp.save(training_state(learners), checkpoint_id=str(folder))
        if rank == 0:
            schedules = {name: x.scheduler.last_epoch for name, x in learners.items()}
            ledger = {name: pool[name] for name in ("position", "ended")} if pool else {}
            for name in ("groups", "queue") if pool else ():
                ledger["finished" if name == "groups" else name] = [at for at, *_ in pool[name]]
            (folder / "run.json").write_text(
                json.dumps(where | {"ledger": ledger, "schedulers": schedules})
            )
            if pool:
                write_batch(folder / "rollouts.jsonl", pool, pool.pop("segments"))
        # each rank reads what it has written; the manifest comes last
        own = [p for p in folder.iterdir() if p.name.startswith(f"__{rank}_")]
        if rank == 0:
            own += [p for p in folder.iterdir() if not p.name.startswith("__")]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {p.name: [p.stat().st_size, digest_of(p)] for p in own})
        if rank == 0:
            files = {name: mark for part in everyone for name, mark in part.items()}
            (folder / MANIFEST).write_text(json.dumps(files))
    older = [p for p in checkpoints(cfg.out) if step_of(p) <= where["step"]]  # newer: damaged ones
    for old in older[: -cfg.keep] if rank == 0 else []:
        if old.name != where["best"].get("checkpoint"):
            shutil.rmtree(old)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def damage(folder: Path, rank: int = 0, world: int = 1) -> str:
    """What is wrong with a checkpoint, the file first; else "". Each rank reads its share."""
    if (folder / "rollouts.pt").exists():
        return (
            "rollouts.pt: a pickle of an earlier version, which reading would execute; go on with"
            " that version, or begin a new run with its <out>/model as --model"
        )
    name = MANIFEST
    try:
        files = json.loads((folder / MANIFEST).read_bytes())
        for i, (name, (size, mark)) in enumerate(sorted(files.items())):
            if (found := (folder / name).stat().st_size) != size:
                return f"{name}: {found} bytes instead of {size}"
            if i % world == rank and digest_of(folder / name) != mark:
                return f"{name}: not the bytes that were written"
        return "" if "run.json" in files else f"{MANIFEST}: run.json is not in it"
    except FileNotFoundError:
        return f"{name}: there is no such file"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as e:
        return f"{name}: cannot be read ({e})"


def newest(cfg, made: dict | None, console) -> dict:
    """Where the run stands: step, version, … of the newest whole checkpoint, with its `folder`, or
    zeros without --resume.

    Every rank calls it; made: of --resume, rank 0's `made_with`. Tells of damaged checkpoints and
    of flags that have changed; `again`: whether the groups that had finished have to start again.
    Raises BadInput, on every rank.
    """
    fresh = {"step": 0, "version": 0, "kl_coef": cfg.kl_coef, "best": {}}
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    box = [checkpoints(cfg.out)[::-1] if cfg.resume else []]
    dist.broadcast_object_list(box)
    for folder in box[0]:
        found = [None] * world
        dist.all_gather_object(found, damage(folder, rank, world))
        if told := next(filter(None, found), ""):
            wrong.append(f"{folder}/{told}")
            told = f"a damaged checkpoint is passed over: {wrong[-1]}"
            console.print(told, style="red", soft_wrap=True)
            continue
        box = [proceed(cfg, folder, made, console) if rank == 0 else None]
        dist.broadcast_object_list(box)
        if isinstance(box[0], BadInput):
            raise box[0]
        return fresh | box[0]
    if cfg.resume:
        told = "\n".join(wrong)
        raise BadInput(f"--resume: --out {cfg.out} has no whole checkpoint; name another\n{told}")
    return fresh


def proceed(cfg, folder: Path, made: dict, console) -> dict | BadInput:
    """Where the run of a whole checkpoint stood, if it can go on with these flags; else why not."""
    where = json.loads((folder / "run.json").read_text()) | {"folder": folder}
    changed, where["again"] = {}, False
    try:
        if was := where.pop("made_with", None):
            changed, where["again"] = compare(cfg, was, made)
    except BadInput as e:
        return e
    if changed:
        told = ", ".join(changed.values())
        console.print(f"changed since the checkpoint: {told}", highlight=False, soft_wrap=True)
    if "kl_coef" in changed:  # else --kl_target goes on from where it was
        where["kl_coef"] = cfg.kl_coef
    console.print(f"going on from {folder.name}, step {where['step']}", soft_wrap=True)
    return where


def pool_of(where: dict) -> dict:
    """The pool's state in a checkpoint, as `Rollouts.restore` takes it."""
    state, segments = read_batch(where["folder"] / "rollouts.jsonl")
    state["segments"] = segments
    if where["again"]:
        state["queue"] += [(at, tries) for at, tries, _ in state["groups"]]
        state |= dict(groups=[], rollouts=[], rows=[], segments=[])
    return state


# what dcp's .metadata may name
NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, x in vars(torch).items() if isinstance(x, torch.dtype))),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # of newer Pythons
}


class Metadata(pickle.Unpickler):
    """Reads dcp's .metadata, a pickle, without executing what another may have put there."""

    def find_class(self, module: str, name: str):
        if name not in NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could be executed")
        return super().find_class(module, name)


def metrics_until(path: Path, step: int) -> tuple[list[bytes], list[int]]:
    """(lines of a metrics.jsonl up to a step, since later ones will be run again; the numbers, from
    1, of those that are no metrics)."""
    kept, broken = [], []
    for i, line in enumerate(path.read_bytes().splitlines()):
        try:
            if json.loads(line.decode())["step"] <= step:
                kept.append(line)
        except (ValueError, LookupError, TypeError, RecursionError):
            broken.append(i + 1)
    return kept, broken


def load_checkpoint(folder: Path, learners: dict[str, Learner]) -> None:
    """Load a checkpoint into models, optimizers and schedules, on any number of ranks. What the
    optimizer's flags say stays.

    Executes nothing that the files hold. Raises BadInput for what is no weights, or does not fit
    the model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = Metadata(file).load()
    except Exception as e:  # as of any bytes
        raise BadInput(f"{folder}/.metadata is refused: {e}") from e

    class Reader(dcp.FileSystemReader):
        def read_metadata(self) -> dcp.Metadata:
            return metadata

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, item, value: io.BytesIO) -> None:
            plain = io.BytesIO()  # dcp itself would execute the value
            torch.save(torch.load(value, weights_only=True), plain)
            plain.seek(0)
            super().load_bytes(item, plain)

    state = training_state(learners)
    try:
        dcp.load(state, storage_reader=Reader(folder), planner=Planner())
    except CheckpointException as e:
        first = str(next(iter(e.failures.values()))[0])
        raise BadInput(f"{folder} is refused: {first}") from e
    schedules = json.loads((folder / "run.json").read_text())["schedulers"]
    options = StateDictOptions(strict=False)  # frozen weights are not in it
    for name, x in learners.items():
        flags = [{k: v for k, v in g.items() if k != "params"} for g in x.optimizer.param_groups]
        set_state_dict(x.replay.model, x.optimizer, **state[name], options=options)
        for group, own in zip(x.optimizer.param_groups, flags):
            group.update(own)
        x.scheduler.last_epoch = schedules[name] - 1
        x.scheduler.step()


@torch.no_grad()
def merge(model) -> None:
    """Add the adapters to their weights, for good: the model computes the same, its adapters are zero and not in state_dict()."""
    for weight, sum_of in merged(model):
        weight.copy_(sum_of())
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.zero_()

    def forget(_, state, *more) -> None:
        for name in [n for n in state if "lora_" in n]:
            del state[name]

    model.register_state_dict_post_hook(forget)


def copy_side_files(path: str, folder: Path) -> None:
    """Copy what stands beside a model's weights into `folder`, as it is: tokenizer, chat template,
    generation config and all that a family has of its own. Its config is another one now."""
    if not os.path.isdir(path):
        path = huggingface_hub.snapshot_download(path, ignore_patterns=OF_WEIGHTS)
    for file in Path(path).iterdir():
        if file.is_file() and not any(map(file.match, [*OF_WEIGHTS, "config.json"])):
            shutil.copy(file, folder)


def export(cfg, model) -> Path:
    """Write the policy as Hugging Face safetensors into <out>/model, with all files that stood
    beside its weights; transformers and vLLM load it.

    With --lora_rank the adapters go into <out>/adapter, as peft loads them, and into the weights: the run ends with it.
    """
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig
    from transformers import AutoTokenizer

    extra = dict(tokenizer=AutoTokenizer.from_pretrained(cfg.model), peft_config=adapters(cfg))

    def write(name: str, written: str, **how) -> Path:
        how |= dict(
            checkpoint_dir=cfg.out, model_save_format="safetensors", model_repo_id=cfg.model
        )
        checkpointer = CheckpointingConfig(**how).build(
            dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0
        )
        with atomic(cfg, name, written) as folder:
            model.save_pretrained(str(folder), checkpointer=checkpointer, **extra)
            if name == "model" and dist.get_rank() == 0:
                copy_side_files(cfg.model, folder / written)
        return Path(cfg.out) / name

    if cfg.lora_rank:
        write("adapter", "model", is_peft=True)
        merge(model)
    return write("model", "model/consolidated", save_consolidated=True)


# ---- the side of an engine's worker
if "vllm" in sys.modules:  # an engine's process; the trainer never imports vllm, which takes 15 s
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Init(base.WeightTransferInitInfo):
        host: str
        port: int
        rank: int  # of the engine's first worker
        world: int
        device: str
        seconds: float

    @dataclass
    class Bucket(base.WeightTransferUpdateInfo):
        names: list[str]
        dtypes: list[str]
        shapes: list[list[int]]
        checksum: int

    class Transport(base.WeightTransferEngine):
        """The worker's side, on vLLM's own seam."""

        init_info_cls, update_info_cls = Init, Bucket

        def init_transfer_engine(self, init: Init) -> None:
            self.group = group(**vars(init) | {"rank": init.rank + self.parallel_config.rank})
            # on a CPU tensor-parallel workers share memory that a killed one would leave; all have mapped it by now
            for path in Path("/dev/shm").glob(f"{os.environ.get('VLLM_DIST_IDENT')}-*"):
                path.unlink(missing_ok=True)

        def start_weight_update(self) -> None:
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = (
                        None  # else vLLM 0.30 does not repack MoE experts on CPU, without a word
                    )
            initialize_layerwise_reload(self.model)
            self.loaded = [0, 0]  # tensors handed to the loader, sum of their buckets' checksums

        def receive_weights(self, bucket: Bucket) -> None:
            spans, size = offsets(bucket.dtypes, bucket.shapes)
            flat = torch.empty(size, dtype=torch.uint8, device=self.device)
            broadcast(self.group, flat)
            if (got := checksum(flat)) != bucket.checksum:
                raise RuntimeError(
                    f"refit: a bucket arrived with checksum {got:x} instead of {bucket.checksum:x}"
                )
            self.load(bucket, flat, spans)

        def load(self, bucket: Bucket, flat: torch.Tensor, spans: list) -> None:
            def tensors():
                for name, dtype, shape, (start, end) in zip(
                    bucket.names, bucket.dtypes, bucket.shapes, spans
                ):
                    self.loaded[0] += 1
                    yield name, flat[start:end].view(getattr(torch, dtype)).view(shape)

            self.model.load_weights(tensors())
            self.loaded[1] = (self.loaded[1] + bucket.checksum) & (1 << 64) - 1

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            for module in self.model.modules():
                if self.device.type == "cpu" and isinstance(module, ParallelLMHead):
                    # a tied head shares the weight but has a packed copy of its own, which vLLM 0.30 leaves stale
                    module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            self.group = None

    class WorkerExtension:
        """Named in worker_extension_cls, so that each worker imports this module and has the methods below."""

        def refit_report(self) -> list[int]:
            return self.weight_transfer_engine.loaded

    WeightTransferEngineFactory.register_engine("instar", Transport)
