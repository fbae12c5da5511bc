"""examples/starter: its size, its tokenizer, its data, how badly it plays, and the demonstrations behind it."""

import asyncio
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, "examples")
import make_starter
from solve import play, rows_of

from rollout import demonstrate, load_rows, order
from server import Chat

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
    assert (
        sum(os.path.getsize(f"{STARTER}/{f}") for f in files if f.endswith(".safetensors"))
        <= 4 << 20
    )
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
        == "".join(
            f"<|im_start|>{r}\n{r}<|im_end|>\n" for r in ("system", "user", "assistant", "tool")
        )
        + "<|im_start|>assistant\n"
    )


def test_held_out_problems_need_two_turns_and_numbers_that_no_demonstration_has():
    held = rows("heldout")
    operands = {int(n) for row in held for n in re.findall(r"\d+", row["prompt"])}
    assert len(held) == 200 and len({row["prompt"] for row in held}) == 200
    assert all(
        len(re.findall(r"\d+", row["prompt"])) in (2, 3) for row in held
    )  # a call and an answer at the least
    assert all(row["label"] == eval(row["prompt"][8:-1]) for row in held + rows("train"))
    for row, turns in make_starter.demonstrations(2000) + make_starter.demonstrations(
        2000, clean=True
    ):
        said = row["prompt"] + "".join(reply for reply, _ in turns if "<calc>" in reply)
        assert not operands & {int(n) for n in re.findall(r"\d+", said)}
    assert not {row["prompt"] for row in held} & {row["prompt"] for row in rows("train")}


def words(message):
    return "".join(part["text"] for part in message["content"])


def test_the_file_of_demonstrations_trains_the_ids_of_each_piece_of_a_reply_and_its_end(tmp_path):
    """Through the file, its loader and the template, against ids that are put together here from ChatML's own text."""
    games = make_starter.demonstrations(300, clean=True) + make_starter.demonstrations(300)
    written = list(make_starter.curriculum(games, steps=6))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    chat, other = Chat(tokenizer), 0

    def encode(text):
        return tokenizer.backend_tokenizer.encode(text).ids

    loaded = load_rows(str(tmp_path / "rows.jsonl"), "prompt")
    assert loaded == written
    for row in loaded:
        ids, trained = [], []
        for asked, said in zip(row["prompt"][::2], row["prompt"][1::2], strict=True):
            assert (asked["role"], said["role"]) == ("user", "assistant")
            end = "\n" if ids else ""  # of the reply before
            context = encode(
                f"{end}<|im_start|>user\n{words(asked)}<|im_end|>\n<|im_start|>assistant\n"
            )
            reply = [i for part in said["content"] for i in encode(part["text"])] + [
                tokenizer.eos_token_id
            ]
            ids, trained = (
                ids + context + reply,
                trained + [False] * len(context) + [True] * len(reply),
            )
            other += reply[:-1] != encode(words(said))
        (segment,) = asyncio.run(demonstrate(chat, row, "prompt", "label", 256))
        assert segment.tokens.tolist() == ids and segment.mask.tolist() == trained
    assert other > 50  # replies whose text encodes to other ids


def test_the_words_before_a_tag_are_cut_at_a_fifth_of_their_characters():
    rng, cuts, places = make_starter.random.Random(0), 0, 0
    for text in 200 * ["First <calc>1+2</calc>", "<answer>3</answer>", "I give up <answer>0"]:
        pieces = [part["text"] for part in make_starter.in_pieces(rng, text)]
        assert "".join(pieces) == text and "<" not in "".join(pieces[:-1])
        cuts, places = cuts + len(pieces) - 1, places + text.index("<")
    assert 0.17 <= cuts / places <= 0.23


def test_the_demonstrations_are_clean_at_first_and_mixed_at_last_and_seen_in_the_order_of_the_file():
    clean, mixed = make_starter.demonstrations(300, clean=True), make_starter.demonstrations(300)

    def said(turns):
        return tuple(reply for reply, _ in turns)

    shown = [
        tuple(map(words, r["prompt"][1::2]))
        for r in make_starter.curriculum(clean + mixed, steps=12)
    ]
    good, bad = {said(turns) for _, turns in clean}, {said(turns) for _, turns in mixed}
    assert len(shown) == 12 * make_starter.BATCH
    assert set(shown[: 7 * make_starter.BATCH]) <= good  # step 6 is the first with a chance, of 0
    share = sum(replies not in good for replies in shown[-2 * make_starter.BATCH :]) / (
        2 * make_starter.BATCH
    )
    assert set(shown[-2 * make_starter.BATCH :]) <= bad and share >= 0.4
    as_written = SimpleNamespace(shuffle=False, seed=0)
    assert [order(as_written, len(shown), at) for at in range(len(shown))] == list(
        range(len(shown))
    )


@pytest.mark.slow
def test_the_script_makes_a_starter_that_plays_as_the_shipped_one(games, tmp_path):
    """From random weights, through train.py --estimator sft, in two fifths of the script's steps."""
    made, flags = str(tmp_path / "made"), ["--work", tmp_path / "work", "--steps", 2000]
    command = [
        "timeout",
        "900",
        sys.executable,
        "examples/make_starter.py",
        "--out",
        made,
        *flags,
    ]  # ends train.py too
    run = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert sorted(os.listdir(made)) == sorted(os.listdir(STARTER))
    for name in ("tokenizer.json", "train.jsonl", "heldout.jsonl"):  # no training
        assert open(f"{made}/{name}").read() == open(f"{STARTER}/{name}").read()
    torch.manual_seed(0)
    solved, other = play(made, rows("train")[:256], greedy=False)
    greedy = [play(folder, rows("heldout"), greedy=True)[0] for folder in (STARTER, made)]
    print(
        f"solved {games[0]:.3f} and {solved:.3f}, other ids {games[1]:.3f} and {other:.3f}, greedy {greedy}"
    )
    assert abs(solved - games[0]) <= 0.12 and other >= 0.1 and max(greedy) <= 0.1
