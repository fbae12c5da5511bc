"""Real engine against real trainer, in one process: agreement, refits, pauses, and every planted bug with the gate that fires."""

import asyncio
import json

import numpy as np
import pytest
import ray
import torch

import refit
import train
from agent import InvariantError, Result, Trace
from replay import pack

pytestmark = pytest.mark.e2e
BAR = 1e-5  # fp32


@pytest.fixture(params=["dense", "tied", "moe"])
def stage(request):
    return request.getfixturevalue(request.param)


def test_trainer_and_engine_agree_on_multi_turn_episodes(stage):
    rows = stage.rollouts()
    metrics = stage.check(rows)
    assert metrics["gap/on_version_max"] <= BAR and metrics["gap/on_version_tokens"] > 100
    assert {len(r.replies) for r in rows} == {3}
    if stage.cfg.replay_experts:
        assert (
            metrics["experts/replayed"] == 1.0
            and metrics["experts/missing"] == 0
            and metrics["experts/agreement"] >= 0.98
        )


def test_five_refits_are_exact(stage):
    try:
        for i in range(5):
            before = stage.ask("score", PROBE)[0]
            stage.learn(seed=i)
            assert stage.molt() <= BAR  # the probe compares engine and trainer on a fixed text
            assert (
                np.abs(stage.ask("score", PROBE)[0] - before).max() > 1e-2
            )  # and the weights did move
    finally:
        stage.reset()


PROBE = list(range(5, 60))


def test_a_paused_engine_keeps_its_requests_and_stamps_the_versions_of_both_sides(dense):
    """Tokens before the pause were sampled by the old weights, tokens after it by the new ones, and the stamps say so."""
    try:
        prompt, old = dense.chat.encode("Count: 1, 2, 3,"), dense.version
        refs = [dense.engine.generate.remote(f"kept-{i}", prompt, 400, 0, 1.0) for i in range(8)]
        before = {n: p.detach().clone() for n, p in dense.model.named_parameters()}
        ray.wait(refs, timeout=0.5)
        dense.learn(scale=0.3)
        dense.molt()
        replies = ray.get(refs, timeout=120)
        assert any(r.versions[0] == old and r.versions[-1] == old + 1 for r in replies)
        rows = []
        for r in replies:
            trace = Trace(prompt)
            trace.reply(r)
            rows.append(trace.segment(Result(), 0, 0))
            assert (np.diff(r.versions) >= 0).all()
        micro = pack(rows, list(range(len(rows))))
        for version, weights in ((old + 1, None), (old, before)):
            if weights:
                with torch.no_grad():
                    for n, p in dense.model.named_parameters():
                        p.copy_(weights[n])
            on = micro.mask & (micro.versions == version)
            with torch.no_grad():
                gaps = (dense.replay.forward(micro)[0] - micro.behaviour_logprobs).abs()
            assert on.sum() > 50 and gaps[on].max() <= BAR
            assert (
                gaps[micro.mask & ~on].max() > 1e-2
            )  # the other side's tokens are not this version's
    finally:
        dense.reset()


def test_without_partial_a_refit_waits_for_running_replies_and_holds_new_ones_back(dense):
    prompt, old = dense.chat.encode("Count: 1, 2, 3,"), dense.version
    ray.get(dense.engine.set.remote({"partial": False}))
    try:
        first = [dense.engine.generate.remote(f"waited-{i}", prompt, 300, 0, 1.0) for i in range(8)]
        ray.wait(first, timeout=0.5)
        assert dense.ask("running") > 0
        dense.learn(scale=0.3)
        paused = dense.engine.pause.remote()
        held = [dense.engine.generate.remote(f"held-{i}", prompt, 20, 0, 1.0) for i in range(8)]
        ray.get(paused, timeout=60)
        dense.ask("begin")
        ray.get(dense.engine.finish.remote(), timeout=60)
        ray.get(
            dense.engine.resume.remote(old), timeout=60
        )  # nothing was sent: the whole refit comes now
        assert not ray.wait(held, timeout=0.3)[0]  # closed until the probe has passed
        dense.molt()
        replies = ray.get(first, timeout=60)
        assert {v for r in replies for v in r.versions} == {old} and len(
            max(replies, key=lambda r: len(r.tokens)).tokens
        ) > 50
        assert {v for r in ray.get(held, timeout=60) for v in r.versions} == {old + 1}
    finally:
        ray.get(dense.engine.set.remote({"partial": True}))
        dense.reset()


def asked(stage, name, prompt, n=8, tokens=40):
    """Rows of n replies to one prompt."""
    refs = [stage.engine.generate.remote(f"{name}-{i}", prompt, tokens, 0, 1.0) for i in range(n)]
    return rows_of(prompt, ray.get(refs, timeout=60))


def interrupted(stage, name, prompt, tokens=200):
    """Replies to one prompt of which a refit to weights that have moved finds some running."""
    refs = [stage.engine.generate.remote(f"{name}-{i}", prompt, tokens, 0, 1.0) for i in range(8)]
    while not stage.ask("running"):  # a reply of 200 tokens takes half a second or less
        assert ray.wait(refs, num_returns=len(refs), timeout=0)[1]
    stage.learn(scale=0.3)
    stage.molt()
    return ray.get(refs, timeout=60)


def rows_of(prompt, replies):
    rows = []
    for reply in replies:
        trace = Trace(prompt)
        trace.reply(reply)
        rows.append(trace.segment(Result(), 0, 0))
    return rows


def test_a_kept_cache_is_off_version_and_new_requests_do_not_see_it(dense):
    """--stale_kv: what an interrupted reply goes on with was computed from two versions, and is stamped with the older one."""
    prompt, old = [5 + i % 200 for i in range(300)], dense.version
    dense.ask("set", {"stale_kv": True})
    try:
        asked(dense, "cached", prompt)  # the prompt is in the cache now
        replies = interrupted(dense, "kept", prompt)
        assert {v for r in replies for v in r.versions} == {old}
        both = rows_of(prompt, replies) + asked(dense, "new", prompt)
        found = dense.check(both, max_lag=1)
        assert found["gap/on_version_max"] <= BAR and found["gap/off_version_max"] > 1e-2
        dense.ask("plant", "version stamped at completion")
        newest = [
            r for r in interrupted(dense, "stamped", prompt) if r.versions[0] == dense.version
        ]
        fires(dense, rows_of(prompt, newest), "policy version: gap/on_version")
    finally:
        dense.ask("heal")
        dense.ask("set", {"stale_kv": False})
        dense.reset()


def test_planted_the_budget_of_a_resumed_request_is_not_reduced(dense):
    prompt = dense.chat.encode("Count: 1, 2, 3,")
    dense.ask("plant", "budget not reduced")
    try:
        rows = rows_of(prompt, interrupted(dense, "again", prompt))
        fires(
            dense,
            rows,
            "token identity: a reply has .* tokens, --max_tokens allows 200",
            max_tokens=200,
            max_lag=1,
        )
        dense.check(asked(dense, "whole", prompt), max_tokens=200)
    finally:
        dense.ask("heal")
        dense.reset()


def test_planted_a_stale_prefix_cache_is_served_after_a_refit(dense):
    prompt = [5 + i % 200 for i in range(300)]  # two blocks of the cache and more
    try:
        assert (
            dense.check(asked(dense, "fresh", prompt))["gap/on_version_max"] <= BAR
        )  # the prompt is cached now
        dense.ask("plant", "cache stale")
        dense.learn(scale=0.3)
        dense.molt()
        with pytest.raises(InvariantError, match="^policy version: gap/on_version"):
            dense.check(asked(dense, "stale", prompt))
    finally:
        dense.ask("heal")
        dense.reset()


def test_planted_a_cache_that_could_not_be_emptied_ends_the_refit(dense):
    dense.ask("plant", "cache not emptied")
    try:
        with pytest.raises(InvariantError, match="(?s)^refit: .*the KV cache was not emptied"):
            dense.molt()
    finally:
        dense.ask("heal")
        dense.reset()


def test_planted_a_refit_while_requests_run_without_a_pause(dense):
    dense.ask("plant", "no pause")
    try:
        with pytest.raises(
            InvariantError, match="(?s)^refit: .*it is not paused, so requests would run"
        ):
            dense.molt()
    finally:
        dense.ask("heal")
        dense.reset()


def test_a_stop_string_ends_a_reply_and_its_ids_stay(dense):
    reply = ray.get(dense.engine.generate.remote("stopped", [5, 6, 7], 300, 0, 1.0, list("aeiou")))
    text, before = (
        dense.chat.tokenizer.decode(reply.tokens),
        dense.chat.tokenizer.decode(reply.tokens[:-1]),
    )
    assert reply.finish == "stop" and set(text) & set("aeiou") and not set(before) & set("aeiou")
    assert len(reply.logprobs) == len(reply.tokens) < 300


def test_a_reply_is_kept_to_a_grammar_and_its_log_probs_are_not_the_policy_s(dense):
    """Why a constrained reply is not trained: what was sampled from is a masked distribution."""
    schema = {
        "type": "object",
        "properties": {"y": {"enum": ["a", "b"]}},
        "required": ["y"],
        "additionalProperties": False,
    }
    prompt = [5, 6, 7]
    kept = dense.engine.generate.remote(
        "kept-to", prompt, 300, 0, 1.0, (), {"json": json.dumps(schema)}
    )
    free = dense.engine.generate.remote("free", prompt, 30)
    gaps = []
    for reply in ray.get([kept, free], timeout=120):
        trace = Trace(prompt)
        trace.reply(reply)
        micro = pack([trace.segment(Result(), 0, 0)], [0])
        with torch.no_grad():
            gaps.append(
                (dense.replay.forward(micro)[0] - micro.behaviour_logprobs).abs()[micro.mask].max()
            )
    said = dense.chat.text(ray.get(kept).tokens)
    assert json.loads(said)["y"] in ("a", "b") and gaps[0] > 1e-2 and gaps[1] <= BAR


def test_a_closed_engine_lets_nothing_in_until_it_is_released(dense):
    dense.molt(release=False)
    ref = dense.engine.generate.remote("early", [5, 6, 7], 4)
    assert ray.wait([ref], timeout=1.0)[0] == []
    dense.ask("release")
    assert (ray.get(ref, timeout=60).versions == dense.version).all()


def test_a_cancelled_request_leaves_the_engine(dense):
    refs = [dense.engine.generate.remote(f"gone-{i}", [5, 6, 7], 450) for i in range(16)]
    while not dense.ask("running"):
        pass
    for ref in refs:
        ray.cancel(ref)
    ended = [isinstance(ended_by(ref), ray.exceptions.RayError) for ref in refs]
    assert any(ended) and dense.ask("running") == 0  # some may have ended by themselves


def ended_by(ref):
    try:
        return ray.get(ref, timeout=30)
    except ray.exceptions.RayError as e:
        return e


# ---- planted bugs: each breaks one mechanism and names the gate that catches it


def fires(stage, rows, invariant, **flags):
    with pytest.raises(InvariantError, match=f"^{invariant}"):
        stage.check(rows, **flags)


def test_planted_a_reply_is_encoded_again(tied):
    rows = tied.rollouts(n=16)
    changed = 0
    for (
        row
    ) in rows:  # what a text-based pipeline does; rows whose ids happen to survive it are no bug
        for a, b, _ in row.replies:
            again = np.asarray(
                tied.chat.encode(tied.chat.tokenizer.decode(row.tokens[a:b])), np.int32
            )[: b - a]
            changed += again.tolist() != row.tokens[a:b].tolist()
            row.tokens[a : a + len(again)] = again
    assert changed
    fires(tied, rows, "token identity")


def test_planted_the_mask_is_shifted_by_one(dense):
    rows = dense.rollouts(n=2)
    rows[0].mask = np.roll(rows[0].mask, -1)
    fires(dense, rows, "token identity")


def test_planted_one_logprob_is_dropped(dense):
    rows = dense.rollouts(n=2)
    a, b, _ = rows[1].replies[0]
    rows[1].logprobs[a : b - 1] = rows[1].logprobs[a + 1 : b].copy()
    fires(dense, rows, "token identity")


def test_planted_another_temperature_in_the_trainer(dense):
    rows = dense.rollouts(n=2)
    dense.replay.temperature = 0.9
    try:
        fires(dense, rows, "policy version: gap/on_version")
    finally:
        dense.replay.temperature = dense.cfg.temperature


def test_planted_raw_instead_of_processed_logprobs(dense):
    def at(temperature):
        prompt = dense.chat.encode("What is 17+25?")
        trace = Trace(prompt)
        trace.reply(dense.ask("generate", "warm", prompt, 64, 0, temperature))
        return [trace.segment(Result(), 0, 0)]

    dense.replay.temperature = 0.7
    try:
        assert dense.check(at(0.7))["gap/on_version_max"] <= BAR
        dense.ask("plant", "raw log-probs")
        fires(dense, at(0.7), "policy version: gap/on_version")
    finally:
        dense.replay.temperature = dense.cfg.temperature
        dense.ask("heal")


@pytest.mark.parametrize("name", ["lm_head", "layers.1.mlp.down_proj", "embed_tokens"])
def test_planted_a_tensor_is_not_sent(dense, monkeypatch, name):
    tensors = refit.hf_tensors
    monkeypatch.setattr(
        refit, "hf_tensors", lambda *a: (x for x in tensors(*a) if name not in x[0])
    )
    try:
        dense.learn()
        with pytest.raises(InvariantError, match="^refit: the probe"):
            dense.molt()
        ref = dense.engine.generate.remote("after", [5, 6, 7], 4)
        assert ray.wait([ref], timeout=1.0)[0] == []  # the engines stay closed
    finally:
        monkeypatch.undo()
        dense.reset()
        ray.get(ref, timeout=60)


def test_planted_one_bucket_is_lost_by_a_worker(dense):
    dense.ask("plant", "one bucket lost")
    try:
        dense.learn()
        dense.refit.limit = 20_000  # several buckets
        with pytest.raises(
            InvariantError, match="^refit: engine 0 worker 0 loaded .* the engines stay paused"
        ):
            dense.molt()
    finally:
        dense.refit.limit = 1 << 20
        dense.ask("heal")
        dense.reset()


def test_planted_a_bucket_is_changed_on_the_way(dense, monkeypatch):
    send = refit.broadcast

    def flip(pg, flat):
        flat = flat.clone()
        flat[7] ^= 1
        send(pg, flat)

    monkeypatch.setattr(refit, "broadcast", flip)
    try:
        with pytest.raises(InvariantError, match="(?s)^refit: .*checksum"):
            dense.molt()
    finally:
        monkeypatch.undo()
        dense.reset()


def test_planted_experts_are_not_repacked(moe):
    moe.ask("plant", "experts not repacked")
    try:
        moe.learn(scale=0.3)
        with pytest.raises(InvariantError, match="^refit: the probe"):
            moe.molt()
    finally:
        moe.ask("heal")
        moe.reset()


def test_planted_a_tied_head_is_not_repacked(tied):
    tied.ask("plant", "tied head not repacked")
    try:
        tied.learn()
        with pytest.raises(InvariantError, match="^refit: the probe"):
            tied.molt()
    finally:
        tied.ask("heal")
        tied.reset()


def test_planted_experts_of_another_layer(moe):
    rows = moe.rollouts(n=2)
    for row in rows:
        row.experts = row.experts[:, [0, 2, 1]].copy()
    with pytest.raises(InvariantError, match="^(forward consistency|policy version)"):
        moe.check(rows)
    with pytest.raises(
        InvariantError, match="^forward consistency: experts/agreement"
    ):  # were the gap wide enough to hide it
        moe.check(rows, max_gap=100.0)


def test_planted_experts_are_shifted_by_one_token(moe):
    rows = moe.rollouts(n=2)
    for row in rows:
        row.experts = np.roll(row.experts, 1, axis=0)
    with pytest.raises(InvariantError, match="^forward consistency: experts/agreement"):
        moe.check(rows, max_gap=100.0)


def test_planted_rows_of_experts_are_lost(moe):
    rows = moe.rollouts(n=2)
    rows[0].experts_ok[rows[0].replies[1][0] : rows[0].replies[1][0] + 5] = False
    fires(moe, rows, "forward consistency: .* have no expert row")


def test_planted_the_version_moves_late(dense):
    dense.ask("plant", "version not moved")
    try:
        with pytest.raises(InvariantError, match="^(policy version|refit)"):
            dense.molt()
            dense.check(dense.rollouts(n=2))
    finally:
        dense.ask("heal")
        dense.reset()


def test_planted_versions_are_stamped_at_completion(dense):
    """A reply that lived through a refit claims to be of the new version as a whole."""
    dense.ask("plant", "version stamped at completion")
    try:
        prompt = dense.chat.encode("Count: 1, 2, 3,")
        refs = [dense.engine.generate.remote(f"late-{i}", prompt, 400, 0, 1.0) for i in range(8)]
        ray.wait(refs, timeout=0.5)
        dense.learn(scale=0.3)
        dense.molt()
        late = [
            r for r in ray.get(refs, timeout=60) if r.versions[0] == dense.version
        ]  # some end before the refit
        rows = rows_of(prompt, late)
        fires(dense, rows, "policy version: gap/on_version")
    finally:
        dense.ask("heal")
        dense.reset()


def test_planted_a_denominator_of_one_micro_batch(dense, monkeypatch):
    rows = dense.rollouts(n=4)
    metrics, gradient = dense.update(rows, tokens_per_microbatch=512)
    _, whole = dense.update(rows)
    assert metrics["loss/mass"] == pytest.approx(1) and torch.allclose(gradient, whole, atol=1e-6)
    real = train.shares
    monkeypatch.setattr(train, "shares", lambda cfg, batch, part: real(cfg, batch, part[:1]))
    with pytest.raises(InvariantError, match="^loss denominator"):
        dense.update(rows, tokens_per_microbatch=512)


def test_engines_answer_many_requests_at_once_and_each_gets_its_own(dense):
    async def all_of_them():
        return await asyncio.gather(
            *[dense.engine.generate.remote(f"many-{i}", [5 + i, 6, 7], 8) for i in range(64)]
        )

    replies = asyncio.run(all_of_them())
    rows = []
    for i, r in enumerate(replies):
        trace = Trace([5 + i, 6, 7])
        trace.reply(r)
        rows.append(trace.segment(Result(), i, i))
    assert dense.check(rows)["gap/on_version_max"] <= BAR


ONCE = dict(minibatches=1, loss="ppo", is_level="token")  # the ratio is 1 by construction


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_one_forward_gives_the_gradient_and_the_metrics_of_two(request, monkeypatch, name):
    stage, forwards = request.getfixturevalue(name), []
    rows = stage.rollouts(4, turns=2)
    hook = stage.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        metrics, gradient = stage.update(rows, tokens_per_microbatch=256, **ONCE)
        once = len(forwards)
        monkeypatch.setattr(train, "one_forward", lambda cfg: False)
        again, same = stage.update(rows, tokens_per_microbatch=256, **ONCE)
    finally:
        hook.remove()
    assert once > 1 and len(forwards) == 3 * once  # one for each micro-batch, then two
    assert (gradient - same).abs().max() <= 1e-6 * same.abs().max()
    assert metrics.keys() == again.keys() and metrics == pytest.approx(again, rel=1e-4, abs=1e-6)
    assert metrics["gap/on_version_tokens"] > 50 and metrics["loss/ratio_max"] == 1.0


def test_with_one_forward_a_gate_stops_the_run_before_the_optimizer_does_anything(dense):
    class Never:
        def step(self):
            raise AssertionError("a batch that breaks a gate was learnt from")

        def zero_grad(self):
            dense.model.zero_grad()

    with pytest.raises(InvariantError, match="gap/on_version_max"):
        dense.update(dense.rollouts(2), optimizer=Never(), max_gap=1e-12, **ONCE)


@pytest.mark.parametrize(
    "flags",
    [
        dict(epochs=2),
        dict(minibatches=2),
        dict(is_denominator="kept"),
        dict(ref_model="x"),
        dict(critic_model="x"),
        dict(balance_coef=0.1),
    ],
)
def test_what_needs_old_log_probs_before_the_update_has_them_computed_before(flags):
    assert train.one_forward(train.Config(minibatches=1))
    assert not train.one_forward(train.Config(**dict(minibatches=1) | flags))
