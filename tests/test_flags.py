"""The tables of AGENTS.md that trace every flag are true, and say so when they are not."""

import ast
import contextlib
import dataclasses
import math
import re
import shutil
import subprocess
import sys
from functools import cache
from types import SimpleNamespace
from typing import get_args

import flags
import pytest
import torch
from test_demonstrations import batches_of
from test_replay import segment
from test_rollout import FakeRay
from test_train import NO_MESH

import rollout
import train
from agent import ChatAgent, Result, Task, load_agent
from estimator import ESTIMATORS
from loss import LOSSES, SEQUENCE_LOSSES
from replay import pack
from rollout import Rollouts
from train import ALWAYS, READ, Config, refuse_unread

ROW = re.compile(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", re.M)
AGENTS = (flags.ROOT / "AGENTS.md").read_text()


def reads(name: str, flag: str) -> bool:
    """Whether the text of a function has cfg.flag, or the flag's name in quotes beside a getattr of cfg."""
    module, _, path = name.partition(":")
    text = ast.get_source_segment(
        (flags.ROOT / f"{module}.py").read_text(), flags.functions()[name]
    )
    listed = "getattr(cfg, " in text and re.search(rf'"([\w ]+ )?{flag}( [\w ]+)?"', text)
    return bool(
        listed or re.search(rf"\b{'self' if path.startswith('Config.') else 'cfg'}\.{flag}\b", text)
    )


@cache
def literals() -> set[str]:
    """Strings of the modules that are no part of an f-string."""
    nodes = [
        n for module in flags.MODULES for n in ast.walk(flags.tree(flags.ROOT / f"{module}.py"))
    ]
    parts = {id(v) for n in nodes if isinstance(n, ast.JoinedStr) for v in n.values}
    return {
        n.value for n in nodes if isinstance(getattr(n, "value", None), str) and id(n) not in parts
    }


@cache
def patterns() -> set[str]:
    """What is put together to a metric: an f-string that begins with one's head, a text that ends as a prefix does."""
    found = set()
    for n in (
        n for module in flags.MODULES for n in ast.walk(flags.tree(flags.ROOT / f"{module}.py"))
    ):
        texts = (
            [getattr(v, "value", None) for v in n.values] if isinstance(n, ast.JoinedStr) else []
        )
        if texts and re.fullmatch(r"[a-z]+/\w*", str(texts[0])):
            found.add("".join(re.escape(x) if isinstance(x, str) else "(.*)" for x in texts))
    return found | {
        x + "(.*)"
        for x in literals()
        if re.fullmatch(r"[a-z]+/(\w+_)?", x) and x + "(.*)" not in found
    }


def known(metric: str) -> bool:
    """Whether a metric is a literal of the modules, or put together with others of their literals."""
    fits = [m.groups() for p in patterns() if (m := re.fullmatch(p, metric))]
    return metric in literals() or any(
        all(x in {"", "*"} | literals() for x in groups) for groups in fits
    )


def problems(agents: str) -> list[str]:
    """What is wrong with the tables in a text of AGENTS.md."""
    there = agents.split(flags.BEGIN)[1].split(flags.END)[0]
    rows, fields = ROW.findall(there), list(Config.__dataclass_fields__)
    found = [f"--{row[0]} is in the table and is no flag" for row in rows if row[0] not in fields]
    found += [
        f"--{flag} is not in the table once"
        for flag in fields
        if [r[0] for r in rows].count(flag) != 1
    ]
    for flag, by, reaches, metrics, test in rows:
        by, metrics, test = (re.findall(r"`(.*?)`", cell) for cell in (by, metrics, test))
        found += [f"--{flag}: there is no function {f}" for f in by if f not in flags.functions()]
        found += [
            f"--{flag}: {f} does not read it"
            for f in by
            if f in flags.functions() and not reads(f, flag)
        ]
        if not {f for f in by if f == "train:check_inputs" or not flags.CHECKS.match(f)}:
            found.append(f"--{flag}: nobody reads it but what checks it")
        found += [f"--{flag}: no module has the metric {m}" for m in metrics if not known(m)]
        found += [f"--{flag}: there is no test {t}" for t in test if t not in flags.tests()]
    if there.strip() != flags.table().strip():
        found.append("AGENTS.md is out of date: run python tests/flags.py")
    return found


def test_every_flag_is_in_the_table_and_every_cell_of_it_is_true():
    assert problems(AGENTS) == []


def test_readme_names_every_estimator_loss_and_aggregation():
    aggregations = get_args(Config.__annotations__["loss_agg"])
    text = (flags.ROOT / "README.md").read_text()
    assert [name for name in [*ESTIMATORS, *LOSSES, *aggregations] if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "old,new,words",
    [
        ("| `lam` |", "| `lamb` |", "--lamb is in the table and is no flag"),
        ("| `lam` |", "| `lamb` |", "--lam is not in the table once"),
        ("`train:weigh`", "`train:weight`", "--loss: there is no function train:weight"),
        ("`train:weigh`", "`train:check_mass`", "--is_band: train:check_mass does not read it"),
        ("`rollout:launch`", "`train:validate`", "--runners: nobody reads it but what checks it"),
        ("`kl/ref`", "`kl/reference`", "--ref_model: no module has the metric kl/reference"),
        ("`reward/*`", "`rewards/*`", "--reward_weights: no module has the metric rewards/*"),
        (
            "::test_max_gap_moves_the_bound`",
            "::test_max_gap`",
            "--max_gap: there is no test test_train.py::test_max_gap",
        ),
        ("advantages [B, T]", "advantages [T, B]", "AGENTS.md is out of date"),
    ],
)
def test_planted_in_the_table_it_is_named(old, new, words):
    assert old in AGENTS
    assert any(problem.startswith(words) for problem in problems(AGENTS.replace(old, new)))


@pytest.mark.parametrize(
    "file,old,new,words",
    [
        (
            "train.py",
            "    gamma: float",
            "    made_up: int = 0\n    gamma: float",
            "--made_up has no entry in HAND",
        ),
        ("train.py", "def weigh(", "def weight(", "AGENTS.md is out of date"),
        ("loss.py", "cfg.dppo_delta", "0.2", "AGENTS.md is out of date"),
        (
            "tests/test_train.py",
            "def test_old_log_probs",
            "def test_log_probs",
            "--old: 'old_log_probs_are_the_trainer'",
        ),
    ],
)
def test_planted_in_the_code_the_script_says_what_to_do(tmp_path, file, old, new, words):
    for path in [
        *flags.ROOT.glob("*.py"),
        *flags.ROOT.glob("tests/*.py"),
        flags.ROOT / "AGENTS.md",
    ]:
        (tmp_path / "tests").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(flags.ROOT))
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    run = subprocess.run(
        [sys.executable, tmp_path / "tests" / "flags.py", "--check"], capture_output=True, text=True
    )
    assert run.returncode == 1 and words in run.stderr


# ---- a flag is read where train.READ says so, and nowhere else

OTHER = {  # another value than the default, which every run that reads the flag may have
    "agent": "other.py",
    "agent_cmd": "true",
    "reward": "grade.py",
    "max_turns": 9,
    "episode_timeout": 9.0,
    "max_failed": 0.9,
    "engines": 9,
    "engine_tp": 9,
    "engine_memory": 0.9,
    "engine_args": '{"block_size": 32}',
    "runners": 9,
    "tool_parser": "hermes",
    "reasoning_parser": "qwen3",
    "server_host": "0.0.0.0",
    "constrained": "free",
    "preserve": True,
    "linger": 9.0,
    "partial": True,
    "samples": 9,
    "engine_timeout": 9.0,
    "replay_experts": True,
    "max_gap": 0.9,
    "refit_bucket_mb": 9,
    "refit_timeout": 9.0,
    "data": "other.jsonl",
    "prompt_key": "question",
    "label_key": "answer",
    "shuffle": False,
    "data_epochs": 9,
    "prompts": 32,
    "max_lag": 9,
    "dynamic_sampling": (0.0, 1.0),
    "oversample": 9.0,
    "max_context": 99,
    "save_rollouts": True,
    "seed": 9,
    "max_tokens": 9,
    "stale_kv": True,
    "max_filtered": 9.0,
    "eval_samples": 9,
    "eval_temperature": 0.9,
    "eval_solved": 0.9,
    "gamma": 0.7,
    "whiten": False,
    "lam": 0.5,
    "bootstrap_truncated": True,
    "value_clip": 0.05,
    "critic_model": "other",
    "critic_lr": 0.5,
    "critic_warmup_steps": 9,
    "reward_clip": (-0.1, 0.6),
    "overlong": (6, 5),
    "reward_weights": (2.0, -1.0),
    "kl_type": "k3",
    "kl_loss": True,
    "kl_target": 0.9,
    "ref_model": "other",
    "kl_horizon": 9.0,
    "clip_low": 0.1,
    "clip_high": 0.1,
    "dual_clip": 1.1,
    "sapo_tau": (3.0, 0.3),
    "dppo_delta": 0.01,
    "old": "behaviour",
    "is_mode": "mask",
    "is_band": (0.999, 1.001),
    "is_denominator": "kept",
    "loss_length": 9,
    "lora_alpha": 9,
    "resume_data": True,
}
READER = [  # runs that between them read every flag
    dict(),
    dict(resume=True, out="x"),
    dict(max_lag=1, is_level="token", partial=True, dynamic_sampling=(0.0, 1.0)),
    dict(eval_data="x", eval_every=1),
    dict(reward="grade.py"),
    dict(reward="grade.py", agent_cmd="true"),
    dict(estimator="gae", kl_coef=0.1, kl_target=0.1, lora_rank=8),
    dict(estimator="gdpo", kl_coef=0.1, kl_loss=True),
    dict(estimator="opd", kl_coef=0.1, ref_model="x"),
    dict(loss="sapo"),
    dict(loss="dppo"),
    dict(is_level="token", is_mode="mask"),
    dict(loss_agg="constant", loss_length=5),
    dict(estimator="sft"),
    dict(train_from="x"),
]


def reads_in(cfg: Config, flag: str) -> bool:
    """What the table says."""
    return all(only.where(cfg) for only in READ if flag in only.flags)


def unread_of(cfg: Config, given: set[str]) -> str:
    try:
        refuse_unread(cfg, given, READ)
    except ValueError as e:
        return str(e)
    return ""


def test_every_flag_is_always_read_or_has_its_conditions_in_the_table():
    sometimes = {flag for only in READ for flag in only.flags}
    told = "train.py: put the flag into ALWAYS, or into an Only of READ that says when it is read"
    assert sometimes | set(ALWAYS) == set(Config.__dataclass_fields__), told
    assert not sometimes & set(ALWAYS) and len(set(ALWAYS)) == len(ALWAYS)
    assert set(OTHER) == sometimes, "OTHER above: give each flag that has a condition another value"


@pytest.mark.parametrize("flag", OTHER)
def test_a_flag_that_nothing_will_read_is_refused_and_one_that_is_read_is_not(flag):
    runs = [
        Config(**how | {flag: OTHER[flag]})
        for how in READER
        if flag not in how and not {flag, *how} >= {"agent_cmd", "train_from"}
    ]
    runs += [Config(**how) for how in READER if flag in how]
    read = [cfg for cfg in runs if reads_in(cfg, flag)]
    unread = [cfg for cfg in runs if not reads_in(cfg, flag)]
    assert read and unread
    for cfg in read:
        assert unread_of(cfg, {flag}) == ""
    for cfg in unread:
        assert re.match(
            rf"--(no_)?{flag}( .*)?: nothing reads it, because ", unread_of(cfg, {flag})
        )
        with pytest.raises(ValueError):
            train.validate(cfg)  # by what differs from the defaults


@pytest.mark.parametrize(
    "line,told",
    [
        (
            "--is_band 0.5 5",
            "--is_band 0.5 5.0: nothing reads it, because --is_level is off; "
            "set --is_level token, seq or geo",
        ),
        ("--is_band 0.5 2", "--is_band 0.5 2.0: nothing reads it"),  # its default
        ("--gamma=1", "--gamma 1.0: nothing reads it"),
        ("--lam 0.9", "--lam 0.9: nothing reads it, because --estimator grpo has no critic"),
        ("--no-whiten", "--no_whiten: nothing reads it"),
        ("--no_whiten", "--no_whiten: nothing reads it"),
        ("--dppo_delta 0.1", "--dppo_delta 0.1: nothing reads it, because --loss is ppo"),
        ("--sapo-tau 1 2", "--sapo_tau 1.0 2.0: nothing reads it"),
        ("--is_mode mask", "--is_mode mask: nothing reads it"),
        ("--is_denominator kept", "--is_denominator kept: nothing reads it"),
        ("--critic_lr 0.001", "--critic_lr 0.001: nothing reads it"),
        ("--value_clip 0.1", "--value_clip 0.1: nothing reads it"),
        ("--kl_horizon 5", "--kl_horizon 5.0: nothing reads it, because --kl_target is 0.0"),
        ("--loss sapo --clip_high 0.3", "--clip_high 0.3: nothing reads it"),
        ("--loss pg --old behaviour", "--old behaviour: nothing reads it"),
        ("--estimator sft --loss ppo", "--estimator sft: its loss is -log pi"),
        ("--reward x.py --agent y.py", "--agent y.py: nothing reads it"),
        ("--preserve", "--preserve True: nothing reads it, because the Agent is an Env"),
        (
            "--train_from x --engines 2 --runners 3 --seed 1",
            "--engines 2 --runners 3: nothing reads them, because no engine samples .*\n"
            "--seed 1: nothing reads it",
        ),
    ],
)
def test_a_command_line_with_a_flag_that_does_nothing_ends_with_exit_code_2(
    line, told, tmp_path, capsys
):
    assert train.main([*line.split(), "--out", str(tmp_path / "out")]) == 2
    assert re.match(f"instar: {told}", capsys.readouterr().err)


def test_an_agent_that_asks_the_capture_server_may_have_its_flags(tmp_path):
    (tmp_path / "chat.py").write_text("from agent import ChatAgent as Agent\n")
    for agent in (dict(agent=str(tmp_path / "chat.py")), dict(agent_cmd="true", reward="agent.py")):
        cfg = Config(out=str(tmp_path / "out"), linger=1.0, **agent)
        if "reward" in agent:
            cfg.reward = str(tmp_path / "grade.py")
            (tmp_path / "grade.py").write_text("def reward(*args):\n    return 1\n")
        train.validate(cfg)
        train.check_inputs(cfg)


class Tokens:
    """A policy and a critic in one: a parameter for the log-prob, or the value, of each token."""

    def __init__(self, start):
        self.model, self.head, self.watched = torch.nn.Module(), None, False
        self.model.each = torch.nn.Parameter(start.clone())  # [B, T]

    def experts(self, micro, counted=None):
        return contextlib.nullcontext()

    def forward(self, micro):
        return self.model.each * micro.mask, -self.model.each * micro.mask


class Critic(Tokens):
    def forward(self, micro):
        return (self.model.each * micro.mask,)


def outcome(cfg: Config) -> dict:
    """What the trainer's own functions make of one batch: gradients, the next KL coefficient."""
    rows = list(range(16))
    micro = pack([segment(12, [(2, 5 + i % 8)], seed=i) for i in rows], rows, rows)
    noise = torch.randn(4, *micro.mask.shape, generator=torch.Generator().manual_seed(0))
    # groups are ever further from the engine; each has both signs of advantage and of the update
    noise[0] *= torch.tensor([0.001, 0.01, 0.1, 1.0]).repeat_interleave(4)[:, None]
    moved = torch.tensor([0.15, 0.06, 0.3, 0.8]).repeat_interleave(4)[:, None]
    moved = moved * torch.tensor([1, 1, -1, -1]).repeat(4)[:, None]
    old = micro.old_logprobs = (micro.behaviour_logprobs + noise[0]) * micro.mask
    micro.ref_logprobs = old + 0.3 * noise[1] if cfg.ref_model else None
    critic = Critic(0.3 * noise[2]) if cfg.critic_model else None
    micro.values = 0.3 * noise[3] if critic else None
    rollouts = []
    for i in rows:
        reward = (0.0, 1.0, 0.5, -0.2)[i % 4]
        parts = {"right": reward, "short": (0.2, 0.9, 0.1, 0.0)[i % 4]}
        result = Result(reward=reward, rewards=parts, truncated=i % 3 == 1)
        rollouts.append({"group": i // 4, "result": result})
    batch, meter, found = {"rollouts": rollouts, "sizes": [16]}, train.Meter(), {}
    train.weigh(cfg, micro)
    train.credit(cfg, batch, [micro], meter)
    learners = [("policy", Tokens(old + moved), train.policy_objective, cfg)]
    if critic:
        mean = dataclasses.replace(cfg, loss_agg="token_mean")
        learners.append(("critic", critic, train.value_objective, mean))
    for name, replay, objective, how in learners:
        still = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
        learner = train.Learner(replay, NO_MESH, still, None)
        train.learn(how, learner, batch, [[micro]], objective, meter)
        found[name] = replay.model.each.grad
    if cfg.kl_target:  # as train.run does
        kl = meter.local()["kl/ref"]
        found["kl"] = train.loss.adapt_kl(cfg.kl_coef, kl, cfg.kl_target, cfg.kl_horizon, 4)
    return found


def differs(one: dict, other: dict) -> bool:
    return one.keys() != other.keys() or any(
        not torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one
    )


COMPUTED = [  # the flags that `outcome` sees the whole way of
    "gamma",
    "whiten",
    "lam",
    "bootstrap_truncated",
    "value_clip",
    "reward_clip",
    "overlong",
    "reward_weights",
    "kl_type",
    "kl_horizon",
    "clip_low",
    "clip_high",
    "dual_clip",
    "sapo_tau",
    "dppo_delta",
    "old",
    "is_mode",
    "is_band",
    "is_denominator",
    "loss_length",
]
BASES = [dict(estimator=name) for name in ESTIMATORS if name not in ("opd", "sft")]
BASES += [dict(estimator="opd", kl_coef=0.1, ref_model="x"), dict(estimator="sft")]
BASES += [dict(estimator=name, kl_coef=0.1) for name in ("reinforce", "gae")]
BASES += [dict(kl_coef=0.1, kl_loss=True), dict(kl_coef=0.1, kl_loss=True, kl_target=0.3)]
BASES += [
    dict(loss=name, loss_agg="seq_mean" if name in SEQUENCE_LOSSES else "token_mean")
    for name in LOSSES
]
BASES += [dict(is_level="token", is_mode=mode) for mode in ("mask", "clip", "trunc")]
BASES += [dict(is_level=level, is_mode="mask", is_band=(0.8, 1.25)) for level in ("seq", "geo")]
BASES += [dict(loss_agg="seq_mean"), dict(loss_agg="constant", loss_length=5)]
BASES += [dict(is_level="token", is_mode="mask", loss_agg="constant", loss_length=5)]


SECOND = {"is_mode": "clip", "loss_length": 7}  # where a base has the other value itself


@cache
def outcome_of(at: int) -> dict:
    return outcome(Config(max_grad_norm=1e9, **BASES[at]))


def disagreements(flag: str) -> list[str]:
    """Where another value changes what is learnt and the table says that nothing reads the flag, or
    the other way round."""
    found = []
    for at, how in enumerate(BASES):
        cfg, value = Config(**how), OTHER[flag]
        if flag == "is_mode" and cfg.is_level in ("seq", "geo"):
            continue  # they have one mode
        value = SECOND[flag] if value == getattr(cfg, flag) else value
        other = Config(**dict(max_grad_norm=1e9) | how | {flag: value})
        if differs(outcome_of(at), outcome(other)) != reads_in(cfg, flag):
            found.append(f"{how}: the table says {reads_in(cfg, flag)}")
    return found


@pytest.mark.parametrize("flag", COMPUTED)
def test_another_value_changes_what_is_learnt_where_the_table_says_so_and_nowhere_else(
    flag, process_group
):
    assert disagreements(flag) == []


@pytest.mark.parametrize("flag", ["gamma", "dual_clip"])
def test_planted_a_condition_that_is_wrong_is_seen(flag, process_group, monkeypatch):
    for narrow in (True, False):
        wrong = train.Only([flag], lambda cfg: False, "")
        kept = [only for only in READ if flag not in only.flags]
        monkeypatch.setattr("test_flags.READ", [*kept, wrong] if narrow else kept)
        assert disagreements(flag)


def test_every_read_of_what_the_losses_and_estimators_read_is_computed():
    """A flag that these modules read and that has a condition is one of those above."""
    names = [f for f in flags.functions() if f.split(":")[0] in ("estimator", "loss")]
    read = {flag for name in names for flag in flags.reads(name)}
    assert read - set(ALWAYS) == set(COMPUTED) & read and len(read) > 10


# ---- what no engine samples


class Recorded(Config):
    """A Config that keeps the names of the flags that were read."""

    def __getattribute__(self, name):
        if name in Config.__dataclass_fields__:
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return object.__getattribute__(self, name)


def unread(cfg: Config) -> set[str]:
    return {flag for flag in OTHER if not reads_in(cfg, flag)}


def test_demonstrations_are_made_without_a_flag_of_engines():
    cfg = Recorded(estimator="sft", prompts=2, data_epochs=1, shuffle=False)
    rows = [{"prompt": f"{i}+{i}?", "label": str(2 * i)} for i in range(4)]
    cfg._read.clear()
    assert len(batches_of(Rollouts(cfg, rows, [], 1))) == 2
    seen = set(cfg._read)
    assert seen & unread(cfg) == set() and {"prompts", "max_lag", "max_context"} <= seen


def test_batches_of_files_are_the_same_whatever_a_flag_of_their_play_says(tmp_path):
    cfg = Config(estimator="sft", prompts=2, data_epochs=1, out=str(tmp_path), save_rollouts=True)
    rows = [{"prompt": f"{i}+{i}?", "label": str(2 * i)} for i in range(4)]
    batches_of(Rollouts(cfg, rows, [], 1))

    def ids(**how):
        cfg = Config(train_from=str(tmp_path / "rollouts"), **how)
        pool = batches_of(Rollouts(cfg, [], [], 1))
        return [row.tokens.tolist() for _, segments in pool for row in segments]

    free = unread(Config(train_from="x")) - {"kl_loss", "ref_model", "critic_model"}
    assert len(ids()) == 4 and free > {"prompts", "max_lag", "shuffle", "seed"}
    assert ids(**{flag: OTHER[flag] for flag in free}) == ids()


@pytest.mark.parametrize("how", [dict(estimator="sft"), dict(train_from="x")])
def test_without_engines_neither_an_engine_nor_a_runner_is_made_that_could_read_their_flags(
    how, monkeypatch
):
    monkeypatch.setattr(rollout, "ray", ray := FakeRay())
    monkeypatch.setattr(rollout, "visible_gpus", list)
    rollout.launch(Config(engines=3, runners=4, **how), [], None, 1, "/x")
    assert [name for name, _ in ray.made] == ["Rollouts"]
    played = r"rollout:(Engine|Runner|Rollouts)\.|rollout:(play|parser|launch)$|refit:Refit\."
    gated = r"|train:(check_gates|gates|bounds|sample_trial)$"  # of what an engine sampled
    asked = r"|train:(watch|molt|times)$"  # --engine_timeout and its like, of no engine
    checked = r"|train:check_limits$|replay:check_model$"  # before the start
    for flag in next(only.flags for only in READ if "engines" in only.flags):
        assert not reads_in(Config(**how), flag)
        assert all(re.match(played + gated + asked + checked, f) for f in flags.readers(flag)), flag


def test_a_long_demonstration_is_none_of_max_tokens():
    for estimator in ("sft", "grpo"):
        micro, cfg = pack([row := segment(9, [(2, 9)])], [0]), Config(estimator=estimator)
        cfg.max_tokens = 3
        with (
            pytest.raises(train.InvariantError) if estimator == "grpo" else contextlib.nullcontext()
        ):
            train.verify(cfg, [micro], [row], 0, "cpu", train.Meter())


def test_a_reward_file_alone_stands_in_the_agent_s_place_with_one_reply_and_no_server(tmp_path):
    (tmp_path / "grade.py").write_text("def reward(*args):\n    return 1\n")
    single = load_agent("no.py", "", str(tmp_path / "grade.py"))()
    assert not isinstance(single, ChatAgent)
    single.reset(Task([{"role": "user", "content": "?"}]))
    assert single.step("!")[2] is True  # done, whatever --max_turns says


def test_groups_are_counted_against_max_filtered_only_with_dynamic_sampling():
    for bounds in ((-math.inf, math.inf), (0.0, 1.0)):
        cfg = Recorded(dynamic_sampling=bounds)
        pool = Rollouts(cfg, [], [], 1)
        cfg._read.clear()
        pool.filters(rollout.Group(0, rollouts=[rollout.Rollout(0, 0)]))
        assert ("max_filtered" in cfg._read) == reads_in(
            Config(dynamic_sampling=bounds), "max_filtered"
        )
