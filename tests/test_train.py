"""train.py without engines: bad input, schedules, metrics, gates, dealing, checkpoints' names."""

import dataclasses
import inspect
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
import transformers
from rich.console import Console
from test_replay import segment

import replay
import train
from agent import BadInput, InvariantError, Result
from replay import build_optimizer, pack
from train import (
    Config,
    Log,
    Meter,
    check_gates,
    check_inputs,
    check_mass,
    credit,
    deal,
    parse,
    validate,
)


@pytest.mark.parametrize(
    "flags,words",
    [
        (dict(samples=1), "--samples 1 --estimator grpo: it compares"),
        (dict(samples=1, estimator="rloo"), "--samples 1.*rloo"),
        (dict(prompts=10, minibatches=3), "--prompts 10 --minibatches 3: .*divisible"),
        (dict(ep=2), "--ep 2: does not divide the 3 ranks"),
        (dict(ep=3, offload="optimizer"), "--offload optimizer --ep 3: .*set --ep 1"),
        (dict(temperature=0.0), "--temperature 0"),
        (dict(max_context=20000), "--tokens_per_microbatch 16384 --max_context 20000: raise"),
        (dict(is_level="seq", is_mode="trunc"), "--is_level seq.*--is_mode mask"),
        (dict(is_band=(2.0, 1.0)), "--is_band 2.0 1.0"),
        (dict(dual_clip=0.5), "--dual_clip 0.5"),
        (dict(balance_coef=-0.1), "--balance_coef -0.1"),
        (dict(balance_coef=math.nan), "--balance_coef nan"),
        (
            dict(balance_coef=0.1, estimator="sft"),
            "--estimator sft: .*no KL, correction or balance",
        ),
        (dict(loss_agg="constant"), "--loss_length"),
        (dict(loss_length=5), "--loss_length 5"),
        (dict(is_level="geo", is_mode="clip"), "--is_level geo --is_mode clip.*--is_mode mask"),
        (
            dict(dual_clip=2.0, loss="cispo"),
            "--dual_clip 2.0: nothing reads it, because --loss cispo has no clip to bound",
        ),
        (dict(loss="gspo", loss_agg="seq_mean", is_level="token"), "--is_level token --loss gspo"),
        (dict(loss="gmpo", loss_agg="seq_mean", is_level="token"), "--is_level token --loss gmpo"),
        (dict(loss="gspo"), "--loss gspo --loss_agg token_mean.*seq_mean"),
        (dict(loss="dppo", is_level="token"), "--loss dppo --is_level token"),
        (dict(old="behaviour", is_level="token"), "--old behaviour --is_level token"),
        (dict(kl_coef=0.1), "--kl_coef 0.1 --estimator grpo.*--kl_loss"),
        (dict(kl_coef=0.1, kl_loss=True, kl_type="k1"), "--kl_loss True --kl_type k1"),
        (dict(kl_loss=True), "--kl_loss True: nothing reads it, .*set a --kl_coef"),
        (dict(kl_target=0.1), "--kl_target 0.1: nothing reads it, because --kl_coef is 0"),
        (dict(estimator="opd", kl_coef=1.0), "--estimator opd: it needs a teacher"),
        (dict(estimator="opd", ref_model="x"), "--estimator opd --kl_coef 0.0"),
        (dict(ref_model="x"), "--ref_model x: nothing reads it"),
        (dict(critic_model="x"), "--critic_model x: .* --estimator grpo has no critic"),
        (
            dict(critic_warmup_steps=3),
            "--critic_warmup_steps 3: .* --estimator grpo has no critic; set --estimator gae",
        ),
        (dict(lora_rank=-1), "--lora_rank -1"),
        (dict(lora_alpha=16), "--lora_alpha 16: nothing reads it, .*set --lora_rank"),
        (dict(lora_rank=8, lora_alpha=-1), "--lora_alpha -1"),
        (dict(reward_weights=(1.0,)), "--reward_weights 1.0: .*; set --estimator gdpo"),
        (dict(overlong=(10, 20)), "--overlong 10 20"),
        (dict(resume=True), "--resume True: needs --out"),
        (dict(engine_args="[1]"), "--engine_args"),
        (dict(engine_args="{x"), "--engine_args"),
        (dict(steps=0), "--steps 0: must be positive"),
        (dict(lr=-1.0), "--lr -1.0: must be positive"),
        (dict(max_failed=2.0), "--max_failed 2.0"),
        (dict(max_lag=-1), "--max_lag -1"),
        (dict(max_lag=1), "--max_lag 1 --is_level off: stale tokens need a correction"),
        (dict(partial=True), "--partial True: .* --max_lag is 0, .*set --max_lag 1"),
        (
            dict(max_lag=1, is_level="token", stale_kv=True),
            "--stale_kv True: nothing reads it, .*set --partial",
        ),
        (dict(oversample=0.5), "--oversample 0.5: must be at least 1"),
        (dict(dynamic_sampling=(1.0, 0.0)), "--dynamic_sampling 1.0 0.0: LO is not below HI"),
        (dict(eval_data="x"), "--eval_data x: set it with"),
        (dict(eval_every=1), "--eval_data : set it with"),
        (dict(eval_data="x", eval_every=1, train_from="y"), "--train_from y: without engines"),
        (
            dict(eval_data="x", eval_every=1, eval_samples=2),
            "--eval_samples 2 --eval_temperature 0.0: greedy",
        ),
        (dict(engine_timeout=0.0), "--engine_timeout 0.0: must be positive"),
        (dict(refit_timeout=0.0), "--refit_timeout 0.0: must be positive"),
        (dict(save_timeout=-1.0), "--save_timeout -1.0: must be positive"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_flag(flags, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        validate(Config(**flags), world=3)


def test_a_wide_band_of_gspo_is_warned_of():
    with pytest.warns(UserWarning, match="--loss gspo --clip_low 0.2"):
        validate(Config(loss="gspo", loss_agg="seq_mean", clip_low=0.2))


def test_each_loss_has_the_clip_of_its_paper_unless_one_is_given():
    made = Config(), Config(loss="gspo"), Config(loss="cispo", clip_high=2.0)
    assert [(c.clip_low, c.clip_high) for c in made] == [(0.2, 0.2), (3e-4, 4e-4), (1.0, 2.0)]


def test_a_reference_and_a_critic_are_there_only_where_a_flag_needs_them():
    assert (Config().ref_model, Config().critic_model) == ("", "")
    cfg = Config(kl_coef=0.1, kl_loss=True)
    assert (cfg.ref_model, cfg.kl_type) == (cfg.model, "k2")
    cfg = Config(estimator="gae", kl_coef=0.1, ref_model="other")
    assert (cfg.ref_model, cfg.critic_model, cfg.kl_type) == ("other", cfg.model, "k1")


def test_the_defaults_and_one_rollout_without_a_group_are_fine():
    validate(Config())
    validate(Config(samples=1, estimator="reinforce"))


@pytest.mark.parametrize(
    "args,words",
    [
        (["--promts", "3"], "Unrecognized options: --promts.*Perhaps you meant:.*--prompts INT"),
        (["--zzz"], "Unrecognized options: --zzz.*--help"),
    ],
)
def test_a_wrong_flag_is_named_with_the_nearest_one_and_exit_code_2_by_one_rank(
    capsys, args, words
):
    for rank in (0, 1):
        with pytest.raises(SystemExit) as end:
            parse(args, rank)
        told = capsys.readouterr().err
        assert end.value.code == 2 and (
            re.search(f"(?s){words}", told) if rank == 0 else told == ""
        )


def test_names_become_absolute_and_hub_names_stay():
    cfg = parse(
        [
            "--agent",
            "agent.py",
            "--model",
            "Qwen/Qwen3-0.6B",
            "--out",
            "out/x",
            "--is_band",
            "0.5",
            "5",
        ]
    )
    assert cfg.agent == os.path.abspath("agent.py") and cfg.model == "Qwen/Qwen3-0.6B"
    assert (
        cfg.out == os.path.abspath("out/x")
        and cfg.is_band == (0.5, 5.0)
        and cfg.dtype in ("float32", "bfloat16")
    )


def test_bad_files_are_refused_before_any_process_starts(tmp_path, tiny):
    good = Config(
        model=f"{tiny}/dense", data=str(tmp_path / "rows.jsonl"), out=str(tmp_path / "out")
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "label": 1}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "no_class.py").write_text("x = 1\n")
    (tmp_path / "file").write_text("")
    assert check_inputs(good) == [{"prompt": "x", "label": 1}]
    for flags, words in (
        (dict(agent="nope.py"), "--agent nope.py: there is no such file"),
        (dict(agent=str(tmp_path / "no_class.py")), "--agent .*no class named Agent"),
        (dict(data="nope.jsonl"), "--data nope.jsonl: there is no such file"),
        (dict(data=str(tmp_path / "empty.jsonl")), "--data .*empty"),
        (dict(prompt_key="question"), "row 0 has no 'question'.*--prompt_key"),
        (dict(model=str(tmp_path / "nope")), "--model .*there is no such folder"),
        (dict(model=str(tmp_path)), "--model .*no model there"),
        (dict(replay_experts=True), "--model .* it is dense.*drop --replay_experts"),
        (dict(balance_coef=0.1), "--model .* it is dense.*drop --balance_coef"),
        (dict(out=str(tmp_path / "file" / "out")), "--out .* cannot be written"),
        (dict(resume=True), "--resume: .* has no checkpoint"),
    ):
        with pytest.raises(ValueError, match=f"(?s){words}"):
            check_inputs(dataclasses.replace(good, **flags))
    check_inputs(
        dataclasses.replace(good, model=f"{tiny}/moe", replay_experts=True, balance_coef=0.1)
    )
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="--out .* holds a run already: add --resume"):
        check_inputs(good)


@pytest.mark.parametrize(
    "args,word",
    [(["--samples", "1"], "--samples 1"), (["--agent", "no.py"], "no.py")],
)
def test_bad_input_is_one_line_and_exit_code_2(args, word, tmp_path):
    command = [sys.executable, "train.py", "--out", str(tmp_path / "out"), *args]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = run.stderr.strip().splitlines()
    assert (
        run.returncode == 2
        and len(lines) == 1
        and lines[0].startswith("instar: ")
        and word in lines[0]
    )


@pytest.mark.parametrize(
    "schedule,warmup,want",
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 4, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", 0, [1 - i / 10 for i in range(10)]),
        ("cosine", 2, [0.5, 1, *[0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule, warmup, want):
    cfg = Config(steps=10, lr=2.0, schedule=schedule, warmup=warmup)
    optimizer, scheduler = build_optimizer(cfg, torch.nn.Linear(2, 2))
    got = []
    for _ in range(10):
        got.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    if warmup == 2:  # the first step after the warm-up is the peak
        want = [0.5, 1.0, *want[2:]]
    assert got == pytest.approx([2.0 * w for w in want])


def test_metrics_add_up_sums_counts_and_maxima_and_keep_a_nan():
    meter = Meter()
    meter.add({"mean": (3.0, 2), "sum": (1, 0), "max": 1.0})
    meter.add({"mean": (1.0, 2), "sum": (4, 0), "max": -5.0}, "")
    assert meter.local() == {"mean": 1.0, "sum": 5.0, "max": 1.0}
    for order in ([1.0, math.nan], [math.nan, 1.0]):
        meter = Meter()
        for value in order:
            meter.add({"max": value})
        assert math.isnan(meter.local()["max"])


def healthy(**changes):
    m = {
        "gap/on_version_max": 1e-6,
        "gap/on_version_mean": 1e-7,
        "gap/on_version_k3": 1e-9,
        "gap/on_version_tokens": 50.0,
    }
    m |= {"lag/max": 0.0, "experts/missing": 0.0, "experts/agreement": 1.0, "tokens/sampled": 100.0}
    return m | {k.replace("__", "/"): v for k, v in changes.items()}


@pytest.mark.parametrize(
    "changes,dtype,words",
    [
        (dict(gap__on_version_max=2e-4), "float32", "policy version: gap/on_version_max"),
        (dict(gap__on_version_max=math.nan), "float32", "policy version: gap/on_version_max"),
        (dict(gap__on_version_mean=0.03), "bfloat16", "policy version: gap/on_version_mean"),
        (dict(gap__on_version_k3=0.002), "bfloat16", "policy version: gap/on_version_k3"),
        (
            dict(gap__on_version_tokens=0.0),
            "float32",
            "policy version: gap/on_version_tokens is 0, not > 0: no token",
        ),
        (
            dict(lag__max=1.0),
            "float32",
            "policy version: lag/max is 1, not <= 0: a token is older than --max_lag",
        ),
        (dict(lag__max=math.nan), "float32", "policy version: lag/max is nan"),
        (
            dict(experts__missing=2.0),
            "float32",
            "forward consistency: experts/missing is 0.02.* of the tokens",
        ),
        (dict(experts__agreement=0.9), "float32", "forward consistency: experts/agreement"),
        (dict(experts__agreement=math.nan), "float32", "forward consistency: experts/agreement"),
    ],
)
def test_each_gate_names_its_invariant(changes, dtype, words):
    cfg = Config(dtype=dtype, replay_experts=True)
    check_gates(cfg, healthy())
    with pytest.raises(InvariantError, match=f"^{words}"):
        check_gates(cfg, healthy(**changes))


def test_max_gap_moves_the_bound():
    check_gates(Config(dtype="float32", max_gap=1e-3), healthy(gap__on_version_max=5e-4))


def test_a_denominator_that_does_not_cover_the_step_is_caught():
    check_mass({"loss/mass": 1.0})
    for mass in (2.0, 0.5, math.nan):
        with pytest.raises(InvariantError, match="^loss denominator"):
            check_mass({"loss/mass": mass})


def test_minibatches_hold_whole_groups_and_every_row_once():
    rng = np.random.default_rng(0)
    rollouts = [{"group": g, "result": Result()} for g in range(7) for _ in range(3)]
    rows = [
        {"rollout": int(o), "tokens": int(rng.integers(1, 50))} for o in rng.integers(0, 21, 40)
    ]
    batch = {"rollouts": rollouts, "rows": rows}
    deal(Config(minibatches=3, tokens_per_microbatch=100), batch, 2)
    assert batch["sizes"] == [9, 6, 6] and len(batch["plan"]) == 3
    seen = [[i for rank in part for micro in rank for i in micro] for part in batch["plan"]]
    assert sorted(i for part in seen for i in part) == list(range(40))
    groups = [{rows[i]["rollout"] // 3 for i in part} for part in seen]
    assert not (groups[0] & groups[1] or groups[1] & groups[2] or groups[0] & groups[2])


def test_resuming_cuts_the_metrics_at_the_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i}) + "\n" for i in (1, 2, 3)) + '{"st'
    )
    Log(Config(out=str(tmp_path)), Console(quiet=True), 2).close()
    assert [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]


def test_a_half_written_checkpoint_is_never_the_newest(tmp_path):
    for name in ("checkpoint-000002", "checkpoint-000010", "unfinished"):
        (tmp_path / name).mkdir()
    assert [p.name for p in train.checkpoints(str(tmp_path))] == [
        "checkpoint-000002",
        "checkpoint-000010",
    ]


class Scorer:
    """Stands for a model and its head: the log-prob of every token is `factor` times its one weight."""

    def __init__(self, factor=1.0):
        self.model, self.head, self.factor = torch.nn.Linear(1, 1, bias=False), None, factor
        self.watched = False
        torch.nn.init.constant_(self.model.weight, -1.0)

    def experts(self, micro, counted=None):
        return train.contextlib.nullcontext()

    def forward(self, micro):
        x = micro.mask * self.model.weight.sum() * self.factor
        return x, x * 3


NO_MESH = SimpleNamespace(device_mesh=None, moe_mesh=None)


def row_of(n, start):
    """A micro-batch of one row whose tokens from `start` on are trained, with advantage and weight 1."""
    micro = pack([segment(n, [(start, n)])], [0])
    micro.old_logprobs = -micro.mask.float()
    micro.advantages, micro.weights = micro.mask.float(), micro.mask.float()
    return micro


def batch_of(*groups):
    """What the trainer knows of rollouts of these groups without their rows."""
    rollouts = [{"group": g, "result": Result()} for g in groups]
    return {
        "rollouts": rollouts,
        "rows": [{"rollout": i} for i in range(len(groups))],
        "sizes": [len(groups)],
    }


def test_a_step_with_a_non_finite_gradient_is_skipped_and_counted(process_group):
    """The weights stay, optim/skipped counts, and the version does not move."""
    scorer, meter = Scorer(math.nan), Meter()
    before = scorer.model.weight.clone()
    learner = train.Learner(
        scorer, NO_MESH, torch.optim.SGD(scorer.model.parameters(), lr=1.0), None
    )
    parts = [[row_of(5, 2)]]
    taken = train.learn(Config(), learner, batch_of(0), parts, train.policy_objective, meter)
    assert (
        taken == 0
        and torch.equal(scorer.model.weight, before)
        and meter.local()["optim/skipped"] == 1
    )


def test_a_batch_has_as_many_optimizer_steps_as_epochs_times_minibatches(process_group):
    scorer, steps = Scorer(), []
    optimizer = SimpleNamespace(step=lambda: steps.append(1), zero_grad=scorer.model.zero_grad)
    learner, batch = (
        train.Learner(scorer, NO_MESH, optimizer, None),
        batch_of(0, 1) | {"sizes": [1, 1]},
    )
    parts = [[row_of(5, 2)], [row_of(6, 2)]]
    taken = train.learn(Config(epochs=3), learner, batch, parts, train.policy_objective, Meter())
    assert taken == len(steps) == 6


@pytest.mark.parametrize("limit,left", [(1.0, 1.0), (20.0, 10.0)])
def test_gradients_are_clipped_to_their_norm(process_group, limit, left):
    scorer = Scorer(10.0)
    scorer.model.weight.grad = torch.full_like(scorer.model.weight, 10.0)
    norm = replay.clip_gradients(Config(max_grad_norm=limit), scorer, NO_MESH)
    assert norm == pytest.approx(10.0) and float(scorer.model.weight.grad) == pytest.approx(
        left, rel=1e-5
    )


def test_adamw_has_the_betas_and_the_weight_decay_that_were_asked_for():
    optimizer, _ = build_optimizer(
        Config(betas=(0.8, 0.7), weight_decay=0.1), torch.nn.Linear(2, 2)
    )
    assert [(g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [((0.8, 0.7), 0.1)]


def test_the_critic_learns_at_its_own_rate_and_the_entropy_has_a_gradient_where_a_bonus_needs_it(
    monkeypatch,
):
    class Model(torch.nn.Module):
        def __init__(self, path):
            super().__init__()
            self.config = transformers.AutoConfig.from_pretrained("examples/starter")
            self.path, self.embed_tokens, self.lm_head = (
                path,
                torch.nn.Embedding(7, 4),
                torch.nn.Linear(4, 7),
            )

        def get_input_embeddings(self):
            return self.embed_tokens

        def get_output_embeddings(self):
            return self.lm_head

    monkeypatch.setattr(replay, "build_model", lambda cfg, device, path="": (Model(path), None))
    cfg = Config(estimator="gae", critic_model="other", lr=0.1, critic_lr=0.5)
    policy, critic = train.build_policy(cfg, "cpu"), train.build_critic(cfg, "cpu")
    assert [x.scheduler.get_last_lr()[0] for x in (policy, critic)] == [0.1, 0.5]
    assert (policy.replay.model.path, critic.replay.model.path) == ("", "other")
    assert not policy.replay.head.entropy_gradient
    assert train.build_policy(Config(entropy_coef=0.01), "cpu").replay.head.entropy_gradient


def objective(micro, of=train.policy_objective, **flags):
    """Losses of the trained tokens with a model that gives log-prob -1 and entropy -3 to each."""
    losses, metrics = of(Config(loss="pg", **flags), Scorer(), micro)
    return losses[micro.mask].tolist(), metrics


def test_a_kl_is_in_the_reward_or_in_the_loss_and_a_bonus_in_the_loss(process_group):
    micro = row_of(4, 2)
    micro.ref_logprobs = -2.0 * micro.mask
    assert objective(micro) == ([1.0, 1.0], {})  # -A log pi
    assert objective(micro, entropy_coef=0.5)[0] == [2.5, 2.5]  # less 0.5 times -3
    flags = dict(kl_coef=0.1, kl_loss=True)
    losses, metrics = objective(micro, **flags)
    assert (
        losses == pytest.approx([1.05, 1.05]) and float(metrics["kl/loss"][0]) == 1.0
    )  # k2: d is 1
    found = {}
    for kl_loss in (False, True):
        credit(
            Config(estimator="reinforce", whiten=False, kl_coef=0.1, kl_loss=kl_loss),
            batch_of(0),
            [micro],
            Meter(),
        )
        found[kl_loss] = micro.advantages[micro.mask].tolist()
    assert found[False] == pytest.approx([-0.2, -0.1]) and found[True] == [0.0, 0.0]  # k1: d is 1


def test_old_log_probs_are_the_trainer_s_or_the_engine_s():
    micro = row_of(4, 2)
    micro.old_logprobs, micro.behaviour_logprobs = -1.0 * micro.mask, -3.0 * micro.mask
    for old, ratio in (("recompute", 1.0), ("behaviour", math.exp(2.0))):
        _, metrics = train.policy_objective(Config(old=old), Scorer(), micro)
        assert float(metrics["loss/ratio_max"]) == pytest.approx(ratio)


def test_the_critic_s_value_moves_by_no_more_than_its_clip():
    micro = row_of(4, 2)
    micro.values, micro.targets = 0.5 * micro.mask, -1.0 * micro.mask
    valued = SimpleNamespace(forward=lambda micro: (-1.0 * micro.mask,))
    for clip, loss, share in ((0.0, 0.0, 0.0), (0.2, 0.5 * 1.3**2, 1.0)):
        losses, metrics = train.value_objective(Config(value_clip=clip), valued, micro)
        assert losses[micro.mask].tolist() == pytest.approx([loss] * 2)
        assert float(metrics["value/clip_share"][0] / metrics["value/clip_share"][1]) == share


def test_rewards_are_clipped_and_shaped_before_they_are_credited(process_group):
    batch, meter = batch_of(0, 0, 0), Meter()
    for r, reward in zip(batch["rollouts"], (-9.0, 0.5, 9.0)):
        r["result"].reward = reward
    micro = pack(
        [segment(9, [(2, n)]) for n in (4, 5, 8)], [0, 1, 2], [0, 1, 2]
    )  # 2, 3 and 6 sampled tokens
    flags = dict(estimator="reinforce", whiten=False, reward_clip=(-1.0, 2.0), overlong=(6, 4))
    credit(Config(**flags), batch, [micro], meter)
    assert [float(a.max() if a.max() else a.min()) for a in micro.advantages] == pytest.approx(
        [-1.0, 0.25, 1.0]
    )
    assert meter.local()["reward/overlong"] == pytest.approx(-1.25 / 3)


def test_gdpo_without_named_rewards_is_refused(process_group):
    with pytest.raises(ValueError, match="--estimator gdpo: the agent's Result.rewards are empty"):
        credit(Config(estimator="gdpo"), batch_of(0, 0), [row_of(5, 2)], Meter())


def test_the_denominator_of_a_step_is_of_all_tokens_or_of_the_kept_of_rollouts_or_a_length(
    process_group, monkeypatch
):
    seen, real = [], train.loss.aggregate
    monkeypatch.setattr(
        train.loss, "aggregate", lambda *args: seen.append(float(args[-1])) or real(*args)
    )
    for flags, want in (
        (dict(), 4.0),
        (dict(is_denominator="kept"), 3.0),
        (dict(loss_agg="seq_mean"), 1.0),  # one of the two rollouts has no token
        (dict(loss_agg="constant", loss_length=50), 100.0),
    ):
        micro, scorer, meter = row_of(6, 2), Scorer(), Meter()  # four trained tokens
        micro.weights[0, 2] = 0.0  # one of them rejected
        learner = train.Learner(scorer, NO_MESH, torch.optim.SGD(scorer.model.parameters()), None)
        train.learn(
            Config(**flags), learner, batch_of(0, 1), [[micro]], train.policy_objective, meter
        )
        assert seen.pop() == want and meter.local()["loss/mass"] == pytest.approx(1.0)


def test_as_many_checkpoints_as_asked_are_kept_and_the_newest_is_loaded(tmp_path, process_group):
    cfg = Config(out=str(tmp_path), keep=2, resume=True)

    def learner(weight):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, weight)
        return {
            "policy": train.Learner(
                SimpleNamespace(model=model), None, *build_optimizer(cfg, model)
            )
        }

    for step in (1, 2, 3):
        train.save_checkpoint(
            cfg, learner(float(step)), {"step": step, "version": step, "kl_coef": 0.5, "best": {}}
        )
    assert [p.name for p in train.checkpoints(cfg.out)] == [
        "checkpoint-000002",
        "checkpoint-000003",
    ]
    found = train.newest(cfg, None, Console(quiet=True))
    train.load_checkpoint(found["folder"], loaded := learner(0.0))
    assert loaded["policy"].replay.model.weight.item() == 3.0 and found["step"] == 3
    assert train.newest(Config(out=cfg.out), None, None)["step"] == 0


def test_a_fault_of_the_user_s_found_by_an_actor_is_told_in_one_line_with_exit_code_2(
    monkeypatch, capsys, tmp_path
):
    def fails(cfg, rows):
        raise ray.exceptions.RayTaskError(
            "next_batch", "a traceback", BadInput("no such tool")
        ).as_instanceof_cause()

    monkeypatch.setattr(train, "run", fails)
    assert train.main(["--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "instar: no such tool\n"


def test_help_says_of_every_flag_what_it_is_and_nothing_else(capsys):
    with pytest.raises(SystemExit):
        train.parse(["--help"])
    shown = re.sub(r"[\s│╭╰╮╯─]+", " ", capsys.readouterr().out)
    lines = inspect.getsource(Config).split("\n")
    for f in dataclasses.fields(Config):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"    {f.name}: "))
        own = (
            lines[at].partition("  # ")[2] or lines[at - 1].partition("    # ")[2]
        )  # beside the field, or above it
        names = re.finditer(rf" --(no_)?{f.name}[ ,]", shown)
        assert own and any(
            re.sub(r"\s+", " ", own) in shown[m.end() : m.end() + 400] for m in names
        ), f.name
    assert not re.search(r"---- \w+\.py", shown)  # a heading of the fields


def test_planted_a_token_of_a_version_to_come_is_refused_and_one_of_today_is_not():
    row = segment(9, [(3, 6)])  # of version 0
    for version in (0, 4):
        train.verify(train.Config(), [pack([row], [0])], [row], version, "cpu", Meter())
    with pytest.raises(
        InvariantError, match="^policy version: a token is stamped 0, the trainer is at version -1"
    ):
        train.verify(train.Config(), [pack([row], [0])], [row], -1, "cpu", Meter())
