"""One batch through the trainer on any number of ranks; rank 0 writes loss, gradients and the weights after an SGD step.

torchrun --nproc-per-node 2 tests/ranks.py MODEL OUT.pt [EP [TOKENS_PER_MICROBATCH [ESTIMATOR]]]
"""

import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
import torch
import torch.distributed as dist
from test_replay import segment

import train
from replay import Replay, pack


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor).detach().clone()


def main(tiny: str, out: str) -> None:
    """All jobs in one process, since most of the time is imports. A job: name, model, tokens per micro-batch, estimator."""
    dist.init_process_group("gloo")
    for name, model, budget, estimator in (
        ("dense", "dense", 16384, "reinforce_baseline"),
        ("dense-many", "dense", 100, "reinforce_baseline"),
        ("dense-positive", "dense", 150, "reinforce"),
        ("tied", "tied", 16384, "reinforce_baseline"),
        ("moe", "moe", 16384, "reinforce_baseline"),
    ):
        job(f"{tiny}/{model}", f"{out}/{name}-{dist.get_world_size()}.pt", budget, estimator)
    dist.destroy_process_group()


def job(model_name: str, out: str, budget: int, estimator: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = world if model_name.endswith("moe") else 1
    cfg = train.Config(
        model=model_name,
        dtype="float32",
        ep=ep,
        tokens_per_microbatch=budget,
        estimator=estimator,
        whiten=estimator != "reinforce",
        minibatches=1,
        is_level="token",
        is_mode="clip",
        is_band=(0.5, 2.0),
        max_grad_norm=1e9,
    )
    model, mesh = train.build_model(cfg, "cpu")
    start = {n: full(p) for n, p in model.named_parameters()}
    replay = Replay(model, 1.0)
    gradients = {}

    class Keep(torch.optim.SGD):
        def step(self):
            gradients.update({n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})
            super().step()

    optimizer = Keep(model.parameters(), lr=1e-2)  # before the first forward, which leaves gathered parameters behind
    rng = np.random.default_rng(0)
    rows, owners = [], []
    for i in range(15):  # 10 rollouts, some with several segments, of very different lengths
        n = int(rng.integers(6, 90))
        a = int(rng.integers(1, n - 4))
        row = segment(n, [(a, n - 2), (n - 1, n)] if n - 2 > a else [(a, n)], seed=i)
        if replay.routers:
            layers = 1 + max(r.layer for r in replay.routers)
            row.experts = (
                np.stack([np.sort(rng.permutation(8)[:2]) for _ in range(n * layers)])
                .reshape(n, layers, 2)
                .astype(np.uint8)
            )
            row.experts_ok = np.arange(n) < n - 1
        rows.append(row)
        owners.append(i % 10)
    batch = {
        "rollouts": [{"group": i // 2, "result": SimpleNamespace(reward=float(rng.random()))} for i in range(10)],
        "rows": [{"id": i, "rollout": o, "tokens": len(r)} for i, (o, r) in enumerate(zip(owners, rows))],
    }
    train.deal(cfg, batch, world)
    parts = [p[rank] for p in batch["plan"]]
    mine = [i for part in parts for m in part for i in m]
    segments = [rows[i] for i in mine]
    parts = [[pack(segments, [mine.index(i) for i in m]) for m in part] for part in parts]
    meter = train.Meter()
    with torch.no_grad():
        old = []
        for micro in (m for part in parts for m in part):
            with replay.experts(micro):
                old.append(replay.forward(micro)[0])
            micro.behaviour_logprobs = (
                torch.sin(micro.tokens.float()) - 4.5
            )  # an engine that is off, the same on any rank
    advantages = train.advantages_of(cfg, batch, mine, segments, meter)
    train.learn(cfg, replay, optimizer, mesh, batch, parts, old, advantages, meter)
    metrics = meter.reduce(dist.group.WORLD)
    train.check_mass(metrics)
    weights = {n: full(p) for n, p in model.named_parameters()}
    if rank == 0:
        torch.save({"metrics": metrics, "gradients": gradients, "weights": weights, "start": start}, out)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
