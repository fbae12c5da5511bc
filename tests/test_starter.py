"""examples/starter: its size, its tokenizer, its data, and how badly it plays."""

import json
import os
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, "examples")
import make_starter
from solve import play, rows_of

STARTER = "examples/starter"


def rows(name):
    return rows_of(f"{STARTER}/{name}.jsonl")


@pytest.fixture(scope="module")
def games():
    torch.manual_seed(0)
    return play(STARTER, rows("train")[:256], greedy=False)


def test_it_solves_at_most_four_tenths_but_not_nothing(games):
    assert 0.05 <= games[0] <= 0.4


def test_at_least_a_tenth_of_its_replies_encode_to_other_ids(games):
    assert games[1] >= 0.1


def test_it_is_small():
    files = os.listdir(STARTER)
    assert sum(os.path.getsize(f"{STARTER}/{f}") for f in files if f.endswith(".safetensors")) <= 4 << 20
    assert AutoModelForCausalLM.from_pretrained(STARTER).num_parameters() <= 1_000_000


def test_its_tokenizer_has_merges_and_single_digits():
    spec = json.load(open(f"{STARTER}/tokenizer.json"))
    assert len(spec["model"]["merges"]) >= 256
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    assert [tokenizer.decode(i) for i in tokenizer.encode("2048")] == list("2048")
    assert len(tokenizer.encode("Now <answer>")) <= 5 < len("Now <answer>") / 2


def test_its_template_is_chatml():
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    messages = [{"role": r, "content": r} for r in ("system", "user", "assistant", "tool")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        text
        == "".join(f"<|im_start|>{r}\n{r}<|im_end|>\n" for r in ("system", "user", "assistant", "tool"))
        + "<|im_start|>assistant\n"
    )


def test_held_out_problems_need_two_turns_and_numbers_that_no_demonstration_has():
    held = rows("heldout")
    operands = {int(n) for row in held for n in re.findall(r"\d+", row["prompt"])}
    assert len(held) == 200 and len({row["prompt"] for row in held}) == 200
    assert all(len(re.findall(r"\d+", row["prompt"])) in (2, 3) for row in held)  # a call and an answer at the least
    assert all(row["label"] == eval(row["prompt"][8:-1]) for row in held + rows("train"))
    for row, turns in make_starter.demonstrations(2000) + make_starter.demonstrations(2000, clean=True):
        said = row["prompt"] + "".join(reply for reply, _ in turns if "<calc>" in reply)
        assert not operands & {int(n) for n in re.findall(r"\d+", said)}
    assert not {row["prompt"] for row in held} & {row["prompt"] for row in rows("train")}
