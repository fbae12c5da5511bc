"""Every estimator against its formula in plain Python, worked values, and bugs planted to see the same check fail."""

import itertools
import math
import random
import statistics
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from estimator import (
    ESTIMATORS,
    GROUP_ESTIMATORS,
    Batch,
    centre,
    clip_rewards,
    explained_variance,
    finish,
    group_sum,
    keeps,
    lengths,
    overlong,
    pass_at_k,
    reinforce,
    scan,
    spread,
    value_targets,
    whiten,
)

torch.set_num_threads(1)
D = torch.float64
NAMES = 3  # named rewards


def config(**fields):
    defaults = dict(gamma=1.0, lam=1.0, whiten=False, kl_coef=0.0, kl_type="k1", reward_weights=())
    return SimpleNamespace(**defaults | dict(bootstrap_truncated=False) | fields)


PLAIN = config()
CONFIGS = [
    config(whiten=True),
    config(lam=0.95, kl_coef=0.1, kl_type="k3"),
    config(gamma=0.9, lam=0.8, whiten=True, kl_coef=0.5, kl_type="k2", bootstrap_truncated=True),
    config(
        gamma=0.9, lam=0.0, kl_coef=0.3, reward_weights=(1.0, 0.5, -2.0), bootstrap_truncated=True
    ),
    config(gamma=0.0, lam=1.0, kl_coef=0.3),
]


def rollout_formula(name, batch, cfg):
    """The one advantage of each rollout, for the estimators that compare the rollouts of a group."""
    rewards, groups = batch.rewards.tolist(), batch.groups.tolist()
    tokens = [0] * len(rewards)
    for r, row in zip(batch.rollout.tolist(), batch.mask.tolist(), strict=True):
        tokens[r] += sum(row)

    def normalised(rewards, r):
        group = [x for x, g in zip(rewards, groups, strict=True) if g == groups[r]]
        if len(set(group)) == 1:
            return 0.0
        return (rewards[r] - math.fsum(group) / len(group)) / (statistics.stdev(group) + 1e-6)

    def one(r):
        group = [i for i, g in enumerate(groups) if g == groups[r]]
        n, total = len(group), math.fsum(rewards[i] for i in group)
        own, mean = rewards[r], total / n
        match name:
            case "grpo":
                return normalised(rewards, r)
            case "rloo":
                return own - (total - own) / (n - 1) if n > 1 else 0.0
            case "dr_grpo" | "reinforce_baseline":
                return own - mean
            case "maxrl":
                return (own - mean) / mean if mean > 0 else 0.0
            case "lite_ppo":
                return (
                    (own - mean) / (statistics.stdev(rewards) + 1e-6)
                    if len(set(rewards)) > 1
                    else 0.0
                )
            case "opo":
                count = sum(tokens[i] for i in group)
                return own - sum(tokens[i] * rewards[i] for i in group) / count if count else 0.0

    if name != "gdpo":
        return [one(r) for r in range(len(rewards))]
    named = batch.named_rewards.T.tolist()
    weights = cfg.reward_weights or [1.0] * len(named)
    sums = [
        math.fsum(w * normalised(x, r) for w, x in zip(weights, named, strict=True))
        for r in range(len(rewards))
    ]
    std = statistics.stdev(sums) if len(sums) > 1 else 0.0
    return [(x - math.fsum(sums) / len(sums)) / (std + 1e-6) if std > 1e-12 else 0.0 for x in sums]


def kl_formula(old, ref, kind):
    d = old - ref
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def row_formula(name, batch, cfg, b):
    """The advantages of one row before whitening, for the estimators that look at its tokens."""
    row, r = batch.mask[b].tolist(), int(batch.rollout[b])
    steps, out = [t for t, m in enumerate(row) if m], [0.0] * len(row)
    kls = {
        t: kl_formula(batch.old_logprobs[b, t].item(), batch.ref_logprobs[b, t].item(), cfg.kl_type)
        for t in steps
    }
    values = {t: batch.values[b, t].item() for t in steps}
    later, value = (
        0.0,
        values[steps[-1]] if steps and cfg.bootstrap_truncated and batch.truncated[r] else 0.0,
    )
    for t in reversed(steps):
        rho = -cfg.kl_coef * kls[t] + (batch.rewards[r].item() if t == steps[-1] else 0.0)
        if name == "reinforce":
            later = rho + cfg.gamma * later
        elif name == "gae":
            later = rho + cfg.gamma * value - values[t] + cfg.gamma * cfg.lam * later
            value = values[t]
        elif name == "opd":
            later = -cfg.kl_coef * (
                batch.old_logprobs[b, t].item() - batch.ref_logprobs[b, t].item()
            )
        elif name == "sft":
            later = 1.0
        out[t] = later
    return out


def formula(name, batch, cfg):
    """The advantages as nested lists, from the definitions, with Python floats and loops only."""
    mask, rollout = batch.mask.tolist(), batch.rollout.tolist()
    if name in GROUP_ESTIMATORS:
        values = rollout_formula(name, batch, cfg)
        rows = [
            [values[r] if m else 0.0 for m in row] for r, row in zip(rollout, mask, strict=True)
        ]
    else:
        rows = [row_formula(name, batch, cfg, b) for b in range(len(mask))]
    active = [
        x for xs, ms in zip(rows, mask, strict=True) for x, m in zip(xs, ms, strict=True) if m
    ]
    if name in ("reinforce", "reinforce_baseline", "gae") and cfg.whiten and active:
        mean = math.fsum(active) / len(active)
        scale = math.sqrt(max(math.fsum((x - mean) ** 2 for x in active) / len(active), 1e-8))
        rows = [
            [(x - mean) / scale if m else 0.0 for x, m in zip(xs, ms, strict=True)]
            for xs, ms in zip(rows, mask, strict=True)
        ]
    return rows


def with_tokens(batch, seed=0, junk=(math.nan, math.inf, -math.inf, 1e30)):
    """The batch with random log-probs and values on action tokens, junk off them, and some truncated rollouts."""
    rng = random.Random(seed)

    def tensor(low, high):
        x = [
            [rng.uniform(low, high) if m else rng.choice(junk) for m in row]
            for row in batch.mask.tolist()
        ]
        return torch.tensor(x, dtype=D)

    truncated = torch.tensor([rng.random() < 0.5 for _ in batch.rewards])
    return replace(
        batch,
        old_logprobs=tensor(-3, 0),
        ref_logprobs=tensor(-3, 0),
        values=tensor(-2, 2),
        truncated=truncated,
    )


def random_batch(seed):
    """Groups of 1 to 6 rollouts in mixed order, 0 to 4 segments a rollout, masks with holes, some of them empty."""
    rng = random.Random(seed)
    # A group of three at least: named rewards of two rollouts may cancel, and gdpo divides their rounding by 1e-6.
    sizes = [rng.randint(3, 6)] + [rng.randint(1, 6) for _ in range(rng.randint(0, 4))]
    groups = [
        g
        for g, n in zip(rng.sample(range(-9, 99), len(sizes)), sizes, strict=True)
        for _ in range(n)
    ]
    rng.shuffle(groups)
    equal = {g: rng.random() < 0.3 for g in groups}  # some groups have one reward
    level = {g: rng.uniform(-5, 5) for g in groups}
    rewards = [
        level[g] if equal[g] else level[g] + rng.choice([0.0, 1.0, rng.gauss(0, 1)]) for g in groups
    ]
    named = [
        [
            level[g] if equal[g] or rng.random() < 0.2 else rng.choice([0.0, 1.0, rng.gauss(0, 1)])
            for g in groups
        ]
        for _ in range(NAMES)
    ]
    segments = rng.choice([[0, 1, 1, 2, 4], [0, 1, 1, 2, 4], [1]])  # of a rollout
    rollout = [r for r in range(len(groups)) for _ in range(rng.choice(segments))] or [0]
    length, density = rng.randint(1, 12), rng.choice([0.2, 0.6, 1.0])
    mask = [[rng.random() < density for _ in range(length)] for _ in rollout]
    batch = Batch(
        mask=torch.tensor(mask),
        rollout=torch.tensor(rollout),
        rewards=torch.tensor(rewards, dtype=D),
        groups=torch.tensor(groups),
        dtype=D,
        named_rewards=torch.tensor(named, dtype=D).T,
    )
    return with_tokens(batch, seed)


CASES = [random_batch(seed) for seed in range(60)]


def agrees(name, estimator, cases=CASES, configs=CONFIGS):
    """Whether the estimator gives the formula's numbers to 1e-10 on every case."""
    return all(
        torch.allclose(
            estimator(batch, cfg)[0],
            torch.tensor(formula(name, batch, cfg), dtype=D),
            rtol=0,
            atol=1e-10,
        )
        for batch in cases
        for cfg in configs
    )


def one_group(rewards, mask=None, rollout=None, dtype=D):
    """A batch of one group; by default one row of one action token a rollout. Each named reward is the reward."""
    rollout = list(range(len(rewards))) if rollout is None else rollout
    mask = [[1]] * len(rollout) if mask is None else mask
    rewards = torch.as_tensor(rewards, dtype=D) if isinstance(rewards, list) else rewards
    groups, named = torch.zeros(len(rewards)).long(), rewards[:, None].expand(-1, NAMES)
    return with_tokens(
        Batch(
            torch.tensor(mask).bool(),
            torch.tensor(rollout),
            rewards,
            groups,
            dtype=dtype,
            named_rewards=named,
        )
    )


def rows_of(batch, rows):
    """The batch with these rows only, in this order; what belongs to rollouts stays."""
    fields = ("mask", "rollout", "old_logprobs", "ref_logprobs", "values")
    return replace(batch, **{name: getattr(batch, name)[rows] for name in fields})


def on_ranks(estimator, batch, cuts, cfg):
    """Run the estimator on the row ranges between `cuts`, one thread a rank, and put the rows together again."""
    barrier, parts, out = threading.Barrier(len(cuts) - 1, timeout=10), {}, {}

    def rank(i):
        def all_sum(x):
            parts[i] = x
            barrier.wait()
            total = sum(parts[j] for j in sorted(parts))
            barrier.wait()
            return total

        out[i] = estimator(
            replace(rows_of(batch, slice(cuts[i], cuts[i + 1])), all_sum=all_sum), cfg
        )

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(cuts) - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([out[i][0] for i in sorted(out)]), [out[i][1] for i in sorted(out)]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_is_its_formula(name):
    assert agrees(name, ESTIMATORS[name])


@pytest.mark.parametrize(
    "name, cfg, expected",
    [
        ("reinforce", CONFIGS[0], [0.9285, -1.2999, -0.1857]),
        ("grpo", PLAIN, [1.0, -1.0, 0.0]),
        ("dr_grpo", PLAIN, [1.5, -1.5, 0.0]),
        ("rloo", PLAIN, [2.25, -2.25, 0.0]),
        ("reinforce_baseline", PLAIN, [1.5, -1.5, 0.0]),
        ("opd", config(kl_coef=0.5), [-0.05, -0.05, -0.05]),
        ("sft", PLAIN, [1.0, 1.0, 1.0]),
        ("maxrl", PLAIN, [3.0, -3.0, 0.0]),
        ("lite_ppo", PLAIN, [1.0, -1.0, 0.0]),
        ("opo", PLAIN, [1.25, -1.75, -0.25]),
        ("gdpo", PLAIN, [1.0, -1.0, 0.0]),
    ],
)
def test_worked_values(name, cfg, expected):
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]])
    advantages, metrics = ESTIMATORS[name](worked(mask), cfg)
    want = torch.tensor(expected, dtype=D)[:, None] * mask
    assert (advantages - want).abs().max() < 5e-5
    assert metrics["advantage/abs"][1] == metrics["kl/ref"][1] == 6
    assert abs(metrics["advantage/abs"][0] - want.abs().sum()) < 5e-4
    assert abs(metrics["advantage/mean"][0] - want.sum()) < 5e-4
    assert abs(metrics["kl/ref"][0] - 0.6) < 1e-12


def worked(mask):
    """Rewards 2, -1, 0.5 in one group, kl 0.1 everywhere, and the critic's values."""
    values = torch.tensor([[0.5, 0.4, 9, 0.3], [9, 0.2, 0.1, 9], [0.6, 9, 9, 9]], dtype=D)
    old = torch.full((3, 4), -1.0, dtype=D)
    return replace(
        one_group([2.0, -1.0, 0.5], mask.tolist()),
        old_logprobs=old,
        ref_logprobs=old - 0.1,
        values=values,
    )


def test_worked_values_of_gae():
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]])
    cfg = config(gamma=0.9, lam=0.8, kl_coef=0.5)
    advantages, targets = ESTIMATORS["gae"](worked(mask), cfg)[0], value_targets(worked(mask), cfg)
    expected = torch.tensor([[0.5358, 1.008, 0, 1.65], [0, -0.988, -1.15, 0], [-0.15, 0, 0, 0]])
    assert (advantages - expected).abs().max() < 5e-5
    expected = torch.tensor([[1.0358, 1.408, 0, 1.95], [0, -0.788, -1.05, 0], [0.45, 0, 0, 0]])
    assert (targets - expected).abs().max() < 5e-5


@pytest.mark.parametrize(
    "kind, expected", [("k1", (0.5, -1, 0)), ("k2", (0.125, 0.5, 0)), ("k3", (0.1065, 0.7183, 0))]
)
def test_worked_values_of_the_kl(kind, expected):
    old = torch.tensor([[-0.5], [-2.0], [-1.0]], dtype=D)
    batch = replace(one_group([0.0] * 3), old_logprobs=old, ref_logprobs=torch.full((3, 1), -1.0))
    advantages, _ = reinforce(batch, config(kl_coef=1.0, kl_type=kind))
    assert (-advantages[:, 0] - torch.tensor(expected)).abs().max() < 5e-5


@pytest.mark.parametrize(
    "name, expected", [("grpo", [1, 1, -1, 0]), ("rloo", [0.75, 0.75, -0.75, 0])]
)
def test_a_rollout_of_two_segments_counts_once(name, expected):
    batch = one_group([1.0, 0.0, 0.5], rollout=[0, 0, 1, 2])
    assert (ESTIMATORS[name](batch, PLAIN)[0][:, 0] - torch.tensor(expected)).abs().max() < 5e-5


def test_the_return_is_discounted_by_action_tokens_not_by_positions():
    batch = one_group([8.0], mask=[[1, 0, 1, 0, 0, 1, 0]])
    advantages, _ = reinforce(batch, config(gamma=0.5))
    assert advantages.tolist() == [[2, 0, 4, 0, 0, 8, 0]]
    last_only, _ = reinforce(batch, config(gamma=0.0))
    assert last_only.tolist() == [[0, 0, 0, 0, 0, 8, 0]]


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name, dtype):
    for n in range(2, 65):
        for k in (0, 100, 300, 700, 999):
            batch = one_group(torch.full((n,), k / 1000, dtype=dtype))
            assert not ESTIMATORS[name](batch, CONFIGS[0])[0].any(), (n, k)


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
def test_equal_rewards_give_exactly_zero_for_every_thousandth_and_beside_another_group(name):
    """One group for each k / 1000, in float32, and one whose rewards differ."""
    for n in range(2, 65):
        rewards = torch.cat(
            [torch.arange(1001).repeat_interleave(n) / 1000, torch.tensor([0.3, 0.1])]
        )  # [R]
        groups = torch.cat(
            [torch.arange(1001).repeat_interleave(n), torch.tensor([1001, 1001])]
        )  # [R]
        rows, named = torch.ones(len(rewards), 1).bool(), rewards[:, None].expand(-1, NAMES)
        batch = Batch(
            rows, torch.arange(len(rewards)), rewards, groups, named_rewards=named, dtype=D
        )
        advantages, _ = ESTIMATORS[name](batch, PLAIN)
        assert not advantages[:-2].any() and advantages[-2] > 0 > advantages[-1], n


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
def test_a_group_of_one_gives_exactly_zero(name):
    batch = one_group(torch.tensor([0.1, 0.7, -3.3]), mask=[[1, 1]] * 3)
    batch = replace(batch, groups=torch.tensor([5, -2, 9]))
    assert not ESTIMATORS[name](batch, CONFIGS[0])[0].any()


def test_group_estimators_are_those_that_are_zero_on_a_group_of_one():
    batch = one_group([0.7], mask=[[1, 1]])
    zero = {
        name for name in ESTIMATORS if not ESTIMATORS[name](batch, config(kl_coef=0.1))[0].any()
    }
    assert zero == GROUP_ESTIMATORS


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
def test_nearly_equal_rewards_are_not_equal(name):
    advantages, _ = ESTIMATORS[name](one_group([0.5, 0.5 + 1e-9, 0.5]), CONFIGS[0])
    assert advantages[1] > 0 > advantages[0]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("cfg", CONFIGS)
def test_advantages_are_finite_at_the_edges(name, cfg):
    one_token = one_group([1.5, -2.0], mask=[[0, 0, 1], [0, 0, 0]])
    no_token = one_group([1.5, -2.0], mask=[[0, 0, 0], [0, 0, 0]])
    no_variance = one_group([0.3] * 3, mask=[[1, 1, 0], [1, 0, 1], [1, 1, 1]])
    tiny_variance = one_group([0.3, 0.3 + 1e-4, 0.3])  # under the floor of 1e-8
    small_variance = one_group([0.3, 0.3 + 4e-4, 0.3])  # just above it
    for batch in (one_token, no_token, no_variance, tiny_variance, small_variance):
        advantages, _ = ESTIMATORS[name](batch, cfg)
        assert advantages.isfinite().all()
        assert not advantages[~batch.mask].any()
        assert agrees(name, ESTIMATORS[name], [batch], [cfg])


def test_advantages_are_float32_for_the_trainer():
    batch = one_group([1.0, 0.0], dtype=Batch.dtype)
    assert {ESTIMATORS[name](batch, CONFIGS[0])[0].dtype for name in ESTIMATORS} == {torch.float32}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_do_not_depend_on_how_rows_are_dealt_to_ranks(name):
    for batch in CASES[:20]:
        rows = len(batch.rollout)
        cuts = [0, rows // 3, rows // 2, rows]  # ragged, a rank may have no row
        for cfg in CONFIGS:
            dealt, metrics = on_ranks(ESTIMATORS[name], batch, cuts, cfg)
            whole, total = ESTIMATORS[name](batch, cfg)
            assert torch.allclose(dealt, whole, rtol=0, atol=1e-10)
            for key, (value, count) in total.items():
                assert torch.allclose(sum(m[key][0] for m in metrics), value, rtol=0, atol=1e-9)
                assert sum(m[key][1] for m in metrics) == count


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_do_not_depend_on_the_order_of_rows_or_on_filler_rows(name):
    for seed, batch in enumerate(CASES[:20]):
        order = torch.randperm(len(batch.rollout), generator=torch.Generator().manual_seed(seed))
        filled = rows_of(batch, torch.cat([order, order[:1]]))
        filled.mask[-1] = False  # the last row is a filler
        for cfg in CONFIGS:
            whole, total = ESTIMATORS[name](batch, cfg)
            mixed, metrics = ESTIMATORS[name](filled, cfg)
            assert (
                torch.allclose(mixed[:-1], whole[order], rtol=0, atol=1e-10) and not mixed[-1].any()
            )
            for key, (value, count) in total.items():
                assert (
                    torch.allclose(metrics[key][0], value, rtol=0, atol=1e-9)
                    and metrics[key][1] == count
                )


@pytest.mark.parametrize("name", ["reinforce", "opd", "gae"])
def test_ratios_of_e80_and_no_kl_at_all_stay_finite(name):
    batch = one_group([1.5, -2.0], mask=[[1, 1, 0], [0, 1, 0]])
    old = torch.tensor([[-80.0, -1.0, -math.inf], [-math.inf, 0.0, math.nan]], dtype=D)
    batch = replace(
        batch, old_logprobs=old, ref_logprobs=torch.tensor([[0.0, -80.0, -math.inf]] * 2, dtype=D)
    )
    for kind in ("k1", "k2", "k3"):
        assert (
            ESTIMATORS[name](batch, config(kl_coef=0.5, kl_type=kind, whiten=True))[0]
            .isfinite()
            .all()
        )


def test_without_a_reference_there_is_no_kl():
    fields = SimpleNamespace(gamma=0.9, whiten=True)  # no kl_coef, no kl_type
    batch = replace(CASES[3], old_logprobs=None, ref_logprobs=None)
    advantages, metrics = reinforce(batch, fields)
    assert torch.equal(advantages, reinforce(CASES[3], config(gamma=0.9, whiten=True))[0])
    assert "kl/ref" not in metrics


def targets_agree(targets, cases=CASES, configs=CONFIGS):
    """Whether the value targets are the advantages before whitening + the values, to 1e-10 on every case."""
    for batch in cases:
        for cfg in configs:
            plain = torch.tensor(
                formula("gae", batch, config(**vars(cfg) | {"whiten": False})), dtype=D
            )
            want = torch.where(batch.mask, plain + batch.values, 0.0)
            if not torch.allclose(targets(batch, cfg), want, rtol=0, atol=1e-10):
                return False
    return True


def test_value_targets_are_their_formula():
    assert targets_agree(value_targets)


def test_explained_variance_is_its_formula_over_all_ranks_and_off_the_mask_nothing_counts():
    generator = torch.Generator().manual_seed(0)
    values, targets = torch.randn(2, 4, 6, generator=generator, dtype=D)
    mask = torch.rand(4, 6, generator=generator) < 0.6
    batch = replace(
        one_group([1.0, 2.0, 3.0, 4.0], mask=mask.tolist()),
        values=values.masked_fill(~mask, math.nan),
    )
    want = 1 - (targets - values)[mask].var(correction=0) / targets[mask].var(correction=0)
    assert abs(explained_variance(batch, targets) - want) < 1e-10
    twice = replace(batch, all_sum=lambda x: 2 * x)  # another rank with the same rows
    assert abs(explained_variance(twice, targets) - want) < 1e-10
    assert abs(explained_variance(replace(batch, values=targets), targets) - 1) < 1e-10
    assert explained_variance(batch, torch.full_like(targets, 0.3)) == 0.0


def loop_scan(x, factor):
    """y_j = x_j + factor·y_{j-1}, of a list."""
    out, y = [], 0.0
    for v in x:
        y = v + factor * y
        out.append(y)
    return out


@pytest.mark.parametrize("factor", [0.0, 1e-9, 0.3, 0.95, 0.9999, 1.0])
def test_a_scan_is_its_loop_for_every_length(factor):
    generator = torch.Generator().manual_seed(0)
    for length, block in (
        (1, 32),
        (31, 32),
        (32, 32),
        (33, 32),
        (200, 3),
        (4096, 32),
        (8192 + 77, 32),
    ):
        x = torch.randn(2, length, generator=generator, dtype=D)
        want = torch.tensor([loop_scan(row, factor) for row in x.tolist()], dtype=D)
        assert torch.allclose(scan(x, factor, block), want, rtol=1e-10, atol=1e-10), (length, block)


def test_gae_with_lam_1_of_9000_tokens_is_reward_minus_value():
    mask = torch.rand(2, 9000, generator=torch.Generator().manual_seed(1)) < 0.9
    batch = with_tokens(one_group([3.0, -1.0], mask=mask.tolist()))
    advantages, _ = ESTIMATORS["gae"](batch, PLAIN)
    want = torch.where(mask, torch.tensor([[3.0], [-1.0]]) - batch.values, 0.0)
    assert torch.allclose(advantages, want, rtol=0, atol=1e-10)


def test_lengths_count_all_rows_of_a_rollout():
    batch = one_group([0.0] * 3, mask=[[1, 0, 1], [1, 1, 1], [0, 0, 0]], rollout=[1, 1, 0])
    assert lengths(batch).tolist() == [0, 5, 0]


def test_overlong_rewards_fall_from_0_to_minus_1_over_the_buffer():
    found = overlong(torch.tensor([0, 12, 13, 14, 16, 17, 99]), 16, 4).tolist()
    assert found == [0, 0, -0.25, -0.5, -1, -1, -1]


def test_rewards_are_clipped_to_their_range():
    assert clip_rewards(torch.tensor([-3.0, 0.2, 7.0]), -1, 1).tolist() == pytest.approx(
        [-1, 0.2, 1]
    )


def test_dynamic_sampling_keeps_whole_groups_whose_mean_is_strictly_inside():
    assert keeps([0.0, 1.0, 0.0], 3, 0.0, 1.0)
    assert not keeps([0.0, 1.0], 3, 0.0, 1.0)  # one is missing
    assert not keeps([0.0, 1.0], 2, 0.5, 1.0) and not keeps([0.0, 1.0], 2, 0.0, 0.5)
    for n in range(1, 65):  # equal scores at a bound, whatever their mean rounds to
        for k in range(1001):
            assert not keeps([k / 1000] * n, n, k / 1000, 2.0) and not keeps(
                [k / 1000] * n, n, -1.0, k / 1000
            )


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert abs(pass_at_k(n, c, k) - sum(map(any, subsets)) / len(subsets)) < 1e-12


# Planted bugs: each test shows that the check above tells the wrong variant from the right one.


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "gae"])
def test_planted_whitening_per_rank_is_seen(name):
    def alone(batch, cfg):
        return ESTIMATORS[name](replace(batch, all_sum=torch.clone), cfg)

    batch = next(b for b in CASES if len(b.rollout) > 8)
    whole, cuts = ESTIMATORS[name](batch, CONFIGS[0])[0], [0, 4, len(batch.rollout)]
    assert torch.allclose(
        on_ranks(ESTIMATORS[name], batch, cuts, CONFIGS[0])[0], whole, rtol=0, atol=1e-10
    )
    assert not torch.allclose(
        on_ranks(alone, batch, cuts, CONFIGS[0])[0], whole, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("count", ["per row", "per rank"])
def test_planted_lengths_of_a_part_of_a_rollout_are_seen(count):
    def opo(batch, cfg):
        centred, length = centre(batch)[0], lengths(replace(batch, all_sum=torch.clone))
        if count == "per row":
            length = torch.zeros_like(length).index_copy(
                0, batch.rollout, batch.mask.sum(1).double()
            )
        baseline = group_sum(length * centred, batch) / group_sum(length, batch).clamp(min=1)
        return finish(spread(centred - baseline, batch), batch)

    if count == "per row":
        assert not agrees("opo", opo)
    else:
        assert agrees("opo", opo)
        batch = next(b for b in CASES if len(b.rollout) > 8)
        dealt, _ = on_ranks(opo, batch, [0, 4, len(batch.rollout)], PLAIN)
        assert not torch.allclose(dealt, opo(batch, PLAIN)[0], rtol=0, atol=1e-10)


def test_planted_whitening_over_padding_is_seen():
    def padded(batch, cfg):
        returns, _ = reinforce(batch, config(**vars(cfg) | {"whiten": False}))
        scaled = (
            (returns - returns.mean())
            / returns.var(correction=0).clamp(min=1e-8).sqrt()
            * batch.mask
        )
        return finish(scaled if cfg.whiten else returns, batch)

    assert not agrees("reinforce", padded)


def test_planted_baseline_over_rows_instead_of_rollouts_is_seen():
    def per_row(batch, cfg):
        groups, rewards = (
            batch.groups[batch.rollout],
            batch.rewards[batch.rollout],
        )  # [B], one entry a segment
        values = torch.stack(
            [r - rewards[groups == g].mean() for r, g in zip(rewards, groups, strict=True)]
        )
        return finish(values[:, None] * batch.mask, batch)

    assert not agrees("dr_grpo", per_row)
    one_row_each = [b for b in CASES if sorted(b.rollout.tolist()) == list(range(len(b.rewards)))]
    assert one_row_each and agrees(
        "dr_grpo", per_row, one_row_each
    )  # only the segments tell them apart


NO_KL = [config(gamma=g, whiten=w) for g in (1.0, 0.9) for w in (True, False)]


def simple_grpo(batch, correction=1, epsilon=1e-6, dtype=D):
    """GRPO with a loop over groups and no special case for equal rewards."""
    values = torch.zeros_like(batch.rewards, dtype=D)  # [R]
    for g in batch.groups.unique():
        rewards = batch.rewards[batch.groups == g].to(dtype)
        std = rewards.std(correction=correction) if len(rewards) > 1 else 0.0
        values[batch.groups == g] = ((rewards - rewards.mean()) / (std + epsilon)).double()
    return finish(spread(values, batch), batch)


def test_planted_rounding_noise_of_equal_rewards_is_seen():
    cases = [one_group(torch.full((n,), k / 1000)) for n in range(2, 65) for k in (100, 300, 700)]
    noisy = [simple_grpo(batch, dtype=torch.float32)[0].abs().max() for batch in cases]
    assert max(noisy) > 0.01  # float32 noise over its own std is a gradient out of nothing
    assert any(
        simple_grpo(one_group([k / 1000] * n))[0].any()
        for n in range(2, 65)
        for k in (100, 300, 700)
    )


def test_planted_biased_std_and_another_epsilon_are_seen():
    cases = [
        b for b in CASES if all(len(set(b.rewards[b.groups == g].tolist())) > 1 for g in b.groups)
    ]
    assert cases
    assert agrees("grpo", lambda batch, cfg: simple_grpo(batch), cases)
    assert not agrees("grpo", lambda batch, cfg: simple_grpo(batch, correction=0), cases)
    assert not agrees("grpo", lambda batch, cfg: simple_grpo(batch, epsilon=1e-4), cases)


def test_planted_statistics_in_float32_are_seen():
    rewards = torch.tensor([1000.1, 1000.2, 1000.4, 1000.5])
    assert agrees("grpo", ESTIMATORS["grpo"], [one_group(rewards)])
    assert not agrees(
        "grpo", lambda batch, cfg: simple_grpo(batch, dtype=torch.float32), [one_group(rewards)]
    )


def test_planted_leave_one_out_that_leaves_none_out_is_seen():
    assert not agrees("rloo", ESTIMATORS["dr_grpo"])


def test_planted_discount_by_positions_is_seen():
    def positions(batch, cfg):
        steps = torch.arange(batch.mask.shape[1])  # [T]
        last = (steps * batch.mask).amax(1, keepdim=True)  # [B, 1]
        discount = (
            cfg.gamma ** (last - steps).clamp(min=0).double()
        )  # [B, T], counts masked tokens as steps
        returns = discount * spread(batch.rewards, batch)
        return finish(whiten(returns, batch) if cfg.whiten else returns, batch)

    dense = [one_group([1.0, 3.0], mask=[[1, 1, 0], [1, 1, 1]])]
    assert agrees("reinforce", positions, dense, NO_KL)  # without holes it is the same
    assert not agrees("reinforce", positions, configs=NO_KL)


def test_planted_one_chain_over_the_segments_of_a_rollout_is_seen():
    def one_chain(batch, cfg):
        mask = batch.mask.double()  # [B, T]
        later = mask.flip(1).cumsum(1).flip(1) - mask
        for b, r in enumerate(batch.rollout.tolist()):
            later[b] += mask[b + 1 :][
                batch.rollout[b + 1 :] == r
            ].sum()  # tokens of the rollout's later segments
        returns = cfg.gamma**later * spread(batch.rewards, batch)
        return finish(whiten(returns, batch) if cfg.whiten else returns, batch)

    one_row_each = [b for b in CASES if len(set(b.rollout.tolist())) == len(b.rollout)]
    assert one_row_each and agrees("reinforce", one_chain, one_row_each, NO_KL)
    assert not agrees("reinforce", one_chain, configs=NO_KL)


def finite(batch):
    """The same batch with plain numbers off the mask."""
    tokens = with_tokens(batch, junk=(-0.7, -1.1))
    return replace(
        batch, **{k: getattr(tokens, k) for k in ("old_logprobs", "ref_logprobs", "values")}
    )


@pytest.mark.parametrize("name", ["reinforce", "gae"])
def test_planted_kl_unmasked_before_the_cumulative_sum_is_seen(name):
    def unmasked(batch, cfg):
        rho = -cfg.kl_coef * (batch.old_logprobs - batch.ref_logprobs)  # [B, T], on all tokens
        sums = (rho.flip(1).cumsum(1).flip(1) + batch.rewards[batch.rollout, None]) * batch.mask
        return finish(sums if name == "reinforce" else sums - batch.values * batch.mask, batch)

    cases, configs = [finite(b) for b in CASES], [config(kl_coef=0.1)]
    full = [b for b in cases if b.mask.all()]
    assert full and agrees(name, unmasked, full, configs)
    assert agrees(name, ESTIMATORS[name], cases, configs) and not agrees(
        name, unmasked, cases, configs
    )


def test_planted_kl_counted_on_the_last_token_only_is_seen():
    def last(batch, cfg):
        return reinforce(replace(batch, ref_logprobs=None), cfg)

    assert agrees("reinforce", last, configs=NO_KL) and not agrees("reinforce", last)


def test_planted_next_value_at_the_next_position_is_seen():
    def positions(batch, cfg):
        following = torch.nn.functional.pad(batch.values[:, 1:], (0, 1))
        delta = cfg.gamma * following - batch.values  # [B, T], without a reward, on all tokens
        last = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)  # [B, T]
        delta = (
            torch.where(last, batch.rewards[batch.rollout, None] - batch.values, delta) * batch.mask
        )
        return finish(scan(delta.flip(1), cfg.gamma * cfg.lam).flip(1) * batch.mask, batch)

    cases, configs = [finite(b) for b in CASES], [config(gamma=0.9, lam=1.0)]
    full = [b for b in cases if b.mask.all()]
    assert full and agrees("gae", positions, full, configs)
    assert not agrees("gae", positions, cases, configs)


def test_planted_bootstrap_of_rollouts_that_ended_is_seen():
    def always(batch, cfg):
        return ESTIMATORS["gae"](replace(batch, truncated=torch.ones_like(batch.truncated)), cfg)

    ended = [replace(b, truncated=torch.zeros_like(b.truncated)) for b in CASES]
    assert agrees("gae", always, configs=CONFIGS[:2]) and not agrees(
        "gae", always, ended, CONFIGS[2:3]
    )


def test_planted_value_target_after_whitening_is_seen():
    def after(batch, cfg):
        return torch.where(batch.mask, ESTIMATORS["gae"](batch, cfg)[0] + batch.values, 0.0)

    assert targets_agree(after, configs=CONFIGS[1:2])
    assert not targets_agree(after, configs=CONFIGS[:1])


def test_planted_length_without_the_reward_mean_is_seen():
    assert not agrees("opo", ESTIMATORS["dr_grpo"])


def test_planted_std_of_the_group_for_that_of_the_batch_is_seen():
    assert not agrees("lite_ppo", ESTIMATORS["grpo"])


def test_planted_sum_of_rewards_before_normalising_is_seen():
    def summed(batch, cfg):
        return ESTIMATORS["gdpo"](
            replace(batch, named_rewards=batch.named_rewards.sum(1, keepdim=True)), cfg
        )

    assert not agrees("gdpo", summed, configs=CONFIGS[:1])


def test_planted_division_by_a_negative_mean_is_seen():
    def unguarded(batch, cfg):
        centred, _, n = centre(batch)
        return finish(spread(centred / (group_sum(batch.rewards, batch) / n), batch), batch)

    positive = [b for b in CASES if all(b.rewards[b.groups == g].mean() > 0 for g in b.groups)]
    assert positive and agrees("maxrl", unguarded, positive)
    assert not agrees("maxrl", unguarded)


def test_rewards_that_cancel_up_to_rounding_have_no_positive_mean():
    assert not ESTIMATORS["maxrl"](one_group([0.1, 0.2, -0.3]), PLAIN)[0].any()


def test_planted_advantages_off_the_mask_are_seen():
    def everywhere(batch, cfg):
        return finish(centre(batch)[0][batch.rollout, None].expand(batch.mask.shape), batch)

    full = [b for b in CASES if b.mask.all()]
    assert full and agrees("dr_grpo", everywhere, full)
    assert not agrees("dr_grpo", everywhere)
