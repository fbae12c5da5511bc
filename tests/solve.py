"""Greedy solve rate of a model folder on rows of the default game, with transformers alone.

python tests/solve.py out/.../model examples/starter/heldout.jsonl
"""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent import Agent, Task
from rollout import play
from server import Chat, Reply


def greedy(model_name: str, data: str) -> float:
    """Mean reward of one greedy rollout per row, played by instar's own episode loop."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model, chat = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval(), Chat(tokenizer)
    cfg = SimpleNamespace(max_turns=4, max_tokens=32, max_context=256)

    async def generate(ids, max_tokens, known):
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)[0, len(ids) :]
        tokens = out.numpy().astype(np.int32)
        return Reply(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), b"", "stop")

    async def call(method, *args):
        return method(*args)

    async def one(row):
        task = Task([{"role": "user", "content": row["prompt"]}], label=row["label"])
        return (await play(Agent(), task, chat, generate, cfg, call)).result.reward

    return float(np.mean([asyncio.run(one(json.loads(line))) for line in open(data)]))


if __name__ == "__main__":
    print(greedy(*sys.argv[1:]))
