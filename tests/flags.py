"""Every flag of Config, traced: flag -> functions that read it -> tensor -> metric -> test, as a table in AGENTS.md.

python tests/flags.py            # writes the table between its two markers
python tests/flags.py --check    # says whether it is up to date; tests/test_flags.py looks at every cell of it

The functions and the tests are found in the code. HAND says the rest of each flag: what it reaches; the metrics that
show it, "-" if none does; where the test that would be found tells little, a part of a better one's name, "-" for none.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ["agent", "server", "rollout", "replay", "estimator", "loss", "refit", "train"]
BEGIN, END = "<!-- every flag: python tests/flags.py -->", "<!-- end of every flag -->"
# they read a flag to check it or to make it whole, and are named only where nobody else reads it
CHECKS = re.compile(
    r"train:(parse|validate|refuse_\w+|check_inputs|check_limits|Config.__post_init__)$"
    r"|rollout:check_data$|replay:check_model$"
)
SETS = re.compile(
    r"(Config|SimpleNamespace|replace|dict|config|pool|episode|check|update|Client|serving)$"
)

HAND = {
    "agent": ("the class that plays each rollout", "reward/mean", "an_agent_file_may_import"),
    "agent_cmd": (
        "a `CommandAgent`, one process for each rollout",
        "reward/mean",
        "a_command_gets_its_prompt",
    ),
    "reward": (
        "`Result.reward` of a command or of one reply",
        "reward/mean",
        "a_reward_file_alone_grades",
    ),
    "data": ("`Rollouts.rows`, a list of dicts", "-", "rows_come_from_jsonl_and_parquet"),
    "prompt_key": ("`Task.messages`", "-", "the_columns_of_prompt_and_label"),
    "label_key": ("`Task.label`", "-"),
    "shuffle": ("the row of each group", "-"),
    "data_epochs": ("where `Rollouts.fill` ends", "step"),
    "max_turns": ("replies of a rollout, `Segment.replies`", "rollouts/turns, rollouts/truncated"),
    "episode_timeout": (
        "the time of one episode",
        "rollouts/failed, rollouts/seconds_max",
        "faults_of_an_agent_cost",
    ),
    "max_lag": ("`Rollouts.capacity`, `Group.version`", "lag/max, lag/mean", "no_lag_or_capacity"),
    "partial": (
        "`Engine.spans`, the versions of a reply's tokens [N]",
        "lag/mixed_rollouts",
        "every_token_is_stamped",
    ),
    "stale_kv": (
        "the KV cache of an interrupted request",
        "refit/rebuilt_tokens",
        "a_kept_cache_is_off_version",
    ),
    "dynamic_sampling": ("which groups a batch has", "groups/filtered", "groups_whose_rewards"),
    "max_filtered": ("which groups a batch has", "groups/filtered", "groups_whose_rewards"),
    "oversample": ("`Rollouts.capacity`", "lag/dropped", "the_slowest_are_not"),
    "save_rollouts": ("rows and rollouts of each batch, in files", "-", "batches_from_files"),
    "train_from": ("`Rollouts.batch`, from files", "loss/policy", "batches_from_files"),
    "eval_data": ("`Rollouts.evaluate`'s rows", "eval/reward", "pass_at_k_is_unbiased_over"),
    "eval_every": ("when `train.evaluate` runs", "eval/pass@1", "would_say_nothing"),
    "eval_at_start": ("when `train.evaluate` runs", "eval/pass@1", "an_evaluation_alone"),
    "eval_only": ("when `train.evaluate` runs", "eval/pass@1", "an_evaluation_alone"),
    "eval_samples": ("rollouts of each row", "eval/pass@1", "pass_at_k_is_unbiased_over"),
    "eval_temperature": ("logits [V] / temperature", "eval/pass@1", "pass_at_k_is_unbiased_over"),
    "eval_solved": ("which rewards count as solved", "eval/pass@1", "solved_from_a_threshold"),
    "max_failed": ("`Rollouts.counts` of the batch", "rollouts/failed", "with_too_many_failures"),
    "model": (
        "weights and tokenizer of trainer and engines",
        "gap/on_version_max",
        "trainer_and_engine_agree",
    ),
    "engines": ("the list of `Engine` actors", "time/generate"),
    "engine_tp": (
        "workers of an engine, each a rank of the refit group",
        "refit/gb_per_s",
        "every_worker_of_tensor",
    ),
    "engine_memory": ("vLLM's `gpu_memory_utilization`, on a GPU", "-"),
    "engine_args": ("any of vLLM's `AsyncEngineArgs`", "-", "an_engine_is_made_of_its_flags"),
    "runners": ("the list of `Runner` actors", "time/generate"),
    "tool_parser": ("calls of a reply, from `parse`", "-", "the_template_chooses_a_parser"),
    "reasoning_parser": (
        "reasoning of a reply, from `parse`",
        "-",
        "the_template_chooses_a_parser",
    ),
    "server_host": ("`Server.host`", "-"),
    "constrained": ("the reply's grammar; its mask [T] is then False", "server/constrained"),
    "preserve": (
        "rows of a rollout where a template strips reasoning",
        "server/rewritten, segments/count",
    ),
    "linger": (
        "seconds until a reply that nobody waits for is stopped",
        "-",
        "a_client_that_never_returns",
    ),
    "prompts": ("groups of a batch", "rollouts/finished", "every_prompt_is_trained_once_a_pass"),
    "samples": ("rollouts of a group; R is --prompts times this", "rollouts/finished"),
    "temperature": (
        "logits of engine and `Head` [n, V]",
        "gap/on_version_max",
        "another_temperature_in_the_trainer",
    ),
    "max_tokens": ("tokens of a reply", "tokens/reply_max", "the_output_cap_is_clamped"),
    "max_context": (
        "T of a row; vLLM's `max_model_len`",
        "rollouts/truncated",
        "limits_on_turns_and_context",
    ),
    "engine_timeout": (
        "`refit.answers`: seconds until an engine is ended",
        "requests/rerun",
        "an_engine_that_hangs_is_ended",
    ),
    "ray_address": ("the cluster of `ray.init`; the host of the refit group", "-"),
    "tokens_per_microbatch": (
        "B × T of a micro-batch",
        "memory/peak_gb",
        "every_row_is_dealt_once_within",
    ),
    "replay_experts": (
        "`MicroBatch.experts` [B, T, L, K], then `Router.target` [B × T, K]",
        "experts/replayed, experts/agreement, experts/missing",
        "experts_are_shifted_by_one",
    ),
    "max_gap": (
        "the limits of `bounds`",
        "gap/on_version_max, gap/on_version_mean, gap/on_version_k3",
    ),
    "estimator": (
        "advantages [B, T]",
        "advantage/mean, advantage/abs",
        "test_an_estimator_is_its_formula",
    ),
    "gamma": ("returns and deltas of action tokens [B, T]", "advantage/abs"),
    "lam": ("the sum over later deltas [B, T]", "advantage/abs", "worked_values_of_gae"),
    "whiten": ("advantages [B, T], moments over all ranks", "advantage/abs", "whitening_per_rank"),
    "reward_clip": ("rewards [R] before the credit", "advantage/abs"),
    "reward_weights": ("named rewards [R, K]", "reward/*", "test_an_estimator_is_its_formula"),
    "overlong": (
        "penalty [R], added to the rewards",
        "reward/overlong",
        "rewards_are_clipped_and_shaped",
    ),
    "bootstrap_truncated": (
        "delta of a row's last action token [B]",
        "advantage/abs",
        "bootstrap_of_rollouts",
    ),
    "kl_coef": (
        "rewards of action tokens, or losses [B, T]",
        "kl/ref, kl/loss",
        "a_kl_is_in_the_reward",
    ),
    "kl_type": ("KL of each token [B, T]", "kl/loss"),
    "kl_loss": ("losses [B, T]; then no KL in the rewards", "kl/loss", "a_kl_is_in_the_reward"),
    "kl_target": ("`cfg.kl_coef` of the next step", "kl/ref", "the_adaptive_coefficient"),
    "kl_horizon": ("`cfg.kl_coef` of the next step", "kl/ref", "the_adaptive_coefficient"),
    "loss": ("losses [B, T]", "loss/policy", "test_a_loss_is_its_formula"),
    "clip_low": (
        "the ratio's lower bound [B, T]",
        "loss/clip_share, loss/ratio_max",
        "a_clipped_token_has",
    ),
    "clip_high": (
        "the ratio's upper bound [B, T]",
        "loss/clip_share, loss/ratio_max",
        "clip_high_that_is_ignored",
    ),
    "sapo_tau": ("tau [B, T] of the gate of `sapo`", "loss/policy"),
    "dppo_delta": ("dropped tokens, bool [B, T]", "loss/clip_share", "dppo_against_the_old"),
    "entropy_coef": ("losses [B, T]; gives the entropy [B, T] a gradient", "loss/entropy"),
    "balance_coef": (
        "`MicroBatch.load` [routers, E]; gates' probabilities [B, T, E]",
        "loss/balance",
        "the_balance_of_a_step",
    ),
    "value_clip": ("the critic's losses [B, T]", "value/clip_share"),
    "dual_clip": (
        "losses [B, T] of negative advantages",
        "loss/clip_share",
        "dual_clip_on_positive",
    ),
    "is_level": (
        "`weights` [B, T]",
        "is/weight_mean, is/rejected",
        "test_correction_is_its_formula",
    ),
    "is_mode": (
        "`weights` [B, T]",
        "is/weight_mean, is/rejected",
        "test_correction_is_its_formula",
    ),
    "is_band": ("`weights` [B, T]", "is/weight_mean, is/rejected", "the_band_is_inclusive"),
    "is_denominator": ("tokens of each rollout [R], then the denominator", "loss/mass"),
    "loss_agg": (
        "weight of a rollout's tokens [R]; the denominator",
        "loss/mass",
        "worked_values_of_the_aggregations",
    ),
    "loss_length": ("the denominator", "loss/policy", "the_denominator_of_a_step"),
    "refit_bucket_mb": (
        "a bucket, uint8 [n]",
        "refit/seconds, refit/gb_per_s",
        "buckets_keep_the_order",
    ),
    "refit_timeout": (
        "`refit.answers` and the refit group's collectives",
        "refit/seconds",
        "an_engine_that_hangs_is_ended",
    ),
    "ref_model": ("`ref_logprobs` [B, T]", "kl/ref"),
    "critic_model": (
        "`values` [B, T]",
        "value/explained_variance",
        "the_critic_learns_at_its_own_rate",
    ),
    "critic_lr": ("the critic's AdamW", "value/error"),
    "critic_warmup_steps": ("first steps without an update of the policy", "version"),
    "old": ("the ratio's old log-probs [B, T]", "loss/ratio_max", "old_log_probs_are_the_trainer"),
    "steps": ("turns of the loop; the end of the schedule", "step"),
    "epochs": ("optimizer steps of a batch", "time/train", "a_batch_has_as_many_optimizer_steps"),
    "minibatches": ("parts of a batch, an optimizer step each", "time/train"),
    "lr": ("the policy's AdamW", "optim/lr"),
    "schedule": ("the factor of both learning rates", "optim/lr"),
    "warmup": ("the factor of both learning rates", "optim/lr"),
    "weight_decay": ("parameters, in AdamW", "-"),
    "betas": ("AdamW's moments of each parameter", "-"),
    "optimizer": (
        "the optimizer's step of the layers' matrices [out, in]",
        "optim/grad_norm",
        "muon_has",
    ),
    "lora_rank": (
        "`lora_A` [rank, in], `lora_B` [out, rank] of each projection",
        "optim/grad_norm",
    ),
    "lora_alpha": ("the scale of `lora_B @ lora_A`", "optim/grad_norm"),
    "checkpoint_activations": (
        "activations [B, T, H] of each layer, computed again in backward",
        "memory/peak_gb",
    ),
    "offload": (
        "weights, gradients and moments in CPU memory",
        "memory/peak_gb",
        "weights_that_stay_in_cpu",
    ),
    "max_grad_norm": ("gradients of all parameters", "optim/grad_norm, optim/skipped"),
    "dtype": (
        "weights of forward, engine and refit",
        "gap/on_version_max",
        "in_the_dtype_of_the_refit",
    ),
    "ep": ("the device mesh of the experts' weights", "loss/mass", "two_ranks_give_the_loss"),
    "seed": ("order of the rows, seeds of engines and tasks", "-"),
    "out": ("a folder", "-", "resuming_cuts_the_metrics"),
    "save_timeout": (
        "`refit.atomic`: seconds until the process ends",
        "time/save",
        "a_checkpoint_that_hangs",
    ),
    "save_every": ("checkpoints in --out", "time/save"),
    "keep": ("checkpoints in --out", "-", "as_many_checkpoints_as_asked"),
    "resume": (
        "step, version, ledger, KL coefficient of the newest checkpoint",
        "step, version",
        "a_killed_run_goes_on",
    ),
    "resume_data": ("`refit.compare`: whether other rows are refused", "-", "other_rows"),
    "show_every": ("a rollout on the console", "-", "-"),
    "wandb": ("a run of Weights & Biases", "-"),
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def strings(node: ast.AST) -> set[str]:
    return {
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


@cache
def fields() -> dict[str, str]:
    """Flag -> its group in Config, in order."""
    config = next(
        n
        for n in tree(ROOT / "train.py").body
        if isinstance(n, ast.ClassDef) and n.name == "Config"
    )
    lines, found = (ROOT / "train.py").read_text().splitlines(), {}
    for at, n in ((n.lineno, n) for n in config.body if isinstance(n, ast.AnnAssign)):
        heads = [
            line.split()[-1] for line in lines[config.lineno : at] if line.startswith("    # ----")
        ]
        found[n.target.id] = heads[-1]
    return found


@cache
def functions() -> dict[str, ast.AST]:
    """module:function or module:Class.method -> its syntax tree; what is nested in a function belongs to it."""
    found, kinds = {}, ast.FunctionDef | ast.AsyncFunctionDef
    for module in MODULES:
        for n in tree(ROOT / f"{module}.py").body:
            methods = n.body if isinstance(n, ast.ClassDef) else []
            found |= {f"{module}:{n.name}": n} if isinstance(n, kinds) else {}
            found |= {f"{module}:{n.name}.{f.name}": f for f in methods if isinstance(f, kinds)}
    return found


@cache
def reads(name: str) -> set[str]:
    """The flags that a function reads: cfg.flag, self.cfg.flag, in Config self.flag, names in a list for getattr."""
    nodes, owners = (
        list(ast.walk(functions()[name])),
        {"cfg", "self"} if ":Config." in name else {"cfg"},
    )
    loads = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    found = {
        n.attr for n in loads if getattr(n.value, "id", getattr(n.value, "attr", "")) in owners
    }
    if any(isinstance(n, ast.Call) and ast.unparse(n).startswith("getattr(cfg, ") for n in nodes):
        found |= {
            w
            for text in strings(functions()[name])
            for w in text.split()
            if set(text.split()) <= set(fields())
        }
    return found & set(fields())


def readers(flag: str) -> list[str]:
    names = [name for name in functions() if flag in reads(name)]
    return [name for name in names if not CHECKS.match(name)] or names


@cache
def tests() -> dict[str, set[str]]:
    """file::test -> the flags that it sets, by --flag or by a keyword of a call that makes a Config."""
    found = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        lines = path.read_text().splitlines()
        for n in ast.walk(tree(path)):
            if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_"):
                first = min([n.lineno, *(d.lineno for d in n.decorator_list)])
                calls = [
                    c
                    for c in ast.walk(n)
                    if isinstance(c, ast.Call) and SETS.search(ast.unparse(c.func))
                ]
                words = re.findall(r"--(\w+)", "\n".join(lines[first - 1 : n.end_lineno]))
                found[f"{path.name}::{n.name}"] = set(words) | {
                    k.arg for c in calls for k in c.keywords
                }
    return found


def test_of(flag: str, part: str = "") -> str:
    """The test with `part` in its name; else of those that set the flag the one that sets the fewest others."""
    if part == "-":
        return part
    if part:
        named = [name for name in tests() if part in name]
        if len(named) != 1:
            raise SystemExit(
                f"tests/flags.py: --{flag}: {part!r} has to be in the name of one test, and is in {named}"
            )
        return named[0]

    def rank(name: str):
        engines = "mark.e2e" in (ROOT / "tests" / name.split("::")[0]).read_text()
        return "refused" in name, engines, len(tests()[name])

    return min((name for name, flags in tests().items() if flag in flags), key=rank, default="-")


@cache
def table() -> str:
    """What belongs between the two markers. Raises SystemExit with the name of a flag that has no entry in HAND."""
    out, group = [], ""
    for flag, module in fields().items():
        if flag not in HAND:
            raise SystemExit(
                f"tests/flags.py: --{flag} has no entry in HAND: add what it reaches and what metric shows it"
            )
        if module != group:
            out += [
                "",
                f"`{module}`",
                "",
                "| flag | read by | reaches | metric | test |",
                "|---|---|---|---|---|",
            ]
        group, (reaches, metric, *part) = module, HAND[flag]
        cells = [readers(flag), metric.split(", "), [test_of(flag, *part)]]
        by, metric, test = (
            ", ".join(x if x == "-" else f"`{x}`" for x in names) for names in cells
        )
        out.append(f"| `{flag}` | {by} | {reaches} | {metric} | {test} |")
    return "\n".join(out)


def split() -> list[str]:
    """AGENTS.md up to the table, the table, what follows it."""
    before, rest = (ROOT / "AGENTS.md").read_text().split(BEGIN)
    return [before, *rest.split(END)]


if __name__ == "__main__":
    before, there, after = split()
    if "--check" in sys.argv:
        sys.exit(
            None
            if there.strip() == table().strip()
            else "AGENTS.md is out of date: run python tests/flags.py"
        )
    (ROOT / "AGENTS.md").write_text(f"{before}{BEGIN}\n{table()}\n\n{END}{after}")
