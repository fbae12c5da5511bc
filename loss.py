"""Learn: advantages and log-probs -> a loss.

Three steps, each a pure function: `correction` weighs every token by how far the trainer is from the engine that
sampled it, a policy loss of LOSSES gives one number a token, `aggregate` adds them up. `gap` measures trainer against
engine. This module does not run a model and knows no ranks: what is global is given to it.

    weights, metrics = correction(old_logprobs, behaviour_logprobs, mask, cfg.is_level, cfg.is_mode, cfg.is_band)
    losses, metrics = LOSSES[cfg.loss](logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs)
    aggregate(losses, weights, mask, denominator).backward()

`kl_loss`, `entropy_bonus` and `value_loss` give one number a token too, and `aggregate` adds them up in the same way.
To add a loss: write the function, add it to LOSSES, to CLIPS when it reads clip_low and clip_high, to
SEQUENCE_LOSSES when one ratio is a whole row's, and test it against its formula in plain Python.

Three log-probs of a token: behaviour (the engine, when it sampled), old (the trainer before the first optimizer step
on the batch), and the current one, which alone has a gradient. All are [B, T], aligned with the tokens. What stands off
the mask may be anything, -inf and nan too, and never reaches a value or a gradient: inputs are masked first, then log
ratios are clamped to ±20, then comes exp. A metric is a (sum, count) pair of this micro-batch, with count 0 for a plain
sum, or a maximum if its name ends in max; the caller reduces them. Imports torch only, and is tested alone:

    pytest tests/test_loss.py tests/test_reference_loss.py
"""

import torch
from torch import Tensor


def log_ratio(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """log-prob minus reference log-prob on action tokens, 0 elsewhere: [B, T]."""
    return logprobs.masked_fill(~mask, 0.0) - reference.masked_fill(~mask, 0.0)


def exp(x: Tensor) -> Tensor:
    """e^x with x clamped to ±20, so that it is finite and not 0; no gradient outside."""
    return x.clamp(-20.0, 20.0).exp()


def k3(d: Tensor) -> Tensor:
    """e^-d - 1 + d with d clamped to ±20, an estimate of the KL that is never negative."""
    d = d.clamp(-20.0, 20.0)
    return (-d).expm1() + d


@torch.no_grad()
def correction(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    level: str,
    mode: str,
    band: tuple,
    gate_only=False,
) -> tuple[Tensor, dict]:
    """Importance weight w = pi_old / pi_behaviour of each token, behind a gate: [B, T], no gradient, 0 off the mask.

    level: what the gate looks at: `token` w_t, `seq` the product of w over the row, `geo` its geometric mean over the
        row's action tokens; `off` is no correction, weight 1.
    mode: `mask` keeps w where that is in the band, bounds included, and gives 0 elsewhere; `clip` clamps w to the band;
        `trunc` caps w at the band's upper end. `seq` and `geo` keep or reject a whole row and take `mask` only.
    gate_only: what is kept has weight 1, not w, as SEQUENCE_LOSSES need it; the level is `seq`, `geo` or `off` then.
    Truncated importance sampling is token trunc 2, IcePop (arXiv 2510.18855) is token mask .5 5.
    Metrics: is/weight_mean; is/rejected, the share of action tokens with weight 0.
    Raises ValueError for a level and a mode that do not exist or do not go together.
    """
    if gate_only and level == "token":
        raise ValueError(
            "--is_level token: this loss has one ratio per sequence, set --is_level seq, geo or off"
        )
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
            unit = exp(
                {"token": u, "seq": u.sum(1, keepdim=True), "geo": row_mean(u, mask)}[level]
            )  # [B, T] or [B, 1]
            weights = torch.where(
                (low <= unit) & (unit <= high), torch.ones_like(w) if gate_only else w, 0.0
            )  # [B, T]
        case _:
            raise ValueError(
                f"--is_level {level} --is_mode {mode}: off; token mask|clip|trunc; seq|geo mask"
            )
    weights = weights.masked_fill(~mask, 0.0)  # [B, T]
    rejected, count = ((weights == 0) & mask).sum(), mask.sum()
    return weights, {"is/weight_mean": (weights.sum(), count), "is/rejected": (rejected, count)}


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the action tokens of each row, 0 for a row without any; x is 0 off the mask: [B, T] -> [B, 1]."""
    return x.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def credit(advantages: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """Advantages in the dtype of `like`, 0 off the mask: [B, T]."""
    return advantages.to(like.dtype).masked_fill(~mask, 0.0)


@torch.no_grad()
def clip_metrics(ratio: Tensor, clipped: Tensor, mask: Tensor) -> dict:
    """Metrics: loss/clip_share, the share of action tokens whose loss a clip decides; loss/ratio_max."""
    ratio_max = ratio.masked_fill(~mask, 0.0).max()
    return {"loss/clip_share": ((clipped & mask).sum(), mask.sum()), "loss/ratio_max": ratio_max}


def surrogate(ratio: Tensor, advantages: Tensor, mask: Tensor, cfg) -> tuple[Tensor, dict]:
    """-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) of each token: [B, T], 0 off the mask.

    dual_clip c > 1: where A < 0 the loss is at most -c·A, arXiv 1912.09729; 0 is off.
    """
    advantages = credit(advantages, mask, ratio)  # [B, T]
    unclipped = -ratio * advantages  # [B, T]
    losses = torch.maximum(
        unclipped, -ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages
    )  # [B, T]
    if cfg.dual_clip:
        losses = torch.where(
            advantages < 0, torch.minimum(losses, -cfg.dual_clip * advantages), losses
        )  # [B, T]
    return losses, clip_metrics(ratio, losses != unclipped, mask)


def ppo(
    logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs=None
) -> tuple[Tensor, dict]:
    """`surrogate` of r = pi / pi_old. arXiv 1707.06347; clip_high above clip_low is clip-higher, arXiv 2503.14476"""
    return surrogate(exp(log_ratio(logprobs, old_logprobs, mask)), advantages, mask, cfg)


def pg(
    logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs=None
) -> tuple[Tensor, dict]:
    """-A·log pi of each token, the policy gradient without a ratio: [B, T]. Reads no old log-probs and no cfg."""
    return -credit(advantages, mask, logprobs) * logprobs.masked_fill(~mask, 0.0), {}


def gspo(
    logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs=None
) -> tuple[Tensor, dict]:
    """`surrogate` of one ratio per row, s = exp(mean of log r over its action tokens): [B, T]. arXiv 2507.18071

    Every action token of a row has the row's loss (with its own A, should A differ), so that the mean over the tokens
    is the sequence's loss and --loss_agg seq_mean is the paper's mean over sequences.
    """
    s = exp(row_mean(log_ratio(logprobs, old_logprobs, mask), mask))  # [B, 1]
    return surrogate(s.expand(mask.shape), advantages, mask, cfg)


def gspo_token(
    logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs=None
) -> tuple[Tensor, dict]:
    """`surrogate` of s_t = sg(s)·pi / sg(pi): the value of `gspo`, a gradient for each token alone. arXiv 2507.18071"""
    s = exp(row_mean(log_ratio(logprobs, old_logprobs, mask), mask)).detach()  # [B, 1]
    return surrogate(s * exp(log_ratio(logprobs, logprobs.detach(), mask)), advantages, mask, cfg)


def cispo(
    logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs=None
) -> tuple[Tensor, dict]:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high))·A·log pi of each token: [B, T]. arXiv 2506.13585

    A clipped token keeps a gradient, unlike in `ppo`. clip_low 1 is no lower bound, as in the paper.
    """
    ratio = exp(log_ratio(logprobs, old_logprobs, mask)).detach()  # [B, T]
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)  # [B, T]
    losses = -clipped * credit(advantages, mask, ratio) * logprobs.masked_fill(~mask, 0.0)  # [B, T]
    return losses, clip_metrics(ratio, clipped != ratio, mask)


def sapo(
    logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs=None
) -> tuple[Tensor, dict]:
    """-(4 / tau)·sigmoid(tau·(r - 1))·A of each token, a soft clip: [B, T]. arXiv 2511.20347

    sapo_tau: tau where A > 0, and tau elsewhere.
    """
    ratio = exp(log_ratio(logprobs, old_logprobs, mask))  # [B, T]
    advantages = credit(advantages, mask, ratio)  # [B, T]
    above, below = cfg.sapo_tau
    tau = torch.full_like(ratio, below).masked_fill(advantages > 0, above)  # [B, T]
    losses = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages  # [B, T]
    return losses, {"loss/ratio_max": ratio.detach().masked_fill(~mask, 0.0).max()}


def gmpo(
    logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs=None
) -> tuple[Tensor, dict]:
    """-A·exp(mean of q over the row's action tokens), q = log r clipped where that lowers A·q: [B, T]. arXiv 2507.20673

    q_t = sgn(A)·min(sgn(A)·log r_t, clip(sgn(A)·log r_t, ±band)): log r_t is held under clip_high where A > 0, over
    -clip_low where A < 0, in logarithms. Every action token of a row has the row's loss, as in `gspo`.
    """
    u = log_ratio(logprobs, old_logprobs, mask)  # [B, T]
    advantages = credit(advantages, mask, u)  # [B, T]
    sign = advantages.sign()  # [B, T]
    bound = torch.full_like(u, cfg.clip_low).masked_fill(sign > 0, cfg.clip_high)  # [B, T]
    factor = exp(row_mean(sign * torch.minimum(sign * u, bound), mask))  # [B, 1]
    return -factor * advantages, clip_metrics(exp(u), sign * u > bound, mask)


def dppo(
    logprobs, old_logprobs, advantages, mask, cfg, behaviour_logprobs=None
) -> tuple[Tensor, dict]:
    """-A·(pi / pi_behaviour) of each token: [B, T], 0 where pi has gone by more than dppo_delta. arXiv 2602.04879

    A token is dropped if A > 0 and pi - pi_b > delta, or A < 0 and pi_b - pi > delta. No correction goes with it: the
    ratio is already the one to the engine.
    """
    ratio = exp(log_ratio(logprobs, behaviour_logprobs, mask))  # [B, T]
    advantages = credit(advantages, mask, ratio)  # [B, T]
    gone = logprobs.detach().exp() - behaviour_logprobs.exp()  # [B, T], anything off the mask
    dropped = torch.where(advantages > 0, gone, -gone) > cfg.dppo_delta  # [B, T]
    dropped &= mask & (advantages != 0)
    return (-ratio * advantages).masked_fill(dropped, 0.0), clip_metrics(ratio, dropped, mask)


LOSSES = {loss.__name__: loss for loss in (ppo, pg, gspo, gspo_token, cispo, sapo, gmpo, dppo)}
CLIPS = {  # clip_low, clip_high that each paper uses; the other losses read neither
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),  # its upper bound has to be tuned
    "gmpo": (0.4, 0.4),
}
SEQUENCE_LOSSES = {
    "gspo",
    "gmpo",
}  # one ratio per row: a correction is a gate over whole rows, of weight 0 or 1


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str) -> tuple[Tensor, dict]:
    """KL of the policy to a reference, per action token, d = log pi - log pi_ref: [B, T], 0 off the mask.

    k2: d²/2, whose gradient is that of the reverse KL on samples of pi. k3: e^-d - 1 + d, with d clamped to ±20, as in
    arXiv 2402.03300.
    Raises ValueError for k1, d itself: the expectation of its gradient is 0.
    """
    d = log_ratio(logprobs, ref_logprobs, mask)  # [B, T]
    if kind not in ("k2", "k3"):
        raise ValueError(
            f"{kind} is no KL loss, take k2 or k3: the expected gradient of k1 is zero"
        )
    losses = d.square() / 2 if kind == "k2" else k3(d)  # [B, T]
    return losses, {"kl/loss": (losses.detach().sum(), mask.sum())}


def adapt_kl(beta: float, kl: float, target: float, horizon: float, rollouts: int) -> float:
    """The next KL coefficient: beta·(1 + clip(kl / target - 1, ±0.2)·rollouts / horizon). arXiv 1909.08593"""
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * rollouts / horizon)


def entropy_bonus(entropy: Tensor, mask: Tensor) -> Tensor:
    """-entropy of action tokens, to be added to the loss times a coefficient: [B, T], 0 off mask. arXiv 1602.01783"""
    return -entropy.masked_fill(~mask, 0.0)


def value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, dict]:
    """.5·max((V - R)², (V_old + clip(V - V_old, ±c) - R)²) of each token: [B, T], 0 off the mask; clip 0 is off.

    R is the value target, V_old the critic's value before the update, from which it was made. arXiv 2005.12729
    Metrics: value/clip_share, the share of action tokens whose loss the clip decides; value/error, mean |V - R|.
    """
    values, old_values, targets = (
        x.masked_fill(~mask, 0.0) for x in (values, old_values, targets)
    )  # [B, T]
    free = (values - targets).square()  # [B, T]
    held = (
        (old_values + (values - old_values).clamp(-clip, clip) - targets).square() if clip else free
    )  # [B, T]
    with torch.no_grad():
        n, clipped = mask.sum(), (held > free).sum()
        metrics = {
            "value/clip_share": (clipped, n),
            "value/error": ((values - targets).abs().sum(), n),
        }
    return torch.maximum(free, held) / 2, metrics


def balance_loss(probs: Tensor, mask: Tensor, counts: Tensor, tokens: float) -> Tensor:
    """Load-balance loss of one MoE layer, E·sum over experts of f_i·P_i, 1 when balanced: a scalar. arXiv 2101.03961

    f_i: the share of all routed slots that expert i got, from counts [E]; no gradient. P_i: the mean router probability
    of expert i, from probs [B, T, E] over the tokens of the mask [B, T], which are all tokens but padding.
    counts and tokens are those of the whole optimizer step, over all ranks and micro-batches: this gives a
    micro-batch's part of the sum, and neither the loss nor its gradient depends on how rows were dealt out.
    """
    share = counts.double() / counts.sum().clamp(min=1)  # [E]
    mean = probs.masked_fill(~mask[..., None], 0.0).sum((0, 1)) / max(
        tokens, 1
    )  # [E], this micro-batch's part
    return len(counts) * (share.to(mean.dtype) * mean).sum()


def counted(weights: Tensor, mask: Tensor, is_denominator: str) -> Tensor:
    """How many tokens of each row count in a mean: `all` action tokens, or those `kept` by the correction. [B] int64"""
    tokens = mask & (weights != 0) if is_denominator == "kept" else mask  # [B, T]
    return tokens.sum(1)


def seq_mean(counts: Tensor) -> tuple[Tensor, Tensor]:
    """--loss_agg seq_mean, the mean over rollouts of the token mean, as weight and denominator of `aggregate`.

    counts [R]: `counted` tokens of each rollout of the optimizer step, over all its rows, ranks and micro-batches.
    Returns the weight of each rollout's tokens, 1 / its count [R], and the number of rollouts that have any token, at
    least 1. aggregate(losses, weights * share[rollout of each row, None], mask, rollouts)
    """
    return 1 / counts.double().clamp(min=1), (counts > 0).sum().clamp(min=1)


def aggregate(losses: Tensor, weights: Tensor, mask: Tensor, denominator: Tensor | float) -> Tensor:
    """sum(loss·weight) over action tokens / denominator, a scalar; losses, weights and mask are [B, T].

    The denominator is that of the whole optimizer step, over all ranks and micro-batches, so that the gradient does not
    depend on how rows were dealt out. token_mean: the sum of `counted`, at least 1. seq_mean: see `seq_mean`. constant
    (arXiv 2503.20783): the loss length times the number of rollouts.
    """
    weights = weights.masked_fill(~mask, 0.0).to(losses.dtype)  # [B, T]
    return (losses.masked_fill(~mask, 0.0) * weights).sum() / denominator


@torch.no_grad()
def gap(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> dict:
    """How far trainer and engine are apart on the tokens of the mask, d = trainer - behaviour log-prob, all [B, T].

    mean: |d|. k3: e^-d - 1 + d. max: the largest |d|, p999: its 99.9th percentile, both 0 when there is no token.
    tokens: how many. A nan on a token of the mask stays nan, so that a gate must ask for `gap <= limit`, never for
    `gap > limit`.
    """
    d = log_ratio(
        logprobs.double(), behaviour_logprobs.double(), mask
    )  # [B, T]; e^-d - 1 + d cancels in float32
    n = mask.sum()
    p999 = d.abs().flatten().topk(int(n) // 1000 + 1).values[-1]  # a nan counts as the largest
    return {
        "mean": (d.abs().sum(), n),
        "k3": (k3(d).sum(), n),
        "max": d.abs().max(),
        "p999": p999,
        "tokens": (n, 0),
    }
