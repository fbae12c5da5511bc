"""Every estimator against its formula in plain Python, worked values, and bugs planted to see the same check fail."""

import math
import random
import statistics
import threading
from types import SimpleNamespace

import pytest
import torch

from estimator import ESTIMATORS, GROUP_ESTIMATORS, Batch, centre, finish, reinforce, spread, whiten

torch.set_num_threads(1)
CONFIGS = [SimpleNamespace(gamma=g, whiten=w) for g in (1.0, 0.9) for w in (True, False)]
PLAIN = SimpleNamespace(gamma=1.0, whiten=False)


def formula(name, batch, cfg):
    """The advantages as nested lists, from the definitions, with Python floats and loops only."""
    rewards, groups = batch.rewards.tolist(), batch.groups.tolist()
    mask, rollout = batch.mask.tolist(), batch.rollout.tolist()
    rows = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        own = rewards[rollout[b]]
        group = [r for r, g in zip(rewards, groups, strict=True) if g == groups[rollout[b]]]
        n, mean = len(group), math.fsum(group) / len(group)
        if name == "grpo":
            a = 0.0 if len(set(group)) == 1 else (own - mean) / (statistics.stdev(group) + 1e-6)
        elif name == "rloo":
            a = own - (math.fsum(group) - own) / (n - 1) if n > 1 else 0.0
        elif name in ("dr_grpo", "reinforce_baseline"):
            a = own - mean
        following = own  # the return of the next action token; the last one's own return is the reward
        for t in reversed(range(len(row))):
            if row[t]:
                rows[b][t] = following if name == "reinforce" else a
                following *= cfg.gamma
    active = [x for xs, ms in zip(rows, mask, strict=True) for x, m in zip(xs, ms, strict=True) if m]
    if name.startswith("reinforce") and cfg.whiten and active:
        mean = math.fsum(active) / len(active)
        scale = math.sqrt(max(math.fsum((x - mean) ** 2 for x in active) / len(active), 1e-8))
        rows = [
            [(x - mean) / scale if m else 0.0 for x, m in zip(xs, ms, strict=True)]
            for xs, ms in zip(rows, mask, strict=True)
        ]
    return rows


def random_batch(seed):
    """Groups of 1 to 6 rollouts in mixed order, 0 to 4 segments a rollout, masks with holes, some of them empty."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
    groups = [g for g, n in zip(rng.sample(range(-9, 99), len(sizes)), sizes, strict=True) for _ in range(n)]
    rng.shuffle(groups)
    equal = {g: rng.random() < 0.3 for g in groups}  # some groups have one reward
    level = {g: rng.uniform(-5, 5) for g in groups}
    rewards = [level[g] if equal[g] else level[g] + rng.choice([0.0, 1.0, rng.gauss(0, 1)]) for g in groups]
    rollout = [r for r in range(len(groups)) for _ in range(rng.choice([0, 1, 1, 2, 4]))] or [0]
    length, density = rng.randint(1, 12), rng.choice([0.2, 0.6, 1.0])
    mask = [[rng.random() < density for _ in range(length)] for _ in rollout]
    return Batch(
        mask=torch.tensor(mask),
        rollout=torch.tensor(rollout),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups),
        dtype=torch.float64,
    )


CASES = [random_batch(seed) for seed in range(60)]


def agrees(name, estimator, cases=CASES, configs=CONFIGS):
    """Whether the estimator gives the formula's numbers to 1e-10 on every case."""
    return all(
        torch.allclose(
            estimator(batch, cfg)[0], torch.tensor(formula(name, batch, cfg), dtype=torch.float64), rtol=0, atol=1e-10
        )
        for batch in cases
        for cfg in configs
    )


def one_group(rewards, mask=None, rollout=None, dtype=torch.float64):
    """A batch of one group; by default one row of one action token a rollout."""
    rollout = list(range(len(rewards))) if rollout is None else rollout
    mask = [[1]] * len(rollout) if mask is None else mask
    rewards = torch.as_tensor(rewards, dtype=torch.float64) if isinstance(rewards, list) else rewards
    return Batch(
        torch.tensor(mask).bool(), torch.tensor(rollout), rewards, torch.zeros(len(rewards)).long(), dtype=dtype
    )


def on_ranks(name, batch, cuts, cfg):
    """Run the estimator on the row ranges between `cuts`, one thread a rank, and put the rows together again."""
    barrier, parts, out = threading.Barrier(len(cuts) - 1, timeout=10), {}, {}

    def rank(i):
        def all_sum(x):
            parts[i] = x
            barrier.wait()
            total = sum(parts[j] for j in sorted(parts))
            barrier.wait()
            return total

        rows = slice(cuts[i], cuts[i + 1])
        mine = Batch(batch.mask[rows], batch.rollout[rows], batch.rewards, batch.groups, all_sum, torch.float64)
        out[i] = ESTIMATORS[name](mine, cfg)

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
    ],
)
def test_worked_values(name, cfg, expected):
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]])
    advantages, metrics = ESTIMATORS[name](one_group([2.0, -1.0, 0.5], mask.tolist()), cfg)
    want = torch.tensor(expected, dtype=torch.float64)[:, None] * mask
    assert (advantages - want).abs().max() < 5e-5
    assert metrics["advantage/abs"][1] == 6
    assert abs(metrics["advantage/abs"][0] - want.abs().sum()) < 5e-4
    assert abs(metrics["advantage/mean"][0] - want.sum()) < 5e-4


@pytest.mark.parametrize("name, expected", [("grpo", [1, 1, -1, 0]), ("rloo", [0.75, 0.75, -0.75, 0])])
def test_a_rollout_of_two_segments_counts_once(name, expected):
    batch = one_group([1.0, 0.0, 0.5], rollout=[0, 0, 1, 2])
    assert (ESTIMATORS[name](batch, PLAIN)[0][:, 0] - torch.tensor(expected)).abs().max() < 5e-5


def test_the_return_is_discounted_by_action_tokens_not_by_positions():
    batch = one_group([8.0], mask=[[1, 0, 1, 0, 0, 1, 0]])
    advantages, _ = reinforce(batch, SimpleNamespace(gamma=0.5, whiten=False))
    assert advantages.tolist() == [[2, 0, 4, 0, 0, 8, 0]]
    last_only, _ = reinforce(batch, SimpleNamespace(gamma=0.0, whiten=False))
    assert last_only.tolist() == [[0, 0, 0, 0, 0, 8, 0]]


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name, dtype):
    for n in range(2, 65):
        for k in range(0, 1001, 37):
            batch = one_group(torch.full((n,), k / 1000, dtype=dtype))
            assert not ESTIMATORS[name](batch, CONFIGS[0])[0].any(), (n, k)


@pytest.mark.parametrize("name", sorted(GROUP_ESTIMATORS))
def test_a_group_of_one_gives_exactly_zero(name):
    batch = Batch(torch.ones(3, 2).bool(), torch.arange(3), torch.tensor([0.1, 0.7, -3.3]), torch.tensor([5, -2, 9]))
    assert not ESTIMATORS[name](batch, CONFIGS[0])[0].any()


def test_group_estimators_are_those_that_are_zero_on_a_group_of_one():
    batch = one_group([0.7], mask=[[1, 1]])
    zero = {name for name in ESTIMATORS if not ESTIMATORS[name](batch, PLAIN)[0].any()}
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
            dealt, metrics = on_ranks(name, batch, cuts, cfg)
            whole, total = ESTIMATORS[name](batch, cfg)
            assert torch.allclose(dealt, whole, rtol=0, atol=1e-10)
            for key, (value, count) in total.items():
                assert torch.allclose(sum(m[key][0] for m in metrics), value, rtol=0, atol=1e-9)
                assert sum(m[key][1] for m in metrics) == count


# Planted bugs: each test shows that the check above tells the wrong variant from the right one.


def test_planted_whitening_per_rank_is_seen():
    batch = next(b for b in CASES if len(b.rollout) > 8)
    halves = [
        Batch(batch.mask[rows], batch.rollout[rows], batch.rewards, batch.groups, dtype=torch.float64)
        for rows in (slice(0, 4), slice(4, None))  # with all_sum left at its default, each half whitens alone
    ]
    alone = torch.cat([reinforce(half, CONFIGS[0])[0] for half in halves])
    assert not torch.allclose(alone, reinforce(batch, CONFIGS[0])[0], rtol=0, atol=1e-10)
    together, _ = on_ranks("reinforce", batch, [0, 4, len(batch.rollout)], CONFIGS[0])
    assert torch.allclose(together, reinforce(batch, CONFIGS[0])[0], rtol=0, atol=1e-10)


def test_planted_whitening_over_padding_is_seen():
    def padded(batch, cfg):
        returns, _ = reinforce(batch, SimpleNamespace(gamma=cfg.gamma, whiten=False))
        scaled = (returns - returns.mean()) / returns.var(correction=0).clamp(min=1e-8).sqrt() * batch.mask
        return finish(scaled if cfg.whiten else returns, batch)

    assert not agrees("reinforce", padded)


def test_planted_baseline_over_rows_instead_of_rollouts_is_seen():
    def per_row(batch, cfg):
        groups, rewards = batch.groups[batch.rollout], batch.rewards[batch.rollout]  # [B], one entry a segment
        values = torch.stack([r - rewards[groups == g].mean() for r, g in zip(rewards, groups, strict=True)])
        return finish(values[:, None] * batch.mask, batch)

    assert not agrees("dr_grpo", per_row)
    one_row_each = [b for b in CASES if sorted(b.rollout.tolist()) == list(range(len(b.rewards)))]
    assert one_row_each and agrees("dr_grpo", per_row, one_row_each)  # only the segments tell them apart


def simple_grpo(batch, correction=1, epsilon=1e-6, dtype=torch.float64):
    """GRPO with a loop over groups and no special case for equal rewards."""
    values = torch.zeros_like(batch.rewards, dtype=torch.float64)  # [R]
    for g in batch.groups.unique():
        rewards = batch.rewards[batch.groups == g].to(dtype)
        std = rewards.std(correction=correction) if len(rewards) > 1 else 0.0
        values[batch.groups == g] = ((rewards - rewards.mean()) / (std + epsilon)).double()
    return finish(spread(values, batch), batch)


def test_planted_rounding_noise_of_equal_rewards_is_seen():
    cases = [one_group(torch.full((n,), k / 1000)) for n in range(2, 65) for k in (100, 300, 700)]
    noisy = [simple_grpo(batch, dtype=torch.float32)[0].abs().max() for batch in cases]
    assert max(noisy) > 0.01  # float32 noise over its own std is a gradient out of nothing
    assert any(simple_grpo(one_group([k / 1000] * n))[0].any() for n in range(2, 65) for k in (100, 300, 700))


def test_planted_biased_std_and_another_epsilon_are_seen():
    cases = [b for b in CASES if all(len(set(b.rewards[b.groups == g].tolist())) > 1 for g in b.groups)]
    assert cases
    assert agrees("grpo", lambda batch, cfg: simple_grpo(batch), cases)
    assert not agrees("grpo", lambda batch, cfg: simple_grpo(batch, correction=0), cases)
    assert not agrees("grpo", lambda batch, cfg: simple_grpo(batch, epsilon=1e-4), cases)


def test_planted_statistics_in_float32_are_seen():
    rewards = torch.tensor([1000.1, 1000.2, 1000.4, 1000.5])
    assert agrees("grpo", ESTIMATORS["grpo"], [one_group(rewards)])
    assert not agrees("grpo", lambda batch, cfg: simple_grpo(batch, dtype=torch.float32), [one_group(rewards)])


def test_planted_leave_one_out_that_leaves_none_out_is_seen():
    assert not agrees("rloo", ESTIMATORS["dr_grpo"])


def test_planted_discount_by_positions_is_seen():
    def positions(batch, cfg):
        steps = torch.arange(batch.mask.shape[1])  # [T]
        last = (steps * batch.mask).amax(1, keepdim=True)  # [B, 1]
        discount = cfg.gamma ** (last - steps).clamp(min=0).double()  # [B, T], counts masked tokens as steps
        returns = discount * spread(batch.rewards, batch)
        return finish(whiten(returns, batch) if cfg.whiten else returns, batch)

    dense = [one_group([1.0, 3.0], mask=[[1, 1, 0], [1, 1, 1]])]
    assert agrees("reinforce", positions, dense)  # without holes it is the same
    assert not agrees("reinforce", positions)


def test_planted_one_chain_over_the_segments_of_a_rollout_is_seen():
    def one_chain(batch, cfg):
        mask = batch.mask.double()  # [B, T]
        later = mask.flip(1).cumsum(1).flip(1) - mask
        for b, r in enumerate(batch.rollout.tolist()):
            later[b] += mask[b + 1 :][batch.rollout[b + 1 :] == r].sum()  # tokens of the rollout's later segments
        returns = cfg.gamma**later * spread(batch.rewards, batch)
        return finish(whiten(returns, batch) if cfg.whiten else returns, batch)

    assert not agrees("reinforce", one_chain)


def test_planted_advantages_off_the_mask_are_seen():
    def everywhere(batch, cfg):
        return finish(centre(batch)[0][batch.rollout, None].expand(batch.mask.shape), batch)

    full = [b for b in CASES if b.mask.all()]
    assert full and agrees("dr_grpo", everywhere, full)
    assert not agrees("dr_grpo", everywhere)
