"""Every loss, KL form and aggregation against its formula in plain Python, and bugs planted to see the same check fail.

The references are written from the definitions, with Python floats and loops. test_loss.py has the correction and more
about ppo.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from test_loss import (
    ADVANTAGES,
    BEHAVIOUR,
    CASES,
    INF,
    LOGPROBS,
    MASK,
    NAN,
    OLD,
    D,
    active,
    bounded_exp,
    close,
)

from loss import (
    CLIPS,
    LOSSES,
    SEQUENCE_LOSSES,
    adapt_kl,
    aggregate,
    balance_loss,
    correction,
    counted,
    entropy_bonus,
    exp,
    kl_loss,
    log_ratio,
    row_mean,
    seq_mean,
    surrogate,
    value_loss,
)

torch.set_num_threads(1)


def configs(name):
    """What the loss may read, and nothing else: its papers' band, a wide one, and a dual clip where there is a clip."""
    if name in ("ppo", "gspo", "gspo_token"):
        bands = [(*CLIPS[name], 0.0), (0.2, 0.28, 0.0), (0.1, 0.4, 1.3)]
        return [
            SimpleNamespace(clip_low=low, clip_high=high, dual_clip=dual)
            for low, high, dual in bands
        ]
    if name in ("cispo", "gmpo"):
        return [
            SimpleNamespace(clip_low=low, clip_high=high) for low, high in (CLIPS[name], (0.1, 0.3))
        ]
    return {
        "pg": [None],
        "sapo": [SimpleNamespace(sapo_tau=(1.0, 1.05)), SimpleNamespace(sapo_tau=(2.0, 0.7))],
        "dppo": [SimpleNamespace(dppo_delta=0.2), SimpleNamespace(dppo_delta=0.01)],
    }[name]


PAIRS = [(name, cfg) for name in LOSSES for cfg in configs(name)]
every_loss = pytest.mark.parametrize(
    "name, cfg", PAIRS, ids=[f"{name}{i}" for i, (name, _) in enumerate(PAIRS)]
)


def clip(x, low, high):
    return min(max(x, low), high)


def clipped_loss(r, a, cfg):
    """(loss, whether a clip decided it) of PPO for the ratio r."""
    loss = -min(r * a, clip(r, 1 - cfg.clip_low, 1 + cfg.clip_high) * a)
    if cfg.dual_clip and a < 0:
        loss = min(loss, -cfg.dual_clip * a)
    return loss, loss != -r * a


def token_formula(name, t, tokens, cfg):
    """(loss, clipped) of the action token t of a row; a token is (position, x, frozen x, old, behaviour, A).

    `frozen` is the log-prob inside a stop gradient: the same number as x, which finite differences leave where it is.
    """
    _, x, frozen, o, e, a = next(token for token in tokens if token[0] == t)
    n = len(tokens)
    match name:
        case "pg":
            return -a * x, False
        case "ppo":
            return clipped_loss(bounded_exp(x - o), a, cfg)
        case "gspo":
            return clipped_loss(
                bounded_exp(math.fsum(y - p for _, y, _, p, _, _ in tokens) / n), a, cfg
            )
        case "gspo_token":
            s = bounded_exp(math.fsum(f - p for _, _, f, p, _, _ in tokens) / n)
            return clipped_loss(s * bounded_exp(x - frozen), a, cfg)
        case "cispo":
            r = bounded_exp(frozen - o)
            weight = clip(r, 1 - cfg.clip_low, 1 + cfg.clip_high)
            return -weight * a * x, weight != r
        case "sapo":
            tau = cfg.sapo_tau[0] if a > 0 else cfg.sapo_tau[1]
            return -4 / tau / (1 + math.exp(-tau * (bounded_exp(x - o) - 1))) * a, False
        case "gmpo":
            q = [q_formula(y - p, b, cfg) for _, y, _, p, _, b in tokens]
            return -a * bounded_exp(math.fsum(q) / n), a != 0 and q_formula(x - o, a, cfg) != x - o
        case "dppo":
            moved = math.exp(x) - math.exp(e)
            dropped = (a > 0 and moved > cfg.dppo_delta) or (a < 0 and -moved > cfg.dppo_delta)
            return 0.0 if dropped else -a * bounded_exp(x - e), dropped


def q_formula(u, a, cfg):
    """sgn(A)·min(sgn(A)·log r, clip(sgn(A)·log r, ±band)), the band's end being that on the clipped side."""
    if a > 0:
        return min(u, clip(u, -cfg.clip_low, cfg.clip_high))
    return -min(-u, clip(-u, -cfg.clip_high, cfg.clip_low)) if a < 0 else 0.0


def formula(name, case, cfg, frozen=None):
    """(losses, clipped) as float64 tensors, from the definitions."""
    logprobs, old, behaviour, advantages, mask = case
    losses, clipped = torch.zeros(mask.shape, dtype=D), torch.zeros(mask.shape, dtype=D)
    frozen = logprobs if frozen is None else frozen
    for b, tokens in active(logprobs, frozen, old, behaviour, advantages, mask):
        for token in tokens:
            losses[b, token[0]], clipped[b, token[0]] = token_formula(name, token[0], tokens, cfg)
    return losses, clipped


def call(function, case, cfg):
    logprobs, old, behaviour, advantages, mask = case
    return function(logprobs, old, advantages, mask, cfg, behaviour_logprobs=behaviour)


def value_agrees(name, function, cfg, cases=CASES):
    """Whether the losses are the formula's to 1e-10 on every case."""
    return all(close(call(function, case, cfg)[0], formula(name, case, cfg)[0]) for case in cases)


MILD = [case for case in CASES if case[4].any() and (case[0] - case[1])[case[4]].abs().max() < 5][
    :12
]


def gradient(function, case, cfg, tokens):
    """Of sum(loss·tokens) by the log-probs."""
    x = case[0].clone().requires_grad_()
    losses, _ = call(function, [x, *case[1:]], cfg)
    return torch.autograd.grad(
        (losses.masked_fill(~case[4], 0.0) * tokens).sum(), x, allow_unused=True
    )[0]


def differences(name, case, cfg, tokens, h=1e-6):
    """The same by central differences of the formula, with what is inside a stop gradient left where it is."""
    out, mask = torch.zeros(case[4].shape, dtype=D), case[4]
    for b, t in mask.nonzero().tolist():
        up, down = case[0].clone(), case[0].clone()
        up[b, t] += h
        down[b, t] -= h
        ends = [formula(name, [x, *case[1:]], cfg, case[0])[0] * tokens for x in (up, down)]
        out[b, t] = (ends[0].sum() - ends[1].sum()) / (2 * h)
    return out


def gradient_agrees(name, function, cfg, cases=MILD):
    generator = torch.Generator().manual_seed(0)
    for case in cases:
        tokens = torch.rand(
            case[4].shape, generator=generator, dtype=D
        )  # another weight for each token
        if not close(
            gradient(function, case, cfg, tokens), differences(name, case, cfg, tokens), 1e-6
        ):
            return False
    return True


@every_loss
def test_a_loss_is_its_formula(name, cfg):
    assert value_agrees(name, LOSSES[name], cfg)
    for case in CASES:
        losses, metrics = call(LOSSES[name], case, cfg)
        assert not losses[~case[4]].any()
        if "loss/clip_share" in metrics:
            assert metrics["loss/clip_share"] == (formula(name, case, cfg)[1].sum(), case[4].sum())
        if "loss/ratio_max" in metrics:
            assert (
                metrics["loss/ratio_max"].isfinite() and not metrics["loss/ratio_max"].requires_grad
            )


@every_loss
def test_the_gradient_is_that_of_finite_differences(name, cfg):
    assert gradient_agrees(name, LOSSES[name], cfg)


@pytest.mark.parametrize("sign, expected", [(1.0, 0.967), (-1.0, 1.105)])
def test_worked_values_of_gmpo(sign, expected):
    u, mask = torch.tensor([[0.6, -0.6, 0.1]], dtype=D), torch.ones(1, 3).bool()
    losses, metrics = LOSSES["gmpo"](
        u, torch.zeros(1, 3), torch.full((1, 3), sign), mask, configs("gmpo")[0]
    )
    assert (losses + sign * expected).abs().max() < 5e-4 and metrics["loss/clip_share"] == (1, 3)


def test_pg_with_advantages_of_one_is_the_negative_log_likelihood():
    losses, _ = LOSSES["pg"](LOGPROBS, None, torch.ones(2, 4), MASK, None)
    assert close(losses, torch.where(MASK, -LOGPROBS, 0.0))


def test_a_sequence_loss_is_the_same_on_all_tokens_of_a_row_and_its_token_mean_is_the_sequence_s():
    rows = [x[:2] for x in (LOGPROBS, OLD, BEHAVIOUR, ADVANTAGES, MASK)]
    for name in (*SEQUENCE_LOSSES, "gspo_token"):
        losses, _ = call(LOSSES[name], rows, configs(name)[1])
        share, rollouts = seq_mean(MASK.sum(1))
        loss = aggregate(losses, share[:, None] * torch.ones(2, 4), MASK, rollouts)
        assert close(loss, (losses[0, 0] + losses[1, 0]) / 2) and losses[0, 0] == losses[0, 2]


def test_gspo_and_gspo_token_have_the_gradient_of_the_sequence():
    """Under a token mean and one advantage per row, both spread the same gradient."""
    case = [LOGPROBS, OLD, BEHAVIOUR, ADVANTAGES, MASK]
    cfg, tokens = (
        SimpleNamespace(clip_low=0.5, clip_high=0.5, dual_clip=0.0),
        1 / MASK.sum(1, keepdim=True),
    )
    assert close(
        gradient(LOSSES["gspo"], case, cfg, tokens),
        gradient(LOSSES["gspo_token"], case, cfg, tokens),
    )


def test_a_clipped_token_has_a_gradient_in_cispo_and_none_in_ppo():
    case = [
        x[:1, :1]
        for x in (torch.tensor([[0.0]]), torch.tensor([[-1.0]]), OLD, torch.tensor([[2.0]]), MASK)
    ]
    cfg = SimpleNamespace(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
    assert gradient(LOSSES["ppo"], case, cfg, 1.0).item() == 0
    assert gradient(LOSSES["cispo"], case, cfg, 1.0).item() == pytest.approx(-1.2 * 2)


@every_loss
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_what_stands_off_the_mask_changes_nothing(name, cfg, junk):
    results = []
    for filler in (0.0, junk):
        tensors = [
            x.float().masked_fill(~MASK, filler) for x in (LOGPROBS, OLD, BEHAVIOUR, ADVANTAGES)
        ]
        losses, metrics = call(LOSSES[name], [*tensors, MASK], cfg)
        slope = gradient(LOSSES[name], [*tensors, MASK], cfg, 1.0)
        results.append(
            [*losses.flatten().tolist(), *slope.flatten().tolist(), *map(str, metrics.values())]
        )
    assert results[0] == results[1] and "nan" not in map(str, results[0])


@every_loss
def test_ratios_of_e80_stay_finite(name, cfg):
    mask = torch.ones(1, 2).bool()
    for far, further, sign in itertools.product(
        (80.0, -80.0), (-80.0, -160.0, 0.0), (1.0, -1.0, 0.0)
    ):
        old = torch.tensor([[further + far, -0.5]])
        case = [torch.tensor([[further, -0.5]]), old, old - far, torch.full((1, 2), sign), mask]
        assert call(LOSSES[name], case, cfg)[0].isfinite().all()
        assert gradient(LOSSES[name], case, cfg, 1.0).isfinite().all()


@every_loss
def test_a_batch_without_action_tokens_gives_zero_and_not_nan(name, cfg):
    case = [LOGPROBS, OLD, BEHAVIOUR, ADVANTAGES, torch.zeros_like(MASK)]
    assert (
        not call(LOSSES[name], case, cfg)[0].any()
        and not gradient(LOSSES[name], case, cfg, 1.0).any()
    )


@every_loss
def test_losses_keep_the_dtype_of_the_log_probs(name, cfg):
    for dtype in (torch.float32, D):
        case = [x.to(dtype) for x in (LOGPROBS, OLD, BEHAVIOUR)] + [ADVANTAGES, MASK]
        assert call(LOSSES[name], case, cfg)[0].dtype == dtype


# ---- one optimizer step, in any number of parts


OFF, BAND = ("off", "mask", (1.0, 1.0)), (0.97, 1.04)
ROLLOUT = torch.tensor(
    [0, 0, 1, 2, 3, 3, 3, 4, 5, 0, 6, 6]
)  # of each row of `step_rows`; rollout 7 has no row
FILLER = 12


def step_rows():
    """Twelve rows of seven rollouts and a filler row, a few of them short."""
    generator = torch.Generator().manual_seed(3)

    def noise(scale):
        return scale * torch.randn(13, 9, generator=generator, dtype=D)

    behaviour = -noise(1.0).abs()
    old = behaviour + noise(0.05)
    mask = torch.rand(13, 9, generator=generator) < torch.rand(13, 1, generator=generator)
    mask[3], mask[FILLER] = torch.arange(9) == 4, False
    rows = [old + noise(0.3), old, behaviour, noise(1.0)]
    return [x.masked_fill(~mask, NAN) for x in rows] + [mask]


def part(name, cfg, agg, gate, kept, x, rows, index, counts):
    """The loss of some rows as the trainer composes it; counts [R] are those of the whole step."""
    logprobs, old, behaviour, advantages, mask = [x[index], *(r[index] for r in rows[1:])]
    losses, _ = LOSSES[name](logprobs, old, advantages, mask, cfg, behaviour)
    weights, _ = correction(old, behaviour, mask, *gate, gate_only=name in SEQUENCE_LOSSES)
    if agg == "token_mean":
        return aggregate(losses, weights, mask, counts.sum())
    if agg == "constant":
        return aggregate(losses, weights, mask, 64 * 8)
    share, rollouts = seq_mean(counts)
    return aggregate(losses, weights * share[owner(index), None], mask, rollouts)


def owner(index):
    return torch.cat([ROLLOUT, torch.tensor([0])])[index]


def counts_of(gate, kept, rows, index):
    _, old, behaviour, _, mask = [r[index] for r in rows]
    weights, _ = correction(old, behaviour, mask, *gate)
    return torch.zeros(8).long().index_add(0, owner(index), counted(weights, mask, kept))


def whole_step(name, cfg, agg, gate, kept, parts, counts_for=None):
    """Loss and gradient of a step whose rows come in parts: micro-batches, of one rank or of several."""
    rows = step_rows()
    counts = sum(counts_of(gate, kept, rows, index) for index in parts)
    x, total = rows[0].clone().requires_grad_(), 0.0
    for index in parts:
        seen = counts_for(gate, kept, rows, index) if counts_for else counts
        loss = part(name, cfg, agg, gate, kept, x, rows, index, seen)
        loss.backward()
        total += loss.item()
    return torch.cat([torch.tensor([total], dtype=D), x.grad[:FILLER].flatten()])


ALL = list(range(FILLER))
GATES = {
    **{name: [OFF, ("seq", "mask", (0.8, 1.3)), ("geo", "mask", BAND)] for name in SEQUENCE_LOSSES},
    "dppo": [OFF],
}
OTHER_GATES = [OFF, ("token", "mask", BAND), ("token", "trunc", BAND), ("geo", "mask", BAND)]
DEALT = [
    [ALL[:6], ALL[6:]],
    [[i] for i in ALL],
    [ALL[::-1]],
    [[7, 1, 11], [0, 4, 3, 2], [5, 10], [9, 6, 8]],
    [[*ALL[:5], FILLER], [FILLER], ALL[5:]],
]


@every_loss
@pytest.mark.parametrize("agg", ["token_mean", "seq_mean", "constant"])
@pytest.mark.parametrize("kept", ["all", "kept"])
def test_a_step_does_not_depend_on_how_its_rows_are_dealt_out(name, cfg, agg, kept):
    for gate in GATES.get(name, OTHER_GATES):
        whole = whole_step(name, cfg, agg, gate, kept, [ALL])
        assert whole.isfinite().all() and whole.any()
        for parts in DEALT:
            assert close(whole_step(name, cfg, agg, gate, kept, parts), whole), (gate, parts)


@pytest.mark.parametrize("kept", ["all", "kept"])
def test_seq_mean_is_the_mean_over_rollouts_of_the_token_mean(kept):
    gate, rows = ("token", "mask", BAND), step_rows()
    weights = correction(rows[1], rows[2], rows[4], *gate)[0]
    losses = formula("ppo", rows, configs("ppo")[0])[0]
    means = []
    for r in range(8):
        own = [
            (losses[b, t] * weights[b, t], weights[b, t])
            for b, t in rows[4].nonzero().tolist()
            if owner(b) == r
        ]
        n = len(own) if kept == "all" else sum(w != 0 for _, w in own)
        means += [sum(x for x, _ in own) / n] if n else []
    assert 4 < len(means) < 8  # a rollout without a counted token has no mean
    found = whole_step("ppo", configs("ppo")[0], "seq_mean", gate, kept, [ALL])[0]
    assert close(found, sum(means) / len(means))


def test_worked_values_of_the_aggregations():
    losses, mask = torch.arange(1.0, 7.0).view(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    ones = torch.ones_like(losses)
    share, rollouts = seq_mean(counted(ones, mask, "all"))
    assert aggregate(losses, ones * share[:, None], mask, rollouts) == pytest.approx(3.25)
    assert aggregate(losses, ones, mask, counted(ones, mask, "all").sum()) == pytest.approx(3.6)


def test_the_shares_of_a_step_add_up_to_one():
    rows = step_rows()
    counts = counts_of(OFF, "all", rows, ALL)
    share, rollouts = seq_mean(counts)
    assert close((share * counts).sum() / rollouts, 1.0)
    assert seq_mean(torch.zeros(3))[1] == 1  # no division by 0


# ---- the correction of a sequence loss


GATED = [("seq", (0.7, 1.4)), ("geo", (0.95, 1.08))]


def gate_agrees(function, level, band):
    """Whether each row is kept with weight 1 or rejected as one, by its own ratio, on every case."""
    for _, old, behaviour, _, mask in CASES:
        want = torch.zeros(mask.shape, dtype=D)
        for b, tokens in active(old, behaviour, mask):
            total = math.fsum(o - e for _, o, e in tokens)
            unit = bounded_exp(total if level == "seq" else total / max(1, len(tokens)))
            for t, _, _ in tokens:
                want[b, t] = band[0] <= unit <= band[1]
        weights, metrics = function(old, behaviour, mask, level, "mask", band, gate_only=True)
        if not torch.equal(weights, want) or metrics["is/rejected"] != (
            (want[mask] == 0).sum(),
            mask.sum(),
        ):
            return False
    return True


@pytest.mark.parametrize("level, band", GATED)
def test_a_gate_keeps_or_rejects_whole_rows_with_weight_one(level, band):
    assert gate_agrees(correction, level, band)


def test_a_gate_of_one_token_is_refused_for_a_sequence_loss():
    assert correction(OLD, BEHAVIOUR, MASK, *OFF, gate_only=True)[0].sum() == MASK.sum()
    for mode in ("mask", "clip", "trunc"):
        with pytest.raises(ValueError, match="--is_level token"):
            correction(OLD, BEHAVIOUR, MASK, "token", mode, BAND, gate_only=True)


# ---- KL, entropy, critic, experts


def kl_formula(case, kind):
    losses = torch.zeros(case[4].shape, dtype=D)
    for b, tokens in active(case[0], case[1], case[4]):
        for t, x, ref in tokens:
            d = clip(x - ref, -20.0, 20.0) if kind == "k3" else x - ref
            losses[b, t] = d * d / 2 if kind == "k2" else math.exp(-d) - 1 + d
    return losses


def kl_agrees(function, kind, cases=CASES):
    return all(
        torch.allclose(
            function(x, ref, mask, kind)[0],
            kl_formula((x, ref, 0, 0, mask), kind),
            rtol=1e-10,
            atol=1e-10,
        )
        for x, ref, _, _, mask in cases
    )


@pytest.mark.parametrize("kind, expected", [("k2", (0.125, 0.5, 0)), ("k3", (0.1065, 0.7183, 0))])
def test_the_kl_loss_is_its_formula(kind, expected):
    assert kl_agrees(kl_loss, kind)
    x, ref = torch.tensor([[-0.5, -2, -1]], dtype=D), torch.full((1, 3), -1.0, dtype=D)
    losses, metrics = kl_loss(x, ref, torch.ones(1, 3).bool(), kind)
    assert (losses[0] - torch.tensor(expected)).abs().max() < 5e-5
    assert close(metrics["kl/loss"][0], losses.sum()) and metrics["kl/loss"][1] == 3
    x = LOGPROBS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: kl_loss(y, OLD, MASK, kind)[0], x)
    far = torch.tensor([[80.0, -80.0, -INF]], requires_grad=True)
    losses, _ = kl_loss(far, torch.zeros(1, 3), torch.tensor([[True, True, False]]), kind)
    assert losses.isfinite().all() and torch.autograd.grad(losses.sum(), far)[0].isfinite().all()


def test_k1_is_refused_as_a_loss():
    for kind in ("k1", "k4"):
        with pytest.raises(ValueError, match=kind):
            kl_loss(LOGPROBS, OLD, MASK, kind)


def test_the_expected_gradient_of_k2_is_that_of_the_reverse_kl_and_of_k1_is_zero():
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=D, requires_grad=True)
    ref = torch.tensor([0.1, 0.2, -0.5, 0.4], dtype=D).log_softmax(0)

    def expected(losses):
        return torch.autograd.grad((logits.softmax(0).detach() * losses).sum(), logits)[0]

    logprobs, mask = logits.log_softmax(0)[None], torch.ones(1, 4).bool()
    (exact,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True
    )
    assert close(expected(kl_loss(logits.log_softmax(0)[None], ref[None], mask, "k2")[0]), exact)
    assert not close(
        expected(kl_loss(logits.log_softmax(0)[None], ref[None], mask, "k3")[0]), exact
    )
    assert expected(logits.log_softmax(0) - ref).abs().max() < 1e-12


@pytest.mark.parametrize(
    "kl, expected",
    [(0.1, 2.0), (0.11, 2.0128), (0.2, 2.0256), (9.0, 2.0256), (0.0, 1.9744), (0.09, 1.9872)],
)
def test_the_adaptive_coefficient_follows_the_kl(kl, expected):
    assert adapt_kl(2.0, kl, target=0.1, horizon=10_000, rollouts=640) == pytest.approx(
        expected, abs=1e-9
    )


def entropy_agrees(function):
    """Whether the mean over the action tokens is that of a plain loop."""
    for entropy, _, _, _, mask in CASES:
        tokens = [x for _, row in active(entropy, mask) for _, x in row]
        n = max(1, len(tokens))
        if not close(
            aggregate(function(entropy, mask), torch.ones(mask.shape), mask, n),
            -math.fsum(tokens) / n,
        ):
            return False
    return True


def test_the_entropy_bonus_is_over_action_tokens():
    assert entropy_agrees(entropy_bonus)


def value_formula(case, clip_at):
    losses = torch.zeros(case[4].shape, dtype=D)
    for b, tokens in active(case[0], case[1], case[3], case[4]):
        for t, v, old, target in tokens:
            held = old + clip(v - old, -clip_at, clip_at) if clip_at else v
            losses[b, t] = 0.5 * max((v - target) ** 2, (held - target) ** 2)
    return losses


def value_loss_agrees(function, clip_at, cases=CASES):
    return all(
        close(
            function(v, old, targets, mask, clip_at)[0],
            value_formula((v, old, 0, targets, mask), clip_at),
        )
        for v, old, _, targets, mask in cases
    )


@pytest.mark.parametrize("clip_at", [0.0, 0.1, 0.5])
def test_the_value_loss_is_its_formula(clip_at):
    assert value_loss_agrees(value_loss, clip_at)
    x = LOGPROBS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, OLD, ADVANTAGES, MASK, clip_at)[0], x)
    x = x.detach().masked_fill(~MASK, NAN).requires_grad_()
    assert (
        torch.autograd.grad(value_loss(x, OLD, ADVANTAGES, MASK, clip_at)[0].sum(), x)[0]
        .isfinite()
        .all()
    )


def test_worked_value_loss():
    v, old, targets = torch.tensor([[[1, 0.2]], [[0.5, 0.1]], [[1.2, 0]]], dtype=D)
    losses, metrics = value_loss(v, old, targets, torch.ones(1, 2).bool(), 0.2)
    assert close(losses.mean(), 0.0725) and metrics["value/clip_share"] == (1, 2)
    assert close(metrics["value/error"][0], 0.4)


def routed(seed=0):
    """probs [B, T, E] of one layer, mask [B, T] of tokens that are no padding, and the counts of top-2 routing [E]."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(5, 7, 4, generator=generator, dtype=D).softmax(-1)
    mask = torch.rand(5, 7, generator=generator) < 0.7
    return probs, mask, probs.topk(2).indices[mask].flatten().bincount(minlength=4)


def balance_agrees(function):
    probs, mask, counts = routed()
    tokens, want = mask.nonzero().tolist(), 0.0
    for i in range(4):
        share = sum(i in probs[b, t].topk(2).indices for b, t in tokens) / (2 * len(tokens))
        want += 4 * share * sum(probs[b, t, i].item() for b, t in tokens) / len(tokens)
    dealt = sum(
        function(probs[i : i + 2], mask[i : i + 2], counts, len(tokens)) for i in range(0, 5, 2)
    )
    return close(function(probs, mask, counts, len(tokens)), want) and close(dealt, want)


def test_the_load_balance_loss_is_its_formula_in_any_number_of_micro_batches():
    assert balance_agrees(balance_loss)
    probs, mask, counts = routed()
    x = probs.masked_fill(~mask[..., None], NAN).requires_grad_()
    (slope,) = torch.autograd.grad(balance_loss(x, mask, counts, 20), x)
    assert torch.autograd.gradcheck(
        lambda p: balance_loss(p, mask, counts, 20), probs.requires_grad_()
    )
    assert close(slope[mask][0], 4 * counts.double() / counts.sum() / 20) and not slope[~mask].any()


def test_the_load_balance_loss_of_uniform_routing_is_one_and_of_one_expert_is_their_number():
    mask, even = torch.ones(2, 3).bool(), torch.full((2, 3, 4), 0.25)
    assert balance_loss(even, mask, torch.full((4,), 3), 6) == 1
    assert (
        balance_loss(torch.eye(4)[torch.zeros(2, 3).long()], mask, torch.tensor([6, 0, 0, 0]), 6)
        == 4
    )
    assert balance_loss(even, torch.zeros(2, 3).bool(), torch.zeros(4), 0) == 0


# Planted bugs: each test shows that the check above tells the wrong variant from the right one.


def test_planted_sequence_ratio_over_padding_is_seen():
    def over_padding(logprobs, old, advantages, mask, cfg, behaviour_logprobs=None):
        s = exp(log_ratio(logprobs, old, mask).mean(1, keepdim=True))  # divides by T
        return surrogate(s.expand(mask.shape), advantages, mask, cfg)

    cfg, full = configs("gspo")[1], [case for case in CASES if case[4].all()]
    assert full and value_agrees("gspo", over_padding, cfg, full)
    assert not value_agrees("gspo", over_padding, cfg)


def test_planted_arithmetic_mean_of_the_ratios_is_seen():
    def arithmetic(logprobs, old, advantages, mask, cfg, behaviour_logprobs=None):
        ratio = exp(log_ratio(logprobs, old, mask)) * mask
        return surrogate(row_mean(ratio, mask).expand(mask.shape), advantages, mask, cfg)

    assert not value_agrees("gspo", arithmetic, configs("gspo")[1])


def test_planted_clip_per_token_instead_of_per_sequence_is_seen():
    for name in ("gspo", "gspo_token"):
        assert not value_agrees(name, LOSSES["ppo"], configs(name)[1])


def test_planted_sequence_ratio_with_the_other_s_gradient_is_seen():
    cfg = configs("gspo")[1]
    assert value_agrees("gspo", LOSSES["gspo_token"], cfg) and value_agrees(
        "gspo_token", LOSSES["gspo"], cfg
    )
    assert not gradient_agrees("gspo", LOSSES["gspo_token"], cfg)
    assert not gradient_agrees("gspo_token", LOSSES["gspo"], cfg)


def test_planted_gradient_through_the_weight_of_cispo_is_seen():
    def attached(logprobs, old, advantages, mask, cfg, behaviour_logprobs=None):
        ratio = exp(log_ratio(logprobs, old, mask)).clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
        return -ratio * advantages.masked_fill(~mask, 0.0) * logprobs.masked_fill(~mask, 0.0), {}

    for cfg in configs("cispo"):
        assert value_agrees("cispo", attached, cfg) and not gradient_agrees("cispo", attached, cfg)


def test_planted_temperatures_of_sapo_exchanged_are_seen():
    def exchanged(logprobs, old, advantages, mask, cfg, behaviour_logprobs=None):
        return LOSSES["sapo"](
            logprobs, old, advantages, mask, SimpleNamespace(sapo_tau=cfg.sapo_tau[::-1])
        )

    assert not value_agrees("sapo", exchanged, configs("sapo")[0])


def test_planted_clip_of_gmpo_on_both_sides_is_seen():
    def both(logprobs, old, advantages, mask, cfg, behaviour_logprobs=None):
        q = log_ratio(logprobs, old, mask).clamp(-cfg.clip_low, cfg.clip_high)
        return -exp(row_mean(q, mask)) * advantages.masked_fill(~mask, 0.0), {}

    assert not value_agrees("gmpo", both, configs("gmpo")[0])


def test_planted_dppo_against_the_old_log_probs_or_without_a_direction_is_seen():
    def against_old(logprobs, old, advantages, mask, cfg, behaviour_logprobs=None):
        return LOSSES["dppo"](logprobs, old, advantages, mask, cfg, old)

    def both_ways(logprobs, old, advantages, mask, cfg, behaviour_logprobs=None):
        losses, _ = LOSSES["dppo"](logprobs, old, advantages, mask, cfg, behaviour_logprobs)
        return losses.masked_fill(
            (logprobs.exp() - behaviour_logprobs.exp()).abs() > cfg.dppo_delta, 0.0
        ), {}

    for variant in (against_old, both_ways):
        assert not value_agrees("dppo", variant, configs("dppo")[0])


@pytest.mark.parametrize("level, band", GATED)
def test_planted_gate_per_token_instead_of_per_sequence_is_seen(level, band):
    def per_token(old, behaviour, mask, level, mode, band, gate_only):
        weights, metrics = correction(old, behaviour, mask, "token", mode, band)
        return (weights > 0).to(weights.dtype), metrics

    assert not gate_agrees(per_token, level, band)


@pytest.mark.parametrize("level, band", GATED)
def test_planted_gate_that_still_carries_the_weight_is_seen(level, band):
    assert not gate_agrees(lambda *arguments, gate_only: correction(*arguments), level, band)


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean"])
def test_planted_denominator_per_micro_batch_is_seen(agg):
    step = ("ppo", configs("ppo")[0], agg, OFF, "all")
    whole = whole_step(*step, [ALL])
    assert close(whole_step(*step, [ALL], counts_of), whole)
    assert not close(whole_step(*step, DEALT[0], counts_of), whole, 1e-3)


def test_planted_mean_over_segments_instead_of_rollouts_is_seen():
    rows = step_rows()
    cfg, whole = (
        configs("ppo")[0],
        whole_step("ppo", configs("ppo")[0], "seq_mean", OFF, "all", [ALL])[0],
    )
    rows = [r[:FILLER] for r in rows]
    losses, _ = call(LOSSES["ppo"], rows, cfg)
    share, segments = seq_mean(rows[4].sum(1))  # one count a row
    assert not close(
        aggregate(losses, share[:, None] * torch.ones(12, 9), rows[4], segments), whole, 1e-3
    )


def test_planted_entropy_over_padding_is_seen():
    def over_padding(entropy, mask):
        mean = entropy.nan_to_num(0.0, 0.0, 0.0).mean()  # of all positions
        return -mean.expand(mask.shape)

    full = [case for case in CASES if case[4].all()]
    assert full and not entropy_agrees(over_padding)
    for entropy, _, _, _, mask in full:
        assert close(over_padding(entropy, mask).mean(), entropy_bonus(entropy, mask).mean())


def test_planted_value_loss_of_the_smaller_error_is_seen():
    def smaller(v, old, targets, mask, clip_at):
        v, old, targets = (x.masked_fill(~mask, 0.0) for x in (v, old, targets))
        held = old + (v - old).clamp(-clip_at, clip_at)
        return torch.minimum((v - targets) ** 2, (held - targets) ** 2) / 2, {}

    assert not value_loss_agrees(smaller, 0.1)


def test_planted_k3_with_the_ratio_inverted_is_seen():
    assert not kl_agrees(lambda x, ref, mask, kind: kl_loss(ref, x, mask, kind), "k3")
    assert kl_agrees(
        lambda x, ref, mask, kind: kl_loss(ref, x, mask, kind), "k2"
    )  # only k3 tells them apart


def test_planted_expert_counts_per_micro_batch_are_seen():
    def local(probs, mask, counts, tokens):
        return balance_loss(
            probs, mask, probs.topk(2).indices[mask].flatten().bincount(minlength=4), tokens
        )

    assert not balance_agrees(local)


def test_planted_experts_of_padding_are_seen():
    assert not balance_agrees(
        lambda probs, mask, *rest: balance_loss(probs, torch.ones_like(mask), *rest)
    )
