"""The losses against their formulas in plain Python, the worked values, and bugs planted to see the same check fail."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch

from loss import aggregate, correction, counted, gap, log_ratio, ppo

torch.set_num_threads(1)
D = torch.float64
NAN, INF = float("nan"), float("inf")
CLIPS = [
    SimpleNamespace(clip_low=low, clip_high=high, dual_clip=dual)
    for low, high, dual in [(0.2, 0.2, 0), (0.2, 0.28, 0), (0.1, 0.4, 1.5), (0.2, 0.2, 3.0)]
]
CORRECTIONS = [  # level, mode, band
    ("off", "mask", (0.9, 1.1)),
    ("token", "mask", (0.9, 1.1)),
    ("token", "clip", (0.9, 1.1)),
    ("token", "trunc", (0.9, 1.1)),
    ("seq", "mask", (0.7, 1.4)),
    ("geo", "mask", (0.95, 1.08)),
]


def bounded_exp(x):
    return math.exp(max(-20.0, min(20.0, x)))


def active(*rows_and_mask):
    """Per row, the tuples of the action tokens' entries, with their positions."""
    *values, mask = [x.tolist() for x in rows_and_mask]
    for b, row in enumerate(mask):
        yield b, [(t, *(v[b][t] for v in values)) for t, m in enumerate(row) if m]


def correction_formula(old, behaviour, mask, level, mode, band):
    """The weights as a float64 tensor, from the definitions, with Python floats and loops only."""
    weights, (low, high) = torch.zeros(mask.shape, dtype=D), band
    for b, tokens in active(old, behaviour, mask):
        total = math.fsum(o - e for _, o, e in tokens)
        for t, o, e in tokens:
            w = bounded_exp(o - e)
            if level == "off":
                weights[b, t] = 1.0
            elif mode == "clip":
                weights[b, t] = min(max(w, low), high)
            elif mode == "trunc":
                weights[b, t] = min(w, high)
            else:
                unit = {
                    "token": w,
                    "seq": bounded_exp(total),
                    "geo": bounded_exp(total / len(tokens)),
                }[level]
                weights[b, t] = w if low <= unit <= high else 0.0
    return weights


def ppo_formula(logprobs, old, advantages, mask, cfg):
    """(loss, gradient of the loss by its log-prob, clipped) of each token, from the definition, in plain Python."""
    losses, gradients, clipped = (torch.zeros(mask.shape, dtype=D) for _ in range(3))
    for b, tokens in active(logprobs, old, advantages, mask):
        for t, x, o, a in tokens:
            r = bounded_exp(x - o)
            loss, slope = -r * a, -r * a if abs(x - o) < 20 else 0.0
            bound = -min(max(r, 1 - cfg.clip_low), 1 + cfg.clip_high) * a
            if bound > loss:
                loss, slope, clipped[b, t] = bound, 0.0, 1.0
            if cfg.dual_clip and a < 0 and loss > -cfg.dual_clip * a:
                loss, slope, clipped[b, t] = -cfg.dual_clip * a, 0.0, 1.0
            losses[b, t], gradients[b, t] = loss, slope
    return losses, gradients, clipped


def random_case(seed, dtype=D):
    """log-probs, old, behaviour, advantages, mask [B, T]: holes, empty rows, zero advantages, junk off the mask."""
    rng = random.Random(seed)
    rows, length, density = rng.randint(1, 6), rng.randint(1, 10), rng.choice([0.0, 0.3, 0.7, 1.0])
    mask = torch.tensor([[rng.random() < density for _ in range(length)] for _ in range(rows)])
    mask[0] &= rng.random() < 0.7
    spread = rng.choice([0.02, 0.3, 40.0])  # the last one goes beyond the clamp of log ratios

    def noise(scale):
        return torch.tensor(
            [[rng.gauss(0, scale) for _ in range(length)] for _ in range(rows)], dtype=D
        )

    behaviour = -noise(2.0).abs()
    old = behaviour + noise(spread / 4)
    logprobs, advantages = old + noise(spread), noise(1.0) * (noise(1.0) > -1)
    junk = [math.nan, -math.inf, math.inf, 1e30]
    tensors = [logprobs, old, behaviour, advantages]
    return [
        torch.where(mask, x, torch.tensor(rng.choice(junk), dtype=D)).to(dtype) for x in tensors
    ] + [mask]


CASES = [random_case(seed) for seed in range(80)]


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=tolerance)


def correction_agrees(function, level, mode, band, cases=CASES):
    """Whether the weights are the formula's to 1e-10 on every case."""
    return all(
        close(
            function(old, behaviour, mask, level, mode, band)[0],
            correction_formula(old, behaviour, mask, level, mode, band),
        )
        for _, old, behaviour, _, mask in cases
    )


def ppo_agrees(function, cfg, cases=CASES):
    """Whether value and gradient are the formula's to 1e-10 on every case."""
    for logprobs, old, _, advantages, mask in cases:
        x = logprobs.clone().requires_grad_()
        losses, _ = function(x, old, advantages, mask, cfg)
        (gradient,) = torch.autograd.grad(losses.sum(), x)
        want, slope, _ = ppo_formula(logprobs, old, advantages, mask, cfg)
        if not (close(losses.detach(), want) and close(gradient, slope)):
            return False
    return True


LOGPROBS = torch.tensor([[-1, -0.5, -2, 0], [-0.2, -1.5, -0.7, -0.3]], dtype=D)
OLD = torch.tensor([[-1.3, -0.5, -1.6, 0], [-0.6, -1.2, -0.7, -0.1]], dtype=D)
BEHAVIOUR = torch.tensor([[-1.31, -0.45, -1.7, 0], [-0.6, -1, -0.75, -0.1]], dtype=D)
ADVANTAGES = torch.tensor([[1.0] * 4, [-0.5] * 4], dtype=D)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()


def step(x, old, behaviour, advantages, mask, cfg, gate, denominator):
    """The loss of some rows as the trainer composes it, and its metrics."""
    losses, metrics = ppo(x, old, advantages, mask, cfg)
    weights, more = correction(old, behaviour, mask, *gate)
    return aggregate(losses, weights, mask, denominator), metrics | more


@pytest.mark.parametrize(
    "high, dual, gate, value, rejected, clipped",
    [
        (0.2, 0, ("off", "mask", (1, 1)), -0.11643, 0, 2),
        (0.28, 0, ("off", "mask", (1, 1)), -0.12786, 0, 2),
        (0.2, 1.2, ("off", "mask", (1, 1)), -0.13728, 0, 3),
        (0.2, 0, ("token", "mask", (0.95, 1.05)), -0.144, 3, 2),
        (0.2, 0, ("token", "clip", (0.95, 1.05)), -0.11526, 0, 2),
        (0.2, 0, ("token", "trunc", (0.95, 1.05)), -0.12277, 0, 2),
        (0.2, 0, ("geo", "mask", (0.99, 1.05)), -0.41487, 4, 2),
    ],
)
def test_worked_values(high, dual, gate, value, rejected, clipped):
    cfg = SimpleNamespace(clip_low=0.2, clip_high=high, dual_clip=dual)
    loss, metrics = step(LOGPROBS, OLD, BEHAVIOUR, ADVANTAGES, MASK, cfg, gate, 7)
    assert abs(loss - value) < 5e-6
    assert metrics["is/rejected"] == (rejected, 7)
    assert metrics["loss/clip_share"] == (clipped, 7)
    assert abs(metrics["loss/ratio_max"] - math.exp(0.4)) < 1e-12


@pytest.mark.parametrize(
    "gate, expected",
    [
        (("off", "mask", (1, 1)), [[0, -0.1429, -0.0958, 0], [0.1066, 0, 0.0714, 0.0585]]),
        (("geo", "mask", (0.99, 1.05)), [[0, -0.1359, -0.1058, 0], [0, 0, 0, 0]]),
    ],
)
def test_worked_gradients(gate, expected):
    x = LOGPROBS.clone().requires_grad_()
    loss, _ = step(x, OLD, BEHAVIOUR, ADVANTAGES, MASK, CLIPS[0], gate, 7)
    assert (torch.autograd.grad(loss, x)[0] - torch.tensor(expected)).abs().max() < 5e-5


def test_aggregate_is_the_sum_over_action_tokens_by_the_denominator():
    losses, mask = torch.arange(1.0, 7.0).view(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    ones = torch.ones_like(losses)
    assert aggregate(losses, ones, mask, counted(ones, mask, "all").sum()) == torch.tensor(
        3.6
    )  # token mean
    assert aggregate(losses, ones, mask, 4 * 2) == 18 / 8  # constant: loss length 4, two rollouts
    weights = torch.tensor([[0.5, 0, 9], [0, 2, 1]])
    assert aggregate(losses, weights, mask, counted(weights, mask, "kept").sum()) == torch.tensor(
        16.5 / 3
    )
    assert aggregate(losses, weights, mask, counted(weights, mask, "all").sum()) == torch.tensor(
        16.5 / 5
    )


@pytest.mark.parametrize("level, mode, band", CORRECTIONS)
def test_correction_is_its_formula(level, mode, band):
    assert correction_agrees(correction, level, mode, band)
    for _, old, behaviour, _, mask in CASES:
        _, metrics = correction(old, behaviour, mask, level, mode, band)
        want = correction_formula(old, behaviour, mask, level, mode, band)
        assert (
            close(metrics["is/weight_mean"][0], want.sum())
            and metrics["is/weight_mean"][1] == mask.sum()
        )
        assert metrics["is/rejected"] == ((want[mask] == 0).sum(), mask.sum())


@pytest.mark.parametrize("cfg", CLIPS)
def test_ppo_is_its_formula(cfg):
    assert ppo_agrees(ppo, cfg)
    for logprobs, old, _, advantages, mask in CASES:
        _, metrics = ppo(logprobs, old, advantages, mask, cfg)
        clipped = ppo_formula(logprobs, old, advantages, mask, cfg)[2]
        assert metrics["loss/clip_share"] == (clipped.sum(), mask.sum())


@pytest.mark.parametrize("cfg", CLIPS)
@pytest.mark.parametrize("gate", CORRECTIONS)
def test_the_gradient_is_that_of_finite_differences(cfg, gate):
    generator = torch.Generator().manual_seed(0)
    x = (OLD + 0.3 * torch.randn(2, 4, generator=generator, dtype=D)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda y: step(y, OLD, BEHAVIOUR, ADVANTAGES, MASK, cfg, gate, 7)[0], x, eps=1e-7, atol=1e-6
    )


def test_the_weight_has_no_gradient():
    old = OLD.clone().requires_grad_()
    for level, mode, band in CORRECTIONS:
        assert not correction(old, BEHAVIOUR, MASK, level, mode, band)[0].requires_grad


def test_the_band_is_inclusive():
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    for level in ("token", "seq", "geo"):
        assert correction(zeros, zeros, mask, level, "mask", (1.0, 2.0))[0].tolist() == [[1, 1]]
        assert correction(zeros, zeros, mask, level, "mask", (0.5, 1.0))[0].tolist() == [[1, 1]]
        assert correction(zeros, zeros, mask, level, "mask", (1.01, 2.0))[0].tolist() == [[0, 0]]


@pytest.mark.parametrize(
    "level, mode", [("seq", "clip"), ("geo", "trunc"), ("row", "mask"), ("token", "cut")]
)
def test_a_correction_that_does_not_exist_is_refused(level, mode):
    with pytest.raises(ValueError, match=f"--is_level {level} --is_mode {mode}"):
        correction(OLD, BEHAVIOUR, MASK, level, mode, (0.5, 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_losses_and_weights_keep_the_dtype_of_the_log_probs(dtype):
    logprobs, old, behaviour = LOGPROBS.to(dtype), OLD.to(dtype), BEHAVIOUR.to(dtype)
    assert ppo(logprobs, old, ADVANTAGES, MASK, CLIPS[0])[0].dtype == dtype
    assert correction(old, behaviour, MASK, "geo", "mask", (0.5, 2.0))[0].dtype == dtype


@pytest.mark.parametrize("gate", CORRECTIONS)
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_what_stands_off_the_mask_changes_nothing(gate, junk):
    results = []
    for filler in (0.0, junk):
        tensors = [
            x.float().masked_fill(~MASK, filler) for x in (LOGPROBS, OLD, BEHAVIOUR, ADVANTAGES)
        ]
        x = tensors[0].requires_grad_()
        loss, metrics = step(*tensors, MASK, CLIPS[2], gate, 7)
        numbers = [
            loss.detach(),
            *torch.autograd.grad(loss, x)[0].flatten(),
            *gap(x.detach(), tensors[2], MASK)["mean"],
        ]
        results.append(
            [float(n) for n in numbers + [metrics["is/weight_mean"][0], metrics["loss/ratio_max"]]]
        )
    assert results[0] == results[1] and all(map(math.isfinite, results[0]))


def test_aggregate_drops_junk_losses_and_weights_off_the_mask():
    losses = torch.tensor([[1.0, NAN]], requires_grad=True)
    loss = aggregate(losses, torch.tensor([[2.0, INF]]), torch.tensor([[True, False]]), 1)
    assert loss == 2 and torch.autograd.grad(loss, losses)[0].tolist() == [[2, 0]]


@pytest.mark.parametrize("gate", CORRECTIONS)
@pytest.mark.parametrize("cfg", CLIPS)
def test_ratios_of_e80_stay_finite(gate, cfg):
    for far, further, sign in itertools.product(
        (80.0, -80.0), (80.0, -80.0, -INF), (1.0, -1.0, 0.0)
    ):
        x = torch.tensor([[further, -0.5]], requires_grad=True)
        old, behaviour = torch.tensor([[0.0, -0.5]]), torch.tensor([[-far, -0.5]])
        mask = torch.ones(1, 2).bool()
        loss, metrics = step(x, old, behaviour, torch.full((1, 2), sign), mask, cfg, gate, 2)
        assert loss.isfinite() and torch.autograd.grad(loss, x)[0].isfinite().all()
        assert metrics["is/weight_mean"][0].isfinite() and metrics["loss/ratio_max"].isfinite()


def test_a_batch_without_action_tokens_gives_zero_and_not_nan():
    nothing = torch.zeros_like(MASK)
    for gate in CORRECTIONS:
        x = LOGPROBS.clone().requires_grad_()
        loss, metrics = step(x, OLD, BEHAVIOUR, ADVANTAGES, nothing, CLIPS[2], gate, 7)
        assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()
        assert metrics["is/rejected"] == (0, 0) and metrics["loss/ratio_max"] == 0
    assert gap(LOGPROBS, BEHAVIOUR, nothing) == {
        "mean": (0, 0),
        "k3": (0, 0),
        "max": 0,
        "p999": 0,
        "tokens": (0, 0),
    }


def by_micro_batches(rows, cfg, gate, cuts, denominator):
    """Loss and gradient of a step in micro-batches; rows = the five tensors, denominator = f(weights, mask)."""
    x = rows[0].clone().requires_grad_()
    total = 0.0
    for start, end in itertools.pairwise(cuts):
        part = [x[start:end], *(r[start:end] for r in rows[1:])]
        weights, _ = correction(part[1], part[2], part[4], *gate)
        loss, _ = step(*part, cfg, gate, denominator(weights, part[4]))
        loss.backward()
        total += loss.item()
    return torch.cat([torch.tensor([total]), x.grad.flatten()])


def one_step(seed):
    """Twelve float32 rows for an optimizer step, mild enough that most tokens are kept."""
    generator = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(12, 9, generator=generator)
    old = behaviour + 0.05 * torch.randn(12, 9, generator=generator)
    logprobs = old + 0.2 * torch.randn(12, 9, generator=generator)
    mask = torch.rand(12, 9, generator=generator) < torch.rand(12, 1, generator=generator)
    return [logprobs, old, behaviour, torch.randn(12, 9, generator=generator), mask]


@pytest.mark.parametrize("gate", CORRECTIONS)
@pytest.mark.parametrize("kept", ["all", "kept"])
def test_the_gradient_does_not_depend_on_micro_batches_or_filler_rows(gate, kept):
    rows = one_step(seed=1)
    n = counted(correction(rows[1], rows[2], rows[4], *gate)[0], rows[4], kept).sum()
    whole = by_micro_batches(rows, CLIPS[1], gate, [0, 12], lambda weights, mask: n)
    for cuts in ([0, 6, 12], [0, 1, 4, 5, 12], list(range(13))):
        assert close(
            by_micro_batches(rows, CLIPS[1], gate, cuts, lambda weights, mask: n), whole, 1e-6
        )
    filler = [torch.cat([r, torch.full((1, 9), NAN)]) for r in rows[:4]] + [
        torch.cat([rows[4], torch.zeros(1, 9).bool()])
    ]
    assert close(
        by_micro_batches(filler, CLIPS[1], gate, [0, 7, 12, 13], lambda weights, mask: n)[:-9],
        whole,
        1e-6,
    )


def test_gap_is_its_formula():
    for logprobs, _, behaviour, _, mask in CASES:
        d = [x - e for _, tokens in active(logprobs, behaviour, mask) for _, x, e in tokens]
        bounded = [max(-20.0, min(20.0, x)) for x in d]
        found = gap(logprobs, behaviour, mask)
        assert close(found["mean"][0], math.fsum(map(abs, d)))
        assert close(found["k3"][0], math.fsum(math.exp(-x) - 1 + x for x in bounded))
        assert close(found["max"], max(map(abs, d), default=0.0))
        assert close(found["p999"], sorted([*map(abs, d), 0.0], reverse=True)[len(d) // 1000])
        assert found["tokens"] == (len(d), 0) and found["mean"][1] == found["k3"][1] == len(d)


def test_a_tiny_gap_is_not_lost_in_float32():
    behaviour = torch.full((1, 8), -1.0)
    trainer = behaviour + torch.tensor([1e-6, -1e-6] * 4)
    d = trainer - behaviour
    want = (d.double() ** 2 / 2).mean()
    k3, n = gap(trainer, behaviour, torch.ones(1, 8).bool())["k3"]
    assert abs(k3 / n / want - 1) < 1e-5
    for in_float32 in (torch.exp(-d) - 1 + d, torch.expm1(-d) + d):
        assert abs(in_float32.mean() / want - 1) > 1e-3


def test_a_nan_on_an_action_token_is_never_hidden():
    logprobs = torch.where(torch.arange(4) == 1, NAN, LOGPROBS)
    assert not gap(logprobs, BEHAVIOUR, MASK)["max"] <= 1e9
    assert ppo(logprobs, OLD, ADVANTAGES, MASK, CLIPS[0])[0].isnan().any()


# Planted bugs: each test shows that the check above tells the wrong variant from the right one.


def test_planted_gate_per_token_instead_of_per_sequence_is_seen():
    def per_token(old, behaviour, mask, level, mode, band):
        return correction(old, behaviour, mask, "token", mode, band)

    assert not correction_agrees(per_token, "seq", "mask", (0.7, 1.4))
    assert not correction_agrees(per_token, "geo", "mask", (0.95, 1.08))


def test_planted_geometric_mean_over_padding_is_seen():
    def over_padding(old, behaviour, mask, level, mode, band):
        u = log_ratio(old, behaviour, mask)
        unit = (
            u.mean(1, keepdim=True).clamp(-20, 20).exp()
        )  # divides by T, not by the action tokens
        kept = (band[0] <= unit) & (unit <= band[1]) & mask
        return u.clamp(-20, 20).exp() * kept, {}

    full = [case for case in CASES if case[4].all()]
    assert full and correction_agrees(over_padding, "geo", "mask", (0.95, 1.08), full)
    assert not correction_agrees(over_padding, "geo", "mask", (0.95, 1.08))


def test_planted_gate_that_keeps_with_weight_one_is_seen():
    def flat(*arguments):
        weights, metrics = correction(*arguments)
        return (weights > 0).to(weights.dtype), metrics

    for level, mode, band in CORRECTIONS[1:]:
        assert not correction_agrees(flat, level, mode, band)


def test_planted_inverted_ratio_is_seen():
    for level, mode, band in CORRECTIONS[1:]:
        assert not correction_agrees(
            lambda old, behaviour, *rest: correction(behaviour, old, *rest), level, mode, band
        )


def test_planted_truncation_that_also_lifts_small_weights_is_seen():
    def clip(old, behaviour, mask, level, mode, band):
        return correction(old, behaviour, mask, level, "clip", band)

    assert not correction_agrees(clip, "token", "trunc", (0.9, 1.1))


def surrogate(logprobs, old, advantages, mask, cfg, reduce=torch.maximum, dual_for=lambda a: a < 0):
    """A PPO that is right by default, with the two places where it is commonly wrong as arguments."""
    ratio = log_ratio(logprobs, old, mask).clamp(-20, 20).exp()
    a = torch.where(mask, advantages, 0.0)
    losses = reduce(-ratio * a, -ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * a)
    if cfg.dual_clip:
        losses = torch.where(dual_for(a), torch.minimum(losses, -cfg.dual_clip * a), losses)
    return losses, {}


@pytest.mark.parametrize("cfg", CLIPS)
def test_planted_optimistic_clip_is_seen(cfg):
    assert ppo_agrees(surrogate, cfg)
    assert not ppo_agrees(lambda *arguments: surrogate(*arguments, reduce=torch.minimum), cfg)


def test_planted_dual_clip_on_positive_advantages_is_seen():
    assert not ppo_agrees(
        lambda *arguments: surrogate(*arguments, dual_for=lambda a: a != 0), CLIPS[2]
    )


def test_planted_clip_high_that_is_ignored_is_seen():
    def symmetric(logprobs, old, advantages, mask, cfg):
        clips = SimpleNamespace(
            clip_low=cfg.clip_low, clip_high=cfg.clip_low, dual_clip=cfg.dual_clip
        )
        return ppo(logprobs, old, advantages, mask, clips)

    assert ppo_agrees(symmetric, CLIPS[0])
    assert not ppo_agrees(symmetric, CLIPS[1])


def test_planted_mask_after_exp_is_seen():
    def late(logprobs, old, advantages, mask, cfg):
        ratio = (logprobs - old).clamp(-20, 20).exp()
        bound = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
        return torch.where(mask, torch.maximum(-ratio * advantages, -bound * advantages), 0.0), {}

    clean = [case for case in CASES if case[4].all()]
    assert clean and ppo_agrees(late, CLIPS[0], clean)
    assert not ppo_agrees(late, CLIPS[0])  # the value is right, the gradient is nan


def test_planted_log_ratio_without_a_clamp_is_seen():
    def unclamped(logprobs, old, advantages, mask, cfg):
        ratio = log_ratio(logprobs, old, mask).exp()
        a = torch.where(mask, advantages, 0.0)
        return torch.maximum(-ratio * a, -ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * a), {}

    assert not ppo_agrees(unclamped, CLIPS[0])


def test_planted_denominator_per_micro_batch_is_seen():
    rows, gate = one_step(seed=1), CORRECTIONS[1]
    n = rows[4].sum()
    whole = by_micro_batches(rows, CLIPS[1], gate, [0, 12], lambda weights, mask: n)
    for parts in (2, 4):
        cuts = list(range(0, 13, 12 // parts))
        local = by_micro_batches(
            rows, CLIPS[1], gate, cuts, lambda weights, mask, k=parts: k * mask.sum().clamp(min=1)
        )
        assert not close(local, whole, 1e-6)


def test_planted_denominator_of_kept_tokens_for_all_is_seen():
    rows, gate = one_step(seed=1), CORRECTIONS[1]
    weights, _ = correction(rows[1], rows[2], rows[4], *gate)
    losses, _ = ppo(*rows[:2], *rows[3:], CLIPS[1])
    values = [
        aggregate(losses, weights, rows[4], counted(weights, rows[4], name).sum())
        for name in ("all", "kept")
    ]
    want = sum(a * w for _, row in active(losses, weights, rows[4]) for _, a, w in row)
    assert close(values[0], want / rows[4].sum(), 1e-6) and close(
        values[1], want / (weights > 0).sum(), 1e-6
    )
    assert not close(values[0], values[1], 1e-3)
