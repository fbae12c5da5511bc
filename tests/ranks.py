"""One batch through the trainer on any number of ranks; rank 0 writes loss, gradients and the weights after an SGD step.

torchrun --nproc-per-node 2 tests/ranks.py MODEL OUT.pt [EP [TOKENS_PER_MICROBATCH [ESTIMATOR]]]
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
import torch
import torch.distributed as dist
from test_adapters import moved
from test_replay import segment
from torch.distributed.fsdp import FSDPModule

import refit
import train
from agent import Result
from refit import hf_tensors
from replay import Replay, ValueHead, build_model, build_optimizer, pack, policy_head

CHECKPOINTED = "_checkpoint_wrapped_module"


def names(model):
    return [(n.replace(f"{CHECKPOINTED}.", ""), p) for n, p in model.named_parameters()]


def full(tensor):
    return (
        (tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor)
        .detach()
        .clone()
    )


def homes(model):
    """Each parameter that FSDP holds -> the name of its group's offload policy."""
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    own = {
        id(p.sharded_param): type(g.offload_policy).__name__ for g in groups for p in g.fsdp_params
    }
    return {n: own[id(p)] for n, p in names(model) if id(p) in own}


def exchanged(model: str, out: str) -> None:
    """A checkpoint of a policy that is offloaded goes into one that is not, and the other way round; both then step."""
    found, kinds = {}, ("none", "optimizer")
    for saved, loaded in (kinds, kinds[::-1]):
        folder = f"{out}/{saved}-{dist.get_world_size()}"
        os.makedirs(folder, exist_ok=True)
        cfg = train.Config(model=model, dtype="float32", out=folder, resume=True, offload=saved)
        one = train.build_policy(cfg, "cpu")
        moved(one)
        train.save_checkpoint(cfg, {"policy": one}, {"step": 1})
        cfg.offload = loaded
        other = train.build_policy(cfg, "cpu")
        train.load_checkpoint(refit.checkpoints(folder)[-1], {"policy": other})
        found[saved] = [{n: full(p) for n, p in moved(x, seed=1).items()} for x in (one, other)]
    if dist.get_rank() == 0:
        torch.save(found, f"{out}/exchanged-{dist.get_world_size()}.pt")


def main(tiny: str, out: str) -> None:
    """All jobs in one process, since most of the time is imports. A job: name, model, tokens per micro-batch, flags."""
    dist.init_process_group("gloo")
    whole = dict(estimator="reinforce_baseline")
    sequences = dict(
        estimator="grpo",
        loss="gspo",
        loss_agg="seq_mean",
        is_level="geo",
        is_mode="mask",
        is_band=(0.1, 9),
    )
    sequences |= dict(entropy_coef=0.01, kl_coef=0.1, kl_loss=True)
    balance = whole | dict(balance_coef=0.5)
    for name, model, budget, flags in (
        ("dense", "dense", 16384, whole),
        ("dense-many", "dense", 100, whole),
        ("dense-positive", "dense", 150, dict(estimator="reinforce", whiten=False)),
        ("tied", "tied", 16384, whole),
        ("moe", "moe", 16384, whole),
        ("sequences", "dense", 16384, sequences),
        ("sequences-many", "dense", 100, sequences),
        ("critic", "dense", 16384, dict(estimator="gae")),
        ("critic-many", "dense", 100, dict(estimator="gae")),
        ("critic-tied", "tied", 100, dict(estimator="gae", kl_coef=0.1)),
        ("dense-again", "dense", 16384, whole | dict(checkpoint_activations=True)),
        ("moe-again", "moe", 16384, whole | dict(checkpoint_activations=True)),
        ("dense-adapted", "dense", 16384, whole | dict(lora_rank=4)),
        ("moe-adapted", "moe", 16384, whole | dict(lora_rank=4)),
        ("moe-muon", "moe", 16384, whole | dict(optimizer="muon")),
        ("moe-flat", "moe", 100, whole | dict(ep=1)),
        ("moe-flat-offloaded", "moe", 100, whole | dict(ep=1, offload="optimizer")),
        ("dense-many-offloaded", "dense", 100, whole | dict(offload="optimizer")),
        ("dense-adapted-offloaded", "dense", 16384, whole | dict(lora_rank=4, offload="optimizer")),
        (
            "critic-tied-offloaded",
            "tied",
            100,
            dict(estimator="gae", kl_coef=0.1, offload="optimizer"),
        ),
        ("moe-balance", "moe", 16384, balance),
        ("moe-balance-many", "moe", 100, balance),
        ("moe-balance-again", "moe", 100, balance | dict(checkpoint_activations=True)),
        ("scaled", "cohere", 100, whole),
        ("capped", "gemma2", 100, whole),
        ("experts-of-transformers", "mixtral", 100, whole),
        ("moe-balance-ep-1", "moe", 100, balance | dict(ep=1)),
    ):
        job(f"{tiny}/{model}", f"{out}/{name}-{dist.get_world_size()}.pt", budget, flags)
    exchanged(f"{tiny}/dense", out)
    dist.destroy_process_group()


def job(model_name: str, out: str, budget: int, flags: dict) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = train.Config(
        model=model_name,
        dtype="float32",
        tokens_per_microbatch=budget,
        max_context=100,
        minibatches=1,
        max_grad_norm=1e9,
        **dict(
            ep=world if "moe" in model_name else 1,
            is_level="token",
            is_mode="clip",
            is_band=(0.5, 2.0),
        )
        | flags,
    )
    train.validate(cfg, world)
    model, mesh = build_model(cfg, "cpu")
    critic = (
        ValueHead(model) if cfg.estimator == "gae" else None
    )  # in the policy's place: what a critic does is tested
    for name, p in model.named_parameters():
        if "lora_" in name:  # on any number of ranks the same, and B not 0
            value = torch.sin(torch.arange(p.numel()).float() * 1.7).view(p.shape) / 10
            sharded = isinstance(p, dist.tensor.DTensor)
            p.data.copy_(
                dist.tensor.distribute_tensor(value, p.device_mesh, p.placements)
                if sharded
                else value
            )
    start, policies = {n: full(p) for n, p in names(model)}, homes(model)
    head = critic or policy_head(model, cfg.entropy_coef != 0)
    replay = Replay(model, 1.0, head, cfg.balance_coef != 0)
    gradients = {}

    class Keep(torch.optim.SGD):
        def step(self):
            gradients.update({n: full(p.grad) for n, p in names(model) if p.grad is not None})
            muon.step() if cfg.optimizer == "muon" else super().step()

    muon, _ = build_optimizer(cfg, model)
    optimizer = Keep(
        model.parameters(), lr=1e-2
    )  # before the first forward, which leaves gathered parameters behind
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
        "rollouts": [
            {"group": i // 2, "result": Result(reward=float(rng.random()))} for i in range(10)
        ],
        "rows": [
            {"id": i, "rollout": o, "tokens": len(r)} for i, (o, r) in enumerate(zip(owners, rows))
        ],
    }
    train.deal(cfg, batch, world)
    parts = [p[rank] for p in batch["plan"]]
    mine = [i for part in parts for m in part for i in m]
    segments = [rows[i] for i in mine]
    owners = [owners[i] for i in mine]
    parts = [[pack(segments, [mine.index(i) for i in m], owners) for m in part] for part in parts]
    micros, meter = [m for part in parts for m in part], train.Meter()
    for micro in micros:  # an engine, a reference and a critic that are off, the same on any rank
        micro.behaviour_logprobs = torch.sin(micro.tokens.float()) - 4.5
        micro.ref_logprobs = torch.cos(micro.tokens.float()) - 4.5 if cfg.kl_coef else None
        micro.values = torch.sin(micro.tokens.float()) / 2 if critic else None
        with torch.no_grad(), replay.experts(micro):
            micro.old_logprobs = (
                micro.behaviour_logprobs + 0.1 if critic else replay.forward(micro)[0]
            )
            micro.load = replay.load(micro) if replay.watched else None
    train.credit(cfg, batch, micros, meter)
    for micro in micros:
        meter.add(train.weigh(cfg, micro))
    learner = train.Learner(replay, mesh, optimizer, None)
    objective = train.value_objective if critic else train.policy_objective
    train.learn(cfg, learner, batch, parts, objective, meter, "critic_" if critic else "")
    metrics = meter.reduce(dist.group.WORLD)
    train.check_mass(metrics)
    weights = {n: full(p) for n, p in names(model)}
    sent = dict(hf_tensors(model, torch.float32)) if cfg.lora_rank else {}
    found = {
        "metrics": metrics,
        "gradients": gradients,
        "weights": weights,
        "start": start,
        "sent": sent,
        "homes": policies,
    }
    if rank == 0:
        torch.save(
            found | {"wrapped": sum(CHECKPOINTED in n for n, _ in model.named_modules())}, out
        )
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
