"""How well a model folder plays the default game, with transformers alone.

python tests/solve.py out/.../model examples/starter/heldout.jsonl            # greedy, as in the README
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent import Agent, Task
from server import Chat


@torch.no_grad()
def play(model_name: str, rows: list[dict], greedy: bool) -> tuple[float, float]:
    """Play every row once, in batches; returns (share solved, share of replies whose text encodes to other ids)."""
    chat = Chat(AutoTokenizer.from_pretrained(model_name))
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()
    stop, games, other = chat.tokenizer.eos_token_id, [], []
    for row in rows:
        env, messages = Agent(), [{"role": "user", "content": row["prompt"]}]
        env.reset(Task(messages, row["label"]))
        games.append({"env": env, "ids": chat.opening(messages), "reward": 0.0})
    live = games
    for _ in range(4):
        batch = chat.tokenizer.pad(
            {"input_ids": [g["ids"] for g in live]}, padding_side="left", return_tensors="pt"
        )
        out = model.generate(**batch, max_new_tokens=32, do_sample=not greedy, top_k=0)[
            :, batch.input_ids.shape[1] :
        ]
        going = []
        for game, ids in zip(live, out.tolist()):
            reply = ids[: ids.index(stop) + 1] if stop in ids else ids
            other.append(chat.encode(chat.tokenizer.decode(reply)) != reply)
            observation, game["reward"], done, _ = game["env"].step(chat.text(reply))
            if not done:
                new = [{"role": "user", "content": observation}]
                game["ids"] += reply + chat.following(new, reply[-1])[0]
                going.append(game)
        if not (live := going):
            break
    return sum(g["reward"] for g in games) / len(games), sum(other) / len(other)


def rows_of(path: str) -> list[dict]:
    return [json.loads(line) for line in open(path)]


if __name__ == "__main__":
    print(play(sys.argv[1], rows_of(sys.argv[2]), greedy=True)[0])
