"""Real runs whose processes are killed: what comes back, what ends the run with its cause, and what stays behind, nothing."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import faults
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_run import QUICK, finish, metrics, start

from agent import read_batch

pytestmark = pytest.mark.e2e
FLAGS = [
    *QUICK,
    "--agent",
    "tests/talker.py",
    "--max_gap",
    1e-5,
    "--max_tokens",
    120,
    "--max_context",
    512,
]
FLAGS += ["--save_rollouts", "--save_every", 1, "--keep", 99]


def faulty(out, tiny, plan, *flags, ranks=0):
    """A run with a plan of kills: (exit code, text, its notes)."""
    how = [*FLAGS, "--model", f"{tiny}/dense", "--out", out, *flags]
    code, text = finish(start(plan, *how, ranks=ranks, script=("tests/faults.py",)), timeout=420)
    assert (out / "faults.jsonl").exists(), text[-3000:]
    notes = [json.loads(line) for line in open(out / "faults.jsonl")]
    return code, text, notes


def recovery(notes, who, when):
    """Seconds from a kill to the end of a step whose batch was played after it."""
    (killed,) = [n["time"] for n in notes if n.get("who") == who and n["when"] == when]
    ends = [n["time"] for n in notes if "step" in n and n["time"] > killed]
    return ends[when in ("idle", "refit")] - killed  # then one is at hand


def check_nothing_lost(out, steps):
    """Every prompt was trained once, in its order, from whole groups, on tokens of the version that they are stamped with."""
    rows = metrics(out)
    assert [r["step"] for r in rows] == list(range(1, steps + 1))
    assert all(
        r["rollouts/finished"] == 16 and r["rollouts/failed"] == 0 and r["groups/lost"] == 0
        for r in rows
    )
    assert max(r["gap/on_version_max"] for r in rows) <= 1e-5 and all(
        r["lag/max"] == 0 for r in rows
    )
    batches = [read_batch(path)[0] for path in sorted(out.glob("rollouts/*.jsonl"))]
    found = [sorted({r["group"] for r in b["rollouts"]}) for b in batches]
    assert found == [list(range(i, i + 4)) for i in range(0, 4 * steps, 4)]
    return rows


@pytest.mark.parametrize(
    "plan",
    [
        "kill:core:decode:2,kill:runner:decode:3",
        pytest.param(
            "kill:core:decode:2,kill:engine:recovery:1,kill:runner:decode:3", marks=pytest.mark.slow
        ),
        pytest.param(
            "stop:core:decode:2,stop:core:refit:4,kill:runner:decode:5", marks=pytest.mark.slow
        ),
    ],
)
def test_an_engine_that_hangs_is_ended_and_what_died_comes_back_and_nothing_is_lost(
    tmp_path, tiny, traces, plan
):
    limits, steps = ["--engine_timeout", 20, "--refit_timeout", 20], int(plan[-1])
    code, text, notes = faulty(tmp_path / "run", tiny, plan, "--steps", steps, *limits)
    assert code == 0, text[-3000:]
    rows = check_nothing_lost(tmp_path / "run", steps)
    assert (
        rows[1]["requests/rerun"] > 0 and rows[-1]["groups/rerun"] == 4
    )  # each of the batch, once
    assert "an engine has died and come back" in text
    assert ("a refit begins anew (--refit_timeout 20.0)" in text) == (
        "refit" in plan or "recovery" in plan
    )
    for _, who, when, _ in (fault.split(":") for fault in plan.split(",")):
        print(
            f"{who} {when}: {recovery(notes, who, when):.1f} s to the end of a step played after it"
        )


@pytest.mark.slow
def test_a_tensor_parallel_worker_that_dies_comes_back_with_its_engine(tmp_path, tiny, traces):
    plan = "kill:worker:decode:2,kill:worker:refit:4"
    code, text, notes = faulty(tmp_path / "run", tiny, plan, "--engine_tp", 2, "--steps", 4)
    assert code == 0, text[-3000:]
    rows = check_nothing_lost(tmp_path / "run", 4)
    assert rows[1]["requests/rerun"] > 0 and "an engine has died and come back" in text
    for when in ("decode", "refit"):
        print(
            f"worker {when}: {recovery(notes, 'worker', when):.1f} s to the end of a step played after it"
        )


MOMENTS = ("idle", "decode", "refit", "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("who", ["engine", "core", "runner"])
def test_what_comes_back_does_so_at_every_moment(tmp_path, tiny, traces, who):
    plan = ",".join(
        f"kill:{who}:{when}:{i}" for when, i in zip(MOMENTS, (2, 4, 7, 8))
    )  # of steps 2, 4, 6, 8
    code, text, notes = faulty(tmp_path / "run", tiny, plan, "--steps", 9)
    assert code == 0, text[-3000:]
    rows = check_nothing_lost(tmp_path / "run", 9)
    again = {k: int(sum(r.get(k, 0) for r in rows)) for k in ("requests/rerun", "groups/rerun")}
    assert again["groups/rerun" if who == "runner" else "requests/rerun"] > 0
    for when in MOMENTS:
        print(
            f"{who} {when}: {recovery(notes, who, when):.1f} s to the end of a step played after it, {again} in all"
        )


@pytest.mark.slow
@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("who,ranks", [("pool", 0), ("rank1", 2), ("rank0", 2)])
def test_what_cannot_come_back_ends_the_run_within_a_minute_and_resume_loses_nothing(
    tmp_path, tiny, traces, who, ranks, when
):
    out, flags = tmp_path / "run", ["--engines", 1, "--steps", 4]
    code, text, notes = faulty(out, tiny, f"kill:{who}:{when}:3", *flags, ranks=ranks)
    seconds = time.time() - notes[-1]["time"]
    cause = "Rollouts" if who == "pool" else "Signal 9 (SIGKILL)"
    assert code == 1 and cause in text and notes[-1]["when"] == when and seconds < 60, text[-3000:]
    done, begun = len(metrics(out)), time.time()
    code, text, notes = faulty(out, tiny, "", *flags, "--resume", ranks=ranks)
    assert code == 0, text[-3000:]
    check_nothing_lost(out, 4)
    back = next(
        n["time"]
        for n in notes[::-1]
        if n.get("step") == min(n["step"] for n in notes if n["time"] > begun)
    )
    print(
        f"{who} {when}: ended in {seconds:.0f} s, {done} steps done, {back - begun:.0f} s to the next one's end"
    )


@pytest.fixture(scope="module")
def learner(tmp_path_factory, tiny):
    """Flags of a run without engines that has a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("sft")
    rows = [{"prompt": f"{i}+1?", "label": str(i + 1)} for i in range(10)]
    (folder / "demos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = [
        "--estimator",
        "sft",
        "--model",
        f"{tiny}/dense",
        "--data",
        folder / "demos.jsonl",
        "--prompts",
        4,
    ]
    how += ["--schedule", "constant"]
    code, text = finish(start(*how, "--out", folder / "run", "--steps", 2))
    assert code == 0, text[-3000:]
    return [*how, "--resume", "--steps", 4], folder / "run"


def test_a_signal_ends_a_run_with_a_checkpoint_that_it_goes_on_from(tmp_path, learner, traces):
    how = [x for x in learner[0] if x != "--resume"]
    how += ["--max_lag", 1, "--save_rollouts", "--out", tmp_path / "run"]
    out, process = tmp_path / "run", start(*how, "--steps", 9999)
    while len(metrics(out)) < 2:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    code, text = finish(process, timeout=60)
    done = len(metrics(out))
    assert (
        code == 1
        and "stopping: the step at hand ends" in text
        and "instar: stopped by a signal" in text
    ), text[-3000:]
    assert "Traceback" not in text and (out / f"checkpoint-{done:06d}" / "run.json").exists()
    code, text = finish(start(*how, "--resume", "--steps", done + 2))
    assert code == 0, text[-3000:]
    found = [
        [r["group"] for r in read_batch(path)[0]["rollouts"]]
        for path in sorted(out.glob("rollouts/*.jsonl"))
    ]
    assert [r["step"] for r in metrics(out)] == list(range(1, done + 3))
    assert found == [list(range(i, i + 4)) for i in range(0, 4 * (done + 2), 4)]


@pytest.mark.parametrize(
    "plan,flags,told",
    [
        ("full:rank0:checkpoint:2", [], "checkpoint-000004 was not written, older ones are whole"),
        pytest.param(
            "hang:rank0:checkpoint:2",
            ["--save_timeout", 4],
            "Timeout (0:00:04)!",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_that_hangs_or_finds_no_room_ends_the_run_and_the_last_one_is_whole(
    tmp_path, learner, traces, plan, flags, told
):
    how, first = learner
    out = shutil.copytree(first, tmp_path / "run")
    code, text = finish(
        start(plan, *how, "--out", out, *flags, script=("tests/faults.py",)), timeout=120
    )
    assert code == 1 and told in text, text[-3000:]
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-000002"]
    code, text = finish(start(*how, "--out", out))
    assert code == 0 and [r["step"] for r in metrics(out)] == [1, 2, 3, 4], text[-3000:]


@pytest.mark.parametrize("rounds", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(
    tmp_path, learner, traces, rounds
):
    """Its ledger, every batch, every loss and the weights; stale groups are in flight and in the checkpoints."""
    how = [str(x) for x in learner[0] if x != "--resume"]
    how[how.index("--steps") + 1] = str(12 * rounds)
    how += ["--max_lag", "2", "--save_rollouts", "--show_every", "0"]
    script = [sys.executable, "tests/rounds.py", str(rounds), str(tmp_path), *how]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120 + 30 * rounds)
    logs = "".join((tmp_path / f"{name}.log").read_text()[-1500:] for name in ("whole", "killed"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    print(done.stdout)
    places = int(re.search(r"from (\d+) steps", done.stdout)[1])
    assert places >= rounds / 2  # it was not killed at one place again and again

    def ledger(name):
        (newest,) = (tmp_path / name).glob(f"checkpoint-{12 * rounds:06d}/run.json")
        found = json.loads(newest.read_text())["ledger"]
        return found | {"finished": None, "queue": sorted(found["finished"] + found["queue"])}

    def batches(name):
        paths = sorted((tmp_path / name / "rollouts").glob("*.jsonl"))
        return [[r["group"] for r in read_batch(path)[0]["rollouts"]] for path in paths]

    def column(name, key):
        return [r[key] for r in metrics(tmp_path / name)]

    assert ledger("killed") == ledger("whole") and batches("killed") == batches("whole")
    assert batches("killed") == [list(range(i, i + 4)) for i in range(0, 48 * rounds, 4)]
    assert column("killed", "loss/policy") == pytest.approx(
        column("whole", "loss/policy"), rel=1e-6
    )
    one, other = (
        load_file(*(tmp_path / name / "model").glob("*.safetensors"))
        for name in ("killed", "whole")
    )
    assert all(np.array_equal(one[k], other[k]) for k in other) and set(one) == set(other)


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks(tmp_path, learner):
    how, first = learner
    out = shutil.copytree(first, tmp_path / "run")
    for ranks, steps in ((2, 4), (0, 6)):
        code, text = finish(start(*how, "--steps", steps, "--out", out, ranks=ranks))
        assert code == 0, text[-3000:]
    code, text = finish(
        start(*[x for x in how if x != "--resume"], "--steps", 6, "--out", tmp_path / "whole")
    )
    assert code == 0, text[-3000:]
    again, whole = metrics(out), metrics(tmp_path / "whole")
    assert [r["step"] for r in again] == [1, 2, 3, 4, 5, 6]
    for key in ("loss/policy", "optim/grad_norm"):
        assert [r[key] for r in again] == pytest.approx([r[key] for r in whole], rel=1e-5), key


@pytest.mark.slow
def test_half_an_hour_of_random_faults_leaves_memory_handles_and_objects_flat(
    tmp_path, tiny, traces
):
    """SOAK_MINUTES sets another time. A Runner dies every ten seconds or so, an engine or its core every 90."""
    out, minutes = tmp_path / "run", float(os.environ.get("SOAK_MINUTES", "30"))
    how = [
        *FLAGS[:-5],
        "--model",
        f"{tiny}/dense",
        "--out",
        out,
        "--max_lag",
        1,
        "--is_level",
        "token",
        "--engines",
        2,
    ]
    # slow learning: a policy that had collapsed to one letter (entropy 0.01) came to a probe gap of 1.3e-5
    how += [
        "--runners",
        2,
        "--save_every",
        20,
        "--engine_timeout",
        60,
        "--steps",
        100_000,
        "--lr",
        1e-4,
    ]
    killed, dice = Counter(), random.Random(0)

    def said() -> str:
        return (tmp_path / "log").read_text()[-3000:]

    # Ray tells of each death: a pipe that nobody reads would fill, and stop the run
    with open(tmp_path / "log", "w") as log:
        process = start(*how, script=("tests/soak.py",), stdout=log)
    while not (out / "soak.jsonl").exists():
        assert process.poll() is None, said()
        time.sleep(1)
    begun, last = time.time(), time.time()
    while time.time() - begun < 60 * minutes:
        time.sleep(dice.uniform(5, 15))
        assert process.poll() is None, said()
        assert time.time() - (out / "metrics.jsonl").stat().st_mtime < 300, said()
        who = "runner"
        if time.time() - last > 90:
            who, last = dice.choice(["engine", "core"]), time.time()
        with contextlib.suppress(LookupError, ProcessLookupError):  # it is being started
            os.kill(faults.find(who, process.pid), signal.SIGKILL)
            killed[who] += 1
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 1 and "instar: stopped by a signal" in said(), said()
    rows, looks = metrics(out), [json.loads(line) for line in open(out / "soak.jsonl")]
    again = {
        k: int(sum(r[k] for r in rows))
        for k in ("requests/rerun", "groups/rerun", "rollouts/failed")
    }
    print(f"{minutes:g} minutes, {len(rows)} steps, killed {dict(killed)}, {again}")
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1)) and max(
        r["lag/max"] for r in rows
    ) <= 1
    assert max(r["gap/on_version_max"] for r in rows) <= 1e-5 and again["rollouts/failed"] == 0
    late = [x for x in looks if x["time"] > begun + 20 * minutes]  # the last two thirds
    hours = [(x["time"] - begun) / 3600 for x in late]
    for who in set.intersection(*map(set, late)) - {
        "time"
    }:  # all that were not killed, Ray's own too
        for what in late[0][who]:
            values = [x[who][what] for x in late]
            slope, middle = np.polyfit(hours, values, 1)[0], float(np.median(values))
            print(f"{who} {what}: {middle:.0f}, {slope:+.1f} an hour")
            # Ray's log monitor keeps up to 200 files of workers open, dead ones too
            bounded = what == "handles" and who.startswith("log_monitor") and max(values) < 250
            assert slope <= max(0.1 * middle, 50) or bounded, (who, what, values)
