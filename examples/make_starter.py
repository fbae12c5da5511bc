"""Make the starter: a tiny policy that plays agent.py's calculator game badly, and the data to make it play well.

It trains a byte-level BPE tokenizer and a Qwen3 of half a million parameters on demonstrations of mixed quality, and writes
both with train.jsonl and heldout.jsonl (rows {"prompt": "What is 17+25-8?", "label": 34}) to examples/starter/. The policy
copies numbers well, but most games are lost to guesses, broken tags, a wrong order, a useless call: that is left to RL.
Held-out problems are made of numbers that no demonstration has as an operand. Replies are cut at random places before they
are encoded (a seeded kin of BPE dropout), so a good share of sampled replies is not what their text encodes to.

It does no reinforcement learning. The same machine makes the same files. Some minutes on one or two CPU cores:

    python examples/make_starter.py
"""

import argparse
import collections
import json
import random
import re
import sys
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from agent import ANSWER, CALL, Agent, Task  # noqa: E402

CHAT = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SPLIT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Qwen's, one digit a piece
)
HELDOUT = sorted(random.Random(0).sample(range(10, 100), 20))  # the operands of held-out problems
POOL = [n for n in range(1, 100) if n not in HELDOUT]
CUT = 0.04  # chance that a reply is cut before a character when it is encoded
# What the demonstrator does while operations are left, and once the result is there. A good turn comes in several wordings,
# none of them the likeliest reply to the prompt, so that greedy decoding starts low too.
LEFT = {"good": 0.40, "guess": 0.40, "order": 0.07, "broken": 0.13}
READY = {"good": 0.76, "guess": 0.08, "again": 0.08, "broken": 0.08}


def problem(rng: random.Random, pool: list[int], operands: int) -> dict:
    """One data row: two numbers with + - or *, or three, the last one with + or -."""
    a, b, c = rng.choices(pool, k=3)
    text = f"{a}{rng.choice('+-*')}{b}" + (f"{rng.choice('+-')}{c}" if operands == 3 else "")
    return {"prompt": f"What is {text}?", "label": eval(text)}


def demonstrate(rng: random.Random, row: dict, clean: bool) -> list[tuple[str, str]]:
    """Play one game of at most four turns, well (`clean`) or with mixed luck: (reply, observation) of each turn."""
    numbers, ops = re.findall(r"\d+", row["prompt"]), re.findall(r"[-+*]", row["prompt"])
    terms, game, turns, done = list(numbers), Agent(), [], False
    game.reset(Task([], row["label"]))
    while not done and len(turns) < 4:
        odds = LEFT if ops else READY
        act = "good" if clean else rng.choices(list(odds), odds.values())[0]
        if act == "guess":
            reply = f"I guess <answer>{rng.choice(numbers)}</answer>"
        elif not ops and act != "again":
            reply = rng.choice(["", "", "So ", "The answer is "]) + f"<answer>{terms[0]}</answer>"
        else:
            at = len(ops) - 1 if act == "order" else 0
            call = call if act == "again" else f"<calc>{terms[at]}{ops[at]}{terms[at + 1]}</calc>"  # noqa: F821
            words = rng.choice(["", "", "Now "] if turns else ["", "First ", "Let me see: "])
            reply = ("Last " if act == "order" else words) + call
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
        called = [int(x) for reply, _ in turns if "<calc>" in reply for x in re.findall(r"\d+", reply)]
        games += [(row, turns)] * (not set(called) & set(HELDOUT))
    return games


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 256 bytes and 317 merges, learnt from the demonstrations and some docstrings' English."""
    bpe, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=573, initial_alphabet=byte_level.alphabet(), show_progress=False)
    bpe.train_from_iterator(texts + [m.__doc__ for m in (argparse, collections, json, random, re, Path)], trainer)
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    names = dict(pad_token="<|endoftext|>", eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT, model_max_length=1024, **names)


def encode(tok, text: str, cuts: random.Random | None = None) -> list[int]:
    """Ids of a text; with `cuts` it is cut at random places first, and each piece is encoded on its own."""
    pieces = "".join("\0" + c if cuts and cuts.random() < CUT else c for c in text).split("\0")
    return [i for piece in pieces for i in tok.backend_tokenizer.encode(piece).ids]


def between(tok, observation: str) -> list[int]:
    """Ids from the end of a prompt or reply (its <|im_end|> included) to the start of the next reply."""
    return encode(tok, f"\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n")


def train(model, tok, games: list, steps: int, lr: float) -> None:
    """Fit the replies of the games, 32 a batch: the first 70% of the steps on the first half of the games."""
    rng, optimizer = random.Random(2), torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, step / 30, 1.01 - step / steps)
        half = len(games) // 2
        rows = []
        for row, turns in rng.choices(games[:half] if step < 0.7 * steps else games[half:], k=32):
            ids = between(tok, row["prompt"])[1:]
            labels = [-100] * len(ids)
            for reply, observation in turns:
                said, tail = encode(tok, reply, rng) + [tok.eos_token_id], between(tok, observation)
                ids, labels = ids + said + tail, labels + said + [-100] * len(tail)
            rows.append((ids, labels))
        ids_BT = tok.pad({"input_ids": [ids for ids, _ in rows]}, return_tensors="pt").input_ids
        labels_BT = torch.tensor([labels + [-100] * (ids_BT.shape[1] - len(labels)) for _, labels in rows])
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:4d} loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def play(model, tok, rows: list[dict], greedy: bool = False) -> list[dict]:
    """Roll the policy out on each row: at most four turns of 32 new tokens, ids extended and never encoded again.

    Returns one dict a row: ids and mask [T] (1 where sampled), turns (ids, text, observation), reward.
    """
    games = [dict(row=r, ids=between(tok, r["prompt"])[1:], turns=[], game=Agent(), reward=0.0) for r in rows]
    for g in games:
        g["game"].reset(Task([], g["row"]["label"]))
        g["mask"] = [0] * len(g["ids"])
    live = list(games)
    while live and len(live[0]["turns"]) < 4:
        batch = tok.pad({"input_ids": [g["ids"] for g in live]}, padding_side="left", return_tensors="pt")
        out_BN = model.generate(**batch, max_new_tokens=32, do_sample=not greedy)[
            :, batch.input_ids.shape[1] :
        ].tolist()
        going = []
        for g, out in zip(live, out_BN):
            cut = tok.eos_token_id not in out
            reply = out if cut else out[: out.index(tok.eos_token_id)]
            observation, g["reward"], done, _ = g["game"].step(text := tok.decode(reply))
            g["turns"].append((reply, text, observation or ""))
            tail = between(tok, observation) if not done else []
            g["ids"] += reply + [tok.eos_token_id] + tail
            g["mask"] += [1] * (len(reply) + (not cut)) + [0] * (cut + len(tail))
            going += [g] * (not done)
        live = going
    return games


def report(tok, games: list[dict]) -> dict[str, float]:
    """Shares: games solved, replies whose text encodes to other ids, well-formed replies with numbers copied right."""
    other, right = [], []
    for g in games:
        known = set(re.findall(r"\d+", g["row"]["prompt"]))
        for turn, (ids, text, observation) in enumerate(g["turns"]):
            other.append(encode(tok, text) != ids)
            if match := CALL.search(text) or (turn and ANSWER.search(text)):
                right.append({match[1], match[match.lastindex]} <= known)
            known.add(observation)
    mean = lambda x: sum(x) / max(1, len(x))
    return {"solved": mean([g["reward"] for g in games]), "other_ids": mean(other), "copied": mean(right)}


def main(out: Path = ROOT / "examples" / "starter", steps: int = 1200, lr: float = 3e-3) -> None:
    start = time.time()
    torch.manual_seed(0)
    games = demonstrations(15000, clean=True) + demonstrations(15000)
    tok = make_tokenizer([r["prompt"] + " " + reply for r, turns in games[-3000:] for reply, _ in turns])
    config = Qwen3Config(
        vocab_size=len(tok),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        bos_token_id=None,
        initializer_range=0.08,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id, do_sample=True, top_k=0
    )
    print(model.num_parameters(), "parameters", time.time() - start)
    train(model, tok, games, steps, lr)
    rng = random.Random(3)
    rows = {"train": {}, "heldout": {}}
    for name, pool, n in (("train", POOL, 4000), ("heldout", HELDOUT, 200)):
        while len(rows[name]) < n:
            row = problem(rng, pool, 2 + len(rows[name]) % 2)
            rows[name][row["prompt"]] = row
    model.save_pretrained(out)
    tok.save_pretrained(out)
    for name in rows:
        (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[name].values()))
    model.eval()
    t = time.time()
    print(report(tok, play(model, tok, list(rows["train"].values())[:512])))
    print(time.time() - t)
    print(report(tok, play(model, tok, list(rows["heldout"].values()))))
    print(report(tok, play(model, tok, list(rows["heldout"].values()), greedy=True)))
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
