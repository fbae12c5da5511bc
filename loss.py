"""Learn: advantages and log-probs -> a loss.

Three steps, each a pure function: `correction` weighs every token by how far the trainer is from the engine that
sampled it, a policy loss of LOSSES gives one number a token, `aggregate` adds them up. `gap` measures trainer against
engine. This module does not run a model and knows no ranks: what is global is given to it.

    weights, metrics = correction(old_logprobs, behaviour_logprobs, mask, cfg.is_level, cfg.is_mode, cfg.is_band)
    losses, metrics = LOSSES[cfg.loss](logprobs, old_logprobs, advantages, mask, cfg)
    aggregate(losses, weights, mask, denominator).backward()

Three log-probs of a token: behaviour (the engine, when it sampled), old (the trainer before the first optimizer step
on the batch), and the current one, which alone has a gradient. All are [B, T], aligned with the tokens. What stands off
the mask may be anything, -inf and nan too, and never reaches a value or a gradient: inputs are masked first, then log
ratios are clamped to ±20, then comes exp. A metric is a (sum, count) pair of this micro-batch, with count 0 for a plain
sum, or a maximum if its name ends in max; the caller reduces them. Imports torch only, and is tested alone:

    pytest tests/test_loss.py
"""

import torch


def log_ratio(logprobs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log-prob minus reference log-prob on action tokens, 0 elsewhere: [B, T]."""
    return logprobs.masked_fill(~mask, 0.0) - reference.masked_fill(~mask, 0.0)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x with x clamped to ±20, so that it is finite and not 0; no gradient outside."""
    return x.clamp(-20.0, 20.0).exp()


@torch.no_grad()
def correction(
    old_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    mask: torch.Tensor,
    level: str,
    mode: str,
    band: tuple[float, float],
) -> tuple[torch.Tensor, dict]:
    """Importance weight w = pi_old / pi_behaviour of each token, behind a gate: [B, T], no gradient, 0 off the mask.

    level: what the gate looks at: `token` w_t, `seq` the product of w over the row, `geo` its geometric mean over the
        row's action tokens; `off` is no correction, weight 1.
    mode: `mask` keeps w where that is in the band, bounds included, and gives 0 elsewhere; `clip` clamps w to the band;
        `trunc` caps w at the band's upper end. `seq` and `geo` keep or reject a whole row and take `mask` only.
    Truncated importance sampling is token trunc 2, IcePop (arXiv 2510.18855) is token mask .5 5.
    Metrics: is/weight_mean; is/rejected, the share of action tokens with weight 0.
    Raises ValueError for a level and a mode that do not exist or do not go together.
    """
    u = log_ratio(old_logprobs, behaviour_logprobs, mask)  # [B, T]
    low, high = band
    w = exp(u)  # [B, T]
    match level, mode:
        case "off", _:
            weights = torch.ones_like(w)  # [B, T]
        case "token", "clip":
            weights = w.clamp(low, high)  # [B, T]
        case "token", "trunc":
            weights = w.clamp(max=high)  # [B, T]
        case "token" | "seq" | "geo", "mask":
            total = u.sum(1, keepdim=True)  # [B, 1]
            mean = total / mask.sum(1, keepdim=True).clamp(min=1)  # [B, 1]
            unit = exp({"token": u, "seq": total, "geo": mean}[level])  # [B, T] or [B, 1]
            weights = torch.where((low <= unit) & (unit <= high), w, 0.0)  # [B, T]
        case _:
            raise ValueError(f"--is_level {level} --is_mode {mode}: off; token mask|clip|trunc; seq|geo mask")
    weights = weights.masked_fill(~mask, 0.0)  # [B, T]
    rejected, count = ((weights == 0) & mask).sum(), mask.sum()
    return weights, {"is/weight_mean": (weights.sum(), count), "is/rejected": (rejected, count)}


def ppo(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, cfg
) -> tuple[torch.Tensor, dict]:
    """-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) of each token, r = pi / pi_old: [B, T], 0 off the mask.

    arXiv 1707.06347; clip_high above clip_low is clip-higher, arXiv 2503.14476. dual_clip c > 1: where A < 0 the loss
    is at most -c·A, arXiv 1912.09729; 0 is off.
    Metrics: loss/clip_share, the share of action tokens whose loss a clip decides; loss/ratio_max.
    """
    ratio = exp(log_ratio(logprobs, old_logprobs, mask))  # [B, T]
    advantages = advantages.to(ratio.dtype).masked_fill(~mask, 0.0)  # [B, T]
    unclipped = -ratio * advantages  # [B, T]
    losses = torch.maximum(unclipped, -ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages)  # [B, T]
    if cfg.dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -cfg.dual_clip * advantages), losses)  # [B, T]
    with torch.no_grad():
        clip_share = ((losses != unclipped).sum(), mask.sum())
        return losses, {"loss/clip_share": clip_share, "loss/ratio_max": ratio.masked_fill(~mask, 0.0).max()}


LOSSES = {"ppo": ppo}


def counted(weights: torch.Tensor, mask: torch.Tensor, is_denominator: str) -> torch.Tensor:
    """How many tokens of these rows count in the token mean: `all` action tokens, or those `kept` by the correction."""
    return (mask & (weights != 0) if is_denominator == "kept" else mask).sum()


def aggregate(
    losses: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor, denominator: torch.Tensor | float
) -> torch.Tensor:
    """sum(loss·weight) over action tokens / denominator, a scalar; losses, weights and mask are [B, T].

    The denominator is that of the whole optimizer step, over all ranks and micro-batches, so that the gradient does not
    depend on how rows were dealt out. token_mean: the sum of `counted`, at least 1. constant (arXiv 2503.20783): the
    loss length times the number of rollouts.
    """
    return (losses.masked_fill(~mask, 0.0) * weights.masked_fill(~mask, 0.0)).sum() / denominator


@torch.no_grad()
def gap(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> dict:
    """How far trainer and engine are apart on the tokens of the mask, d = trainer - behaviour log-prob, all [B, T].

    mean: |d|. k3: e^-d - 1 + d. max: the largest |d|, p999: its 99.9th percentile, both 0 when there is no token.
    tokens: how many. A nan on a token of the mask stays nan, so that a gate must ask for `gap <= limit`, never for
    `gap > limit`.
    """
    d = log_ratio(logprobs.double(), behaviour_logprobs.double(), mask)  # [B, T]; e^-d - 1 + d cancels in float32
    n = mask.sum()
    clamped = d.clamp(-20.0, 20.0)  # [B, T]
    k3 = (-clamped).expm1() + clamped  # [B, T]
    p999 = d.abs().flatten().topk(int(n) // 1000 + 1).values[-1]  # a nan counts as the largest
    return {"mean": (d.abs().sum(), n), "k3": (k3.sum(), n), "max": d.abs().max(), "p999": p999, "tokens": (n, 0)}
