"""replay.py: dealing rows, packing, identity, the one shift, chunked log-probs, expert replay."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

import replay
from agent import InvariantError, Segment, digest
from replay import Replay, Router, check_identity, pack, plan


def segment(n, replies, seed=0, rollout_id=0):
    """A random row of n tokens whose digests are right."""
    rng = np.random.default_rng(seed)
    tokens, mask = rng.integers(3, 90, n).astype(np.int32), np.zeros(n, bool)
    for a, b in replies:
        mask[a:b] = True
    logprobs = np.where(mask, -rng.random(n), 0).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    marks = [
        (a, b, digest(tokens[:a], tokens[a:b], logprobs[a:b], versions[a:b])) for a, b in replies
    ]
    return Segment(tokens, mask, logprobs, versions, replies=marks, rollout_id=rollout_id)


@pytest.fixture
def small():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


@given(
    st.lists(st.integers(1, 100), max_size=60),
    st.integers(1, 8),
    st.integers(100, 400),
)
def test_every_row_is_dealt_once_within_the_budget_and_ranks_have_equal_counts(
    lengths, ranks, budget
):
    dealt = plan(lengths, ranks, budget)
    assert len(dealt) == ranks and len({len(d) for d in dealt}) == 1
    assert sorted(i for d in dealt for m in d for i in m) == list(range(len(lengths)))
    assert all(len(m) * max(lengths[i] for i in m) <= budget for d in dealt for m in d if m)


def test_ranks_get_like_totals_and_none_is_idle():
    lengths = [50] * 16
    dealt = plan(lengths, 4, 10_000)
    assert [sum(lengths[i] for m in d for i in m) for d in dealt] == [200] * 4


def test_a_row_over_the_budget_is_refused_by_name():
    with pytest.raises(ValueError, match="row of 11 tokens exceeds --tokens_per_microbatch 10"):
        plan([3, 11], 1, 10)


def test_logprobs_stand_at_their_own_token(small):
    """Against logits of each row alone, without padding: the shift, the padding and the chunking at once."""
    rows = [
        segment(9, [(2, 4), (6, 9)]),
        segment(5, [(1, 5)], seed=1),
        segment(12, [(11, 12)], seed=2),
    ]
    want = []
    for row in rows:
        ids = torch.tensor(row.tokens)[None].long()
        logits = small(ids).logits[0].double() / 0.7
        logprobs = torch.cat(
            [
                torch.zeros(1),
                logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0].detach(),
            ]
        )
        entropies = torch.cat(
            [torch.zeros(1), torch.distributions.Categorical(logits=logits[:-1]).entropy().detach()]
        )
        want.append((logprobs * torch.tensor(row.mask), entropies * torch.tensor(row.mask)))
    got = Replay(small, 0.7).forward(pack(rows, [2, 0, 1]))
    for b, i in enumerate([2, 0, 1]):
        for value, reference in zip(got, want[i]):
            torch.testing.assert_close(
                value[b, : len(rows[i])].double(), reference, atol=2e-6, rtol=5e-7
            )  # rtol: four ulps
            assert (value[b, len(rows[i]) :] == 0).all()


def test_chunks_give_the_values_and_gradients_of_the_whole(small, monkeypatch):
    rows, results = [segment(30, [(3, 28)]), segment(20, [(5, 20)], seed=1)], []
    scorer = Replay(small, 1.0)
    for chunk in (1 << 25, 97 * 3):
        monkeypatch.setattr(replay, "CHUNK", chunk)
        small.zero_grad()
        logprobs, _ = scorer.forward(pack(rows, [0, 1]))
        (logprobs * torch.arange(30)).sum().backward()
        results.append((logprobs.detach(), [p.grad.clone() for p in small.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=0)
    for a, b in zip(results[0][1], results[1][1]):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)


def test_the_logits_of_a_batch_never_exist_at_once(small, monkeypatch):
    biggest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (97,):
                biggest.append(out.numel())
            return out

    monkeypatch.setattr(replay, "CHUNK", 97 * 8)
    scorer, micro = Replay(small, 1.0), pack([segment(60, [(1, 60)])], [0])
    with Watch():
        logprobs, _ = scorer.forward(micro)
        logprobs.sum().backward()
    assert biggest and max(b for b in biggest if b != small.lm_head.weight.numel()) <= 97 * 8


def test_an_empty_micro_batch_trains_nothing_but_has_a_graph(small):
    logprobs, _ = Replay(small, 1.0).forward(pack([], []))
    logprobs.sum().backward()
    assert logprobs.requires_grad and all(
        p.grad is None or (p.grad == 0).all() for p in small.parameters()
    )


def test_identity_holds_for_packed_rows_and_counts_them():
    rows = [segment(9, [(2, 4), (6, 9)]), segment(5, [(1, 5)], seed=1)]
    assert check_identity(pack(rows, [1, 0]), rows) == 9


@pytest.mark.parametrize(
    "bug",
    [
        "another id",
        "a mask shifted by one",
        "a log-prob dropped",
        "another version",
        "a changed prompt",
    ],
)
def test_identity_catches(bug):
    row = segment(9, [(2, 4), (6, 9)])
    if bug == "another id":
        row.tokens[7] += 1
    elif bug == "a mask shifted by one":
        row.mask = np.roll(row.mask, 1)
    elif bug == "a log-prob dropped":
        row.logprobs[6:8] = row.logprobs[7:9]
    elif bug == "another version":
        row.versions[3] = 1
    else:
        row.tokens[0] += 1
    with pytest.raises(InvariantError, match="^token identity"):
        check_identity(pack([row], [0]), [row])


def test_a_router_keeps_the_live_choice_where_nothing_was_captured_and_counts_agreement():
    router, live = Router(0), torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert router.apply(live) is live
    router.target = torch.tensor([[2, 1], [-1, -1], [5, 7]])
    router.counted = torch.tensor([True, False, True])
    assert router.apply(live).tolist() == [[2, 1], [3, 4], [5, 7]]
    assert (router.agree, router.total) == (1, 2)


def test_missing_experts_are_counted_and_a_rows_last_token_is_not_one_of_them(small):
    row = segment(6, [(2, 6)])
    row.experts, row.experts_ok = np.zeros((6, 2, 2), np.uint8), np.array([1, 1, 1, 0, 1, 0], bool)
    micro = pack([row, segment(3, [(1, 3)])], [0])
    assert (
        (micro.experts[0, 3] == -1).all()
        and (micro.experts[0, 5] == -1).all()
        and (micro.experts[0, 4] == 0).all()
    )
    scorer = Replay(small, 1.0)
    scorer.routers = [Router(0), Router(1)]
    metrics = scorer.expert_metrics(micro)
    assert metrics["experts/missing"] == (1, 0)
    assert metrics["experts/replayed"] == (8, 10)  # 5 inputs × 2 layers, one input missing


def test_padding_does_not_reach_a_real_token(small):
    rows = [segment(5, [(1, 5)]), segment(40, [(1, 40)], seed=1)]
    scorer = Replay(small, 1.0)
    alone, _ = scorer.forward(pack(rows, [0]))
    padded, _ = scorer.forward(pack(rows, [1, 0]))
    torch.testing.assert_close(alone[0], padded[1, :5], atol=1e-6, rtol=5e-7)
