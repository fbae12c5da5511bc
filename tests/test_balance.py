"""--balance_coef: the load-balance loss of a mixture of experts, from the gates to the gradient.

With a small model in plain PyTorch, whose gates have the two handles of AutoModel's that `replay` holds on to, and once with
AutoModel's own. `test_ranks.py` has it on 1 and 2 ranks and with EP 2.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_replay import segment
from torch import nn
from torch.utils.checkpoint import checkpoint

import replay
import train
from replay import MicroBatch, Replay, Router, build_model, pack

E, K, COEF = 8, 2, 0.5


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.router_replay = nn.Parameter(torch.randn(E, 8) / 4), "AutoModel's"

    def _route_scores(self, logits):
        probs = logits.softmax(-1)  # [N, E]
        used = self.router_replay.apply(probs.topk(K).indices)  # [N, K]
        return probs.gather(1, used), used, probs

    def forward(self, x):
        return self._route_scores(F.linear(x, self.weight))[:2]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Gate(), nn.Parameter(torch.randn(E, 8, 8) / 4)

    def forward(self, x):
        """x [B, T, 8] -> [B, T, 8]."""
        weights, used = self.gate(x.flatten(0, 1))  # [B * T, K] each
        out = torch.einsum(
            "nd,nkdh,nk->nh", x.flatten(0, 1), self.experts[used], weights
        )  # [B * T, 8]
        return x + torch.tanh(out).view(x.shape)


class Model(nn.Module):
    """Each token alone: embedding, two layers of experts, head."""

    def __init__(self, again: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.layers = nn.Embedding(97, 8), nn.ModuleList([Layer(), Layer()])
        self.lm_head, self.again = nn.Linear(8, 97, bias=False), again

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, padding_mask, **_):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.lm_head(x)


def rows_of(lengths, replayed=True):
    """Rows, with the experts of an engine for all tokens but the last, for most of them the first two."""
    rows, rng = [], np.random.default_rng(1)
    for i, n in enumerate(lengths):
        row = segment(n, [(n // 2, n)], seed=i)
        if replayed:
            row.experts = np.where(rng.random((n, 3, 1)) < 0.6, [0, 1], [2, 5]).astype(
                np.uint8
            )  # [T, layers, K]
            row.experts_ok = np.arange(n) < n - 1
        rows.append(row)
    return rows


LENGTHS = [5, 9, 4, 12, 6]
DEALS = {
    "one": [[0, 1, 2, 3, 4]],
    "three": [[3], [1, 4], [0, 2]],
    "an empty one": [[3, 1, 4], [], [0, 2]],
}


class Update:
    """A batch that was scored, in micro-batches dealt as said; `learn` takes one optimizer step and keeps what it saw."""

    def __init__(self, deal="one", coef=COEF, again=False, replayed=True, make=Model):
        self.model, self.rows = make(again), rows_of(LENGTHS, replayed)
        self.cfg = train.Config(balance_coef=coef, loss="pg", minibatches=1)
        self.replay, self.logits = Replay(self.model, 1.0, watched=coef != 0), {}
        self.gates = {n: m for n, m in self.model.named_modules() if hasattr(m, "router_replay")}
        for name, gate in self.gates.items():
            gate.register_forward_hook(
                lambda gate, args, _, name=name: self.logits[name].append(
                    F.linear(args[0].double(), gate.weight.double()).tolist()
                )
            )  # [B * T, E]
        self.micros = [pack(self.rows, m, list(range(len(LENGTHS)))) for m in DEALS[deal]]
        for micro in self.micros:
            micro.advantages, micro.weights = torch.cos(micro.tokens.float()), micro.mask.float()
        self.score()

    def score(self):
        self.logits |= {name: [] for name in self.gates}
        train.verify(self.cfg, self.micros, self.rows, 0, "cpu", train.Meter())
        train.score(self.replay, self.micros, train.Meter())

    def learn(self, step=lambda: None):
        """step: what the optimizer does with the gradients."""
        self.gradients, meter = {}, train.Meter()
        self.logits |= {name: [] for name in self.gates}

        def take():
            self.gradients |= {n: p.grad.clone() for n, p in self.model.named_parameters()}
            step()

        optimizer = SimpleNamespace(step=take, zero_grad=self.model.zero_grad)
        batch = {"rollouts": [{} for _ in LENGTHS], "sizes": [len(LENGTHS)]}
        learner = train.Learner(self.replay, None, optimizer, None)
        train.learn(self.cfg, learner, batch, [self.micros], train.policy_objective, meter)
        self.metrics = meter.local()
        return self


def by_hand(update) -> float:
    """The mean over layers of E · sum f_i · P_i over the rows' tokens, in plain loops from the logits of the forward."""
    layers = []
    for name, batches in update.logits.items():
        slots, mass, tokens, layer = (
            [0] * E,
            [0.0] * E,
            0,
            int(name.split("layers.")[1].split(".")[0]),
        )
        for micro, logits in zip(update.micros, batches):
            for b, row in enumerate(update.rows[i] for i in micro.rows):
                for t in range(len(row)):
                    z = logits[b * micro.tokens.shape[1] + t]
                    used = sorted(range(E), key=lambda i: -z[i])[:K]
                    if row.experts is not None and row.experts_ok[t]:
                        used = row.experts[t, layer].tolist()
                    for i in range(E):
                        slots[i] += i in used
                        mass[i] += math.exp(z[i]) / sum(map(math.exp, z))
                    tokens += 1
        assert tokens == sum(LENGTHS) and sum(slots) == K * tokens
        layers.append(E * sum(slots[i] / (K * tokens) * mass[i] / tokens for i in range(E)))
    return sum(layers) / 2


def same(a, b, bar=1e-6) -> bool:
    scale = {n: g.abs().max().clamp(min=1e-6) for n, g in a.gradients.items()}
    return all((g - b.gradients[n]).abs().max() <= bar * scale[n] for n, g in a.gradients.items())


def agrees(bar=1e-6, **how) -> bool:
    """Whether the loss is the formula's, and loss and gradient (to `bar`) do not depend on how the rows were dealt out."""
    for replayed in (True, False):
        updates = [Update(deal, replayed=replayed, **how).learn() for deal in DEALS]
        want = pytest.approx(by_hand(updates[0]), rel=1e-6)
        if not all(u.metrics["loss/balance"] == want and same(updates[0], u, bar) for u in updates):
            return False
    return True


def slope_agrees(**how) -> bool:
    """Whether the gates' gradients are the slope of policy loss and balance, the load held as it was before the update."""
    update = Update("three", **how).learn()
    for gate, gradient in [
        (gate, update.gradients[f"{name}.weight"]) for name, gate in update.gates.items()
    ]:
        found, move = [], 2e-3 * gradient / gradient.norm()
        for at in (
            1,
            -2,
            1,
        ):  # one move forwards, then to one move backwards, then to where it began
            with torch.no_grad():
                gate.weight += at * move
            m = update.learn().metrics
            found.append(m["loss/policy"] + COEF * m["loss/balance"])
        if (found[0] - found[1]) / 4e-3 != pytest.approx(gradient.norm().item(), rel=2e-3):
            return False
    return True


@pytest.fixture(autouse=True)
def one_rank(process_group, monkeypatch):
    """Without AutoModel's clipping, which takes seconds to import."""
    monkeypatch.setattr(replay, "clip_gradients", lambda cfg, replay, mesh: 1.0)


@pytest.mark.parametrize("again", [False, True])
def test_the_balance_of_a_step_is_its_formula_in_any_number_of_micro_batches(again):
    """again: activations are computed again in backward."""
    assert agrees(again=again)


def test_the_gradient_is_the_slope_of_the_whole_loss():
    assert slope_agrees()


@pytest.mark.e2e
def test_automodel_s_gates_give_the_formula_and_its_slope(tiny):
    def make(again):
        return build_model(train.Config(model=f"{tiny}/moe", dtype="float32"), "cpu")[0]

    assert agrees(3e-6, make=make)
    assert slope_agrees(make=make)


def test_without_the_flag_nothing_is_watched_and_the_policy_s_loss_is_the_same():
    on, off = Update().learn(), Update(coef=0.0).learn()
    assert on.metrics["loss/policy"] == off.metrics["loss/policy"]
    assert "loss/balance" not in off.metrics and off.micros[0].load is None and not same(on, off)
    assert all(r.route is None and r.seen is None for r in off.replay.routers)


def test_nothing_of_a_forward_is_kept_when_its_block_ends():
    update = Update().learn()
    assert all(r.route and r.seen is None for r in update.replay.routers)


def test_the_flag_lowers_the_imbalance():
    """Of gates that send nearly all tokens to the same experts, while the policy's loss is at work as well."""
    busiest = {}
    for coef in (1e-12, 0.3):  # the first is watched and moves nothing
        update, busiest[coef] = Update("three", coef, replayed=False), []
        with torch.no_grad():
            update.model.embed_tokens.weight += 2.0
        sgd = torch.optim.SGD((gate.weight for gate in update.gates.values()), lr=0.2)
        for _ in range(20):
            update.score()
            load = sum(m.load for m in update.micros)  # [routers, E]
            busiest[coef].append((load.amax(1) / load.mean(1)).mean().item())
            update.learn(sgd.step)
    assert busiest[0.3][-1] < 2.5 < busiest[1e-12][-1]


def test_every_optimizer_step_of_a_batch_has_the_load_of_before_the_update(monkeypatch):
    loads, real = [], train.balance
    monkeypatch.setattr(train, "balance", lambda *args: loads.append(args[-1]) or real(*args))
    update = Update(replayed=False)
    update.cfg.epochs, before = 2, update.micros[0].load
    update.learn(torch.optim.SGD(update.model.parameters(), lr=1.0).step)
    update.score()
    assert len(loads) == 2 and all(torch.equal(x, before) for x in loads)
    assert not torch.equal(update.micros[0].load, before)


# Planted bugs: each test shows that the checks above tell the wrong variant from the right one.


def test_planted_counts_of_the_micro_batch_are_seen(monkeypatch):
    def local(replay, micro, load, real=train.balance):
        return real(replay, micro, micro.load * load.sum() / micro.load.sum().clamp(min=1))

    monkeypatch.setattr(train, "balance", local)
    assert not agrees()


@pytest.mark.parametrize(
    "bug,which",
    [
        ("padding counts", lambda micro: torch.ones_like(micro.mask)),
        ("a micro-batch without rows counts", lambda micro: ~micro.padding),
        ("only trained tokens count", lambda micro: micro.mask),
    ],
)
def test_planted_other_tokens_are_seen(monkeypatch, bug, which):
    monkeypatch.setattr(MicroBatch, "real", property(which))
    assert not agrees()


def test_planted_experts_of_the_gate_where_others_were_replayed_are_seen(monkeypatch):
    def watch(router, logits):
        found = router.route(logits)
        router.seen = (found[2].topk(K).indices, found[2]) if router.seen == () else router.seen
        return found

    monkeypatch.setattr(Router, "watch", watch)
    assert not agrees()


def test_planted_probabilities_without_a_gradient_are_seen(monkeypatch):
    def watch(router, logits):
        found = router.route(logits)
        router.seen = (found[1], found[2].detach()) if router.seen == () else router.seen
        return found

    monkeypatch.setattr(Router, "watch", watch)
    assert not slope_agrees()
