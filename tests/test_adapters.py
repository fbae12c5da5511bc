"""LoRA and Muon: what learns, what the engine, the checkpoint and the exported folders get."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_replay import segment
from torch.distributed.tensor import DTensor, distribute_tensor

import refit
import train
from refit import hf_tensors
from replay import build_optimizer, build_policy, pack
from train import Config

BAR = 1e-5
TEXT = list(range(5, 60))


class Spy:
    """The real optimizer; notes which parameters had a gradient at each step."""

    def __init__(self, stage):
        self.model, self.optimizer, self.seen = stage.model, stage.optimizer, []

    def step(self):
        self.seen.append({n for n, p in self.model.named_parameters() if p.grad is not None})
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


@pytest.mark.e2e
def test_the_adapters_alone_learn_and_the_engine_gets_them_added_to_the_weights(adapted):
    adapters = {n for n in adapted.weights if "lora_" in n}
    before, spy = adapted.ask("score", TEXT)[0], Spy(adapted)
    adapted.update(adapted.rollouts(), optimizer=spy)  # finds B at 0, so A moves at the second step
    adapted.molt()
    adapted.update(adapted.rollouts(), optimizer=spy)
    now = dict(adapted.model.named_parameters())
    assert spy.seen == [adapters, adapters]
    assert {n for n in now if not torch.equal(now[n], adapted.weights[n])} == adapters
    assert (
        adapted.molt() <= BAR
    )  # the probe: the engine, a plain model, against the trainer's forward through the adapters
    assert np.abs(adapted.ask("score", TEXT)[0] - before).max() > 1e-3
    metrics = adapted.check(adapted.rollouts())
    assert metrics["gap/on_version_max"] <= BAR and metrics["experts/agreement"] >= 0.98


def moved(policy, seed=0):
    """Give every parameter that learns a random gradient and take a step; its values afterwards."""
    generator = torch.Generator().manual_seed(seed)
    learning = {n: p for n, p in policy.replay.model.named_parameters() if p.requires_grad}
    for p in learning.values():
        grad = torch.randn(p.shape, generator=generator)
        sharded = isinstance(p, DTensor)  # one rank shards too in bfloat16
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if sharded else grad
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    policy.scheduler.step()
    return {n: p.detach().clone() for n, p in learning.items()}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "model,flags",
    [
        ("moe", dict(lora_rank=4)),
        ("dense", dict(lora_rank=4, optimizer="muon", checkpoint_activations=True)),
        ("moe", dict(optimizer="muon")),
    ],
)
def test_a_resumed_run_steps_as_the_one_that_went_on(tiny, process_group, tmp_path, model, flags):
    """Adapters are all that a checkpoint holds of a model whose weights are frozen."""
    from torch.distributed.checkpoint import FileSystemReader

    cfg = Config(model=f"{tiny}/{model}", dtype="float32", out=str(tmp_path), resume=True, **flags)
    policy = build_policy(cfg, "cpu")
    moved(policy)
    train.save_checkpoint(cfg, {"policy": policy}, {"step": 1})
    names = FileSystemReader(refit.checkpoints(cfg.out)[-1]).read_metadata().state_dict_metadata
    saved = [n for n in names if n.startswith("policy.model_state_dict.")]
    assert saved and all("lora_" in n for n in saved) == bool(cfg.lora_rank)
    resumed = build_policy(cfg, "cpu")
    train.load_checkpoint(refit.checkpoints(cfg.out)[-1], {"policy": resumed})
    want, got = moved(policy, seed=1), moved(resumed, seed=1)
    assert want.keys() == got.keys() and all(torch.equal(want[n], got[n]) for n in want)
    assert policy.scheduler.get_last_lr() == resumed.scheduler.get_last_lr()


def perturb(model):
    """Adapters that change a lot; they begin at zero."""
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)


def logprobs(model, row):
    with torch.no_grad():
        logits = (
            model(input_ids=torch.tensor(row.tokens[None].astype(np.int64)))
            .logits[0]
            .log_softmax(-1)
        )
    return logits[:-1].gather(-1, torch.tensor(row.tokens[1:, None].astype(np.int64)))[
        :, 0
    ]  # [T - 1]


def add_adapter(model, folder):
    """As peft does: W + alpha / r * B A; of grouped experts the ranks of all experts are one axis."""
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), {}
    assert config["peft_type"] == "LORA" and config["r"] == 4 and not config["use_dora"]
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, kind = (
            name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        )
        tensors.setdefault(module, {})[kind] = tensor
    parameters = dict(model.named_parameters())
    for module, two in tensors.items():
        outer = module.removesuffix(".base_layer")
        if not outer.endswith("experts"):
            weight, update = parameters[f"{module}.weight"], two["B"] @ two["A"]
        else:
            weight = parameters[
                outer + (".gate_up_proj" if outer != module else ".down_proj")
            ]  # [E, out, in]
            a, b = two["A"].unflatten(0, (len(weight), 4)), two["B"].unflatten(1, (4, len(weight)))
            update = torch.einsum("ore,eri->eoi", b, a)
        weight.data += config["lora_alpha"] / 4 * update


@pytest.mark.e2e
@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
def test_the_exported_model_and_the_base_with_the_exported_adapter_are_the_policy(
    tiny, process_group, tmp_path, model
):
    from transformers import AutoModelForCausalLM

    cfg = Config(
        model=f"{tiny}/{model}",
        dtype="float32",
        out=str(tmp_path),
        lora_rank=4,
        checkpoint_activations=True,
    )
    policy, row = build_policy(cfg, "cpu"), segment(50, [(1, 50)])
    micro = pack([row], [0])
    with torch.no_grad():
        start = policy.replay.forward(micro)[0][0, 1:]
        perturb(policy.replay.model)
        want = policy.replay.forward(micro)[0][0, 1:]
        folder = train.export(cfg, policy.replay.model)
        after = policy.replay.forward(micro)[0][0, 1:]
    base = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    assert (logprobs(base, row) - start).abs().max() <= BAR and (want - start).abs().max() > 0.1
    add_adapter(base, tmp_path / "adapter")
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for got in (after, logprobs(exported, row), logprobs(base, row)):
        assert (got - want).abs().max() <= BAR


def errors(program, model, out, **env):
    """By how much a program's log-probs differ from the exported model's: with the exported adapter, with the same of half its
    scale, which is planted, and with none."""
    from transformers import AutoModelForCausalLM

    cfg = Config(model=model, dtype="float32", out=str(out), lora_rank=4)
    policy, row = build_policy(cfg, "cpu"), segment(50, [(1, 50)])
    perturb(policy.replay.model)
    folder, right, planted = (
        train.export(cfg, policy.replay.model),
        out / "adapter",
        out / "planted",
    )
    want = logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), row)
    shutil.copytree(right, planted)
    config = json.loads((right / "adapter_config.json").read_text())
    (planted / "adapter_config.json").write_text(
        json.dumps(config | {"lora_alpha": config["lora_alpha"] / 2})
    )
    words = [program, model, json.dumps(row.tokens.tolist()), right, planted, ""]
    command = [sys.executable, "tests/load_adapter.py", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | env)
    assert run.returncode == 0, run.stderr[-3000:]
    return [
        (torch.tensor(json.loads(line)) - want).abs().max() for line in run.stdout.splitlines()[-3:]
    ]


@pytest.mark.e2e
def test_vllm_serves_the_base_with_the_exported_adapter_as_the_exported_model(
    tiny, process_group, tmp_path
):
    """A dense model's: vLLM 0.30 has no CPU kernel for adapters of experts."""
    right, planted, none = errors("vllm", f"{tiny}/dense", tmp_path)
    assert right <= BAR and planted > 0.1 and none > 0.1


@pytest.mark.clients
@pytest.mark.parametrize("model", ["dense", "tied", "experts"])
def test_peft_loads_the_exported_adapter_as_the_exported_model(
    tiny, process_group, tmp_path, model
):
    """Not a mixed model's: with dense layers among them, peft 0.21 expects other shapes of the experts' adapters."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    assert os.path.isdir(".clients/peft"), "peft is not installed: run make clients"
    path = f"{tiny}/{model}"
    if model == "experts":  # all layers
        torch.manual_seed(0)
        path = str(shutil.copytree(f"{tiny}/moe", tmp_path / model))
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig.from_pretrained(path, mlp_only_layers=[])
        ).save_pretrained(path)
    right, planted, none = errors("peft", path, tmp_path, PYTHONPATH=".clients/peft")
    assert right <= BAR and planted > 0.1 and none > 0.1


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(tiny):
    from transformers import AutoModelForCausalLM

    def load():
        return AutoModelForCausalLM.from_pretrained(f"{tiny}/moe", dtype=torch.float32)

    def gradients(model):
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)

    model, plain = load(), load()
    optimizer, _ = build_optimizer(Config(optimizer="muon", lr=0.01, weight_decay=0.1), model)
    matrices = {
        n for n, p in plain.named_parameters() if n.endswith(("_proj.weight", "gate.weight"))
    }
    assert len(matrices) == 17 and all(
        p.ndim == 2 for n, p in plain.named_parameters() if n in matrices
    )
    parts = [
        [p for n, p in plain.named_parameters() if (n in matrices) == muon]
        for muon in (True, False)
    ]
    muon = torch.optim.Muon(parts[0], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(parts[1], lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(3):
        for m, optimizers in ((model, [optimizer]), (plain, [muon, adamw])):
            gradients(m)
            for o in optimizers:
                o.step()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters()):
        assert torch.equal(p, q), name


@pytest.mark.e2e
@pytest.mark.parametrize(
    "model,rank,offload",
    [("dense", 4, "none"), ("moe", 0, "none"), ("moe", 4, "none"), ("dense", 4, "optimizer")],
)
def test_one_rank_in_bfloat16_exports_what_it_sends(
    tiny, process_group, tmp_path, model, rank, offload
):
    cfg = Config(
        model=f"{tiny}/{model}",
        dtype="bfloat16",
        out=str(tmp_path),
        lora_rank=rank,
        offload=offload,
    )
    policy = build_policy(cfg, "cpu")
    assert {p.dtype for p in policy.replay.model.parameters()} == {torch.float32}
    moved(policy)
    sent = dict(hf_tensors(policy.replay.model, torch.bfloat16))
    got = load_file(train.export(cfg, policy.replay.model) / "model-00001-of-00001.safetensors")
    assert got.keys() == sent.keys() and all(torch.equal(got[n].bfloat16(), sent[n]) for n in sent)
