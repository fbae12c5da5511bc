"""The pool of groups against a simple model of it: thousands of schedules with random sizes, durations, failures, filters, lags,
standing versions, kills and resumes. No engine, no process, no clock: the test decides what ends next."""

import asyncio
import math
import pickle
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import PARTS, Result, Segment, read_batch, write_batch
from rollout import Rollout, Rollouts
from train import Config


class World:
    """What happens outside the pool: rollouts that end when the schedule says so, a trainer, kills. Checks every rule."""

    def __init__(
        self,
        kind,
        seed,
        n_rows,
        epochs,
        prompts,
        samples,
        max_lag,
        oversample,
        filtered,
        fails,
        kills,
    ):
        self.kind, self.random, self.fails, self.kills = kind, Random(seed), fails, kills
        band = (0.0, 1.0) if filtered else (-math.inf, math.inf)
        self.cfg = Config(
            prompts=prompts, samples=samples, max_lag=max_lag, oversample=oversample, dynamic_sampling=band, max_failed=99.0
        )  # fmt: skip
        self.cfg.data_epochs, self.total = epochs, n_rows * epochs
        self.rows, self.filtered, self.capacity = (
            [{"prompt": "p"}] * n_rows,
            filtered,
            int((1 + max_lag) * prompts * oversample),
        )
        self.version, self.trained, self.saved, self.rollouts = 0, [], (0, [], {}, None), self
        self.outcome = {}
        self.open(None)

    def open(self, state):
        self.running, self.handed = {}, []  # handed: being trained
        self.pool = self.kind(
            self.cfg, self.rows, [self], 2, pickle.loads(state) if state else None
        )

    # ---- in the place of a Runner

    def remote(self, tasks, group_id, rollout_ids, attempt):
        assert len(tasks) == len(rollout_ids) == self.cfg.samples
        future = asyncio.get_running_loop().create_future()
        self.running[group_id, attempt] = future, self.version, rollout_ids
        alive = [f for f, *_ in self.running.values() if not f.done()]
        assert len(alive) + len(self.handed) <= self.capacity, (
            "more groups in flight than the capacity"
        )
        assert (
            len([k for k, (f, *_) in self.running.items() if k[0] == group_id and not f.done()])
            == 1
        ), "started twice"
        return future

    async def end_one(self):
        """One of the groups that are running ends."""
        alive = [k for k, (f, *_) in self.running.items() if not f.done()]
        if not alive:
            return False
        key = self.random.choice(
            alive[: self.random.choice((1, len(alive)))]
        )  # at times the oldest
        future, version, ids = self.running[key]
        level = self.random.random() if self.filtered else 0.5
        outs = []
        for i in ids:
            reward = float(
                self.random.random() < (0.0 if level < 0.2 else 1.0 if level > 0.8 else 0.5)
            )
            failed = self.random.random() < self.fails
            outs.append(Rollout(key[0], i, Result(reward), error="boom" if failed else ""))
        self.outcome[key[0]] = (
            version,
            [o.rollout_id for o in outs if not o.error],
            [o.result.reward for o in outs],
        )
        future.set_result(outs)
        await self.spin()
        return True

    async def spin(self):
        for _ in range(6):
            await asyncio.sleep(0)

    # ---- in the place of the trainer

    async def batch(self):
        """The pool's next batch, while groups end one by one; checked against what was seen of them."""
        waiting = asyncio.create_task(self.pool.next_batch())
        for _ in range(20 * self.capacity * self.cfg.samples + 1000):
            await self.spin()
            if waiting.done():
                break
            assert await self.end_one(), "the pool waits, and nothing is running"
        else:
            raise AssertionError("no end")
        batch = waiting.result()
        if batch is None:
            return None
        groups = {}
        for r in batch["rollouts"]:
            groups.setdefault(r["group"], []).append(r)
        assert groups.keys() <= self.outcome.keys(), "a group that has not ended"
        for g, members in groups.items():
            version, good, rewards = self.outcome[g]
            assert self.version - version <= self.cfg.max_lag, "a group is older than --max_lag"
            assert len(members) == len(good) >= 2, "a member is missing"
            assert g not in self.trained and g < self.total, "trained twice, or from nowhere"
        assert list(groups) == sorted(groups)
        alive = [k for k, (f, *_) in self.running.items() if not f.done()]
        assert len(groups) == self.cfg.prompts or not alive, (
            "a batch is small while others are running"
        )
        finished = [g.id for g in self.pool.groups.values() if g.rollouts]
        for g in finished:  # of what had ended, the oldest
            assert max((self.outcome[h][0], h) for h in groups) < (self.outcome[g][0], g), (
                "a younger one was preferred"
            )
        if not self.cfg.max_lag:
            assert not alive, "something is in flight across a strictly on-policy batch"
        return list(groups)

    async def run(self):
        """A whole run; what the pool says at its end has to be what happened."""
        for step in range(10 * self.total + 10):
            groups = await self.batch()
            if groups is None:
                break
            self.handed = groups
            for _ in range(self.random.randrange(3)):
                await self.end_one()  # while the trainer trains
            if self.kills and self.random.random() < self.kills:
                await self.kill()
                continue
            self.trained += groups
            self.handed = []
            self.version += (
                self.random.random() < 0.8
            )  # it stands still in a warm-up or after a skipped step
            self.pool.refitted(self.version)
            if step % 2:
                self.saved = (
                    self.version,
                    list(self.trained),
                    dict(self.outcome),
                    pickle.dumps(self.pool.snapshot()),
                )
            await self.spin()
        else:
            raise AssertionError("no end")
        ended = self.pool.ended["lost"] + self.pool.ended["filtered"]
        assert sorted(self.trained + ended) == list(range(self.total)), (
            "a prompt is lost, or counted twice"
        )
        assert not self.pool.groups and not self.pool.queue and not self.pool.store

    async def kill(self):
        """kill -9 and --resume: what came after the last checkpoint is run again."""
        for future, *_ in self.running.values():
            future.cancel()
        await self.spin()
        self.version, trained, outcome, state = self.saved
        self.trained, self.outcome = list(trained), dict(outcome)
        self.open(state)


def play(seed, kind=Rollouts, **how):
    random = Random(seed)
    drawn = dict(
        n_rows=random.randint(1, 12),
        epochs=random.randint(1, 2),
        prompts=random.randint(1, 5),
        samples=random.randint(2, 3),
        max_lag=random.choice((0, 0, 1, 2, 3)),
        oversample=random.choice((1.0, 1.0, 1.5)),
        filtered=random.random() < 0.4,
        fails=random.choice((0.0, 0.0, 0.2)),
        kills=random.choice((0.0, 0.0, 0.3)),
    )
    asyncio.run(World(kind, seed, **drawn | how).run())


@settings(max_examples=3000, deadline=None)
@given(st.integers(0, 2**40))
def test_no_prompt_is_lost_or_trained_twice_and_no_lag_or_capacity_exceeded_in_any_schedule(seed):
    play(seed)


def seen(kind, word, **how):
    with pytest.raises(AssertionError, match=word):
        for seed in range(300):
            play(seed, kind, **how)


NOTHING = {"groups": [], "rollouts": [], "rows": [], "segments": []}  # had finished


def test_planted_position_saved_at_dispatch_loses_what_was_running():
    class Wrong(Rollouts):
        def snapshot(self):
            return super().snapshot() | NOTHING | {"queue": []}

    seen(Wrong, "a prompt is lost", kills=0.3, max_lag=2)


def test_planted_a_buffer_that_is_not_saved_is_trained_never():
    class Wrong(Rollouts):
        def snapshot(self):
            return super().snapshot() | NOTHING

    seen(Wrong, "a prompt is lost", kills=0.3, max_lag=2)


def test_planted_a_group_trained_before_every_member_has_ended():
    class Wrong(Rollouts):
        async def play(self, group):
            outs = await super().play(group)
            return outs[:2]

    seen(Wrong, "a member is missing", samples=3, fails=0.0)


def test_planted_the_fastest_groups_are_taken():
    class Wrong(Rollouts):
        def choose(self):
            done = [g for g in self.groups.values() if g.rollouts]
            full = len(done) >= self.cfg.prompts or len(done) == len(self.groups)
            return done[-self.cfg.prompts :] if full else []

    seen(Wrong, "a younger one was preferred|older than", max_lag=2, oversample=1.0)


def test_planted_groups_that_are_not_waited_for_grow_too_old():
    class Wrong(Rollouts):
        def choose(self):
            alive = sorted(self.groups.values(), key=lambda g: (g.version, g.id))
            done = [g for g in alive if g.rollouts][: self.cfg.prompts]
            return done if len(done) == self.cfg.prompts or len(done) == len(alive) else []

        def drop_stale(self, version):
            pass

    seen(Wrong, "a group is older than --max_lag", max_lag=2, oversample=1.0, n_rows=12, prompts=2)


def test_planted_capacity_that_forgets_what_is_being_trained():
    class Wrong(Rollouts):
        def fill(self):
            handed, self.handed = self.handed, []
            super().fill()
            self.handed = handed

    seen(Wrong, "more groups in flight", n_rows=12, prompts=2, max_lag=1)


def batches(n_rows, reward, most=2, **flags):
    """The first batches of a pool whose group g has the rewards `reward(g)`; groups end in their order, or as `hold` says."""
    hold = flags.pop("hold", set())

    async def run():
        class Runner:
            def remote(self, tasks, group_id, ids, attempt):
                future = asyncio.get_running_loop().create_future()
                started.append(group_id)
                if group_id not in hold:
                    future.set_result(
                        [Rollout(group_id, i, Result(r)) for i, r in zip(ids, reward(group_id))]
                    )
                return future

        runner, found = Runner(), []
        runner.rollouts = runner
        cfg = Config(**dict(prompts=2, samples=2, data_epochs=1) | flags)
        pool = Rollouts(cfg, [{"prompt": "p"}] * n_rows, [runner], 2)
        while len(found) < most and (batch := await asyncio.wait_for(pool.next_batch(), 5)):
            found.append(batch)
            pool.refitted(len(found))
            hold.clear()
        return found

    started = []
    found = asyncio.run(run())
    return [(sorted({r["group"] for r in b["rollouts"]}), b["counts"]) for b in found], started


def test_groups_whose_rewards_do_not_differ_are_replaced_until_the_cap_and_then_taken():
    def equal(g):
        return [1.0, 1.0] if g in (0, 3) or g > 5 else [0.0, 1.0]

    (first, second), _ = batches(40, equal, dynamic_sampling=(0.0, 1.0))
    assert first[0] == [1, 2] and first[1]["groups/filtered"] == 1
    assert second[0] == [4, 5] and second[1]["groups/filtered"] == 1
    (first, *_), started = batches(
        40, lambda g: [1.0, 1.0], dynamic_sampling=(0.0, 1.0), max_filtered=3.0
    )
    assert first[0] == [6, 7] and first[1]["groups/filtered"] == 6
    (first, *_), _ = batches(40, lambda g: [1.0, 1.0])
    assert first[0] == [0, 1]


def test_the_slowest_are_not_waited_for_with_oversample_and_start_again():
    (first, second), started = batches(40, lambda g: [0.0, 1.0], oversample=2.0, hold={0, 2})
    assert (
        first[0] == [1, 3] and first[1]["lag/dropped"] == 2
    )  # strictly on-policy: what is left cannot be trained any more
    assert (
        second[0] == [0, 2] and second[1]["lag/dropped"] == 2
    )  # they start again first, at the new version
    assert started[:6] == [0, 1, 2, 3, 0, 2] and started.count(0) == started.count(2) == 2


def test_a_batch_is_read_from_its_files_as_it_was_written(tmp_path):
    rows = []
    for i, n in enumerate((5, 9, 4)):
        fields = [
            np.arange(n, dtype=np.int32),
            np.arange(n) > 2,
            np.linspace(0, -1, n, dtype=np.float32),
        ]
        experts = np.full((n, 2, 2), i, np.uint8)
        row = Segment(
            *fields,
            np.full(n, i, np.int32),
            experts,
            np.arange(n) < n - 1,
            [(2, n, b"\x00mark\xff")],
            7,
            70 + i // 2,
        )
        rows.append(row)
    results = [Result(0.5, [0.5], {"a": 1.0}, {"calls": np.float32(2.0)}, True), Result()]
    rollouts = [
        {"group": 7, "id": 70 + i, "result": r, "seconds": 1.5, "replies": 2, "other_ids": 1}
        for i, r in enumerate(results)
    ]
    batch = {
        "version": 3,
        "counts": {"rollouts/finished": 2},
        "first_error": "x",
        "rollouts": rollouts,
    }
    batch["rows"] = [
        {"id": i, "rollout": i // 2, "tokens": len(s), "trained": 1} for i, s in enumerate(rows)
    ]
    write_batch(tmp_path / "new" / "1.jsonl", batch, rows)
    again, segments = read_batch(tmp_path / "new" / "1.jsonl")
    assert again | {"rows": 0} == batch | {"rows": 0} and [r["rollout"] for r in again["rows"]] == [
        0,
        0,
        1,
    ]
    for s, t in zip(rows, segments, strict=True):
        for name in PARTS:
            assert (getattr(s, name) == getattr(t, name)).all() and getattr(
                s, name
            ).dtype == getattr(t, name).dtype
        assert (s.replies, s.group_id, s.rollout_id) == (
            [tuple(r) for r in t.replies],
            t.group_id,
            t.rollout_id,
        )
    assert segments[0].reward == 0.5 and segments[0].truncated and not segments[2].truncated
