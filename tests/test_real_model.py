"""SmolLM2-135M-Instruct, a real pretrained model with its own tokenizer. `make real-model` makes it and runs this."""

import os

import pytest
from test_run import finish, metrics, start

pytestmark = [pytest.mark.e2e, pytest.mark.real_model]
MODEL = "out/smollm2"
AGENT = """
from agent import Env

class Agent(Env):
    def step(self, reply):  # a reward that differs between rollouts: brief replies are better
        return "Shorter, please.", 1.0 / (1 + len(reply.split())), False, {"words": len(reply.split())}
"""


def test_a_pretrained_model_keeps_its_tokens_and_agrees_with_its_engine(tmp_path):
    assert os.path.isdir(MODEL), "run `make real-model`, which makes it"
    (tmp_path / "brief.py").write_text(AGENT)
    flags = [
        "--agent",
        tmp_path / "brief.py",
        "--model",
        MODEL,
        "--prompts",
        4,
        "--samples",
        4,
        "--steps",
        3,
        "--max_context",
        512,
        "--max_tokens",
        48,
    ]
    flags += [
        "--max_turns",
        3,
        "--lr",
        1e-5,
        "--max_gap",
        1e-3,
        "--tokens_per_microbatch",
        2048,
        "--out",
        tmp_path / "run",
    ]
    code, text = finish(start(*flags), timeout=1500)
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3 and all(row["optim/grad_norm"] > 0 for row in rows)
    for row in rows:
        assert row["gap/on_version_mean"] <= 1e-4 and row["gap/on_version_p999"] <= 1e-4
        assert row["tokens/digest_mismatch"] == 0 and row["rollouts/turns"] > 1
        print(
            {
                k: row[k]
                for k in ("rollouts/retokenised", "gap/on_version_mean", "gap/on_version_p999", "gap/on_version_max")
            }
        )
    assert sum(row["rollouts/retokenised"] for row in rows) / 3 >= 0.1
