"""--offload without a GPU: where a step on one would put its tensors. That it learns the same is in test_ranks.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import refit
import train
from replay import MicroBatch, ValueHead, build_model

pytestmark = pytest.mark.e2e


@pytest.fixture
def policy(process_group, tiny):
    return train.build_policy(
        train.Config(model=f"{tiny}/dense", dtype="float32", offload="optimizer"), "cpu"
    )


@pytest.fixture
def asked(policy, monkeypatch):
    """The mesh says that it is of GPUs; what goes to a device stays here, and the device is noted."""

    def to(tensor, device):
        found.append(device)
        return tensor

    found = []
    monkeypatch.setattr(DeviceMesh, "device_type", property(lambda mesh: "cuda"))
    monkeypatch.setattr(DTensor, "to", to)
    monkeypatch.setattr(MicroBatch, "to", to)
    return found


def test_the_probe_goes_to_where_the_model_computes(policy, asked):
    reached = []
    policy.replay.forward = lambda micro, temperature: (
        reached.append(list(asked)) or (micro.mask.float(),) * 2
    )
    train.probe(
        train.Config(dtype="float32", max_gap=9.0),
        policy.replay,
        [(np.zeros(5), None, 0)],
        list(range(6)),
        0,
    )
    assert reached == [["cuda"]] and {p.device.type for p in policy.replay.model.parameters()} == {
        "cpu"
    }


def test_weights_are_gathered_and_sent_by_the_devices_that_the_engines_have(
    policy, asked, monkeypatch
):
    sent = dict(refit.hf_tensors(policy.replay.model, torch.float32))
    assert asked == ["cuda"] * len(sent) and len(sent) == len(
        list(policy.replay.model.parameters())
    )
    joined, made = [], []
    monkeypatch.setattr(refit, "answers", lambda *args: None)
    monkeypatch.setattr(refit, "group", lambda **how: made.append(how["device"]))
    engine = SimpleNamespace(
        do=SimpleNamespace(remote=lambda method, init: joined.append(init["device"]))
    )
    refit.Refit(train.Config(), policy.replay.model, [engine]).rendezvous()
    assert joined == made == ["cuda"]


def test_the_critic_s_head_computes_where_its_input_is(process_group, tiny):
    cfg = train.Config(model=f"{tiny}/dense", dtype="float32", estimator="gae", offload="optimizer")
    head = train.build_critic(cfg, "cpu").replay.head
    assert isinstance(head, ValueHead) and head.weight.device.type == "cpu"
    head.where = slice(None)
    assert head(torch.zeros(2, 3, 64, device="meta")).device.type == "meta"


def test_buffers_go_to_where_the_model_computes(process_group, tiny, monkeypatch):
    """On several ranks AutoModel makes them beside the weights."""
    from nemo_automodel import NeMoAutoModelForCausalLM

    buffer = SimpleNamespace(data="cpu", to=lambda device: device)
    loaded = SimpleNamespace(buffers=lambda: [buffer])
    monkeypatch.setattr(NeMoAutoModelForCausalLM, "from_pretrained", lambda *args, **how: loaded)
    build_model(train.Config(model=f"{tiny}/dense", dtype="float32"), "cuda")
    assert buffer.data == "cuda"
