"""The critic of gae in the trainer's process: its values, its checkpoint, and what it shares with the policy (nothing)."""

import json

import pytest
import torch
from test_replay import segment

import refit
import train
from replay import pack

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def learners(process_group, tiny):
    def build(**flags):
        cfg = train.Config(
            model=f"{tiny}/dense", dtype="float32", estimator="gae", steps=100, **flags
        )
        policy, critic = train.build_policy(cfg, "cpu"), train.build_critic(cfg, "cpu")
        return cfg, {"policy": policy, "critic": critic}

    return build


def micro_of(critic):
    micro = pack([segment(30, [(5, 12), (20, 30)], seed=1), segment(17, [(3, 17)], seed=2)], [0, 1])
    with torch.no_grad():
        (micro.values,) = critic.replay.forward(micro)
    micro.targets, micro.weights = torch.sin(micro.tokens.float()), micro.mask.float()
    return micro


def learn(cfg, critic, steps):
    micro, meter, errors = micro_of(critic), train.Meter(), []
    batch = {"rollouts": [{}, {}], "sizes": [2]}
    for _ in range(steps):
        meter = train.Meter()
        train.learn(cfg, critic, batch, [[micro]], train.value_objective, meter, "critic_")
        critic.scheduler.step()
        errors.append(meter.local()["value/error"])
    return errors


def test_a_critic_begins_at_zero_and_learns_the_value_before_each_token(learners):
    cfg, made = learners(value_clip=0.0)
    critic, micro = made["critic"], micro_of(made["critic"])
    assert (micro.values == 0).all() and micro.values.shape == micro.tokens.shape
    errors = learn(cfg, critic, 30)
    assert errors[-1] < errors[0] / 2
    (values,) = critic.replay.forward(micro)
    assert (values[~micro.mask] == 0).all()
    # the value of token t is read from the tokens before it: changing token t leaves it, changing t - 1 moves it
    for at, moves in ((25, False), (24, True)):
        other = micro_of(critic)
        other.tokens[0, at] += 1
        (changed,) = critic.replay.forward(other)
        assert ((changed[0, 25] - values[0, 25]).abs() > 1e-4) == moves


def test_a_critic_is_saved_and_resumed_with_its_optimizer_and_schedule(learners, tmp_path):
    cfg, made = learners(out=str(tmp_path))
    learn(cfg, made["critic"], 3)
    where = {"step": 3, "version": 0, "kl_coef": 0.0}
    train.save_checkpoint(cfg, made, where)
    cfg, again = learners(out=str(tmp_path), resume=True)
    weights = {n: p.detach().clone() for n, p in again["critic"].replay.model.named_parameters()}
    saved = refit.checkpoints(cfg.out)[-1]
    train.load_checkpoint(saved, again)
    found = json.loads((saved / "run.json").read_text())
    assert found | where == found
    moved = 0
    for name, p in made["critic"].replay.model.named_parameters():
        loaded = dict(again["critic"].replay.model.named_parameters())[name]
        assert torch.equal(p, loaded)
        moved += not torch.equal(weights[name], loaded)
    assert moved > 5 and "value_head.weight" in weights
    assert (
        again["critic"].scheduler.get_last_lr()
        == made["critic"].scheduler.get_last_lr()
        != [cfg.critic_lr]
    )
    assert learn(cfg, made["critic"], 2) == pytest.approx(learn(cfg, again["critic"], 2), rel=1e-6)
