"""Whole runs of train.py as a user starts them: learning, resuming after kill -9, a mixture of experts on two ranks, planted bugs."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from faults import descendants

from agent import read_batch

pytestmark = pytest.mark.e2e
QUICK = ["--prompts", "4", "--samples", "4", "--show_every", "0"]


def start(*args, ranks=0, script=("train.py",), stdout=subprocess.PIPE):
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks
        else []
    )
    return subprocess.Popen(
        [sys.executable, *launcher, *script, *map(str, args)],
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, timeout=300):
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("the run hangs:\n" + process.communicate()[0][-3000:]) from None
    return process.returncode, text


def metrics(out):
    path = os.path.join(out, "metrics.jsonl")
    return [json.loads(line) for line in open(path)] if os.path.exists(path) else []


def train_by_default(out, seed):
    """Unmodified defaults; returns (wall seconds, metrics, console text)."""
    begun = time.time()
    code, text = finish(start("--out", out, *(["--seed", seed] if seed else [])), timeout=420)
    assert code == 0, text[-3000:]
    return time.time() - begun, metrics(out), text


def check_learning(out, wall, rows, text, least):
    """least: mean reward of the last three batches."""
    from solve import play, rows_of

    assert rows[0]["reward/mean"] <= 0.4
    # the gate of the run itself is on the largest gap of a step; a group that shares one
    # ill-conditioned number moves a step's percentile, but not the median of 48 of them
    assert max(r["gap/on_version_max"] for r in rows) <= 1e-4
    assert max(r["gap/on_version_mean"] for r in rows) <= 1e-6
    assert np.median([r["gap/on_version_p999"] for r in rows]) <= 1e-5
    assert {r["tokens/digest_mismatch"] for r in rows} == {0}
    assert "FAIL" not in text and text.count("PASS") >= 3
    solved, _ = play(
        str(out / "model"), rows_of("examples/starter/heldout.jsonl"), greedy=True
    )  # operands never demonstrated
    last = sum(r["reward/mean"] for r in rows[-3:]) / 3
    print(f"{wall:.0f} s, reward {rows[0]['reward/mean']:.2f} to {last:.3f}, held out {solved:.3f}")
    assert solved >= 0.9 and last >= least


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("default") / "run"
    return out, *train_by_default(out, 0)


def test_default_training_climbs_and_solves_unseen_problems(trained):
    """The sampled reward of three batches is a noisy number: here it has a margin, `make test-all` asks for 0.9 on three seeds."""
    check_learning(*trained, least=0.85)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_training_climbs_to_nine_tenths_in_five_minutes(tmp_path, seed):
    wall, rows, text = train_by_default(tmp_path / "run", seed)
    assert wall <= 300
    check_learning(tmp_path / "run", wall, rows, text, least=0.9)


def check_server_rows(rows):
    """What every run through the capture server shows: replies of several turns, all captured, none lost to an echo."""
    assert {r["tokens/digest_mismatch"] for r in rows} == {0}
    assert max(r["gap/on_version_max"] for r in rows) <= 1e-4
    assert all(r["rollouts/turns"] > 1.2 and r["rollouts/failed"] == 0 for r in rows)
    assert all(r["server/echo_T0"] > 0 and r.get("server/rewritten", 0) == 0 for r in rows)
    assert all(
        r["segments/count"] == r["rollouts/finished"] for r in rows
    )  # one row each: nothing branched


def test_a_chat_agent_with_streamed_replies_learns(tmp_path):
    flags = [
        "--agent",
        "tests/chat_agent.py",
        "--steps",
        8,
        "--show_every",
        0,
        "--out",
        tmp_path / "run",
    ]
    code, text = finish(start(*flags))
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    check_server_rows(rows)
    assert all(
        0.2 < r["info/claude"] < 0.8 for r in rows
    )  # both wires, and the gap holds on all tokens
    assert rows[0]["reward/mean"] <= 0.4 and rows[-1]["reward/mean"] >= rows[0]["reward/mean"] + 0.2


def test_a_command_line_is_an_agent(tmp_path):
    """A script that knows nothing of instar, in a process for each rollout; a file that grades its output."""
    command = f"{sys.executable} {os.path.abspath('tests/talk.py')} {{prompt}}"
    flags = [
        "--agent_cmd",
        command,
        "--reward",
        "tests/grade.py",
        "--prompts",
        2,
        "--minibatches",
        1,
        "--steps",
        2,
    ]
    code, text = finish(start(*flags, "--show_every", 0, "--out", tmp_path / "run"))
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    check_server_rows(rows)
    assert [r["rollouts/finished"] for r in rows] == [16, 16] and sum(
        r["reward/mean"] for r in rows
    ) > 0


def climbs(out, *flags, timeout=600):
    """Run train.py with these flags; from at most 0.4 the reward has to reach 0.9, the mean of the last three batches."""
    code, text = finish(start(*flags, "--show_every", 0, "--out", out), timeout=timeout)
    assert code == 0, text[-3000:]
    rows = metrics(out)
    last = sum(r["reward/mean"] for r in rows[-3:]) / 3
    print(f"reward {rows[0]['reward/mean']:.2f} to {last:.3f}")
    assert rows[0]["reward/mean"] <= 0.4 and last >= 0.9
    return rows


@pytest.mark.slow
def test_a_command_line_climbs_to_nine_tenths(tmp_path):
    """Some 3,000 processes of about a second of CPU each."""
    command = f"{sys.executable} {os.path.abspath('tests/talk.py')} {{prompt}}"
    flags = ["--agent_cmd", command, "--reward", "tests/grade.py", "--steps", 24, "--epochs", 2]
    check_server_rows(climbs(tmp_path / "run", *flags, timeout=3600))


@pytest.mark.slow
def test_a_chat_agent_with_streamed_replies_climbs_to_nine_tenths(tmp_path):
    check_server_rows(climbs(tmp_path / "run", "--agent", "tests/chat_agent.py"))


def test_an_evaluation_alone_scores_a_model_and_trains_nothing(tmp_path, trained):
    out, *_ = trained
    flags = [
        "--eval_only",
        "--eval_data",
        "examples/starter/heldout.jsonl",
        "--eval_samples",
        2,
        "--eval_temperature",
        1.0,
    ]
    code, text = finish(start("--model", out / "model", *flags, "--out", tmp_path / "run"))
    assert code == 0, text[-3000:]
    (row,) = metrics(tmp_path / "run")
    assert (
        row["step"] == 0 and row["eval/pass@1"] >= 0.8 and row["eval/pass@2"] > row["eval/pass@1"]
    )
    assert row["eval/reward"] == pytest.approx(row["eval/pass@1"]) and row["eval/failed"] == 0
    assert not list((tmp_path / "run").glob("checkpoint-*")) and "eval of version 0: " in text


@pytest.mark.slow
def test_groups_that_teach_nothing_are_replaced_and_evaluations_come_between(tmp_path):
    """Dynamic sampling, over-sampling, stale rollouts and --eval_every together, in the default game."""
    flags = [
        "--dynamic_sampling",
        0,
        1,
        "--oversample",
        1.25,
        "--max_lag",
        1,
        "--is_level",
        "token",
        "--steps",
        12,
    ]
    flags += ["--eval_data", "examples/starter/heldout.jsonl", "--eval_every", 4, "--save_rollouts"]
    code, text = finish(start(*flags, "--show_every", 0, "--out", tmp_path / "run"))
    assert code == 0, text[-3000:]
    rows, scores = (
        metrics(tmp_path / "run"),
        [r["eval/pass@1"] for r in metrics(tmp_path / "run")[3::4]],
    )
    print(f"filtered {sum(r['groups/filtered'] for r in rows)}, greedy {scores}")
    assert len(rows) == 12 and all(
        "eval/pass@1" not in r for i, r in enumerate(rows) if (i + 1) % 4
    )
    assert sum(r["groups/filtered"] for r in rows) > 0 and {
        r["reward/groups_equal"] for r in rows
    } == {0.0}
    assert max(r["lag/max"] for r in rows) <= 1 and all(r["rollouts/finished"] == 128 for r in rows)
    batches = [
        read_batch(path)[0]["rollouts"] for path in (tmp_path / "run").glob("rollouts/*.jsonl")
    ]
    trained = [rollout["group"] for batch in batches for rollout in batch]
    assert len(trained) == 12 * 128 and max(Counter(trained).values()) == 8  # no prompt twice
    best = json.loads((tmp_path / "run" / "checkpoint-000012" / "run.json").read_text())["best"]
    assert best["score"] == max(scores) > 0.5 and (tmp_path / "run" / best["checkpoint"]).is_dir()


def test_the_exported_model_is_served_by_vllm_and_a_dataset_that_ends_ends_the_run(
    tmp_path, trained
):
    """The trained policy goes on from its export: vLLM loads it, and it plays as well as it did. 7 prompts make 2 batches."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(open("examples/starter/train.jsonl").readlines()[:7])
    )
    flags = [
        "--model",
        trained[0] / "model",
        "--data",
        tmp_path / "rows.jsonl",
        "--data_epochs",
        1,
        "--steps",
        50,
        "--lr",
        1e-5,
    ]
    flags += ["--samples", 16, "--minibatches", 2, "--epochs", 2, "--wandb", "instar-test"]
    flags += ["--eval_data", "examples/starter/heldout.jsonl", "--eval_at_start"]
    code, text = finish(start(*QUICK, *flags, "--out", tmp_path / "run", ranks=1))
    assert code == 0 and "the data has ended" in text, text[-3000:]
    rows = metrics(tmp_path / "run")
    assert rows.pop(0)["eval/pass@1"] >= 0.9 and "eval of version 0: " in text
    assert [r["rollouts/finished"] for r in rows] == [64, 48]
    assert sum(r["reward/mean"] for r in rows) / 2 >= 0.8
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("steps,near", [(14, 0.2), pytest.param(40, 0.05, marks=pytest.mark.slow)])
def test_a_student_comes_close_to_its_teacher_without_a_reward(tmp_path, trained, steps, near):
    """On-policy distillation: the starter learns what the trained policy says, in one reply to each prompt."""
    flags = [
        "--estimator",
        "opd",
        "--kl_coef",
        1,
        "--ref_model",
        trained[0] / "model",
        "--steps",
        steps,
    ]
    code, text = finish(start(*flags, "--show_every", 0, "--out", tmp_path / "run"))
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    kl = [r["kl/ref"] for r in rows]
    print(f"KL to the teacher {kl[0]:.3f} to {sum(kl[-5:]) / 5:.4f}")
    assert (
        kl[0] > 0.2 and abs(sum(kl[-5:]) / 5) < near and {r["reward/mean"] for r in rows} == {0.0}
    )


def test_a_critic_learns_and_its_warm_up_leaves_the_policy_and_the_version_alone(tmp_path):
    flags = ["--estimator", "gae", "--critic_warmup_steps", 2, "--steps", 8, "--kl_coef", 0.01]
    flags += ["--show_every", 0, "--offload", "optimizer"]  # policy, critic and reference
    code, text = finish(start(*flags, "--out", tmp_path / "run"))
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    assert [r["version"] for r in rows] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert all("optim/grad_norm" not in r for r in rows[:2]) and all(
        r["optim/critic_grad_norm"] > 0 for r in rows
    )
    assert (
        all(abs(r["kl/ref"]) <= 1e-6 for r in rows[:3]) and rows[-1]["kl/ref"] > 1e-4
    )  # the reference stays behind
    # the critic starts at 0, where its error is the return itself, and comes to know it
    assert (
        rows[0]["value/explained_variance"] == 0
        and rows[0]["value/error"] > 0.7 * rows[0]["reward/mean"]
    )
    assert rows[-1]["value/error"] < 0.6 * rows[-1]["reward/mean"]
    assert (
        sum(r["reward/mean"] for r in rows[-2:]) / 2
        > sum(r["reward/mean"] for r in rows[:3]) / 3 + 0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_with_a_critic_climbs_to_nine_tenths(tmp_path, seed):
    climbs(tmp_path / "run", "--estimator", "gae", "--seed", seed)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["pg", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dppo"])
def test_each_loss_raises_the_reward_in_a_short_run(tmp_path, loss):
    flags = [
        "--loss",
        loss,
        "--loss_agg",
        "seq_mean" if loss in ("gspo", "gmpo") else "token_mean",
        "--steps",
        12,
    ]
    code, text = finish(start(*flags, "--show_every", 0, "--out", tmp_path / "run"))
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    last = sum(r["reward/mean"] for r in rows[-3:]) / 3
    print(f"{loss}: reward {rows[0]['reward/mean']:.2f} to {last:.3f}")
    assert last >= rows[0]["reward/mean"] + 0.2


def test_a_mixture_of_experts_on_two_ranks_replays_its_engines_experts(tmp_path, tiny):
    flags = [
        "--model",
        f"{tiny}/moe",
        "--ep",
        2,
        "--replay_experts",
        "--steps",
        3,
        "--estimator",
        "reinforce",
        "--no_whiten",
    ]
    code, text = finish(start(*QUICK, *flags, "--out", tmp_path / "run", ranks=2))
    assert code == 0, text[-3000:]
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    for row in rows:
        assert (
            row["gap/on_version_max"] <= 1e-5
            and row["experts/replayed"] == 1.0
            and row["experts/agreement"] >= 0.98
        )


@pytest.mark.parametrize("engines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_worker_of_tensor_parallel_engines_gets_the_weights_and_ends_with_the_run(
    tmp_path, tiny, traces, engines
):
    flags = [
        "--model",
        f"{tiny}/dense",
        "--agent",
        "tests/talker.py",
        "--engine_tp",
        2,
        "--engines",
        engines,
    ]
    flags += ["--steps", 3]
    code, text = finish(
        start(*QUICK, *flags, "--max_gap", 1e-5, "--out", tmp_path / "run"), timeout=420
    )
    assert code == 0, text[-3000:]
    for row in metrics(tmp_path / "run"):
        assert (
            row["gap/on_version_max"] <= 1e-5
            and row["refit/probe_gap"] <= 1e-5
            and row["optim/grad_norm"] > 0
        )


def test_a_killed_run_goes_on_with_the_same_prompts_optimizer_version_and_step(tmp_path, tiny):
    """A dense run whose every token agrees to 1e-5, killed with -9 and resumed: as if nothing had happened."""
    out = tmp_path / "run"
    flags = [
        *QUICK,
        "--steps",
        6,
        "--save_every",
        1,
        "--keep",
        9,
        "--model",
        f"{tiny}/dense",
        "--agent",
        "tests/talker.py",
    ]
    flags += ["--max_gap", 1e-5, "--out", out]
    process = start(*flags)
    whole = random.randint(
        2, 5
    )  # metrics are written before the checkpoint, so after one line there may be none
    print(f"killed after {whole} of 6 steps")
    while len(metrics(out)) < whole:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.2)
    children = descendants(process.pid)
    for pid in [process.pid, *children]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    (out / "unfinished" / "shard").mkdir(
        parents=True
    )  # as a kill in the middle of a save leaves it
    before = metrics(out)
    code, text = finish(start(*flags, "--resume"))
    assert code == 0 and not (out / "unfinished").exists(), text[-3000:]
    after = metrics(out)
    assert [r["step"] for r in after] == [1, 2, 3, 4, 5, 6] and [r["version"] for r in after] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert after[: len(before) - 1] == before[:-1]
    assert max(r["gap/on_version_max"] for r in after) <= 1e-5 and all(
        r["optim/grad_norm"] > 0 for r in after
    )
    assert [r["optim/lr"] for r in after] == pytest.approx([1e-3 * (1 - i / 6) for i in range(6)])
    ledgers = [
        json.loads((out / f"checkpoint-{i:06d}" / "run.json").read_text())["ledger"]
        for i in range(1, 7)
    ]
    for trained, ledger in zip(
        range(4, 25, 4), ledgers
    ):  # no prompt lost, none twice: what was not trained goes on
        assert sorted(ledger["queue"] + ledger["finished"]) == list(
            range(trained, ledger["position"])
        )
        assert ledger["ended"] == {"filtered": [], "lost": []} and ledger["position"] <= trained + 4
    from torch.distributed.checkpoint import FileSystemReader

    names = FileSystemReader(str(out / "checkpoint-000006")).read_metadata().state_dict_metadata
    step = next(n for n in names if n.endswith(".step"))
    state = {step: torch.zeros(())}
    torch.distributed.checkpoint.load(
        state, checkpoint_id=str(out / "checkpoint-000006"), no_dist=True
    )
    assert (
        float(state[step]) == 12
    )  # AdamW counted both minibatches of every step, before the kill and after


@pytest.mark.parametrize(
    "bug,words",
    [
        ("temperature", "policy version: gap/on_version_max"),
        pytest.param("weights", "refit: the probe", marks=pytest.mark.slow),
    ],
)
def test_planted_in_a_real_run_the_gate_ends_it_with_code_3(tmp_path, bug, words):
    flags = [*QUICK, "--steps", 2, "--out", tmp_path / "run"]
    code, text = finish(start(bug, *flags, script=("tests/planted.py",)))
    assert code == 3, text[-3000:]
    assert f"instar: an invariant failed. {words}" in text and metrics(tmp_path / "run") == []


def test_a_cluster_without_room_ends_the_run_with_code_2_and_what_is_asked_and_free(tmp_path):
    """A real one of four cores, whose room is waited for 3 seconds instead of 60; it ends with the test."""
    script = """
import sys
sys.path.insert(0, "tests")
import rounds, rollout
rollout.PLACE_TIMEOUT = 3
with rounds.cluster() as address:
    sys.exit(rounds.train.main([*sys.argv[1:], "--ray_address", address]))
"""
    code, text = finish(
        start("--engines", 3, "--runners", 2, "--out", tmp_path / "run", script=("-c", script)), 120
    )
    assert code == 2 and "--engines --engine_tp --runners: no room in Ray within 3 s" in text, text[
        -3000:
    ]
    assert text.split("each node has")[1].split()[:4] == ["CPU", "6", "4", "[4]"]


def test_an_agent_that_always_raises_ends_the_run_with_code_1_and_its_traceback(tmp_path):
    (tmp_path / "bad.py").write_text(
        "from agent import Agent as Game\n\nclass Agent(Game):\n    def step(self, reply):\n        raise KeyError('my bug')\n"
    )
    code, text = finish(start(*QUICK, "--agent", tmp_path / "bad.py", "--out", tmp_path / "run"))
    assert code == 1 and "--max_failed 0.5" in text and "KeyError: 'my bug'" in text
