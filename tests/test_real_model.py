"""SmolLM2-135M-Instruct, a real pretrained model with its own tokenizer. `make real-model` makes it and runs this."""

import json
import os

import pytest
from test_run import finish, metrics, start

pytestmark = [pytest.mark.e2e, pytest.mark.real_model]
MODEL = "out/smollm2"
AGENT = """
from agent import Env

class Agent(Env):
    def step(self, reply):  # a reward that differs between rollouts: brief replies earn more
        return "Go on.", 1.0 / (1 + len(reply.split())), False, {"words": len(reply.split())}
"""


def test_a_pretrained_model_keeps_its_tokens_and_agrees_with_its_engine(tmp_path):
    assert os.path.isdir(MODEL), "run `make real-model`, which makes it"
    (tmp_path / "brief.py").write_text(AGENT)
    topics = ("rivers", "bread", "chess", "whales", "old maps", "tea", "bridges", "owls")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Tell me about {t}."}) + "\n" for t in topics)
    )
    numbers = dict(
        prompts=4,
        samples=4,
        steps=3,
        max_turns=2,
        max_tokens=96,
        max_context=512,
        lr=1e-5,
        max_gap=1e-4,
    )
    numbers |= dict(tokens_per_microbatch=2048)
    flags = ["--model", MODEL, "--agent", tmp_path / "brief.py"]
    flags += ["--data", tmp_path / "rows.jsonl", "--out", tmp_path / "run"]
    flags += [word for name, value in numbers.items() for word in (f"--{name}", value)]
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
                for k in ("rollouts/retokenised", "gap/on_version_mean", "gap/on_version_p999")
            }
        )
    assert sum(row["rollouts/retokenised"] for row in rows) / 3 >= 0.1
