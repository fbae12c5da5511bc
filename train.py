"""instar: reinforcement learning of LLM agents, one flat loop.

On a laptop's CPU, with nothing but this repository:
$ make train                                                  # builds .venv, then: python train.py
One GPU for the trainer, the next one for the engine:
$ torchrun --nproc-per-node 1 train.py --model Qwen/Qwen3-0.6B --agent my_agent.py --data rows.jsonl --max_context 4096
Eight GPUs, six of them engines; a mixture of experts with the engines' routes replayed:
$ torchrun --nproc-per-node 2 train.py --model Qwen/Qwen3-30B-A3B --ep 2 --replay_experts --engines 3 --engine_tp 2
A cluster:
$ sbatch slurm/grpo.sbatch --model ...
`python train.py` is the same as one rank under torchrun, and gives its exit code: 0 done, 2 bad input, 3 an invariant failed
(the message names it), 1 anything else. torchrun itself turns each of them into 1 and prints the code in its table.

This file wires the other seven modules: flags, the steps of an update, metrics, the loop.
"""

import contextlib
import json
import logging
import math
import operator
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault(
    "RAY_AUTH_MODE", "token"
)  # before ray is imported: every rank joins the cluster with its token
# else engines yield the CPU to everything, to imports first; else Ray ends what would free the shared memory of a dead engine;
# else it keeps a record of 100,000 calls, which nobody reads
off = "worker_niceness process_group_cleanup_enabled kill_child_processes_on_worker_exit task_events_report_interval_ms"
os.environ.update({f"RAY_{name}": "0" for name in off.split()} | os.environ)

import numpy as np
import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import estimator
import loss
from agent import BadInput, InvariantError, Result, Segment, Trace, bad_input, load_agent
from estimator import ESTIMATORS, GROUP_ESTIMATORS
from loss import CLIPS, LOSSES, SEQUENCE_LOSSES
from refit import (
    EngineLeft,
    NotWritten,
    Refit,
    ask,
    checkpoints,
    compute_device,
    export,
    load_checkpoint,
    newest,
    save_checkpoint,
)
from replay import (
    Learner,
    Replay,
    build_critic,
    build_policy,
    build_reference,
    check_identity,
    clip_gradients,
    experts_of,
    pack,
    plan,
)
from rollout import DEATHS, begun, canonical, column, launch, load_rows, tools_of
from server import Chat

# Slow imports (transformers 3 s, AutoModel 15 s) stand in the functions that need them, so that engines start first.


@dataclass
class Config:
    """Each field is a flag. Grouped as the modules: agent, generate, re-run, credit, learn, molt, run."""

    # ---- agent.py

    agent: str = "agent.py"  # Python file that exports a class Agent; opd needs none
    # a command line to run as the agent instead, as in 'claude -p {prompt}'; needs --reward
    agent_cmd: str = ""
    # Python file with reward(prompt, label, output, folder); without --agent_cmd it grades one
    # reply to each prompt
    reward: str = ""
    # prompts: a jsonl, json (or either as gz, bz2, xz) or parquet file, or a hub dataset
    data: str = "examples/starter/train.jsonl"
    # column with the prompt: a text or a list of chat messages; a.b: entry b of column a
    prompt_key: str = "prompt"
    # column with the label that the agent's reward needs, named in the same way; this one may be
    # absent
    label_key: str = "label"
    # draw rows in a seeded order, another one each pass; else as they stand in the file
    shuffle: bool = True
    # passes over the data before the run ends by itself; 0 repeats until --steps
    data_epochs: int = 0
    max_turns: int = 4  # replies of the policy per rollout
    episode_timeout: float = 600.0  # seconds after which a rollout counts as failed
    max_failed: float = 0.5  # share of a batch's rollouts that may fail before the run stops

    # ---- rollout.py

    model: str = "examples/starter"  # policy: a local folder or a hub name, with a chat template
    engines: int = 1  # vLLM engines
    engine_tp: int = 1  # tensor-parallel size of each engine
    engine_memory: float = 0.85  # share of a GPU's memory that an engine takes
    engine_args: str = "{}"  # JSON with any other vLLM engine argument
    runners: int = 1  # processes that play episodes
    # vLLM's name of the parser of tool calls; auto: by the chat template, none: calls stay text
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"  # vLLM's name of the parser of reasoning
    # where agents reach the capture server; beyond loopback each rollout's key is demanded
    server_host: str = "127.0.0.1"
    # a client wants JSON or forces a call: mask keeps the engine to it and does not train the
    # reply; free does neither
    constrained: Literal["mask", "free"] = "mask"
    # go on from the sampled ids also where the chat template strips old reasoning: one row, not one
    # for each question
    preserve: bool = False
    linger: float = 60.0  # seconds that a reply goes on after its client has disconnected
    prompts: int = 16  # groups per batch
    # versions that a trained token may be old; 0: strictly on-policy, nothing is in flight across a
    # refit
    max_lag: int = 0
    # of --partial: keep the KV cache at a refit; faster, and what an interrupted reply goes on with
    # counts as off-version
    stale_kv: bool = False
    # a refit interrupts replies, which go on under the new weights; else it waits for them
    partial: bool = False
    # LO HI: groups whose mean reward is not strictly between are replaced by others (DAPO)
    dynamic_sampling: tuple[float, float] = (-math.inf, math.inf)
    # groups that dynamic sampling may replace, as a multiple of --prompts; the batch then takes
    # them as they come
    max_filtered: float = 4.0
    # groups in flight, as a multiple of what is needed: the slowest are not waited for, and start
    # again
    oversample: float = 1.0
    samples: int = 8  # rollouts per group
    temperature: float = 1.0  # sampling temperature; the trainer applies the same
    max_tokens: int = 24  # sampled tokens per turn
    max_context: int = 256  # tokens per rollout, prompt included
    # seconds in which an engine answers when the trainer asks how it is; one that hangs is started
    # again
    engine_timeout: float = 300.0
    ray_address: str = ""  # Ray cluster to join ("auto" under Slurm); empty starts one on this node

    save_rollouts: bool = False  # write each batch to --out/rollouts, for --train_from
    # train on the batches in this folder, as --save_rollouts wrote them, without engines
    train_from: str = ""

    eval_data: str = ""  # rows to evaluate on, as --data; a column data_source splits the scores
    eval_every: int = 0  # steps between evaluations; 0: none
    eval_at_start: bool = False  # evaluate before the first step too
    eval_only: bool = False  # evaluate --model, or with --resume the newest checkpoint, and end
    eval_samples: int = 1  # rollouts of each row
    eval_temperature: float = 0.0  # of evaluations; 0 is greedy
    eval_solved: float = 1.0  # reward from which a rollout counts as solved, for pass@k

    # ---- replay.py

    # tokens per forward, padding included: a strict bound on memory
    tokens_per_microbatch: int = 16384
    # replay the engine's expert choices in the trainer (mixture of experts only)
    replay_experts: bool = False
    # bound on gap/on_version; 0 means 1e-4 on the max in float32, 0.02 on the mean and 1e-3 on k3
    # in bfloat16
    max_gap: float = 0.0

    # ---- estimator.py

    estimator: Literal[tuple(ESTIMATORS)] = "grpo"  # rewards to advantages
    gamma: float = 1.0  # discount per action token (reinforce, gae)
    lam: float = 0.95  # lambda of gae
    # whiten the advantages of reinforce, reinforce_baseline and gae over the batch
    whiten: bool = True
    # LO HI that a rollout's reward is held between before it is credited
    reward_clip: tuple[float, float] = (-math.inf, math.inf)
    # of the named rewards of gdpo, in the order of their names; empty: all 1
    reward_weights: tuple[float, ...] = ()
    # LIMIT BUFFER of a rollout's sampled tokens: the reward falls by up to 1 in the last BUFFER
    # (DAPO); 0 0 is off
    overlong: tuple[int, int] = (0, 0)
    # gae: a truncated rollout goes on at the critic's last value, not at 0
    bootstrap_truncated: bool = False
    # coefficient of the KL to --ref_model: in the reward, or with --kl_loss in the loss
    kl_coef: float = 0.0
    # its estimator; auto: k1 in the reward, k2 in the loss
    kl_type: Literal["auto", "k1", "k2", "k3"] = "auto"
    kl_loss: bool = False  # the KL is a loss with a gradient, not a part of the reward
    kl_target: float = 0.0  # KL that --kl_coef is adapted to; 0: it stays as it is
    kl_horizon: float = 10_000.0  # rollouts in which it adapts

    # ---- loss.py

    loss: Literal[tuple(LOSSES)] = "ppo"  # policy loss
    # lower clip of the ratio is 1 - this; unset: what the loss's paper uses (loss.CLIPS)
    clip_low: float | None = None
    clip_high: float | None = None  # upper clip of the ratio is 1 + this
    # temperature of sapo's gate where the advantage is positive, and elsewhere
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    dppo_delta: float = 0.2  # dppo drops a token whose probability has moved by more
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # weight of the load-balance loss of the experts (mixture of experts only)
    balance_coef: float = 0.0
    # the critic's value moves by no more than this from the one before the update; 0 is off
    value_clip: float = 0.2
    dual_clip: float = 0.0  # bound c > 1 on the loss of negative advantages; 0 is off
    # unit of the rollout/trainer correction; off is sound only while nothing can be stale
    is_level: Literal["off", "token", "seq", "geo"] = "off"
    is_mode: Literal["mask", "clip", "trunc"] = "trunc"  # what happens to weights outside the band
    is_band: tuple[float, float] = (0.5, 2.0)  # LO HI, inclusive
    # whether rejected tokens still count in the denominator
    is_denominator: Literal["all", "kept"] = "all"
    # mean over the update's trained tokens; over rollouts of their token means; sum over
    # --loss_length times rollouts
    loss_agg: Literal["token_mean", "seq_mean", "constant"] = "token_mean"
    loss_length: int = 0  # the L_max of --loss_agg constant

    # ---- refit.py

    refit_bucket_mb: int = 256  # megabytes per bucket
    # seconds for each step of a refit, such as one bucket; engines that hang are started again
    refit_timeout: float = 600.0

    # ---- train.py

    # reference of the KL, or the teacher of opd; empty with a --kl_coef: --model as it was at the
    # start
    ref_model: str = ""
    # what the critic of gae starts from, with a new scalar head; empty: --model
    critic_model: str = ""
    critic_lr: float = 1e-3  # peak learning rate of the critic
    critic_warmup_steps: int = 0  # first steps in which the critic learns alone
    # old log-probs of the ratio: the trainer's own, or the engine's as they came
    old: Literal["recompute", "behaviour"] = "recompute"
    steps: int = 48  # batches to train on
    epochs: int = 1  # passes over each batch
    minibatches: int = 2  # optimizer steps per pass; divides --prompts
    lr: float = 1e-3  # peak learning rate
    schedule: Literal["constant", "linear", "cosine"] = "linear"  # learning rate after the warm-up
    warmup: int = 0  # steps of linear warm-up
    weight_decay: float = 0.0  # of AdamW
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    # muon: Muon for the matrices of the layers, its steps as large as AdamW's, and AdamW for the
    # rest
    optimizer: Literal["adamw", "muon"] = "adamw"
    # rank of the policy's adapters on all projections and experts, the weights stay as they are; 0
    # trains the weights
    lora_rank: int = 0
    lora_alpha: int = 0  # the adapters are scaled by this over --lora_rank; 0: twice the rank
    # compute the activations of each layer again in backward, instead of keeping them
    checkpoint_activations: bool = False
    # optimizer: float32 weights, gradients and moments stay in CPU memory, where it steps (FSDP2's
    # CPUOffloadPolicy)
    offload: Literal["none", "optimizer"] = "none"
    # gradients are clipped to this norm; a step with a non-finite norm is skipped and counted
    max_grad_norm: float = 1.0
    # of forward, engine and refit; auto: bfloat16 on GPU, float32 on CPU. Master weights are
    # float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    ep: int = 1  # expert-parallel ranks
    seed: int = 0  # of prompts' order, engines and tasks
    # folder for metrics.jsonl, checkpoints and the exported model; empty: out/<date>-<seed>
    out: str = ""
    # seconds for writing a checkpoint; then the run ends, the last one is whole
    save_timeout: float = 1800.0
    save_every: int = 0  # steps between checkpoints; 0: at the end only
    keep: int = 2  # checkpoints kept
    resume: bool = False  # go on from the newest checkpoint in --out
    show_every: int = 10  # steps between printed sample rollouts; 0: never
    wandb: str = ""  # Weights & Biases project; offline unless a key is set

    def __post_init__(self):
        """What follows from other flags where it was not given."""
        low, high = CLIPS.get(self.loss, (0.0, 0.0))
        self.clip_low = low if self.clip_low is None else self.clip_low
        self.clip_high = high if self.clip_high is None else self.clip_high
        if self.kl_type == "auto":
            self.kl_type = "k2" if self.kl_loss else "k1"
        if self.estimator == "sft" and self.loss == "ppo":
            self.loss = "pg"  # a demonstration has no other log-probs to compare with
        if (
            self.estimator == "opd"
        ):  # the teacher has to be named, and is all that there is to learn from
            self.agent = "" if self.agent == "agent.py" else self.agent
        elif self.kl_coef:
            self.ref_model = self.ref_model or self.model
        if self.estimator == "gae":
            self.critic_model = self.critic_model or self.model
        self.lora_alpha = self.lora_alpha or 2 * self.lora_rank


def parse(argv: list[str] | None = None, rank: int = 0) -> Config:
    """The command line as a Config, names made absolute and "auto" resolved. Rank 0 tells of a wrong flag, all exit with code 2."""
    style = dict(config=(tyro.conf.FlagCreatePairsOff,), use_underscores=True)
    cfg = tyro.cli(Config, args=argv, console_outputs=rank == 0, **style)
    for name in (
        "agent",
        "data",
        "model",
        "reward",
        "ref_model",
        "critic_model",
        "train_from",
        "eval_data",
    ):
        if os.path.exists(value := getattr(cfg, name)):
            setattr(cfg, name, os.path.abspath(value))  # actors may run in another folder
    cfg.out = os.path.abspath(cfg.out or f"out/{datetime.now():%Y%m%d-%H%M%S}-{cfg.seed}")
    if cfg.dtype == "auto":
        cfg.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return cfg


def validate(cfg: Config, world: int = 1) -> None:
    """Refuse what cannot work. Pure: looks at nothing but `cfg` and the number of ranks; raises ValueError."""
    positive = "max_turns episode_timeout engines engine_tp runners prompts samples max_tokens max_context steps epochs"
    positive += " lr temperature refit_bucket_mb tokens_per_microbatch minibatches max_grad_norm ep keep kl_horizon"
    positive += " engine_timeout refit_timeout save_timeout"
    refused = [(getattr(cfg, name) <= 0, name, "must be positive") for name in positive.split()]
    zero = "max_lag balance_coef lora_rank lora_alpha"
    refused += [
        (not getattr(cfg, name) >= 0, name, "must be positive, or 0 for none")
        for name in zero.split()
    ]
    for wrong, names, fix in refused + unfit(cfg, world):
        if wrong:
            values = [(name, getattr(cfg, name)) for name in names.split()]
            told = [
                f"--{n} {' '.join(map(str, v)) if isinstance(v, tuple) else v}" for n, v in values
            ]
            raise ValueError(f"{' '.join(told)}: {fix}")
    if cfg.loss in ("gspo", "gspo_token") and max(cfg.clip_low, cfg.clip_high) > 0.05:
        clips = f"--loss {cfg.loss} --clip_low {cfg.clip_low} --clip_high {cfg.clip_high}"
        warnings.warn(f"{clips}: its paper clips at 3e-4 and 4e-4", stacklevel=2)


def unfit(cfg: Config, world: int) -> list[tuple]:
    """What does not fit together: (whether it is so, the flags, what to do)."""
    engine_args = None
    with contextlib.suppress(ValueError):
        engine_args = json.loads(cfg.engine_args)
    kind, loss, kl, grouped = (
        cfg.estimator,
        cfg.loss,
        cfg.kl_coef != 0,
        cfg.estimator in GROUP_ESTIMATORS,
    )
    evals = bool(cfg.eval_every or cfg.eval_at_start or cfg.eval_only)
    idle, several = (
        kind == "sft" or cfg.train_from,
        cfg.eval_samples > 1 and cfg.eval_temperature == 0,
    )
    constant, sequences, gated = (
        cfg.loss_agg == "constant",
        loss in SEQUENCE_LOSSES,
        cfg.is_level in ("seq", "geo"),
    )
    corrected, clipped, rewarded = (
        cfg.is_level != "off",
        loss in ("ppo", "gspo", "gspo_token"),
        kl and not cfg.kl_loss,
    )
    stale = cfg.max_lag > 0 and not (
        corrected or cfg.old == "behaviour" or loss == "dppo" or kind == "sft"
    )
    critic = cfg.critic_model or cfg.critic_warmup_steps or cfg.bootstrap_truncated
    plain = loss == "pg" and not kl and not corrected and not cfg.balance_coef and cfg.epochs == 1
    return [
        (
            cfg.agent_cmd and not cfg.reward,
            "agent_cmd",
            "set --reward to the file that grades what it did",
        ),
        (
            cfg.samples < 2 and grouped,
            "samples estimator",
            "it compares rollouts of a group, set --samples 2 or more",
        ),
        (
            cfg.prompts % cfg.minibatches,
            "prompts minibatches",
            "the first has to be divisible by the second",
        ),
        (world % cfg.ep, "ep", f"does not divide the {world} ranks: start a multiple of it"),
        (
            cfg.offload != "none" and cfg.ep > 1,
            "offload ep",
            "the experts would not leave the CPU: set --ep 1",
        ),
        (
            cfg.max_context > cfg.tokens_per_microbatch,
            "tokens_per_microbatch max_context",
            "raise the first",
        ),
        (not 0 <= cfg.max_failed <= 1, "max_failed", "is a share, between 0 and 1"),
        (
            evals != bool(cfg.eval_data),
            "eval_data",
            "set it with --eval_every, --eval_at_start or --eval_only",
        ),
        (
            evals and idle,
            "eval_data estimator train_from",
            "without engines nothing can be evaluated",
        ),
        (
            several,
            "eval_samples eval_temperature",
            "greedy samples are all the same: set a temperature",
        ),
        (cfg.oversample < 1, "oversample", "must be at least 1"),
        (
            cfg.dynamic_sampling[0] >= cfg.dynamic_sampling[1],
            "dynamic_sampling",
            "LO is not below HI",
        ),
        (
            cfg.partial and not cfg.max_lag,
            "partial max_lag",
            "nothing is in flight across a refit: set --max_lag 1",
        ),
        (
            cfg.stale_kv and not cfg.partial,
            "stale_kv partial",
            "nothing is interrupted by a refit: set --partial",
        ),
        (
            stale,
            "max_lag is_level",
            "stale tokens need a correction: --is_level token, --loss dppo or --old behaviour",
        ),
        (cfg.dual_clip and cfg.dual_clip <= 1, "dual_clip", "must be above 1, or 0 for off"),
        (cfg.is_band[0] > cfg.is_band[1], "is_band", "LO is above HI"),
        (
            constant != (cfg.loss_length > 0),
            "loss_agg loss_length",
            "constant needs a length, the others none",
        ),
        (
            any(cfg.overlong) and not 0 < cfg.overlong[1] <= cfg.overlong[0],
            "overlong",
            "0 < BUFFER <= LIMIT, or 0 0",
        ),
        (cfg.lora_alpha and not cfg.lora_rank, "lora_alpha lora_rank", "set --lora_rank as well"),
        (cfg.resume and not cfg.out, "resume", "needs --out, the folder of the run to go on with"),
        (
            not isinstance(engine_args, dict),
            "engine_args",
            "is not a JSON object, as in '{\"block_size\": 32}'",
        ),
        # estimators, losses and corrections that mean nothing together
        (
            gated and cfg.is_mode != "mask",
            "is_level is_mode",
            "a gate over whole sequences: set --is_mode mask",
        ),
        (
            cfg.dual_clip and not clipped,
            "dual_clip loss",
            "that loss has no clip to bound: use ppo",
        ),
        (
            sequences and cfg.is_level == "token",
            "is_level loss",
            "one ratio per sequence: set --is_level seq or geo",
        ),
        (
            sequences and cfg.loss_agg != "seq_mean",
            "loss loss_agg",
            "a mean over sequences: set --loss_agg seq_mean",
        ),
        (
            loss == "dppo" and corrected,
            "loss is_level",
            "its ratio is the one to the engine: drop --is_level",
        ),
        (
            cfg.old == "behaviour" and corrected,
            "old is_level",
            "the ratio then is the correction: drop one",
        ),
        (rewarded and grouped, "kl_coef estimator", "it takes no KL as a reward: add --kl_loss"),
        (
            cfg.kl_loss and cfg.kl_type == "k1",
            "kl_loss kl_type",
            "the expected gradient of k1 is zero: use k2 or k3",
        ),
        (cfg.kl_loss and not kl, "kl_loss", "it needs a --kl_coef"),
        (cfg.kl_target and not kl, "kl_target", "it needs a --kl_coef to start from"),
        (kind == "opd" and not cfg.ref_model, "estimator", "it needs a teacher: set --ref_model"),
        (
            kind == "opd" and not rewarded,
            "estimator kl_coef",
            "it learns from the KL alone: set it, no --kl_loss",
        ),
        (
            kind == "sft" and not plain,
            "estimator",
            "its loss is -log pi: no KL, correction or balance, one epoch",
        ),
        (cfg.ref_model and not kl, "ref_model", "nothing reads it: set a --kl_coef"),
        (
            kind != "gae" and critic,
            "estimator critic_model critic_warmup_steps",
            "it has no critic: use gae",
        ),
        (
            cfg.reward_weights and kind != "gdpo",
            "reward_weights estimator",
            "only gdpo weighs named rewards",
        ),
    ]


def check_rows(cfg: Config, flag: str, data: str) -> list[dict]:
    """The rows of --data or --eval_data. Raises BadInput with the flag, the file, the row and the
    fix."""
    name, labels, rows = f"--{flag} {data}", 0, load_rows(data, cfg.prompt_key, f"--{flag}")
    for i, row in enumerate(rows):
        labelled = column(row, cfg.label_key) is not None
        labels += labelled
        with bad_input(f"{name}: row {i}"):
            turns = canonical(column(row, cfg.prompt_key), tools_of(row))[1]
            if not any(t.text or t.role == "assistant" and t.calls for t in turns):
                raise ValueError(f"its {cfg.prompt_key!r} has no text; fill it in")
            if cfg.estimator != "sft":
                begun(turns)
            elif not labelled and not any(t.role == "assistant" for t in turns):
                lack = f"no assistant message and no {cfg.label_key!r} to learn"
                raise BadInput(f"{name}: row {i} has {lack}")
    if not labels and cfg.label_key != Config.label_key:
        fix = f"the first has only {list(rows[0])}; set --label_key"
        raise BadInput(f"{name}: no row has a {cfg.label_key!r}, {fix}")
    return rows


def check_inputs(cfg: Config) -> list[dict]:
    """Look at the files before any process starts; returns the data rows. Raises ValueError with the flag and the fix."""
    from transformers import AutoConfig

    if cfg.estimator != "sft":
        flag = "reward" if cfg.agent_cmd or cfg.reward else "agent"
        with bad_input(f"--{flag} {getattr(cfg, flag)}"):
            load_agent(cfg.agent, cfg.agent_cmd, cfg.reward)
    rows = check_rows(cfg, "data", cfg.data)
    if cfg.eval_data:
        check_rows(cfg, "eval_data", cfg.eval_data)
    models = {
        flag: path
        for flag in ("critic_model", "ref_model", "model")
        if (path := getattr(cfg, flag))
    }
    for flag, path in models.items():
        if not os.path.isdir(path) and os.path.isdir(
            os.path.dirname(path)
        ):  # else it may be a hub name
            raise ValueError(f"--{flag} {path}: there is no such folder")
        try:
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as e:
            raise ValueError(
                f"--{flag} {path}: no model there ({str(e).splitlines()[0]})"
            ) from None
    for flag in ("replay_experts", "balance_coef"):
        if getattr(cfg, flag) and not experts_of(config):
            raise ValueError(
                f"--{flag}: --model {cfg.model} is dense, it has no experts; drop the flag"
            )
    try:
        os.makedirs(cfg.out, exist_ok=True)
        tempfile.TemporaryFile(dir=cfg.out).close()
    except OSError as e:
        raise ValueError(f"--out {cfg.out} cannot be written ({e.strerror})") from None
    if cfg.train_from and not list(Path(cfg.train_from).glob("*.jsonl")):
        raise ValueError(
            f"--train_from {cfg.train_from}: there are no batches, as --save_rollouts writes them"
        )
    if cfg.resume and not checkpoints(cfg.out):
        raise ValueError(f"--resume: --out {cfg.out} has no checkpoint")
    if not cfg.resume and (Path(cfg.out) / "metrics.jsonl").exists():
        raise ValueError(
            f"--out {cfg.out} holds a run already: add --resume to go on with it, or name another folder"
        )
    return rows


# ---- metrics


class Meter(dict):
    """Metrics of one step on one rank: (sum, count) pairs are added up, single numbers are maxima."""

    def add(self, metrics: dict, prefix: str = "") -> None:
        for key, value in metrics.items():
            if isinstance(value, tuple):
                total, count = self.get(prefix + key, (0.0, 0.0))
                self[prefix + key] = (total + float(value[0]), count + float(value[1]))
            else:
                self[prefix + key] = float(
                    np.maximum(self.get(prefix + key, -math.inf), float(value))
                )  # a nan wins

    def local(self) -> dict[str, float]:
        """sum / count (the sum where count is 0), or the max."""
        return {
            k: (v[0] / v[1] if v[1] else v[0]) if isinstance(v, tuple) else v
            for k, v in self.items()
        }

    def reduce(self, group) -> dict[str, float]:
        """`local` over all ranks, whatever keys each has, in one collective."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dict(self), group=group)
        total = Meter()
        for metrics in everyone:
            total.add(metrics)
        return total.local()


class Clock:
    """Seconds between marks, by name."""

    def __init__(self):
        self.last, self.spans = time.perf_counter(), {}

    def mark(self, name: str) -> None:
        """Everything since the last mark was `name`."""
        now = time.perf_counter()
        self.spans[name] = self.spans.get(name, 0.0) + now - self.last
        self.last = now

    def take(self) -> dict[str, float]:
        """The spans so far; they begin anew."""
        spans, self.spans = self.spans, {}
        return spans


SHOWN = {  # in the console's line of a step, those that the run has
    "reward": ("reward/mean", ".3f"),
    "pass@1": ("eval/pass@1", ".3f"),
    "kl": ("kl/ref", ".4f"),
    "loss": ("loss/policy", ".4f"),
    "turns": ("rollouts/turns", ".1f"),
    "tokens": ("tokens/trained", "6d"),
    "gap": ("gap/on_version_max", ".1e"),
    "clip": ("loss/clip_share", ".3f"),
    "grad": ("optim/grad_norm", ".2f"),
}


class Log:
    """metrics.jsonl, a console line per step under a progress bar, and Weights & Biases when asked for. Rank 0 only."""

    def __init__(self, cfg: Config, console: Console, step: int):
        self.console, self.shown_error, self.wandb = console, False, None
        path = Path(cfg.out) / "metrics.jsonl"
        lines = (
            path.read_text().split("\n")[:-1] if path.exists() else []
        )  # a full disk may have cut the last one
        kept = [
            line for line in lines if json.loads(line)["step"] <= step
        ]  # later ones will be run again
        path.write_text("".join(line + "\n" for line in kept))
        self.file = path.open("a", buffering=1)
        (Path(cfg.out) / "config.json").write_text(json.dumps(vars(cfg), indent=1))
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self.task = self.bar.add_task("steps", total=cfg.steps, completed=step)
        self.bar.start()
        if cfg.wandb:
            import wandb

            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
            quiet = wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_stats=True
            )
            self.wandb = wandb.init(
                project=cfg.wandb, dir=cfg.out, mode=mode, config=vars(cfg), settings=quiet
            )

    def write(self, m: dict[str, float]) -> None:
        self.file.write(json.dumps(m) + "\n")
        self.bar.update(self.task, completed=m["step"])
        shown = "  ".join(
            f"{label} {m[key]:{form}}" for label, (key, form) in SHOWN.items() if key in m
        )
        spent = ", ".join(
            f"{k} {m['time/' + k]:.1f}" for k in ("generate", "train", "refit") if "time/" + k in m
        )
        line = f"step {m['step']:4d}  {shown}" + (
            f"  {m['time/step']:.1f} s ({spent})" if spent else ""
        )
        self.console.print(line, highlight=False, soft_wrap=True)
        if self.wandb:
            self.wandb.log(m, step=m["step"])

    def close(self) -> None:
        self.bar.stop()
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def bounds(cfg: Config) -> dict[str, float]:
    """The metrics that are bounded: in bfloat16 single tokens differ by much, so the mean and k3 are instead of the max."""
    if cfg.dtype == "float32":
        return {"gap/on_version_max": cfg.max_gap or 1e-4}
    return {
        "gap/on_version_mean": cfg.max_gap or 0.02,
        "gap/on_version_k3": (cfg.max_gap or 0.02) / 20,
    }


SIGNS = {"<=": operator.le, ">=": operator.ge, ">": operator.gt}  # a nan passes none


def gates(cfg: Config, m: dict[str, float]) -> list[tuple]:
    """What scored rows have to show: (invariant, metric, its value, sign, limit, what is wrong where that does not hold)."""
    apart = "--max_gap allows no more: trainer and engine do not compute the same log-probs from the same weights"
    found = [
        ("policy version", name, m[name], "<=", limit, apart) for name, limit in bounds(cfg).items()
    ]
    if cfg.replay_experts:
        share, agreed = m["experts/missing"] / max(1.0, m["tokens/sampled"]), m["experts/agreement"]
        lost, other = (
            "so many of the tokens have no expert row",
            "the trainer's gates choose other experts",
        )
        found.append(("forward consistency", "experts/missing", share, "<=", 0.01, lost))
        found.append(("forward consistency", "experts/agreement", agreed, ">=", 0.98, other))
    return found


def check_gates(cfg: Config, m: dict[str, float]) -> None:
    """Raise InvariantError before a batch is trained on whose log-probs or experts are not the engine's."""
    none, old = "no token is of the trainer's version", "a token is older than --max_lag allows"
    found = [("policy version", "gap/on_version_tokens", m["gap/on_version_tokens"], ">", 0, none)]
    found.append(("policy version", "lag/max", m["lag/max"], "<=", cfg.max_lag, old))
    for invariant, metric, value, sign, limit, wrong in found + gates(cfg, m):
        if not SIGNS[sign](value, limit):
            raise InvariantError(
                f"{invariant}: {metric} is {value:.3g}, not {sign} {limit:.3g}: {wrong}"
            )


# ---- the steps of an update


def observe(replay: Replay, micro, logprobs, entropy) -> dict:
    """Keep the old log-probs [B, T] of a micro-batch; what the forward showed that gave them: gap/…, lag/…, experts/…, entropy."""
    micro.old_logprobs, on = logprobs.detach(), micro.on_version  # [B, T] both
    lags = (micro.version - micro.versions)[micro.mask]  # [N]
    newest = micro.versions.masked_fill(~micro.mask, -1).amax(1, keepdim=True)  # [B, 1]
    mixed = (micro.mask & (micro.versions < newest)).any(
        1
    )  # [B], rows that more than one version sampled
    found = {"loss/entropy": (entropy.sum(), micro.mask.sum()), "lag/mean": (lags.sum(), len(lags))}
    found |= {"lag/max": lags.max() if len(lags) else 0, "lag/mixed_rollouts": (mixed.sum(), 0)}
    for name, where in (("gap/on_version_", on), ("gap/off_version_", micro.mask & ~on)):
        found |= {
            name + k: v
            for k, v in loss.gap(micro.old_logprobs, micro.behaviour_logprobs, where).items()
        }
    return found | replay.expert_metrics(micro)


def verify(
    cfg: Config, micros: list, segments: list, version: int, device: str, meter: Meter
) -> None:
    """Check the identity of packed micro-batches, that no reply has more tokens than it may and that no token is of the future,
    then move them to the device. version: the trainer's."""
    longest = max((end - start for s in segments for start, end, _ in s.replies), default=0)
    meter.add({"tokens/reply_max": longest})
    if longest > cfg.max_tokens and cfg.estimator != "sft":
        raise InvariantError(
            f"token identity: a reply has {longest} tokens, --max_tokens allows {cfg.max_tokens}"
        )
    for micro in micros:
        meter.add(
            {
                "tokens/digest_mismatch": (0.0, 0),
                "tokens/sampled": (check_identity(micro, segments), 0),
            }
        )
        if (newest := int(micro.versions.max())) > version:
            raise InvariantError(
                f"policy version: a token is stamped {newest}, the trainer is at version {version}"
            )
        micro.to(device).version = version


def score(replay: Replay, micros: list, meter: Meter, temperature: float | None = None) -> None:
    """Fill in the old log-probs of each micro-batch."""
    with torch.no_grad():
        for micro in micros:
            with replay.experts(micro, counted=micro.on_version):
                logprobs, entropy = replay.forward(micro, temperature)
                micro.load = replay.load(micro) if replay.watched else None
            meter.add(observe(replay, micro, logprobs, entropy))


def deal(cfg: Config, batch: dict, world: int) -> None:
    """Cut a batch into minibatches of whole groups, each into micro-batches per rank: batch["plan"][minibatch][rank].

    batch["sizes"] has the rollouts of each minibatch, those without a row too.
    """
    groups, batch["plan"], batch["sizes"] = [r["group"] for r in batch["rollouts"]], [], []
    for part in np.array_split(np.unique(groups), cfg.minibatches):
        batch["sizes"].append(int(np.isin(groups, part).sum()))
        rows = [i for i, row in enumerate(batch["rows"]) if groups[row["rollout"]] in part]
        dealt = plan([batch["rows"][i]["tokens"] for i in rows], world, cfg.tokens_per_microbatch)
        batch["plan"].append([[[rows[i] for i in micro] for micro in rank] for rank in dealt])


def credit(cfg: Config, batch: dict, micros: list, meter: Meter) -> None:
    """Fill in the advantages of this rank's micro-batches, and the critic's targets; moments are taken over all ranks."""

    def all_sum(x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x)
        return x

    def together(name: str) -> torch.Tensor | None:
        """One field of all micro-batches: [B, T], T the longest of them."""
        fields = [getattr(m, name).cpu() for m in micros if getattr(m, name) is not None]
        width = max(m.mask.shape[1] for m in micros)
        return torch.cat([F.pad(x, (0, width - x.shape[1])) for x in fields]) if fields else None

    results = [r["result"] for r in batch["rollouts"]]
    rewards = torch.tensor([r.reward for r in results], dtype=torch.float64)  # [R]
    names = sorted({name for r in results for name in r.rewards})
    named = [[r.rewards.get(name, 0.0) for name in names] for r in results]
    rollouts = estimator.Batch(
        rollout=torch.cat([m.rollout for m in micros]).cpu(),
        rewards=estimator.clip_rewards(rewards, *cfg.reward_clip),
        groups=torch.tensor([r["group"] for r in batch["rollouts"]], dtype=torch.int64),
        all_sum=all_sum,
        named_rewards=torch.tensor(named, dtype=torch.float64),
        truncated=torch.tensor([r.truncated for r in results]),
        **{name: together(name) for name in ("mask", "old_logprobs", "ref_logprobs", "values")},
    )
    if any(cfg.overlong):
        penalty = estimator.overlong(estimator.lengths(rollouts), *cfg.overlong)  # [R]
        rollouts.rewards = rollouts.rewards + penalty
        meter.add({"reward/overlong": (penalty.sum(), len(penalty))})
    if cfg.estimator == "gdpo" and not names:
        raise BadInput(
            "--estimator gdpo: the agent's Result.rewards are empty, and it learns from nothing else"
        )
    if cfg.kl_loss:  # then it is no part of the reward
        cfg = replace(cfg, kl_coef=0.0)
    advantages, metrics = ESTIMATORS[cfg.estimator](rollouts, cfg)
    meter.add(metrics)
    found = {"advantages": advantages}
    if rollouts.values is not None:
        found["targets"] = estimator.value_targets(rollouts, cfg)
        meter.add(
            {"value/explained_variance": estimator.explained_variance(rollouts, found["targets"])}
        )
    for name, whole in found.items():
        for micro, rows in zip(micros, whole.split([len(m.mask) for m in micros])):
            setattr(micro, name, rows[:, : micro.mask.shape[1]].to(micro.mask.device))


def weigh(cfg: Config, micro) -> dict:
    """Fill in the weights of the correction of the mismatch between trainer and engine."""
    bands = cfg.is_level, cfg.is_mode, cfg.is_band, cfg.loss in SEQUENCE_LOSSES
    micro.weights, metrics = loss.correction(
        micro.old_logprobs, micro.behaviour_logprobs, micro.mask, *bands
    )
    return metrics


def check_mass(m: dict[str, float]) -> None:
    """The tokens of each optimizer step, divided by its denominator, add up to 1 over ranks and micro-batches."""
    for name in ("loss/mass", "loss/critic_mass"):
        if name in m and not abs(m[name] - 1) <= 1e-6:
            mass = f"the tokens of an optimizer step over its denominator add up to {m[name]:.6g} ({name})"
            raise InvariantError(
                f"loss denominator: {mass}: the denominator was local to a rank or a micro-batch"
            )


def one_forward(cfg: Config) -> bool:
    """Whether the forward of the update can also give the old log-probs, since its ratio is 1 and nothing needs them before."""
    once = cfg.epochs == cfg.minibatches == 1 and cfg.is_denominator == "all"
    return (
        cfg.estimator == "sft"
        or once
        and not (cfg.ref_model or cfg.critic_model or cfg.balance_coef)
    )


def policy_objective(cfg: Config, replay: Replay, micro) -> tuple[torch.Tensor, dict]:
    """The loss of each token [B, T]: that of --loss, and where asked for the KL and the entropy bonus."""
    logprobs, entropy = replay.forward(micro)
    metrics = {}
    if micro.old_logprobs is None:
        metrics = observe(replay, micro, logprobs, entropy.detach()) | weigh(cfg, micro)
    old = micro.behaviour_logprobs if cfg.old == "behaviour" else micro.old_logprobs
    losses, seen = LOSSES[cfg.loss](
        logprobs, old, micro.advantages, micro.mask, cfg, micro.behaviour_logprobs
    )
    metrics |= seen
    if cfg.kl_loss:
        kl, seen = loss.kl_loss(logprobs, micro.ref_logprobs, micro.mask, cfg.kl_type)
        losses, metrics = losses + cfg.kl_coef * kl, metrics | seen
    if cfg.entropy_coef:
        losses = losses + cfg.entropy_coef * loss.entropy_bonus(entropy, micro.mask)
    return losses, metrics


def value_objective(cfg: Config, replay: Replay, micro) -> tuple[torch.Tensor, dict]:
    """The critic's loss of each token [B, T]."""
    (values,) = replay.forward(micro)
    return loss.value_loss(values, micro.values, micro.targets, micro.mask, cfg.value_clip)


def shares(cfg: Config, batch: dict, part: list) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight of a token of each rollout [R], what the weighted tokens are divided by) of one optimizer step, the same on every
    rank: over all ranks and micro-batches, known before the first backward. Divisor 0: there is nothing to learn from."""
    counts = torch.zeros(len(batch["rollouts"]), dtype=torch.int64)  # [R]
    for micro in part:
        counts.index_add_(
            0,
            micro.rollout.cpu(),
            loss.counted(micro.weights, micro.mask, cfg.is_denominator).cpu(),
        )
    dist.all_reduce(counts)
    if cfg.loss_agg == "seq_mean":
        share, rollouts = loss.seq_mean(counts)
        return share, rollouts * (counts.sum() > 0)
    return torch.ones_like(counts), counts.sum()


def balance(replay: Replay, micro, load: torch.Tensor) -> torch.Tensor:
    """A micro-batch's part of the load-balance loss of its forward, the mean over the layers with experts: a scalar.

    load [routers, E]: that of the whole optimizer step. It was counted before the update, so for every optimizer step of a batch
    but the first it is the load of the policy that the update began with; the probabilities are those of now.
    """
    shape, tokens = (*micro.mask.shape, -1), load.sum(1).tolist()
    probs = [
        F.normalize(r.seen[1].float(), 1.0, -1).view(shape) for r in replay.routers
    ]  # [B, T, E] each
    return torch.stack(
        [loss.balance_loss(p, micro.real, n, t) for p, n, t in zip(probs, load, tokens)]
    ).mean()


def learn(
    cfg: Config,
    learner: Learner,
    batch: dict,
    parts: list,
    objective,
    meter: Meter,
    name="",
    gate=None,
) -> int:
    """All optimizer steps of the policy or the critic on one batch; returns how many were taken.

    parts: micro-batches of each minibatch; objective: (cfg, replay, micro) -> losses [B, T], metrics; name: "" or "critic_";
    gate: called before each optimizer step, to stop the run.
    """
    world, replay, taken, title = (
        dist.get_world_size(),
        learner.replay,
        0,
        f"loss/{name or 'policy'}".rstrip("_"),
    )
    for part, size in list(zip(parts, batch["sizes"])) * cfg.epochs:
        share, total = shares(cfg, batch, part)
        if total == 0:  # nothing to learn from, on any rank
            continue
        denominator = cfg.loss_length * size if cfg.loss_agg == "constant" else float(total)
        if replay.watched:
            load = torch.stack([m.load for m in part]).sum(0)  # [routers, E]
            dist.all_reduce(load)
        for micro in part:
            compared = micro.on_version if micro.old_logprobs is None else None  # [B, T]
            with replay.experts(micro, compared):  # open through backward
                losses, metrics = objective(cfg, replay, micro)
                each = share.to(losses)[micro.rollout]  # [B]
                own, extra = (
                    loss.aggregate(losses, micro.weights * each[:, None], micro.mask, denominator),
                    0.0,
                )
                if replay.watched:
                    extra = balance(replay, micro, load)
                    metrics = metrics | {"loss/balance": (extra.detach(), 1 / world / len(part))}
                ((own + cfg.balance_coef * extra) * world).backward()  # FSDP averages over ranks
            mass = (
                loss.counted(micro.weights, micro.mask, cfg.is_denominator) * each.double()
            ).sum() / float(total)
            meter.add(metrics | {title: (own.detach(), 0), f"loss/{name}mass": (mass, 0)})
        meter.add(dict.fromkeys((title, f"loss/{name}mass"), (0.0, 1 / world)))
        if gate:
            gate()
        norm = clip_gradients(cfg, replay, learner.mesh)
        if finite := math.isfinite(norm):
            learner.optimizer.step()
        learner.optimizer.zero_grad()
        taken += finite
        meter.add(
            {
                f"optim/{name}skipped": (not finite, 0),
                f"optim/{name}grad_norm": norm if finite else 0.0,
            }
        )
    return taken


def probe(cfg: Config, replay: Replay, scores: list, ids: list[int], version: int) -> Meter:
    """Score one fixed text with the trainer and compare: the first request after a refit.

    scores: what each engine gave for it. Returns gap/on_version_… and experts/…, which count in the next batch, so that they are
    never empty; raises InvariantError, the engines still closed, when the gap is over --max_gap.
    """
    meter, sampled = Meter(), np.arange(len(ids)) > 0
    for logprobs, experts, engine_version in scores:
        if engine_version != version:
            raise InvariantError(
                f"policy version: an engine stamps {engine_version} after the refit to {version}"
            )
        row = Segment(
            np.asarray(ids, np.int32),
            sampled,
            np.r_[0, logprobs],
            np.where(sampled, version, -1),
            experts,
        )
        row.experts_ok = None if experts is None else ~np.zeros(len(ids), bool)
        micro = pack([row], [0]).to(compute_device(replay.model))
        micro.version = version
        score(replay, [micro], meter, temperature=1.0)  # prompt log-probs are raw
    for name, limit in bounds(cfg).items():
        if not (value := meter.local()[name]) <= limit:
            found = f"the probe's {name} is {value:.3g} at version {version}, --max_gap allows {limit:.3g}"
            raise InvariantError(
                f"refit: {found}: the engines do not have the trainer's weights; they stay closed"
            )
    return meter


def sample_trial(cfg: Config, engines: list, ids: list[int]) -> list[Segment]:
    """Eight short replies per engine to the probe's first half, as rows: they go the whole way of a rollout before the run."""
    prompt, trial = ids[: max(1, len(ids) // 2)], []
    room = min(16, cfg.max_tokens, cfg.max_context - len(prompt))
    asked = [e.generate.remote(f"trial-{i}", prompt, room) for i in range(8) for e in engines]
    for reply in ray.get(asked):
        trace = Trace(prompt)
        trace.reply(reply)
        trial.append(trace.segment(Result(), -1, -1))
    return trial


def batch_metrics(batch: dict) -> dict[str, float]:
    """What rank 0 knows of a batch without its rows."""
    rollouts, rows = batch["rollouts"], batch["rows"]
    rewards, groups = (
        np.array([r["result"].reward for r in rollouts]),
        np.array([r["group"] for r in rollouts]),
    )
    trained, played = sum(r["trained"] for r in rows), Meter()
    for r in rollouts:
        result, replies = r["result"], r["replies"]
        played.add(
            {
                "rollouts/truncated": (result.truncated, 0),
                "rollouts/retokenised": (r["other_ids"], replies),
            }
        )
        played.add({"rollouts/turns": (replies, 1), "rollouts/seconds_max": r["seconds"]})
        played.add({name: (value, 1) for name, value in result.info.items()}, "info/")
        played.add({name: (value, 1) for name, value in result.rewards.items()}, "reward/")
    equal = [np.ptp(rewards[groups == g]) == 0 for g in np.unique(groups)]
    found = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/groups_equal": np.mean(equal),
    }
    found = {name: float(value) for name, value in found.items()} | {"segments/count": len(rows)}
    found |= {"tokens/trained": trained, "tokens/context": sum(r["tokens"] for r in rows) - trained}
    return found | batch["counts"] | played.local()


def show(console, chat, segment) -> None:
    """Print one rollout as the policy saw it: what it sampled is bold, the rest is dim."""
    text, at = Text(), 0
    for start, end, _ in segment.replies:
        text.append(chat.tokenizer.decode(segment.tokens[at:start]), style="dim")
        text.append(chat.tokenizer.decode(segment.tokens[start:end]), style="bold green")
        at = end
    console.print(text)
    trained = f"{segment.mask.sum()} of {len(segment)} tokens trained, reward {segment.reward:g}"
    console.print(f"rollout {segment.rollout_id}: {len(segment.replies)} turns, {trained}")


def verdict(cfg: Config, console, m: dict[str, float]) -> None:
    """The start-up table: each invariant, its number, its threshold."""
    identity = "token identity", "digests that differ", m["tokens/digest_mismatch"], "<=", 0.0, ""
    refit = (
        "refit",
        "probe gap, first refit",
        m["refit/probe_gap"],
        "<=",
        max(bounds(cfg).values()),
        "",
    )
    table = Table("invariant", "measured", "value", "threshold", "verdict")
    for invariant, metric, value, sign, limit, _ in [identity, *gates(cfg, m), refit]:
        word = Text("PASS", "green") if SIGNS[sign](value, limit) else Text("FAIL", "red")
        table.add_row(invariant, metric, f"{value:.2e}", f"{sign} {limit:.2e}", word)
    console.print(table)


# ---- the loop

PROBE = "The quick brown fox jumps over the lazy dog. 0123456789 + - * / = ; def f(x): return x ** 2  # naïve café, 東京 🦊\n"


@dataclass
class Run:
    """What a rank holds from start to end. Engines and the log are rank 0's."""

    cfg: Config
    device: str
    control: Any  # a process group whose collectives wait for a batch as long as it takes
    clock: Clock
    console: Console
    learners: dict[str, Learner]
    reference: Replay | None
    chat: Chat
    rollouts: Any  # the pool
    engines: list
    scratch: str  # folder of Ray's logs and all temporary files
    refit: Refit | None = None  # nothing to refit without engines
    probe: list[int] = field(default_factory=list)  # ids of its text
    seen: Meter = field(default_factory=Meter)  # what the last probe showed, for the next batch
    stopped: float = 0.0  # when a signal came


def from_rank_0(control, value=None):
    dist.broadcast_object_list(box := [value], group=control)
    return box[0]


def start(cfg: Config, rows: list[dict] | None, where: dict) -> Run:
    """Engines, process groups and models, all loaded when it returns. rows: rank 0's data; where: as `newest` gives it."""
    rank, clock = int(os.environ["RANK"]), Clock()
    engines, rollouts, address, scratch = [], None, None, ""
    if rank == 0:  # the engines load while this process imports and builds its model
        scratch = tempfile.tempdir = tempfile.mkdtemp(
            prefix="instar-", dir="/tmp"
        )  # a short name, for Ray's sockets
        pool = (
            torch.load(checkpoints(cfg.out)[-1] / "rollouts.pt", weights_only=False)
            if cfg.resume
            else None
        )
        engines, rollouts, address = launch(
            cfg, rows, pool, 2 if cfg.estimator in GROUP_ESTIMATORS else 1, scratch
        )

    from transformers import AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    control = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    address, cfg = from_rank_0(control, (address, cfg))  # the default --out has the time in it
    if rank:
        ray.init(**address)
        rollouts = ray.get_actor("rollouts")
    learners = {"policy": build_policy(cfg, device)}
    if cfg.estimator == "gae":
        learners["critic"] = build_critic(cfg, device)
    reference = build_reference(cfg, device) if cfg.ref_model else None
    if cfg.resume:
        load_checkpoint(cfg, learners)
    # no markup: a traceback, or the name of a data source, may look like some
    chat, console = (
        Chat(AutoTokenizer.from_pretrained(cfg.model)),
        Console(quiet=rank > 0, markup=False),
    )
    r = Run(
        cfg, device, control, clock, console, learners, reference, chat, rollouts, engines, scratch
    )
    clock.mark("time/start_trainer")
    if cfg.estimator != "sft" and not cfg.train_from:
        host = ray.util.get_node_ip_address() if cfg.ray_address else "127.0.0.1"
        r.refit = Refit(cfg, learners["policy"].replay.model, engines, host)
        r.probe = chat.encode(PROBE)[: cfg.max_context - 1]
        from_rank_0(control, r.refit.connect())
        clock.mark("time/start_engines")
    return r


def listen(r: Run) -> None:
    """From here on the first SIGINT or SIGTERM ends the run after the step at hand; another one, a second later, at once."""

    def stop(*_) -> None:
        if (
            r.stopped and time.monotonic() - r.stopped > 1
        ):  # torchrun passes on what the terminal has sent to all
            raise KeyboardInterrupt
        r.stopped = r.stopped or time.monotonic()
        r.console.print("stopping: the step at hand ends, then a checkpoint is written")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def watch(r: Run, call):
    """Rank 0: what `call` of the pool returns, or before that "stop" after a signal, or "engine" when one has come back."""
    while not r.stopped:
        if ray.wait([call], timeout=2)[0]:
            return ray.get(call)
        with contextlib.suppress(EngineLeft):  # Ray is starting it
            if not all(ask(r.engines, r.cfg.engine_timeout, "joined")):
                return "engine"
    return "stop"


def awaited(r: Run, version: int, method: str, *args):
    """What a method of the pool returns, on every rank, or "stop". Engines that come back meanwhile get the weights."""
    call = getattr(r.rollouts, method).remote(*args) if dist.get_rank() == 0 else None
    for _ in range(DEATHS):
        if (found := from_rank_0(r.control, watch(r, call) if call else None)) != "engine":
            return found
        r.console.print(
            f"an engine has died and come back: all get the weights of version {version}",
            style="red",
        )
        molt(r, version)
    raise RuntimeError(f"engines have died {DEATHS} times while one batch was played")


def molt(r: Run, version: int) -> dict:
    """Weights to the engines, the probe, then they open; returns the refit's metrics. Where an engine dies, all over again."""
    if not r.refit:
        return {}
    scores, tries = None, 0
    while scores is None:
        if (tries := tries + 1) > DEATHS:
            raise RuntimeError(f"engines have died in {DEATHS} refits, one after the other")
        from_rank_0(r.control, r.refit.connect())
        try:
            metrics = r.refit(version)
            scores = ask(r.engines, r.cfg.engine_timeout, "score", r.probe)
        except EngineLeft as e:  # on rank 0; the others have sent all there was to send
            r.console.print(
                f"a refit begins anew (--refit_timeout {r.cfg.refit_timeout}): {e}", style="red"
            )
        scores = from_rank_0(r.control, scores)
    seen = probe(r.cfg, r.learners["policy"].replay, scores, r.probe, version)
    with contextlib.suppress(EngineLeft):  # whoever waits for a batch will see
        ask(r.engines, r.cfg.engine_timeout, "release")
    r.seen = seen if dist.get_rank() == 0 else Meter()
    return metrics | {"refit/probe_gap": seen["gap/on_version_max"]}


def prove(r: Run, version: int) -> None:
    """The first molt, then a few replies of each engine go the whole way of a rollout; prints the verdict table.

    Raises InvariantError before anything is learnt.
    """
    metrics = molt(r, version)
    if r.refit:
        trial, meter = (
            from_rank_0(r.control, sample_trial(r.cfg, r.engines, r.probe)),
            Meter(r.seen),
        )
        micro = pack(trial, list(range(len(trial))))
        verify(r.cfg, [micro], trial, version, r.device, meter)
        score(r.learners["policy"].replay, [micro], meter)
        first = meter.reduce(r.control) | metrics
        verdict(r.cfg, r.console, first)
        check_gates(r.cfg, first)
    r.clock.mark("time/start_checks")
    spans = r.clock.take()
    spent = ", ".join(f"{k.removeprefix('time/start_')} {v:.0f} s" for k, v in spans.items())
    r.console.print(f"ready after {sum(spans.values()):.0f} s: {spent}")


def evaluate(r: Run, version: int, step: int, best: dict) -> dict[str, float]:
    """The eval/… metrics: rewards and the unbiased pass@k, k = 1, 2, 4, …, over rollouts, for each data source too.

    best: {checkpoint, version, score} of the best pass@1 so far, updated in place. Raises InvariantError for mixed versions.
    """
    cfg, n, found = r.cfg, r.cfg.eval_samples, {}
    rows = load_rows(cfg.eval_data, cfg.prompt_key, "--eval_data")
    if (outs := awaited(r, version, "evaluate", rows)) == "stop":
        return found
    if (seen := set().union(*(out["versions"] for out in outs))) - {version}:
        raise InvariantError(
            f"policy version: an evaluation of version {version} has tokens of {sorted(seen)}"
        )
    rewards, sources = [[] for _ in rows], [str(row.get("data_source") or "") for row in rows]
    for out in outs:
        rewards[out["row"]].append(0.0 if out["error"] else out["reward"])
    for source in ["", *sorted(set(sources) - {""})]:
        name = f"eval/{source}/" if source else "eval/"
        own = [x for x, of in zip(rewards, sources) if source in ("", of)]
        solved = [sum(x >= cfg.eval_solved for x in xs) for xs in own]
        found[name + "reward"] = float(np.mean(own))
        for k in (2**i for i in range(n.bit_length())):
            found[f"{name}pass@{k}"] = float(
                np.mean([estimator.pass_at_k(n, c, k) for c in solved])
            )
    found["eval/failed"] = sum(bool(out["error"]) for out in outs)
    if found["eval/pass@1"] > best.get("score", -1.0):
        best |= {
            "checkpoint": f"checkpoint-{step:06d}",
            "version": version,
            "score": found["eval/pass@1"],
        }
    scores = "  ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in found.items())
    r.console.print(f"eval of version {version}: {scores}", highlight=False, soft_wrap=True)
    return found


def fetch(r: Run, batch: dict, version: int, meter: Meter) -> tuple[list, list]:
    """This rank's rows of a batch: (micro-batches of each minibatch, verified, the Segments that they are packed from)."""
    parts = [p[dist.get_rank()] for p in batch["plan"]]
    mine = [i for part in parts for micro in part for i in micro]
    segments = ray.get(r.rollouts.fetch.remote([batch["rows"][i]["id"] for i in mine]))
    place, owners = (
        {row: at for at, row in enumerate(mine)},
        [batch["rows"][i]["rollout"] for i in mine],
    )
    parts = [
        [pack(segments, [place[i] for i in micro], owners) for micro in part] for part in parts
    ]
    verify(r.cfg, [micro for part in parts for micro in part], segments, version, r.device, meter)
    return parts, segments


def update(r: Run, batch: dict, parts: list, meter: Meter, warm: bool) -> int:
    """A batch becomes gradients; returns how many optimizer steps the policy took, none while its critic warms up.

    parts: micro-batches of each minibatch. Raises InvariantError before a batch that breaks a gate is learnt from.
    """
    cfg, policy, critic, taken = r.cfg, r.learners["policy"], r.learners.get("critic"), 0
    micros = [micro for part in parts for micro in part]

    def gate() -> None:
        if r.refit:  # else nobody sampled with these weights
            check_gates(cfg, meter.reduce(r.control))

    if not one_forward(cfg):
        score(policy.replay, micros, meter)
        gate()
        for micro in micros:
            meter.add(weigh(cfg, micro))
    with torch.no_grad():
        for micro in micros:
            micro.ref_logprobs = r.reference.forward(micro)[0] if r.reference else None
            micro.values = critic.replay.forward(micro)[0] if critic else None
    credit(cfg, batch, micros, meter)
    if critic:
        learn(
            replace(cfg, loss_agg="token_mean"),
            critic,
            batch,
            parts,
            value_objective,
            meter,
            "critic_",
        )
    if warm:
        taken = learn(
            cfg,
            policy,
            batch,
            parts,
            policy_objective,
            meter,
            gate=gate if one_forward(cfg) else None,
        )
    for learner in r.learners.values():
        learner.scheduler.step()
    return taken


def times(r: Run, tokens: int) -> dict[str, float]:
    """time/…, perf/… and memory/… since the last call, in which rows of `tokens` tokens were trained on.

    perf/overlap is max(g, t) / step with g of the engines and t of the trainer: 1 is the bound, .5 two equal phases in turns.
    """
    spans, busy, cuda = r.clock.take(), [], r.device == "cuda"
    with contextlib.suppress(EngineLeft):  # then nobody knows how long they worked
        busy = ask(r.engines, r.cfg.engine_timeout, "take_busy")
    step, idle, work = (
        sum(spans.values()),
        spans.get("time/generate", 0.0),
        float(np.mean(busy or [0.0])),
    )
    peak = (
        torch.cuda.max_memory_allocated() / 1e9
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    )
    found = {
        "time/step": step,
        "time/trainer_idle": idle,
        "time/engine_idle": step - work,
        "memory/peak_gb": peak,
    }
    found |= {
        "perf/tokens_per_second": tokens / step,
        "perf/overlap": max(work, spans.get("time/train", 0.0)) / step,
    }
    return spans | found


def tell(r: Run, log: Log, metrics: dict[str, float], batch: dict, segments: list) -> None:
    """The line of a step, every now and then one of its rollouts, and the first failure of one."""
    metrics |= times(r, metrics["tokens/trained"] + metrics["tokens/context"])
    if r.cfg.estimator == "sft":  # nothing was sampled
        unknown = "reward", "gap", "lag", "is", "advantage"
        metrics = {k: v for k, v in metrics.items() if k.split("/")[0] not in unknown}
    log.write(metrics)
    if segments and r.cfg.show_every and (metrics["step"] - 1) % r.cfg.show_every == 0:
        show(r.console, r.chat, segments[0])
    if batch["first_error"] and not log.shown_error:
        log.shown_error = True
        r.console.print(
            f"a rollout failed; the first traceback:\n{batch['first_error']}", style="red"
        )


def run(cfg: Config, rows: list[dict] | None) -> None:
    """Everything after the inputs were checked, on every rank; rank 0 alone has the data, the engines and the console."""
    where = newest(cfg)
    if cfg.kl_target:
        cfg.kl_coef = where["kl_coef"]
    r = start(cfg, rows, where)
    cfg, version, rank, policy = r.cfg, where["version"], dist.get_rank(), r.learners["policy"]
    saved, batch = where["step"] if cfg.resume else -1, None
    prove(r, version)
    listen(r)
    log, best = Log(cfg, r.console, where["step"]) if rank == 0 else None, where["best"]
    if cfg.eval_at_start or cfg.eval_only:
        # of the start of a fresh run there is no checkpoint, which could be the best
        found = evaluate(r, version, where["step"], best if cfg.resume else {})
        r.clock.mark("time/eval")
        if rank == 0:
            log.write({"step": where["step"], "version": version} | found | times(r, 0))

    for step in range(where["step"], 0 if cfg.eval_only else cfg.steps):
        batch = awaited(r, version, "next_batch")
        if batch in (None, "stop"):
            r.console.print("stopped" if batch else "the data has ended")
            break
        r.clock.mark("time/generate")
        deal(cfg, batch, dist.get_world_size())

        # the same tokens and experts that the engines saw; identity, versions and experts are checked before anything is learnt
        meter, lr = Meter(r.seen), policy.scheduler.get_last_lr()[0]
        try:
            parts, segments = fetch(r, batch, version if r.refit else batch["version"], meter)
            version += update(r, batch, parts, meter, step >= cfg.critic_warmup_steps) > 0
            learnt = meter.reduce(r.control)
            check_mass(learnt)
        except InvariantError as e:
            kept = ray.get(r.rollouts.save.remote(f"stopped-{step + 1}"))
            raise InvariantError(
                f"{e}\nThe batch is in {kept}; --train_from its folder runs it again"
            ) from e
        if cfg.kl_target:
            rollouts = len(batch["rollouts"])
            cfg.kl_coef = loss.adapt_kl(
                cfg.kl_coef, learnt["kl/ref"], cfg.kl_target, cfg.kl_horizon, rollouts
            )
        r.clock.mark("time/train")

        refit_metrics = molt(r, version)
        r.clock.mark("time/refit")
        if rank == 0:
            ray.get(r.rollouts.refitted.remote(version))

        metrics = {"step": step + 1, "version": version, "optim/lr": lr, "kl/coef": cfg.kl_coef}
        metrics |= batch_metrics(batch) | learnt | refit_metrics
        if evaluated := cfg.eval_every and (step + 1) % cfg.eval_every == 0:
            metrics |= evaluate(r, version, step + 1, best)
            r.clock.mark("time/eval")
        if (
            rank == 0
        ):  # before the checkpoint: a resumed run cuts the metrics at its checkpoint, and never lacks a line
            tell(r, log, metrics, batch, segments)
        where = {"step": step + 1, "version": version, "kl_coef": cfg.kl_coef, "best": best}
        if (
            evaluated
            and best.get("version") == version
            or cfg.save_every
            and (step + 1) % cfg.save_every == 0
        ):
            save_checkpoint(cfg, r.learners, where, r.rollouts)
            saved = step + 1
            r.clock.mark("time/save")

    if rank == 0:
        log.close()
    if not cfg.eval_only and saved != where["step"]:
        save_checkpoint(cfg, r.learners, where, r.rollouts)
    if not cfg.eval_only and batch != "stop":
        r.console.print(
            f"checkpoint and model are in {cfg.out}; the model alone is {export(cfg, policy.replay.model)}"
        )
    dist.barrier()
    dist.destroy_process_group()
    ray.shutdown()
    if rank == 0:
        shutil.rmtree(r.scratch, ignore_errors=True)
    if batch == "stop":
        raise KeyboardInterrupt


ENDS = {  # what ends a run before its time: the exit code, and what is said; the first that fits
    BadInput: (2, "{cause}"),
    InvariantError: (3, "an invariant failed. {e}"),
    NotWritten: (1, "{e}"),
    ray.exceptions.RayError: (
        1,
        "an actor failed (its log: {logs}); --resume goes on from the last checkpoint\n{e}",
    ),
    KeyboardInterrupt: (
        1,
        "stopped by a signal; if there is a checkpoint, --resume --out {out} goes on from it",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Parse, check, run; returns the exit code."""
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update(alone | os.environ)  # without torchrun: one rank
    rank = int(os.environ["RANK"])
    try:
        cfg = parse(argv, rank)
        validate(cfg, int(os.environ["WORLD_SIZE"]))
        if (
            "PYTHONWARNINGS" not in os.environ
        ):  # libraries warn about much that is meant to be so; set it to see all
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
        rows = check_inputs(cfg) if rank == 0 else None
    except ValueError as e:
        if rank == 0:
            print(f"instar: {e}", file=sys.stderr)
        return 2
    try:
        run(cfg, rows)
    except tuple(ENDS) as e:
        code, told = next(end for kind, end in ENDS.items() if isinstance(e, kind))
        logs = f"{'/tmp/ray' if cfg.ray_address else tempfile.gettempdir()}/session_latest/logs"
        print(
            "instar: " + told.format(e=e, cause=getattr(e, "cause", e), logs=logs, out=cfg.out),
            file=sys.stderr,
        )
        return code
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
