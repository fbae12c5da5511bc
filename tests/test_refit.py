"""refit.py without engines: buckets, packing, checksums, the comparison of what was sent and loaded."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from agent import InvariantError
from refit import PAGE, Refit, buckets, checksum, hf_tensors, offsets, pack


def unpack(flat, meta):
    spans, size = offsets(meta["dtypes"], meta["shapes"])
    assert size == flat.numel()
    return [
        (n, flat[a:b].view(getattr(torch, d)).view(s))
        for n, d, s, (a, b) in zip(meta["names"], meta["dtypes"], meta["shapes"], spans)
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
            st.integers(0, 5),
            st.integers(1, 7),
        ),
        min_size=1,
    )
)
def test_what_is_packed_unpacks_bit_for_bit(kinds):
    torch.manual_seed(0)
    tensors = [(f"t{i}", (torch.randn(a, b) * 50).to(d)) for i, (d, a, b) in enumerate(kinds)]
    flat, meta = pack(tensors)
    assert flat.numel() % PAGE == 0 and meta["checksum"] == checksum(flat)
    for (n, t), (m, u) in zip(tensors, unpack(flat, meta)):
        assert n == m and t.dtype == u.dtype and torch.equal(t, u)


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 1000))
def test_buckets_keep_the_order_and_the_limit(sizes, limit):
    tensors = [(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate(sizes)]
    made = list(buckets(iter(tensors), limit))
    assert [n for b in made for n, _ in b] == [str(i) for i in range(len(sizes))]
    assert all(sum(t.nbytes for _, t in b) <= limit or len(b) == 1 for b in made) and all(made)


@given(st.integers(0, 3 * PAGE - 1), st.integers(0, 3 * PAGE - 1), st.sampled_from([1, 4, 128]))
@example(8, PAGE, 1)  # equal sums of row and column
@example(7, PAGE + 7, 128)  # the sign, whose product with an even number is nothing
def test_a_checksum_sees_a_changed_and_a_moved_byte(i, j, bits):
    flat = torch.randint(
        0, 255, (3 * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    changed = flat.clone()
    changed[i] ^= bits
    assert checksum(changed) != checksum(flat)
    swapped = flat.clone()
    swapped[i], swapped[j] = flat[j].clone(), flat[i].clone()
    assert (checksum(swapped) == checksum(flat)) == torch.equal(swapped, flat)


def test_a_tied_head_is_sent_once_and_in_the_dtype_of_the_refit(tiny):
    from transformers import AutoModelForCausalLM

    names = [
        n
        for n, t in hf_tensors(AutoModelForCausalLM.from_pretrained(f"{tiny}/tied"), torch.bfloat16)
    ]
    assert (
        len(names) == len(set(names))
        and "model.embed_tokens.weight" in names
        and "lm_head.weight" not in names
    )
    sent = dict(hf_tensors(AutoModelForCausalLM.from_pretrained(f"{tiny}/dense"), torch.bfloat16))
    assert "lm_head.weight" in sent and {t.dtype for t in sent.values()} == {torch.bfloat16}


@pytest.mark.parametrize("report", [[3, 77], [4, 78], [0, 0]])
def test_a_worker_that_loaded_something_else_is_named(report):
    refit = Refit(None, None, [])
    sent = [(2, 100, 40), (2, 50, 37)]
    refit.verify(sent, [[[4, 77]], [[4, 77], [4, 77]]])
    with pytest.raises(InvariantError, match="^refit: engine 1 worker 1 loaded"):
        refit.verify(sent, [[[4, 77]], [[4, 77], report]])
