"""Models of many families: what works agrees with engine and transformers, the rest is refused.

The table in docs/models.md is FAMILIES of tests/families.py; the slow test runs each row of it.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import families
import pytest
import ray
import torch
from conftest import Stage
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import train
from agent import BadInput, InvariantError
from refit import copy_side_files, export, hf_tensors
from replay import (
    Head,
    MicroBatch,
    Replay,
    build_critic,
    build_model,
    check_model,
    empty,
    experts_of,
    own_class,
    tail,
    unfit_config,
)

TABLE = Path(__file__).parents[1] / "docs/models.md"


def rows() -> dict[str, list[str]]:
    """The table's rows: family -> the cells after it."""
    lines = re.findall(r"^\| `(\w+)` \|(.*)\|$", TABLE.read_text(), re.M)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


WORK = [name for name, cells in rows().items() if cells[0] == "works"]
AGREE = [name for name, cells in rows().items() if cells[0] == "agrees"]  # without an engine
REFUSED = [name for name, cells in rows().items() if cells[0] == "refused"]


@pytest.fixture
def family(tmp_path):
    return lambda name, **flags: families.make(name, str(tmp_path / name), **flags)


def padded() -> MicroBatch:
    """Three rows of random tokens, two of them padded on the right."""
    torch.manual_seed(1)
    shape, lengths = (3, 40), torch.tensor([40, 30, 11])
    padding = torch.arange(40)[None] >= lengths[:, None]  # [3, 40]
    tokens = torch.randint(0, 570, shape).masked_fill(padding, 0)
    mask = ~padding & (torch.arange(40) >= 5)
    nothing = torch.zeros(shape)
    return MicroBatch(
        [0, 1, 2], torch.arange(3), tokens, mask, nothing, nothing.int(), padding, version=0
    )


@torch.no_grad()
def logprobs_of_transformers(
    folder: str, micro: MicroBatch, temperature=1.0, attention="eager"
) -> torch.Tensor:
    """[B, T] of transformers' own class, each row alone and without padding; 0 off the mask."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    )
    found = torch.zeros(micro.tokens.shape)
    for b, row in enumerate(micro.tokens):
        ids = row[~micro.padding[b]][None]  # [1, t]
        logits = model(ids, use_cache=False).logits[0].float() / temperature
        found[b, 1 : ids.shape[1]] = (
            logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        )
    return found.masked_fill(~micro.mask, 0.0)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("llama", (1.0, math.inf)),
        ("cohere", (0.25, math.inf)),
        ("granite", (0.25, math.inf)),
        ("gemma2", (1.0, 2.0)),
    ],
)
def test_what_a_model_does_after_its_head_is_asked_of_its_class(name, expected, family):
    assert tail(empty(AutoConfig.from_pretrained(family(name)))) == pytest.approx(expected)


def test_a_class_that_changes_its_logits_in_another_way_is_refused(family):
    model = empty(AutoConfig.from_pretrained(family("llama")))
    forward = model.forward

    def shifted(**inputs):
        out = forward(**inputs)
        out.logits = out.logits + 1
        return out

    model.forward = shifted
    with pytest.raises(ValueError, match="otherwise than by a scale and a cap"):
        tail(model)


# one of each kind: a scale, caps, experts in transformers' class; all others are in the slow tests
KINDS = ["cohere", "gemma2", "mixtral"]


@pytest.mark.parametrize(
    "name",
    [*KINDS, *[pytest.param(n, marks=pytest.mark.slow) for n in WORK + AGREE if n not in KINDS]],
)
def test_the_trainer_s_log_probs_are_those_of_transformers(name, family, process_group):
    folder, micro = family(name), padded()
    policy = train.build_policy(train.Config(model=folder, dtype="float32"), "cpu")
    found, _ = policy.replay.forward(micro, 0.7)
    expected = logprobs_of_transformers(folder, micro, 0.7)
    assert (found - expected).abs().max() < 1e-5
    found.sum().backward()
    assert all(p.grad is not None for p in policy.replay.model.parameters())


@pytest.mark.parametrize("name", ["cohere", "gemma2"])
def test_planted_head_without_what_comes_after_it_is_seen(name, family, process_group):
    folder, micro = family(name), padded()
    model, _ = build_model(train.Config(model=folder, dtype="float32"), "cpu")
    found, _ = Replay(model, 1.0, Head(model.get_output_embeddings())).forward(micro)
    assert (found - logprobs_of_transformers(folder, micro)).abs().max() > 1e-2


def test_planted_attention_without_its_cap_is_seen(family):
    folder, micro = family("gemma2"), padded()
    with_cap, without = (
        logprobs_of_transformers(folder, micro, attention=a) for a in ("eager", "sdpa")
    )
    assert (with_cap - without).abs().max() > 1e-2


def test_a_critic_s_values_are_not_scaled_as_logits_are(family, process_group):
    cfg = train.Config(model="", critic_model=family("cohere"), dtype="float32", critic_lr=1e-3)
    critic = build_critic(cfg, "cpu")
    torch.nn.init.constant_(critic.replay.head.bias, 3.0)
    values = critic.replay.forward(micro := padded())[0]
    assert (values[micro.mask] == 3.0).all()


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_weights_reach_the_engine_under_the_names_of_the_file(name, family, process_group):
    from safetensors.torch import load_file

    folder = family(name)
    model, _ = build_model(train.Config(model=folder, dtype="float32"), "cpu")
    sent, stored = dict(hf_tensors(model, torch.float32)), load_file(f"{folder}/model.safetensors")
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[n], stored[n]) for n in stored)


def refused(folder: str, flag: str = "model", **flags) -> str:
    """What is said of a model before the start; raises where it is taken."""
    with pytest.raises(BadInput) as e:
        check_model(train.Config(**flags), flag, folder)
    assert str(e.value).startswith(f"--{flag} {folder}: ")
    return str(e.value)


def edit(folder: str, **fields) -> str:
    """Change fields of a model's config.json; returns the folder."""
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("flag", ["replay_experts", "balance_coef", "ep"])
def test_flags_of_experts_are_refused_where_automodel_has_no_class_of_its_own(flag, family):
    value = {"replay_experts": True, "balance_coef": 0.1, "ep": 2}[flag]
    assert f"drop --{flag}" in refused(family("mixtral"), **{flag: value})
    check_model(train.Config(**{flag: value}), "model", family("qwen3_moe"))
    check_model(train.Config(), "model", family("olmoe"))


def test_flags_of_experts_are_refused_for_a_dense_model(family):
    assert "it is dense" in refused(family("llama"), replay_experts=True)
    check_model(train.Config(replay_experts=True), "ref_model", family("llama"))


def test_a_window_that_the_engine_reads_otherwise_has_to_hold_the_whole_context(family):
    folder = family("cohere2", sliding_window=16)
    assert "--max_context 17 may be 16 at most" in refused(folder, max_context=17)
    check_model(train.Config(max_context=16), "model", folder)


def test_a_model_without_a_chat_template_is_refused(family):
    folder = family("llama")
    Path(folder, "chat_template.jinja").unlink()
    assert "no chat template" in refused(folder)
    check_model(train.Config(), "ref_model", folder)  # its tokenizer is not used


def test_a_model_without_a_tokenizer_is_refused(family):
    folder = family("llama")
    for file in Path(folder).glob("*token*"):
        file.unlink()
    assert "no tokenizer there" in refused(folder)


def test_a_tokenizer_with_more_tokens_than_the_model_has_is_refused(family):
    folder = family("llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(folder)
    assert "577 tokens and its embedding 576 rows" in refused(folder)


def test_weights_that_are_not_there_or_of_another_format_are_refused(family):
    folder = family("llama")
    Path(folder, "model.safetensors").rename(Path(folder, "pytorch_model.bin"))
    assert "only in another format" in refused(folder)
    Path(folder, "pytorch_model.bin").unlink()
    assert "its weights are not there" in refused(folder)


def test_a_shard_that_is_not_there_is_named(family):
    folder = family("llama")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors cannot be read (FileNotFoundError" in refused(folder)


@pytest.mark.parametrize("content", ["", "{}", "\xff"])
def test_an_index_of_weights_that_is_none_is_named(content, family):
    folder = family("llama")
    Path(folder, "model.safetensors.index.json").write_text(content, encoding="latin-1")
    assert "model.safetensors.index.json cannot be read" in refused(folder)


def test_weights_that_were_cut_are_named(family):
    folder = family("llama")
    path = Path(folder, "model.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refused(folder)


def test_a_model_with_code_of_its_own_is_refused_and_nothing_of_it_runs(family):
    code = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
    code = f"{code}from transformers import PretrainedConfig as FooConfig\n"
    folder = edit(
        family("llama"), model_type="foo", auto_map={"AutoConfig": "configuration_foo.FooConfig"}
    )
    Path(folder, "configuration_foo.py").write_text(code)
    assert "Python code of its own, which is not run" in refused(folder)
    assert not list(Path(folder).rglob("ran"))


def test_a_quantised_model_is_refused(family):
    folder = edit(family("llama"), quantization_config={"quant_method": "fp8"})
    assert "quantised" in refused(folder)


def test_an_encoder_with_a_decoder_is_refused():
    from transformers import T5Config

    assert "an encoder and a decoder" in unfit_config(T5Config())


@pytest.mark.parametrize("config", ["Qwen2_5_VLConfig", "Gemma3Config", "Mistral3Config"])
def test_a_model_that_reads_images_is_refused(config):
    import transformers

    found = unfit_config(getattr(transformers, config)())
    assert "reads more than text" in found


def test_a_model_with_another_head_is_refused_but_as_a_critic(family):
    folder = edit(family("llama"), architectures=["LlamaForSequenceClassification"])
    assert '["LlamaForCausalLM"]' in refused(folder)
    check_model(train.Config(), "critic_model", folder)
    assert "names the architectures []" in refused(edit(folder, architectures=None))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "there is no such folder" in refused(str(tmp_path / "not-there"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": "no-such"}', "\xff\x00"])
def test_a_config_that_is_none_is_refused(content, tmp_path):
    tmp_path.joinpath("config.json").write_text(content, encoding="latin-1")
    assert "no model there" in refused(str(tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_family_ends_with_code_2_and_the_words_of_the_table(
    name, family, capsys, monkeypatch
):
    monkeypatch.setattr(train, "run", lambda *_: pytest.fail("it was started"))
    folder = family(name)
    out = str(Path(folder).with_name("out"))
    assert train.main(["--model", folder, "--out", out]) == 2
    assert rows()[name][1] in capsys.readouterr().err


def test_the_side_files_of_a_model_are_copied_and_no_weights(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target, source / "sub"):
        folder.mkdir()
    kept = ["generation_config.json", "chat_template.jinja", "added_tokens.json", "LICENSE"]
    left = ["config.json", "model.safetensors", "model.safetensors.index.json", "a.bin", "code.py"]
    for name in kept + left:
        source.joinpath(name).write_text(name)
    target.joinpath("generation_config.json").write_text("another")
    copy_side_files(str(source), target)
    assert {f.name: f.read_text() for f in target.iterdir()} == {name: name for name in kept}


def test_where_the_two_sides_differ_at_the_start_the_class_is_named_and_the_table(monkeypatch):
    def differ(r, version):
        raise InvariantError("policy version: gap/on_version_max is 0.24")

    monkeypatch.setattr(train, "molt", differ)
    policy = SimpleNamespace(replay=SimpleNamespace(model=torch.nn.Linear(1, 1)))
    with pytest.raises(InvariantError, match="(?s)is 0.24.*nothing was learnt.*Linear.*models.md"):
        train.prove(SimpleNamespace(learners={"policy": policy}), 0)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("name", WORK)
def test_a_family_learns_two_steps_beside_the_engine_and_its_export_is_the_same_model(
    name, family, tmp_path, cluster, process_group
):
    folder = family(name)
    config = AutoConfig.from_pretrained(folder)
    own = bool(experts_of(config) and own_class(config))
    assert rows()[name][1] == ("replayed" if own else "live" if experts_of(config) else "none")
    stage = Stage(folder, replay_experts=own, lr=2e-3, out=str(tmp_path / "out"))
    gaps = []
    try:
        for _ in range(2):
            segments = stage.rollouts()
            before = {n: p.detach().clone() for n, p in stage.model.named_parameters()}
            metrics = stage.check(segments)  # raises where a gap is over 1e-5
            assert metrics["gap/on_version_tokens"] > 0
            gaps.append(metrics["gap/on_version_max"])
            assert metrics.get("experts/agreement", 1.0) >= 0.98
            stage.update(segments, optimizer=stage.optimizer)
            still = [n for n, p in stage.model.named_parameters() if torch.equal(p, before[n])]
            assert not still, still
            gaps.append(stage.molt())
        assert max(gaps) <= 1e-5
        print(f"{name}: largest gap {max(gaps):.1e}")
        written, micro = export(stage.cfg, stage.model), padded()
        found, _ = stage.replay.forward(micro)
        expected = logprobs_of_transformers(str(written), micro)
        assert (found - expected).abs().max() < 1e-5
    finally:
        ray.kill(stage.engine)
    for file in Path(folder).iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            assert written.joinpath(file.name).read_bytes() == file.read_bytes()
    ends = [GenerationConfig.from_pretrained(f).eos_token_id for f in (folder, written)]
    assert ends[0] == ends[1] and len(ends[0]) == 2  # vLLM stops at each
    check_model(train.Config(replay_experts=own), "model", str(written))


def test_the_table_has_the_families_that_are_tested():
    assert rows().keys() == families.FAMILIES.keys()
    assert {*WORK, *AGREE, *REFUSED} == rows().keys()
    assert len(WORK) >= 16
