"""Runs that overlap: stale and interrupted rollouts of a mixture of experts, every stamp rescored, batches trained again from files."""

import json

import numpy as np
import pytest
import torch
from test_run import finish, metrics, start
from tiny import upcycle
from transformers import AutoTokenizer

import train
from agent import read_batch
from replay import pack
from server import Chat

pytestmark = pytest.mark.e2e
STEPS, LAG = 6, 2
TRAINER = [
    "--is_level",
    "token",
    "--minibatches",
    1,
    "--max_tokens",
    120,
    "--steps",
    STEPS,
    "--show_every",
    0,
]
FLAGS = [
    *TRAINER,
    "--replay_experts",
    "--max_lag",
    LAG,
    "--prompts",
    4,
    "--samples",
    4,
    "--max_context",
    512,
    "--max_turns",
    3,
]

LETTERS = """
from agent import Env


class Agent(Env):
    def step(self, reply):
        return "Again.", min(reply.count("a"), 100) / 300, False, {}
"""


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory, tiny):
    """Two engines, replies that refits interrupt, experts replayed, each version's weights and each batch kept."""
    out = tmp_path_factory.mktemp("async") / "run"
    flags = [
        "--model",
        f"{tiny}/moe",
        "--agent",
        "tests/talker.py",
        "--partial",
        "--engines",
        2,
        "--max_gap",
        1e-5,
    ]
    code, text = finish(
        start(*FLAGS, *flags, "--save_every", 1, "--keep", 20, "--save_rollouts", "--out", out)
    )
    assert code == 0, text[-3000:]
    return out


def model_of(out):
    return json.loads((out / "config.json").read_text())["model"]


def test_on_version_tokens_agree_at_every_step_of_an_interrupted_run_with_replayed_experts(
    asynchronous,
):
    rows = metrics(asynchronous)
    assert len(rows) == STEPS and max(r["lag/max"] for r in rows) == LAG
    for row in rows:
        assert row["gap/on_version_max"] <= 1e-5 and row["gap/on_version_tokens"] >= 100
        assert (
            row["experts/agreement"] >= 0.98
            and row["experts/replayed"] == 1.0
            and row["experts/missing"] == 0
        )


def test_every_token_is_stamped_with_the_version_whose_weights_give_its_log_prob(
    asynchronous, process_group
):
    """Each version's tokens under that version's checkpoint: a refit amid a reply is seen to the token."""
    segments = [
        s for path in sorted(asynchronous.glob("rollouts/*.jsonl")) for s in read_batch(path)[1]
    ]
    cfg = train.Config(
        model=model_of(asynchronous), dtype="float32", out=str(asynchronous), resume=True
    )
    policy = train.build_policy(cfg, "cpu")
    checked, wrong = 0, []
    for version in range(STEPS):
        if version:
            saved = asynchronous / f"checkpoint-{version:06d}"
            train.load_checkpoint(saved, {"policy": policy})
        for s in segments:
            own = s.mask & (s.versions == version)
            if own.any():
                micro = pack([s], [0])
                micro.experts = (
                    None  # the live choice: rows that are replayed are those of the last version
                )
                with torch.no_grad():
                    logprobs = policy.replay.forward(micro)[0][0].numpy()
                assert np.abs(logprobs - s.logprobs)[own].max() <= 1e-5
                checked += own.sum()
                wrong.append(np.abs(logprobs - s.logprobs)[s.mask & ~own].max(initial=0))
    assert checked == sum(s.mask.sum() for s in segments)
    assert max(wrong) > 1e-2  # another version's weights would have shown
    mixed = [s for s in segments if len(set(s.versions[s.mask])) > 1]
    inside = [s for s in mixed if any(len(set(s.versions[a:b])) > 1 for a, b, _ in s.replies)]
    print(
        f"{checked} tokens, {len(mixed)} of {len(segments)} rows of several versions, {len(inside)} within a reply"
    )
    assert len(inside) >= 3 and all((np.diff(s.versions[s.mask]) >= 0).all() for s in segments)


def test_replies_whose_text_encodes_to_other_ids_are_counted_as_a_recount_of_the_rows_finds(
    asynchronous,
):
    chat, found = Chat(AutoTokenizer.from_pretrained(model_of(asynchronous))), 0
    paths = sorted(asynchronous.glob("rollouts/*.jsonl"))
    for path, row in zip(paths, metrics(asynchronous), strict=True):
        segments = read_batch(path)[1]
        replies = [s.tokens[a:b].tolist() for s in segments for a, b, _ in s.replies]
        other = sum(chat.encode(chat.tokenizer.decode(ids)) != ids for ids in replies)
        assert row["rollouts/retokenised"] == other / len(replies)
        found += other
    assert found > 0  # of hundreds of replies of a random model, which are no text


def test_batches_from_files_are_trained_as_they_were_without_an_engine(asynchronous, tmp_path):
    flags = [
        *TRAINER,
        "--model",
        model_of(asynchronous),
        "--train_from",
        asynchronous / "rollouts",
        "--out",
        tmp_path / "run",
    ]
    code, text = finish(start(*flags))
    assert code == 0, text[-3000:]
    before, again = metrics(asynchronous), metrics(tmp_path / "run")
    assert len(again) == STEPS and "engines" not in text
    for name in (
        "loss/policy",
        "optim/grad_norm",
        "reward/mean",
        "is/weight_mean",
        "gap/off_version_mean",
    ):
        assert [r[name] for r in again] == pytest.approx(
            [r[name] for r in before], rel=1e-6, abs=1e-6
        ), name


@pytest.mark.slow
def test_a_random_mixture_of_experts_climbs_to_nine_tenths_and_agrees_at_every_step(tmp_path, tiny):
    """As above, in a game whose reward is at most 1: a hundred times the letter a in each reply."""
    (tmp_path / "letters.py").write_text(LETTERS)
    flags = [
        "--model",
        f"{tiny}/moe",
        "--agent",
        tmp_path / "letters.py",
        "--partial",
        "--engines",
        2,
    ]
    flags += ["--max_gap", 1e-5, "--steps", 64, "--lr", 5e-3]
    code, text = finish(start(*FLAGS, *flags, "--out", tmp_path / "run"), timeout=600)
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    last, worst = (
        sum(r["reward/mean"] for r in rows[-3:]) / 3,
        max(r["gap/on_version_max"] for r in rows),
    )
    print(
        f"reward {rows[0]['reward/mean']:.2f} to {last:.3f} in {len(rows)} steps, gap at most {worst:.1e}"
    )
    assert rows[0]["reward/mean"] <= 0.2 and last >= 0.9 and worst <= 1e-5
    assert max(r["lag/max"] for r in rows) == LAG and sum(
        r["lag/mixed_rollouts"] for r in rows
    ) > len(rows)
    assert all(r["gap/on_version_tokens"] >= 100 and r["experts/replayed"] == 1.0 for r in rows)


@pytest.mark.slow
def test_an_interrupted_run_of_experts_still_climbs_to_nine_tenths(tmp_path):
    """The default game with a starter of four experts, stale and interrupted rollouts, replayed routes, two engines."""
    upcycle(str(tmp_path / "starter"))
    flags = [
        "--model",
        tmp_path / "starter",
        "--replay_experts",
        "--max_lag",
        LAG,
        "--partial",
        "--is_level",
        "token",
    ]
    code, text = finish(
        start(*flags, "--engines", 2, "--show_every", 0, "--out", tmp_path / "run"), timeout=900
    )
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    last = sum(r["reward/mean"] for r in rows[-3:]) / 3
    worst, lags = max(r["gap/on_version_max"] for r in rows), [r["lag/mean"] for r in rows[LAG:]]
    above, rare = (
        sum(r["gap/on_version_max"] > 1e-5 for r in rows),
        max(r["gap/on_version_p999"] for r in rows),
    )
    print(f"gap over 1e-5 in {above} of {len(rows)} steps, 99.9th percentile {rare:.1e}")
    print(
        f"reward {rows[0]['reward/mean']:.2f} to {last:.3f}, gap {worst:.1e}, lag {min(lags):.2f} to {max(lags):.2f}"
    )
    assert rows[0]["reward/mean"] <= 0.4 and last >= 0.9
    assert max(r["lag/max"] for r in rows) == LAG and all(
        r["gap/on_version_tokens"] >= 100 for r in rows
    )
