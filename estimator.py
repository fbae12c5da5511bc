"""Credit: the rewards of the rollouts -> one advantage for every action token.

An estimator is a pure function of a `Batch` and the run's flat config that returns (advantages, metrics). To add one:
write the function, add its line to ESTIMATORS, and to GROUP_ESTIMATORS when it compares the rollouts of a group, and
test it against its formula in plain Python.

Rules that all of them keep. Reward statistics are over rollouts, never over rows: a rollout cut into five segments
counts once. Every statistic is in float64 and over the whole batch, never over one rank's rows. Every segment is a
chain of its own that ends in the rollout's reward. Advantages are 0 off the mask.

This module does not clip or filter rewards, does not know log-probs, and does not log: a metric is a (sum, count) pair
of this rank's action tokens, which the caller adds up over ranks. B = rows of this rank, T = tokens of a row, R =
rollouts of the whole batch. It imports torch only and is tested alone:

    pytest tests/test_estimator.py
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass
class Batch:
    """What an estimator sees: the rows of this rank, and the rewards of all rollouts, the same on every rank."""

    mask: torch.Tensor  # [B, T] bool, action tokens
    rollout: torch.Tensor  # [B] int64, index of each row's rollout in rewards; any valid one for a filler row
    rewards: torch.Tensor  # [R] float64, finite
    groups: torch.Tensor  # [R] int64, group of each rollout (any integers)
    all_sum: Callable[[torch.Tensor], torch.Tensor] = identity  # sums a tensor over all data-parallel ranks
    dtype: torch.dtype = torch.float32  # of the advantages; everything before is float64


def centre(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """R - mean(G), unbiased std(G) and n = |G| of each rollout's group: three float64 [R].

    All three are exact where rewards are equal: centre and std are 0, not rounding noise. So they are for n = 1.
    """
    ids, group = batch.groups.unique(return_inverse=True)  # [G], [R]
    rewards = batch.rewards.double()  # [R]
    zeros = rewards.new_zeros(len(ids))  # [G]
    n = zeros.index_add(0, group, torch.ones_like(rewards))[group]  # [R]
    # Measured from the group's lowest reward, equal rewards are exact zeros, which no rounding of a mean can spoil.
    above = rewards - zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)[group]  # [R]
    centred = above - zeros.index_add(0, group, above)[group] / n  # [R]
    variance = zeros.index_add(0, group, centred.square())[group] / (n - 1).clamp(min=1)  # [R]
    return centred, variance.sqrt(), n


def spread(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """One value a rollout [R] -> the same value on every action token of its rows, 0 elsewhere: [B, T]."""
    return values[batch.rollout, None] * batch.mask  # [B, T]


def whiten(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(x - mean) / sqrt(max(var, 1e-8)) over the action tokens of all ranks: [B, T], 0 off the mask."""
    mask = batch.mask  # [B, T]
    total = batch.all_sum(torch.stack([(x * mask).sum(), mask.sum().to(x.dtype)]))  # [2]: sum, number of tokens
    count = total[1].clamp(min=1)
    centred = (x - total[0] / count) * mask  # [B, T]
    variance = batch.all_sum(centred.square().sum()) / count
    return centred / variance.clamp(min=1e-8).sqrt()


def finish(advantages: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict]:
    """Cast to the batch's dtype; (sum, count) metrics over this rank's action tokens."""
    count = batch.mask.sum()
    metrics = {"advantage/mean": (advantages.sum(), count), "advantage/abs": (advantages.abs().sum(), count)}
    return advantages.to(batch.dtype), metrics


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
    advantages = spread(centred, batch)  # [B, T]
    return finish(whiten(advantages, batch) if cfg.whiten else advantages, batch)


def reinforce(batch: Batch, cfg) -> tuple[torch.Tensor, dict]:
    """REINFORCE++: gamma^(action tokens after t)·R, whitened over the batch if cfg.whiten. arXiv 2501.03262

    The reward sits on a row's last action token; tokens off the mask are no time steps.
    """
    mask = batch.mask.double()  # [B, T]
    later = mask.flip(1).cumsum(1).flip(1) - mask  # [B, T], action tokens after t
    returns = cfg.gamma**later * spread(batch.rewards.double(), batch)  # [B, T]
    return finish(whiten(returns, batch) if cfg.whiten else returns, batch)


ESTIMATORS = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_baseline": reinforce_baseline,
}
GROUP_ESTIMATORS = {"grpo", "dr_grpo", "rloo", "reinforce_baseline"}  # these need n >= 2 rollouts of each prompt
