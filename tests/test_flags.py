"""The tables of AGENTS.md that trace every flag are true, and say so when they are not."""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from typing import get_args

import flags
import pytest

from estimator import ESTIMATORS
from loss import LOSSES
from train import Config

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
