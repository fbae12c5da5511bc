"""What --resume goes on from: flags, data, damaged files, another run in the folder, and files that would execute code."""

import dataclasses
import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from test_replay import segment

import agent
import refit
import replay
import train
from agent import BadInput, Result, read_batch, write_batch
from rollout import Group, Rollout, Rollouts
from train import Config

HERE = Path(__file__).parent
FLAGS = {field.name: field for field in dataclasses.fields(Config)}


def made(cfg: Config, weights="w", **content) -> dict:
    """As `refit.made_with` gives it, without looking at files."""
    flags = json.loads(json.dumps(vars(cfg)))
    return {"flags": flags, "content": content | {"weights": weights}}


def learners(cfg: Config, weight: float = 0.0) -> dict:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, weight)
    fields = SimpleNamespace(model=model), None, *replay.build_optimizer(cfg, model)
    return {"policy": train.Learner(*fields)}


def pool(**flags) -> Rollouts:
    """A pool amid a run: groups 0 to 3 were trained, 4 and 5 have finished, 6 is running, 7 was dropped and waits."""
    found = Rollouts(Config(prompts=4, **flags), [{"prompt": "p"}] * 20, [], 1)
    found.version, found.position, found.batches = 1, 8, 1
    found.ended["lost"].append(2)
    found.queue.append(Group(7, 1))
    found.groups[6] = Group(6, 0, 1)
    for at in (4, 5):
        rows = [segment(6 + i, [(2, 4)], seed=at) for i in range(2)]
        outs = [
            Rollout(at, 2 * at, Result(0.5, info={"calls": 1.0}), replies=2, seconds=0.25),
            Rollout(at, 2 * at + 1, Result(), counts={"server/requests": 3}),
        ]
        outs[0].rows = [found.keep(s) for s in rows]
        found.groups[at] = Group(at, 1, 1, outs)
    return found


def actor(of: Rollouts):
    return SimpleNamespace(snapshot=SimpleNamespace(remote=of.snapshot))


@pytest.fixture
def out(tmp_path, process_group, monkeypatch):
    """A run's folder with checkpoints of steps 2 and 4."""
    monkeypatch.setattr(refit.ray, "get", lambda found: found)
    cfg = Config(out=str(tmp_path / "run"))
    for step in (2, 4):
        where = {"step": step, "version": step, "kl_coef": 0.5, "best": {}}
        where["made_with"] = made(cfg, data="rows", model="model")
        refit.save_checkpoint(cfg, learners(cfg, float(step)), where, actor(pool()))
    return tmp_path / "run"


def resume(out, content=(("data", "rows"), ("model", "model")), **flags) -> tuple[dict, str]:
    """(where the run goes on, what it prints), or BadInput."""
    cfg = Config(out=str(out), resume=True, **flags)
    console = Console(file=io.StringIO(), width=1000)
    found = refit.newest(cfg, made(cfg, **dict(content)), console)
    refit.load_checkpoint(found["folder"], learners(cfg))
    refit.pool_of(found)
    return found, console.file.getvalue()


# ---- flags


CLASSES = [*refit.REFUSED, *refit.ORDERED, *refit.PLAYED, *refit.UNTOLD]


def test_a_flag_is_in_one_class_or_is_told():
    assert len(set(CLASSES)) == len(CLASSES) and set(CLASSES) < set(FLAGS)


def another(name: str):
    """A value of a flag that is not its default, which `compare` need not be able to run with."""
    value, kind = getattr(Config(), name), FLAGS[name].type
    for choices in (kind, *get_args(kind)):  # the second one of Literal[...] | None
        if get_origin(choices) is Literal and isinstance(value, str):
            return next(choice for choice in get_args(choices) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (1, 2, 3)
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_another_value_of_a_flag_is_refused_or_told_or_of_no_consequence(name):
    cfg, value = Config(out="run", resume=True), another(name)
    if name == "estimator":
        value = "gae"
    old, new = made(cfg), made(cfg)
    new["flags"][name] = json.loads(json.dumps(value))
    told = f"--{name} {shown(old['flags'][name])} -> {shown(new['flags'][name])}"
    if name in refit.REFUSED or name in refit.ORDERED:
        with pytest.raises(BadInput, match=re.escape(told + ": ")):
            refit.compare(cfg, old, new)
    if name in refit.ORDERED and name != "train_from":
        cfg.resume_data = True
        assert refit.compare(cfg, old, new) == ({name: told}, True)
    if name in refit.PLAYED or name not in CLASSES:
        assert refit.compare(cfg, old, new) == ({name: told}, name in refit.PLAYED)
    if name in refit.UNTOLD:
        assert refit.compare(cfg, old, new) == ({}, False)


def shown(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value) or "''"


@pytest.mark.parametrize(
    "old,new,fits",
    [
        ("grpo", "rloo", True),
        ("opd", "grpo", True),
        ("gae", "grpo", False),
        ("grpo", "gae", False),
        ("sft", "grpo", False),
        ("grpo", "sft", False),
    ],
)
def test_an_estimator_may_change_where_no_critic_comes_or_goes_and_rollouts_stay_rollouts(
    old, new, fits
):
    cfg = Config(out="run", resume=True)
    was, now = made(cfg), made(cfg)
    was["flags"]["estimator"], now["flags"]["estimator"] = old, new
    if fits:
        assert refit.compare(cfg, was, now)[1]  # what was finished is played again
    else:
        with pytest.raises(BadInput, match=f"--estimator {old} -> {new}: it holds a critic"):
            refit.compare(cfg, was, now)


def test_other_files_of_train_from_go_on_when_asked_and_engines_never_take_their_place():
    cfg = Config(out="run", resume=True, resume_data=True)
    batches, other, none = (made(dataclasses.replace(cfg, train_from=x)) for x in ("a", "b", ""))
    assert refit.compare(cfg, batches, other) == ({"train_from": "--train_from a -> b"}, True)
    for was, now in ((batches, none), (none, batches)):
        with pytest.raises(BadInput, match="--train_from .*: the ledger counts files with it"):
            refit.compare(cfg, was, now)
    rows = made(dataclasses.replace(cfg, train_from="a"), data="x"), made(cfg, data="y")
    rows[1]["flags"]["train_from"] = "a"
    cfg.resume_data = False
    assert refit.compare(cfg, *rows) == ({}, False)  # nothing is drawn from --data


def test_an_evaluation_of_a_checkpoint_needs_its_model_and_not_its_data():
    cfg = Config(out="run", resume=True, eval_only=True)
    refit.compare(cfg, made(cfg, data="x", model="m"), made(cfg, data="y", model="m"))
    with pytest.raises(BadInput, match="--model"):
        refit.compare(cfg, made(cfg, model="m"), made(cfg, model="n"))


def test_a_flag_that_came_after_the_checkpoint_is_not_compared():
    cfg = Config(out="run", resume=True)
    was = made(cfg)
    del was["flags"]["lr"], was["flags"]["optimizer"]
    assert refit.compare(cfg, was, made(cfg)) == ({}, False)


def test_changed_flags_are_told_in_one_line_with_the_step_that_it_goes_on_from(out):
    found, told = resume(out, lr=5e-4, betas=(0.8, 0.95), agent="")
    assert told.splitlines() == [
        "changed since the checkpoint: --agent agent.py -> '', --lr 0.001 -> 0.0005, --betas 0.9 "
        "0.95 -> 0.8 0.95",
        "going on from checkpoint-000004, step 4",
    ]
    assert found["step"] == 4 and found["again"]
    found, told = resume(out, show_every=0)
    assert told == "going on from checkpoint-000004, step 4\n" and not found["again"]


@pytest.mark.parametrize("given,used", [(0.0, 0.5), (0.25, 0.25)])
def test_an_adapted_kl_coefficient_goes_on_unless_another_one_is_given(out, given, used):
    assert resume(out, kl_coef=given, ref_model="x" if given else "")[0]["kl_coef"] == used


def test_the_optimizer_s_flags_are_those_of_now_and_its_moments_those_of_the_checkpoint(
    tmp_path, process_group
):
    cfg = Config(out=str(tmp_path), steps=8)
    made = learners(cfg)["policy"]
    for _ in range(2):
        made.replay.model(torch.ones(1, 3)).sum().backward()
        made.optimizer.step()
        made.scheduler.step()
    refit.save_checkpoint(cfg, {"policy": made}, {"step": 2, "version": 2, "best": {}})
    (saved,) = refit.checkpoints(cfg.out)
    other = dataclasses.replace(cfg, lr=4e-4, betas=(0.5, 0.6), weight_decay=0.1, steps=4)
    for now, lr in ((cfg, 1e-3 * 6 / 8), (other, 4e-4 * 2 / 4)):
        refit.load_checkpoint(saved, found := learners(now))
        (group,) = found["policy"].optimizer.param_groups
        assert group["lr"] == pytest.approx(lr) == found["policy"].scheduler.get_last_lr()[0]
        assert group["betas"] == now.betas and group["weight_decay"] == now.weight_decay
        for p, q in zip(made.replay.model.parameters(), found["policy"].replay.model.parameters()):
            mine, its = made.optimizer.state[p], found["policy"].optimizer.state[q]
            assert torch.equal(p, q) and all(torch.equal(mine[k], its[k]) for k in mine)
        found["policy"].scheduler.step()
        assert group["lr"] < lr


# ---- what lies behind a flag


@pytest.fixture
def files(tmp_path, tiny):
    """A Config with a model and a critic in folders of their own."""
    model = shutil.copytree(f"{tiny}/dense", tmp_path / "model")
    return Config(model=str(model), data=str(tmp_path / "rows.jsonl"), out=str(tmp_path / "run"))


ROWS = [{"prompt": [{"role": "user", "content": f"{i}é\ud800"}], "label": i} for i in range(5)]


def test_data_and_models_are_the_same_by_content_wherever_they_lie(files, tmp_path):
    moved = shutil.copytree(files.model, tmp_path / "moved")
    other = dataclasses.replace(
        files, model=str(moved), critic_model=str(moved), data="moved.jsonl", resume=True
    )
    files.critic_model = files.model
    was, now = refit.made_with(files, ROWS), refit.made_with(other, json.loads(json.dumps(ROWS)))
    assert was["content"] == now["content"] and set(was["content"]) == {
        "data",
        "model",
        "weights",
        "critic_model",
    }
    changed, again = refit.compare(other, was, now)
    assert set(changed) == {"model", "critic_model", "data"} and not again


def change(path: Path, act) -> None:
    path.write_text(json.dumps(act(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    "file,act",
    [
        ("config.json", lambda c: c | {"rope_theta": 5e5, "rope_parameters": None}),
        ("config.json", lambda c: c | {"intermediate_size": c["intermediate_size"] + 8}),
        ("tokenizer.json", "vocabulary"),
        ("model.safetensors", "weights"),
    ],
)
def test_another_model_in_the_same_folder_is_refused(files, file, act):
    was, path = refit.made_with(files, ROWS), Path(files.model, file)
    if act == "vocabulary":
        tokenizer = json.loads(path.read_text())
        ids = tokenizer["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
        path.write_text(json.dumps(tokenizer))
    elif act == "weights":
        data = bytearray(path.read_bytes())
        data[-100:] = bytes(100)
        path.write_bytes(data)
    else:
        change(path, act)
    now = refit.made_with(files, ROWS)
    with pytest.raises(BadInput, match=r"--model .*/model: not the content that it had: "):
        refit.compare(files, was, now)


def test_where_a_model_s_weights_are_not_here_yet_its_name_decides(files):
    was = refit.made_with(files, ROWS)
    Path(files.model, "model.safetensors").unlink()
    assert refit.compare(files, was, refit.made_with(files, ROWS)) == ({}, False)
    other = dataclasses.replace(files, model=shutil.copytree(files.model, files.model + "-moved"))
    with pytest.raises(BadInput, match="--model .*model -> .*model-moved: "):
        refit.compare(other, was, refit.made_with(other, ROWS))


@pytest.mark.parametrize(
    "rows",
    [ROWS[:-1], ROWS[::-1], [*ROWS, {}], [*ROWS[:-1], ROWS[-1] | {"label": "4"}]],
)
def test_other_rows_are_refused_unless_they_are_asked_for(files, rows):
    was, now = refit.made_with(files, ROWS), refit.made_with(files, rows)
    with pytest.raises(
        BadInput, match="--data .*rows.jsonl: not the content that it had: .*resume_data"
    ):
        refit.compare(files, was, now)
    files.resume_data = True
    changed, again = refit.compare(files, was, now)
    assert list(changed) == ["data"] and again  # what had finished is played from the new rows


def test_resume_data_is_refused_of_a_run_that_begins():
    with pytest.raises(ValueError, match="--resume_data True: .*--resume"):
        train.validate(Config(resume_data=True))


# ---- the pool's part


def test_a_pool_goes_on_with_its_ledger_and_the_groups_that_had_finished(out):
    found, _ = resume(out)
    before, after = (
        pool(),
        Rollouts(Config(prompts=4), [{"prompt": "p"}] * 20, [], 1, refit.pool_of(found)),
    )
    for name in ("version", "position", "batches", "ended"):
        assert getattr(after, name) == getattr(before, name)
    assert [(g.id, g.tries) for g in after.queue] == [(6, 0), (7, 1)]
    assert sorted(after.groups) == [4, 5]
    for at in (4, 5):
        one, other = before.groups[at], after.groups[at]
        assert (one.tries, one.version) == (other.tries, other.version)
        for a, b in zip(one.rollouts, other.rollouts, strict=True):
            fields = "group_id", "rollout_id", "result", "replies", "seconds", "counts"
            assert all(getattr(a, name) == getattr(b, name) for name in fields)
            for r, s in zip(a.rows, b.rows, strict=True):
                assert (r["tokens"], r["trained"]) == (s["tokens"], s["trained"])
                (x,), (y,) = before.fetch([r["id"]]), after.fetch([s["id"]])
                for name in agent.PARTS:
                    if getattr(x, name) is not None:
                        assert np.array_equal(getattr(x, name), getattr(y, name))
                assert [tuple(reply) for reply in x.replies] == y.replies
    assert len(after.store) == 4 == after.next_row


def test_where_groups_would_be_played_otherwise_now_those_that_had_finished_start_again(out):
    found, _ = resume(out, temperature=0.5)
    after = Rollouts(Config(prompts=4), [{"prompt": "p"}] * 20, [], 1, refit.pool_of(found))
    assert [(g.id, g.tries) for g in after.queue] == [(6, 0), (7, 1), (4, 1), (5, 1)]
    assert not after.groups and not after.store and after.position == 8


# ---- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def nothing_in_it(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()


DAMAGES = {
    "__0_0.distcp": (cut, empty, flip, Path.unlink),
    "run.json": (cut, empty, flip, Path.unlink),
    "rollouts.jsonl": (cut, empty, flip, Path.unlink),
    "rollouts.safetensors": (cut, empty, flip, Path.unlink),
    ".metadata": (cut, empty, flip, Path.unlink),
    "manifest.json": (cut, empty, Path.unlink, nothing_in_it),
}


@pytest.mark.parametrize(
    "name,act", [(name, act) for name, acts in DAMAGES.items() for act in acts]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(out, name, act):
    newer = out / "checkpoint-000004"
    act(newer / name)
    found, told = resume(out)
    first, last = told.splitlines()
    assert first.startswith(f"a damaged checkpoint is passed over: {newer}/{name}: ")
    assert last == "going on from checkpoint-000002, step 2" and found["step"] == 2
    act(out / "checkpoint-000002" / name)
    with pytest.raises(BadInput) as e:
        resume(out)
    said = str(e.value).splitlines()
    assert said[0] == f"--resume: --out {out} has no whole checkpoint; name another"
    assert [line.split(": ")[0] for line in said[1:]] == [
        f"{out}/checkpoint-{step:06d}/{name}" for step in (4, 2)
    ]


def test_any_flipped_byte_of_any_file_is_noticed(out):
    for path in (out / "checkpoint-000004").iterdir():
        whole = path.read_bytes()
        for at in np.linspace(0, len(whole) - 1, 20).astype(int):
            data = bytearray(whole)
            data[at] ^= 0x20 if path.name == "manifest.json" else 1 << at % 8
            path.write_bytes(data)
            assert refit.damage(path.parent), (path.name, at)
        path.write_bytes(whole)
    assert refit.damage(path.parent) == ""


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", "3", '{"run.json": 3}', '{"run.json": ["a", 1]}', "[" * 100_000]
)
def test_a_manifest_that_says_nothing_is_damage(out, text):
    (out / "checkpoint-000004" / "manifest.json").write_text(text)
    assert resume(out)[0]["step"] == 2


def test_a_checkpoint_of_an_earlier_version_is_refused_as_it_would_have_to_be_executed(out):
    (out / "checkpoint-000004" / "rollouts.pt").write_bytes(b"")
    assert "rollouts.pt: a pickle of an earlier version" in resume(out)[1]


def test_only_folders_with_a_step_for_a_name_are_checkpoints_and_steps_are_numbers(tmp_path):
    for name in (
        "checkpoint-1000000",
        "checkpoint-999999",
        "checkpoint-000002 (copy)",
        "unfinished",
    ):
        (tmp_path / name).mkdir()
    names = [path.name for path in refit.checkpoints(str(tmp_path))]
    assert names == ["checkpoint-999999", "checkpoint-1000000"]


def test_a_damaged_newer_checkpoint_does_not_count_among_those_that_are_kept(out):
    (out / "checkpoint-000009").mkdir()
    cfg = Config(out=str(out), keep=2)
    where = {"step": 5, "version": 5, "best": {}}
    refit.save_checkpoint(cfg, learners(cfg), where, actor(pool()))
    assert [p.name for p in refit.checkpoints(out)] == [
        "checkpoint-000004",
        "checkpoint-000005",
        "checkpoint-000009",
    ]


RANKS = """
import sys
from types import SimpleNamespace
import torch.distributed as dist
from rich.console import Console
import refit
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
for out in sys.argv[3:]:
    cfg = SimpleNamespace(out=out, resume=True, kl_coef=0.0)
    try:
        print("step", refit.newest(cfg, None, Console(quiet=rank > 0))["step"])
    except refit.BadInput as e:
        print(e)
"""


def test_damage_that_one_rank_sees_is_known_to_all_of_them(out):
    """Each of two ranks looks at its half of the files."""
    for folder in refit.checkpoints(str(out)):
        where = json.loads((folder / "run.json").read_text())
        del where["made_with"]
        (folder / "run.json").write_text(json.dumps(where))
        sign(folder)
    newer = out / "checkpoint-000004"
    share = [
        bool(refit.damage(copy, rank, 2))
        for copy in (flipped(newer, "run.json"), flipped(newer, "__0_0.distcp"))
        for rank in (0, 1)
    ]
    assert share.count(True) == 2  # of each file one rank
    flip(newer / "__0_0.distcp")
    none = shutil.copytree(out, out.parent / "none")
    flip(none / "checkpoint-000002" / "__0_0.distcp")
    script = [sys.executable, "-c", RANKS]
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    folders = [str(path) for path in (out.parent / "store", out, none)]
    ranks = [subprocess.Popen([*script, str(rank), *folders], **how) for rank in (0, 1)]
    for process in ranks:
        text = process.communicate(timeout=120)[0]
        assert "step 2\n" in text and f"--out {none} has no whole checkpoint" in text, text


def flipped(folder: Path, name: str) -> Path:
    """A copy of a checkpoint with a flipped byte."""
    copy = shutil.copytree(folder, folder.parent / f"{name}-flipped")
    flip(copy / name)
    return copy


def sign(folder: Path) -> None:
    """Make the manifest fit, as whoever plants something would."""
    files = [p for p in folder.iterdir() if p.name != "manifest.json"]
    marks = {p.name: [p.stat().st_size, refit.digest_of(p)] for p in files}
    (folder / "manifest.json").write_text(json.dumps(marks))


BROKEN = [
    b"{",
    b"",
    b"null",
    b"3",
    b"[1]",
    b"{}",
    b'{"step": "2"}',
    b'{"step": null}',
    b"\xff\xfe\x00",
    b'{"step": 1, "x": "\xff"}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_line_of_the_metrics_that_is_none_is_named_and_left_out(tmp_path, broken):
    path, console = tmp_path / "metrics.jsonl", Console(file=io.StringIO(), width=1000)
    lines = [b'{"step": 1, "reward": NaN}', broken, b'{"step": 2}', b'{"step": 3}']
    path.write_bytes(b"\n".join(lines) + b"\n")
    train.Log(Config(out=str(tmp_path)), console, 2).close()
    assert path.read_bytes() == lines[0] + b"\n" + lines[2] + b"\n"
    told = console.file.getvalue()
    assert told == f"{path}: not a step's metrics and left out, line 2\n"


def test_metrics_of_garbage_are_told_in_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\x00\xff\n" * 1000)
    console = Console(file=io.StringIO(), width=1000)
    train.Log(Config(out=str(tmp_path)), console, 2).close()
    assert console.file.getvalue().endswith("line 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …\n")


# ---- code in files


class Planted:
    """What touches a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_planted_code_in_dcp_s_metadata_is_refused_by_name_and_not_executed(out, tmp_path):
    folder, mark = out / "checkpoint-000004", tmp_path / "executed"
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(mark)))
    sign(folder)
    with pytest.raises(
        BadInput, match=r"checkpoint-000004/.metadata is refused: it names \w+.system"
    ):
        resume(out)
    assert not mark.exists()
    with pytest.raises(AttributeError):  # torch's own reader has executed it when it finds nothing
        dcp.FileSystemReader(folder).read_metadata()
    assert mark.exists()


@pytest.mark.parametrize(
    "name", ["torch.distributed.checkpoint.metadata os", "torch load", "builtins eval"]
)
def test_metadata_may_name_dcp_s_own_classes_alone(out, name):
    module, attribute = name.split()
    bad = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
    bad += b"\x8c" + bytes([len(attribute)]) + attribute.encode() + b"\x93."
    folder = out / "checkpoint-000004"
    (folder / ".metadata").write_bytes(bad)
    sign(folder)
    with pytest.raises(BadInput, match=f"it names {module}.{attribute}"):
        resume(out)


def test_planted_code_in_a_value_of_the_optimizer_is_refused_and_not_executed(
    out, tmp_path, monkeypatch
):
    real, mark = refit.training_state, tmp_path / "executed"

    def planted(learners):
        state = real(learners)
        state["policy"]["optim_state_dict"]["param_groups"][0]["foreach"] = Planted(mark)
        return state

    cfg = Config(out=str(out))
    with monkeypatch.context() as m:
        m.setattr(refit, "training_state", planted)
        refit.save_checkpoint(
            cfg, learners(cfg), {"step": 6, "version": 6, "best": {}}, actor(pool())
        )
    mark.unlink(missing_ok=True)
    with pytest.raises(BadInput, match=r"(?s)checkpoint-000006 is refused: .*\w+.system"):
        resume(out)
    assert not mark.exists()
    dcp.load(real(learners(cfg)), checkpoint_id=str(out / "checkpoint-000006"))  # torch's own way
    assert mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n3",
        '{}\n{"rows": []}',
        '{}\n{"result": {"eval": 1}, "rows": []}',
        '{}\n{"group": 0, "id": 0, "result": {}, "rows": [{"tokens": 9, "replies": []}]}',
    ],
)
def test_a_batch_that_save_rollouts_did_not_write_is_named(tmp_path, text):
    row, rollout = segment(3, [(1, 3)]), {"group": 0, "id": 0, "result": Result()}
    path = tmp_path / "rollouts" / "1.jsonl"
    write_batch(path, {"rollouts": [rollout], "rows": [{"rollout": 0}]}, [row])
    assert len(read_batch(path)[1]) == 1
    path.write_text(text)
    with pytest.raises(BadInput, match=re.escape(f"{path}: these are no rows as --save_rollouts")):
        read_batch(path)


def test_no_module_reads_a_pickle_or_trusts_a_model_s_code(monkeypatch):
    for path in HERE.parent.glob("*.py"):
        text = path.read_text()
        assert "weights_only=False" not in text and "pickle.load" not in text, path
        assert not re.search(r"trust_remote_code\W+True", text), path
        assert all("weights_only=True" in x[:200] for x in text.split("torch.load(")[1:]), path


def test_automodel_is_told_not_to_trust_a_model_s_code(monkeypatch, tiny, process_group):
    """Its default trusts whatever the hub has under nvidia/."""
    import nemo_automodel

    class Asked(Exception):
        pass

    def asked(path, **how):
        assert how["trust_remote_code"] is False
        raise Asked

    kind = nemo_automodel.NeMoAutoModelForCausalLM
    monkeypatch.setattr(kind, "from_pretrained", asked)
    with pytest.raises(Asked):
        replay.build_model(Config(model=f"{tiny}/dense", dtype="float32"), "cpu")


# ---- one run in a folder

HOLDS = """
import os, sys, time, refit
refit.hold(sys.argv[1])
if os.fork() == 0:  # a child that outlives its parent
    time.sleep(600)
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_run_is_refused_until_the_first_one_is_dead_whatever_its_children_do(
    tmp_path, monkeypatch
):
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    how = dict(stdout=subprocess.PIPE, env=env, text=True, start_new_session=True)
    first = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], **how)
    try:
        assert first.stdout.readline() == "held\n"
        monkeypatch.setattr(refit, "LOCK_TIMEOUT", 0.3)
        with pytest.raises(
            BadInput, match=f"--out {tmp_path} is in use by process {first.pid} on "
        ):
            refit.hold(str(tmp_path))
        monkeypatch.setattr(refit, "LOCK_TIMEOUT", 60)
        first.kill()  # and it may take its time
        refit.hold(str(tmp_path))
        refit.hold(str(tmp_path))  # its own
    finally:
        os.killpg(first.pid, signal.SIGKILL)


def test_a_run_looks_for_another_one_before_it_starts(tmp_path, tiny, monkeypatch):
    def held(out):
        raise BadInput(f"--out {out} is in use")

    monkeypatch.setattr(train, "hold", held)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "label": 1}\n')
    cfg = Config(
        model=f"{tiny}/dense", data=str(tmp_path / "rows.jsonl"), out=str(tmp_path / "run")
    )
    with pytest.raises(BadInput, match="is in use"):
        train.check_inputs(cfg)


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(refit.fcntl, "lockf", no_locks)
    refit.hold(str(tmp_path))
    told = capsys.readouterr().err
    assert f"--out {tmp_path}: its file system has no locks (No locks available)" in told
