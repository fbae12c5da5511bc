"""Credit: the rewards of the rollouts -> one advantage for every action token.

An estimator is a pure function of a `Batch` and the run's flat config that returns (advantages, metrics). To add one:
write the function, add it to ESTIMATORS, and to GROUP_ESTIMATORS when it compares the rollouts of a group, and
test it against its formula in plain Python. What shapes or filters the rewards before that stands at the end.

Rules that all of them keep. Reward statistics are over rollouts, never over rows: a rollout cut into five segments
counts once. Every statistic is in float64 and over the whole batch, never over one rank's rows. Every segment is a
chain of its own that ends in the rollout's reward, and only action tokens are its steps. Advantages are 0 off the mask,
where log-probs and values may be anything, -inf and nan too.

This module runs no model and does not log: a metric is a (sum, count) pair of this rank's action tokens, which the
caller adds up over ranks. B = rows of this rank, T = tokens of a row, R = rollouts of the whole batch, K = named
rewards. It imports torch only and is tested alone:

    pytest tests/test_estimator.py
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass
class Batch:
    """What an estimator sees: the rows of this rank, and the rewards of all rollouts, the same on every rank."""

    mask: torch.Tensor  # [B, T] bool, action tokens
    rollout: (
        torch.Tensor
    )  # [B] int64, index of each row's rollout in rewards; any valid one for a filler row
    rewards: torch.Tensor  # [R] float64, finite
    groups: torch.Tensor  # [R] int64, group of each rollout (any integers)
    all_sum: Callable[[torch.Tensor], torch.Tensor] = lambda x: (
        x
    )  # sums a tensor over all data-parallel ranks
    dtype: torch.dtype = torch.float32  # of the advantages; everything before is float64
    old_logprobs: torch.Tensor | None = None  # [B, T], with ref_logprobs: KL as a reward
    ref_logprobs: torch.Tensor | None = (
        None  # [B, T] of the reference or teacher; None: no KL, cfg.kl_… are not read
    )
    values: torch.Tensor | None = (
        None  # [B, T], the critic's before the update: V_t of the state before token t
    )
    # [R, K] float64, for gdpo; nan where a rollout lacks one
    named_rewards: torch.Tensor | None = None
    truncated: torch.Tensor | None = None  # [R] bool, for cfg.bootstrap_truncated

    @cached_property
    def after(self) -> torch.Tensor:
        """How many action tokens of the row come after token t: [B, T] int64."""
        until = self.mask.cumsum(1)  # [B, T], those up to t
        return until[:, -1:] - until


def group_sum(x: torch.Tensor, batch: Batch, reduce: str = "sum") -> torch.Tensor:
    """The sum of x over the group of each rollout, or another of torch's reductions: [R] -> [R]."""
    ids, group = batch.groups.unique(return_inverse=True)  # [G], [R]
    return x.new_zeros(len(ids)).scatter_reduce(0, group, x, reduce, include_self=False)[
        group
    ]  # [R]


def centre(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """R - mean(G), unbiased std(G) and n = |G| of each rollout's group: three float64 [R].

    All three are exact where rewards are equal: centre and std are 0, not rounding noise. So they are for n = 1.
    """
    rewards = batch.rewards.double()  # [R]
    n = group_sum(torch.ones_like(rewards), batch)  # [R]
    # Measured from the group's lowest reward, equal rewards are exact zeros, which no rounding of a mean can spoil.
    above = rewards - group_sum(rewards, batch, "amin")  # [R]
    centred = above - group_sum(above, batch) / n  # [R]
    variance = group_sum(centred.square(), batch) / (n - 1).clamp(min=1)  # [R]
    return centred, variance.sqrt(), n


def lengths(batch: Batch) -> torch.Tensor:
    """Action tokens of each rollout, over all its rows and all ranks: [R] float64."""
    rows = batch.mask.sum(1).double()  # [B]
    return batch.all_sum(
        rows.new_zeros(len(batch.rewards)).index_add(0, batch.rollout, rows)
    )  # [R]


def spread(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """One value a rollout [R] -> the same value on every action token of its rows, 0 elsewhere: [B, T]."""
    return values[batch.rollout, None] * batch.mask  # [B, T]


def whiten(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(x - mean) / sqrt(max(var, 1e-8)) over the action tokens of all ranks: [B, T], 0 off the mask."""
    mask = batch.mask  # [B, T]
    total = batch.all_sum(
        torch.stack([(x * mask).sum(), mask.sum().to(x.dtype)])
    )  # [2]: sum, number of tokens
    count = total[1].clamp(min=1)
    centred = (x - total[0] / count) * mask  # [B, T]
    variance = batch.all_sum(centred.square().sum()) / count
    return centred / variance.clamp(min=1e-8).sqrt()


def finish(
    advantages: torch.Tensor, batch: Batch, whitened: bool = False
) -> tuple[torch.Tensor, dict]:
    """Whitened if asked for, cast to the batch's dtype; (sum, count) metrics over this rank's action tokens.

    kl/ref: k1, whatever cfg.kl_type is: its mean estimates KL(pi_old | reference), which an adaptive coefficient needs.
    """
    advantages, count = whiten(advantages, batch) if whitened else advantages, batch.mask.sum()
    metrics = {
        "advantage/mean": (advantages.sum(), count),
        "advantage/abs": (advantages.abs().sum(), count),
    }
    if batch.ref_logprobs is not None:
        metrics["kl/ref"] = (kl(batch, "k1").sum(), count)
    return advantages.to(batch.dtype), metrics


# ---- chains of action tokens


def kl(batch: Batch, kind: str) -> torch.Tensor:
    """KL of pi_old to the reference, per action token, d = log pi_old - log pi_ref: [B, T] float64, 0 off the mask.

    k1 d, k2 d²/2, k3 e^-d - 1 + d with d clamped to ±20. Masked before anything adds it up.
    """
    old, ref = batch.old_logprobs.double(), batch.ref_logprobs.double()  # [B, T]
    d = old.masked_fill(~batch.mask, 0.0) - ref.masked_fill(~batch.mask, 0.0)  # [B, T]
    if kind == "k3":
        d = d.clamp(-20.0, 20.0)  # [B, T]
        return (-d).expm1() + d
    return {"k1": d, "k2": d.square() / 2}[kind]


def chain(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Each row's action tokens from the last one backwards, with nothing between them, then 0: [B, T] -> [B, T]."""
    return torch.zeros_like(x).scatter_add_(1, batch.after, x.masked_fill(~batch.mask, 0.0))


def unchain(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The inverse of `chain`: [B, T] -> [B, T], 0 off the mask."""
    return x.gather(1, batch.after).masked_fill(~batch.mask, 0.0)


def scan(x: torch.Tensor, factor: float, block: int = 32) -> torch.Tensor:
    """y_j = x_j + factor·y_{j-1} along the last dimension, factor in [0, 1]: [..., T] -> [..., T].

    One matrix product with the powers of the factor per block, then the same over the ends of the blocks. A power that
    underflows is a term that has no weight: nothing is divided by it.
    """
    steps = torch.arange(min(x.shape[-1], block))  # [t]
    powers = (factor ** (steps - steps[:, None]).clamp(min=0).to(x)).triu()  # [t, t]
    if x.shape[-1] <= block:
        return x @ powers
    blocks = -(-x.shape[-1] // block)
    padded = torch.nn.functional.pad(x, (0, blocks * block - x.shape[-1]))
    inside = padded.unflatten(-1, (blocks, block)) @ powers  # [..., blocks, block]
    ends = scan(inside[..., -1], factor**block, block)  # [..., blocks]
    before = torch.nn.functional.pad(ends, (1, -1))[..., None]  # [..., blocks, 1]
    return inside.addcmul(before, factor * powers[0]).flatten(-2)[..., : x.shape[-1]]


def chain_rewards(batch: Batch, cfg) -> torch.Tensor:
    """rho in `chain` order: -kl_coef·KL on every action token, plus R on the last one: [B, T] float64."""
    rho = batch.mask.new_zeros(batch.mask.shape, dtype=torch.float64)  # [B, T]
    if batch.ref_logprobs is not None:
        rho = chain(-cfg.kl_coef * kl(batch, cfg.kl_type), batch)  # [B, T]
    rho[:, 0] += batch.rewards.double()[batch.rollout]
    return rho


def gae_advantages(batch: Batch, cfg) -> torch.Tensor:
    """Advantages of `gae` before whitening: [B, T] float64, 0 off the mask."""
    values = chain(batch.values.double(), batch)  # [B, T]
    delta = chain_rewards(batch, cfg) - values  # [B, T]
    delta[:, 1:] += cfg.gamma * values[:, :-1]
    if cfg.bootstrap_truncated:
        delta[:, 0] += cfg.gamma * values[:, 0] * batch.truncated[batch.rollout]
    return unchain(scan(delta, cfg.gamma * cfg.lam), batch)


def value_targets(batch: Batch, cfg) -> torch.Tensor:
    """What the critic of `gae` learns: advantage before whitening + value: [B, T], 0 off the mask. arXiv 1506.02438"""
    values = batch.values.double().masked_fill(~batch.mask, 0.0)  # [B, T]
    return (gae_advantages(batch, cfg) + values).to(batch.dtype)


def explained_variance(batch: Batch, targets: torch.Tensor) -> float:
    """1 - var(target - value) / var(target) over the action tokens of all ranks: 1 for a perfect critic, 0 for a constant.

    targets: [B, T]. 0 where all targets are equal: there is nothing to explain.
    """
    x = torch.stack([targets.double(), targets.double() - batch.values.double()])  # [2, B, T]
    x = x.masked_fill(~batch.mask, 0.0).flatten(1)  # [2, B·T]
    moments = batch.all_sum(
        torch.stack([x.sum(1), x.square().sum(1), batch.mask.sum().double().expand(2)])
    )  # [3, 2]
    total, missed = (moments[1] / moments[2] - (moments[0] / moments[2]).square()).tolist()
    return 1 - missed / total if total > 1e-12 else 0.0


# ---- estimators


def grpo(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """(R - mean(G)) / (std(G) + 1e-6), unbiased std; exactly 0 when n = 1 or all rewards are equal. arXiv 2402.03300"""
    centred, std, _ = centre(batch)
    return finish(spread(centred / (std + 1e-6), batch), batch)


def dr_grpo(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """R - mean(G); belongs with a constant loss denominator, not the token mean. arXiv 2503.20783"""
    centred, _, _ = centre(batch)
    return finish(spread(centred, batch), batch)


def rloo(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """R - mean of the group's other n - 1 rewards, which is (R - mean(G))·n/(n - 1); 0 when n = 1. arXiv 2402.14740"""
    centred, _, n = centre(batch)
    return finish(spread(centred * n / (n - 1).clamp(min=1), batch), batch)


def reinforce_baseline(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """REINFORCE++ with a group baseline: R - mean(G), whitened over the batch if cfg.whiten. arXiv 2501.03262"""
    centred, _, _ = centre(batch)
    return finish(spread(centred, batch), batch, cfg.whiten)


def reinforce(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """REINFORCE++: return_t = rho_t + gamma·return_next, whitened over the batch if cfg.whiten. arXiv 2501.03262

    rho = -kl_coef·KL, plus R on a row's last action token; next = next action token: tokens off the mask are no steps.
    """
    returns = unchain(scan(chain_rewards(batch, cfg), cfg.gamma), batch)  # [B, T]
    return finish(returns, batch, cfg.whiten)


def gae(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """A_t = delta_t + gamma·lam·A_next, delta_t = rho_t + gamma·V_next - V_t; whitened if cfg.whiten. arXiv 1506.02438

    rho and next as in `reinforce`. V after the end of a row is 0; with cfg.bootstrap_truncated it is V at the row's
    last action token, the last state that the critic has judged, in every row of a truncated rollout.
    """
    return finish(gae_advantages(batch, cfg), batch, cfg.whiten)


def opd(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """On-policy distillation: -kl_coef·(log pi_old - log pi_teacher), and nothing else. arXiv 2306.13649, 2306.08543"""
    return finish(-cfg.kl_coef * kl(batch, "k1"), batch)


def maxrl(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """(R - mean(G)) / mean(G), 0 if the mean is not positive. arXiv 2602.02710"""
    centred, _, n = centre(batch)
    mean = group_sum(batch.rewards.double(), batch) / n  # [R]
    # Rewards of both signs may cancel up to their rounding: such a mean is 0, and no divisor.
    positive = mean > 1e-12 * group_sum(batch.rewards.double().abs(), batch) / n  # [R]
    return finish(spread(torch.where(positive, centred / mean, 0.0), batch), batch)


def lite_ppo(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """(R - mean(G)) / (std of the rewards of the batch + 1e-6), unbiased std. arXiv 2508.08221"""
    centred, _, _ = centre(batch)
    _, std, _ = centre(
        replace(batch, groups=torch.zeros_like(batch.groups))
    )  # the batch as one group
    return finish(spread(centred / (std + 1e-6), batch), batch)


def opo(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """R - sum(length·R) / sum(length) over G, length = action tokens of the rollout. arXiv 2505.23585"""
    centred, _, _ = centre(batch)  # moves R and the baseline alike, and keeps equal rewards exact
    length = lengths(batch)  # [R]
    baseline = group_sum(length * centred, batch) / group_sum(length, batch).clamp(min=1)  # [R]
    return finish(spread(centred - baseline, batch), batch)


def gdpo(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """Each named reward normalised as in `grpo`, their sum with cfg.reward_weights (empty: all 1), then divided by its
    unbiased std over the batch's rollouts + 1e-6. arXiv 2601.05242

    The batch's mean is not subtracted: it is 0, as the mean of every group is, and its rounding
    would be no exact 0. A rollout
    that lacks a reward, where it is nan, is no part of that reward's group, and gets nothing of it.
    """
    alone = batch.groups.max() + 1 + torch.arange(len(batch.groups))  # [R], a group for each
    weights = cfg.reward_weights or [1.0] * batch.named_rewards.shape[1]
    total = torch.zeros_like(batch.rewards, dtype=torch.float64)  # [R]
    for weight, rewards in zip(weights, batch.named_rewards.T, strict=True):
        groups = torch.where(rewards.isnan(), alone, batch.groups)  # [R]
        centred, std, _ = centre(replace(batch, rewards=rewards.nan_to_num(), groups=groups))
        total += weight * centred / (std + 1e-6)
    std = (total.square().sum() / max(1, len(total) - 1)).sqrt()
    return finish(spread(total / (std + 1e-6), batch), batch)


def sft(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """1 on every action token, here those of a demonstration: with the loss `pg` it is -log pi."""
    return finish(batch.mask.double(), batch)


EVERY = (
    grpo,
    dr_grpo,
    rloo,
    reinforce,
    reinforce_baseline,
    gae,
    opd,
    maxrl,
    lite_ppo,
    opo,
    gdpo,
    sft,
)
ESTIMATORS = {estimator.__name__: estimator for estimator in EVERY}
# these compare the n >= 2 rollouts of each prompt, and take no KL as a reward
GROUP_ESTIMATORS = {
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_baseline",
    "maxrl",
    "lite_ppo",
    "opo",
    "gdpo",
}


# ---- rewards and groups before the credit


def clip_rewards(rewards: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Rewards held between low and high: [R] -> [R]."""
    return rewards.clamp(low, high)


def overlong(length: torch.Tensor, limit: float, buffer: float) -> torch.Tensor:
    """Penalty to add to the reward: 0 up to limit - buffer, then falling to -1 at the limit: [R]. arXiv 2503.14476"""
    return ((limit - buffer - length.double()) / buffer).clamp(-1.0, 0.0)


def keeps(scores: list[float], n: int, low: float, high: float) -> bool:
    """Dynamic sampling: whether all n rollouts of a group are there, and low < mean < high. arXiv 2503.14476"""
    # Not the mean itself, which rounds: n equal scores at a bound must be at the bound.
    return len(scores) == n and math.fsum(s - low for s in scores) > 0 < math.fsum(
        high - s for s in scores
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k samples is right, when c of n were: 1 - C(n - c, k) / C(n, k). arXiv 2107.03374"""
    return 1 - math.comb(n - c, k) / math.comb(n, k)
