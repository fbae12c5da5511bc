"""Make the starter: a tiny policy that plays agent.py's calculator game badly, and the data to make it play well.

Learns a byte-level BPE tokenizer, has train.py --estimator sft fit a random Qwen3 of 0.3 M parameters to demonstrations
of mixed quality, and writes both, train.jsonl and heldout.jsonl to examples/starter/. The policy copies numbers well,
but gives up, or forgets to end a tag: what to do is left to RL. Held-out problems are made of numbers that no
demonstration has as an operand. Words before a tag are cut at random places and encoded in pieces (a kin of BPE dropout,
arXiv 1910.13267). Ten minutes on two CPU cores:

    python examples/make_starter.py
"""

import argparse
import collections
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import torch
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from agent import Agent, Task

CHAT = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HELDOUT = sorted(random.Random(0).sample(range(10, 100), 20))  # the operands of held-out problems
POOL = [n for n in range(1, 100) if n not in HELDOUT]
BATCH = 32  # demonstrations a step
CUT = 0.2  # chance that the words before a tag are cut before a character when they are encoded
# What the demonstrator does while operations are left, and once the result is there. Every number that it writes follows from the
# game so far: a random one would teach to copy badly. Giving up is likeliest, so that greedy decoding starts low too.
LEFT = {"good": 0.34, "give up": 0.42, "operand": 0.05, "order": 0.05, "broken": 0.14}
READY = {"good": 0.72, "operand": 0.10, "again": 0.09, "broken": 0.09}


def problem(rng: random.Random, pool: list[int], operands: int) -> dict:
    """One data row: two numbers with + - or *, or three, the last one with + or -."""
    a, b, c = rng.choices(pool, k=3)
    text = f"{a}{rng.choice('+-*')}{b}" + f"{rng.choice('+-')}{c}" * (operands == 3)
    return {"prompt": f"What is {text}?", "label": eval(text)}


def demonstrate(rng: random.Random, row: dict, clean: bool) -> list[tuple[str, str]]:
    """Play one game of at most four turns, well (`clean`) or with mixed luck: (reply, observation) of each turn."""
    numbers, ops = re.findall(r"\d+", row["prompt"]), re.findall(r"[-+*]", row["prompt"])
    terms, game, turns, done, call = list(numbers), Agent(), [], False, ""
    game.reset(Task([], row["label"]))
    while not done and len(turns) < 4:
        odds = LEFT if ops else READY
        act = "good" if clean else rng.choices(list(odds), odds.values())[0]
        if act in ("give up", "operand") or (not ops and act != "again"):
            number = {"give up": "0", "operand": numbers[-1]}.get(act, terms[0])
            words = rng.choice(["", "", "", "I give up "] if act == "give up" else ["", "So "])
            reply = f"{words}<answer>{number}</answer>"
        else:
            at = len(ops) - 1 if act == "order" else 0
            call = call if act == "again" else f"<calc>{terms[at]}{ops[at]}{terms[at + 1]}</calc>"
            reply = rng.choice(["", "Now "] if turns else ["", "First "]) + call
        reply = reply.split("</")[0] if act == "broken" else reply
        observation, _, done, _ = game.step(reply)
        turns.append((reply, observation or ""))
        if ops and act in ("good", "order"):
            terms[at : at + 2], ops[at : at + 1] = [observation], []
    return turns


def demonstrations(n: int, clean: bool = False, seed: int = 1) -> list[tuple[dict, list]]:
    """n games (row, turns) in which no held-out number is an operand, not even of a later call."""
    rng, games = random.Random(seed), []
    while len(games) < n:
        row = problem(rng, POOL, rng.choice((2, 3)))
        turns = demonstrate(rng, row, clean)
        called = [
            int(x) for reply, _ in turns if "<calc>" in reply for x in re.findall(r"\d+", reply)
        ]
        games += [(row, turns)] * (not set(called) & set(HELDOUT))
    return games


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 256 bytes and 317 merges, learnt from the demonstrations and some docstrings' English."""
    bpe, byte_level = (
        Tokenizer(models.BPE()),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=573, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(
        texts + [m.__doc__ for m in (argparse, collections, json, random, re, Path)], trainer
    )
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    names = dict(pad_token="<|endoftext|>", eos_token="<|im_end|>", model_max_length=1024)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT, **names)


def in_pieces(rng: random.Random, reply: str) -> list[dict]:
    """A reply as text parts, which train.py encodes one by one: the words before its tag are cut at random places."""
    words, tag, rest = reply.partition("<")
    pieces = "".join("\0" + c if rng.random() < CUT else c for c in words).split("\0")
    pieces[-1] += tag + rest
    return [{"type": "text", "text": piece} for piece in pieces]


def curriculum(games: list, steps: int):
    """Yield rows of chat messages, BATCH a step: at first of the games' clean half, at last of their mixed one."""
    rng, half = random.Random(2), len(games) // 2
    for step in range(steps):
        mixed = 3 * step / steps - 1.5  # chance of a game of mixed quality
        for _ in range(BATCH):
            row, turns = games[rng.randrange(half) + half * (rng.random() < mixed)]
            messages, asked = [], row["prompt"]
            for reply, observation in turns:
                messages.append({"role": "user", "content": [{"type": "text", "text": asked}]})
                messages.append({"role": "assistant", "content": in_pieces(rng, reply)})
                asked = observation
            yield {"prompt": messages}


def main(
    out: Path = ROOT / "examples/starter", work: Path = ROOT / "out/starter", steps: int = 5000
) -> None:
    """Write the starter into `out`, with the run of train.py that makes it in `work`, which must hold none."""
    torch.manual_seed(0)
    games = demonstrations(15000, clean=True) + demonstrations(15000)
    tok = make_tokenizer(
        [r["prompt"] + " " + reply for r, turns in games[-3000:] for reply, _ in turns]
    )
    shape = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=4)
    shape |= dict(head_dim=32, num_attention_heads=4, num_key_value_heads=2)
    ids = dict(eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id, bos_token_id=None)
    rope = {"rope_type": "default", "rope_theta": 100.0}  # a rollout has at most 256 tokens
    more = dict(
        max_position_embeddings=1024,
        rope_parameters=rope,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tok), **shape, **ids, **more))
    model.generation_config = GenerationConfig(
        eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id
    )
    for part in (model, tok):
        part.save_pretrained(work / "random")
    (work / "demonstrations.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in curriculum(games, steps))
    )
    flags = f"--model random --data demonstrations.jsonl --no_shuffle --out run --steps {steps} --prompts {BATCH}"
    flags += " --minibatches 1 --lr 3e-3 --schedule linear --warmup 30 --weight_decay 0.1 --betas 0.9 0.98"
    subprocess.run(
        [sys.executable, ROOT / "train.py", "--estimator", "sft", *flags.split()],
        cwd=work,
        check=True,
    )
    for part in (
        Qwen3ForCausalLM.from_pretrained(work / "run/model"),
        tok,
    ):  # one file, however the export is cut
        part.save_pretrained(out)
    for name, pool, n in (("train", POOL, 4000), ("heldout", HELDOUT, 200)):
        rng, rows = random.Random(3), {}
        while len(rows) < n:
            row = problem(rng, pool, 2 + len(rows) % 2)
            rows[row["prompt"]] = json.dumps(row)
        (out / f"{name}.jsonl").write_text("\n".join(rows.values()) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
