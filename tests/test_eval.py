"""Evaluation: what is played, how it is scored, and that versions are never mixed."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import train
from agent import InvariantError, Result, Segment
from rollout import Rollout, Rollouts
from train import Config


class Runner:
    """Answers at once: `reward(row, sample)`, None for a rollout that failed; two rows of tokens each."""

    def __init__(self, reward, version=3):
        self.reward, self.version, self.rollouts, self.asked = reward, version, self, []

    async def remote(self, tasks, group_id, ids, attempt, temperature):
        self.asked.append(
            (
                group_id,
                ids,
                temperature,
                [t.messages[-1]["content"] for t in tasks],
                {t.seed for t in tasks},
            )
        )
        outs = []
        for sample, i in enumerate(ids):
            versions = np.array([-1, self.version, self.version], np.int32)
            fields = np.arange(3, dtype=np.int32), versions >= 0, np.zeros(3, np.float32), versions
            reward = self.reward(group_id, sample)
            error = "boom" if reward is None else ""
            outs.append(
                Rollout(
                    group_id, i, Result(reward or 0.0), [Segment(*fields), Segment(*fields)], error
                )
            )
        return outs


def evaluated(tmp_path, monkeypatch, rows, runner, version=3, best=None, **flags):
    (tmp_path / "rows.jsonl").write_text("".join(train.json.dumps(row) + "\n" for row in rows))
    cfg = Config(eval_data=str(tmp_path / "rows.jsonl"), eval_every=1, **flags)
    pool = Rollouts(cfg, [{"prompt": "p"}], [runner], 2)
    monkeypatch.setattr(
        train,
        "awaited",
        lambda r, version, method, *args: asyncio.run(getattr(pool, method)(*args)),
    )
    r = SimpleNamespace(cfg=cfg, console=Console(quiet=True))
    return train.evaluate(r, version, 8, best if best is not None else {})


ROWS = [{"prompt": f"q{i}", "data_source": "easy" if i < 2 else "hard"} for i in range(4)]


def test_pass_at_k_is_unbiased_over_rollouts_and_for_each_source(tmp_path, monkeypatch):
    right = {0: 4, 1: 2, 2: 1, 3: 0}  # of four
    runner = Runner(lambda row, sample: float(sample < right[row]))
    m = evaluated(tmp_path, monkeypatch, ROWS, runner, eval_samples=4, eval_temperature=0.7)
    assert m["eval/pass@1"] == pytest.approx(7 / 16) and m["eval/reward"] == pytest.approx(7 / 16)
    assert m["eval/pass@2"] == pytest.approx((1 + (1 - 1 / 6) + (1 - 3 / 6) + 0) / 4)
    assert m["eval/pass@4"] == pytest.approx(3 / 4)
    assert (m["eval/easy/pass@1"], m["eval/hard/pass@1"]) == (
        pytest.approx(0.75),
        pytest.approx(0.125),
    )
    assert sorted(k for k in m if "hard" in k) == [
        "eval/hard/pass@1",
        "eval/hard/pass@2",
        "eval/hard/pass@4",
        "eval/hard/reward",
    ]
    ids = [i for _, some, *_ in runner.asked for i in some]
    assert len(set(ids)) == 16 and max(ids) < 0  # ids of no rollout that is trained
    assert {t for _, _, t, *_ in runner.asked} == {0.7}
    assert sorted(asked[0] for _, _, _, asked, _ in runner.asked) == ["q0", "q1", "q2", "q3"]
    assert len(set().union(*(seeds for *_, seeds in runner.asked))) == 16


def test_a_rollout_that_fails_counts_as_unsolved_and_is_counted(tmp_path, monkeypatch):
    m = evaluated(tmp_path, monkeypatch, ROWS[:2], Runner(lambda row, sample: 1.0 if row else None))
    assert (m["eval/pass@1"], m["eval/failed"]) == (0.5, 1)


def test_a_reward_counts_as_solved_from_a_threshold(tmp_path, monkeypatch):
    m = evaluated(tmp_path, monkeypatch, ROWS, Runner(lambda row, sample: row / 2), eval_solved=0.5)
    assert m["eval/pass@1"] == 0.75 and m["eval/reward"] == 0.75


def test_an_evaluation_with_tokens_of_another_version_stops_the_run(tmp_path, monkeypatch):
    with pytest.raises(InvariantError, match=r"an evaluation of version 4 has tokens of \[3\]"):
        evaluated(tmp_path, monkeypatch, ROWS, Runner(lambda row, sample: 1.0), version=4)


def test_the_best_score_keeps_the_version_and_the_checkpoint_that_it_was_of(tmp_path, monkeypatch):
    best = {}
    evaluated(tmp_path, monkeypatch, ROWS, Runner(lambda row, sample: float(row > 1)), best=best)
    assert best == {"checkpoint": "checkpoint-000008", "version": 3, "score": 0.5}
    kept = dict(best, checkpoint="checkpoint-000002")
    evaluated(tmp_path, monkeypatch, ROWS, Runner(lambda row, sample: float(row > 1)), best=kept)
    assert kept["checkpoint"] == "checkpoint-000002"  # as good is not better
    evaluated(tmp_path, monkeypatch, ROWS, Runner(lambda row, sample: 1.0), best=kept)
    assert kept == {"checkpoint": "checkpoint-000008", "version": 3, "score": 1.0}


@pytest.mark.parametrize(
    "flags,words",
    [
        (dict(eval_every=5), "--eval_data : set it with"),
        (dict(eval_data="x"), "--eval_data x: set it with"),
        (
            dict(eval_data="x", eval_only=True, estimator="sft"),
            "without engines nothing can be evaluated",
        ),
        (
            dict(eval_data="x", eval_every=2, train_from="y"),
            "--train_from y: without engines nothing",
        ),
        (
            dict(eval_data="x", eval_only=True, eval_samples=4),
            "--eval_samples 4 --eval_temperature 0.0: greedy samples",
        ),
    ],
)
def test_flags_of_an_evaluation_that_would_say_nothing_are_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        train.validate(Config(**flags))
