"""Supervised fine-tuning as a user starts it: it learns, goes on after a stop, and ranks change nothing. No engine."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from test_run import finish, metrics, start
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import order

sys.path.insert(0, "examples")
import make_starter

pytestmark = pytest.mark.e2e
STEPS, PROMPTS, ROWS = (
    40,
    8,
    150,
)  # 320 demonstrations: two passes and a piece of a third, each in another order


@torch.no_grad()
def nll(folder, rows):
    """Mean over the tokens of the replies, with transformers alone and ids put together from ChatML's own text."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    said = []
    for row in rows:
        ids, mask = [], []
        for message in row["prompt"]:
            texts, spoken = (
                [part["text"] for part in message["content"]],
                message["role"] == "assistant",
            )
            asked = (
                "\n" * bool(ids)
                + f"<|im_start|>user\n{texts[0]}<|im_end|>\n<|im_start|>assistant\n"
            )
            new = [
                i
                for text in ([*texts, "<|im_end|>"] if spoken else [asked])
                for i in tokenizer.encode(text)
            ]
            ids, mask = ids + new, mask + [spoken] * len(new)
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)  # [T - 1, V]
        said.append(logprobs.gather(1, torch.tensor(ids)[1:, None])[torch.tensor(mask)[1:]])
    return -float(torch.cat(said).mean())


def test_it_learns_and_goes_on_after_a_stop_and_on_two_ranks_as_if_nothing_had_happened(
    tmp_path, tiny
):
    rows = list(make_starter.curriculum(make_starter.demonstrations(ROWS, clean=True), steps=5))[
        :ROWS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, out, after = f"{tiny}/dense", tmp_path / "run", tmp_path / "run" / "model"
    flags = [
        "--estimator",
        "sft",
        "--model",
        before,
        "--data",
        tmp_path / "rows.jsonl",
        "--out",
        out,
        "--steps",
        STEPS,
    ]
    flags += [
        "--prompts",
        PROMPTS,
        "--minibatches",
        1,
        "--lr",
        5e-3,
        "--warmup",
        5,
        "--save_every",
        STEPS // 2,
    ]
    code, text = finish(start(*flags), timeout=240)
    assert code == 0, text[-3000:]
    whole = metrics(out)
    assert [r["step"] for r in whole] == list(range(1, STEPS + 1)) and whole[-1]["version"] == STEPS
    first = [rows[order(SimpleNamespace(shuffle=True, seed=0), ROWS, at)] for at in range(PROMPTS)]
    assert (
        whole[0]["loss/policy"] == pytest.approx(nll(before, first), rel=1e-5)
        and whole[0]["loss/policy"] > 5
    )
    last = [r["loss/policy"] for r in whole[-5:]]
    print(
        f"loss {whole[0]['loss/policy']:.2f} to {sum(last) / 5:.2f}, exported {nll(after, rows):.2f}"
    )
    assert max(last) < 1.5 and nll(after, rows) < 1.3

    shutil.rmtree(out / f"checkpoint-{STEPS:06d}")  # as if it had been stopped half-way
    code, text = finish(start(*flags, "--resume", ranks=2), timeout=240)
    assert code == 0, text[-3000:]
    again = metrics(out)
    half = STEPS // 2
    assert len(again) == STEPS and again[:half] == whole[:half]
    assert [r["time/train"] for r in again[half:]] != [
        r["time/train"] for r in whole[half:]
    ]  # run anew, not left over
    for name in ("step", "version", "optim/lr", "tokens/trained", "segments/count"):
        assert [r[name] for r in again] == [r[name] for r in whole]
    for name in ("loss/policy", "optim/grad_norm"):
        assert [r[name] for r in again] == pytest.approx([r[name] for r in whole], abs=1e-5)
