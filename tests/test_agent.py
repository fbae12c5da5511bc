"""agent.py: the default game, segments, digests, loading a user's file."""

import numpy as np
import pytest

from agent import Agent, Segment, Task, digest, load_agent


def play(label, *replies):
    env = Agent()
    env.reset(Task([{"role": "user", "content": "?"}], label=label))
    return [env.step(r) for r in replies]


def test_the_calculator_answers_one_operation_a_call():
    (seven, reward, done, info), (_, final, over, _) = play(21, "<calc>3+4</calc>", "<answer>21</answer>")
    assert (seven, reward, done, info["calls"]) == ("7", 0.0, False, 1)
    assert (final, over) == (1.0, True)
    assert play(0, "<calc>-14+5</calc>", "<calc>12*7</calc>", "<calc>1-9</calc>")[0][0] == "-9"


def test_only_the_right_number_is_rewarded_and_a_malformed_reply_gets_a_hint():
    assert play(21, "<answer>22</answer>")[0][1:3] == (0.0, True)
    for reply in (
        "",
        "21",
        "<calc>1+2+3</calc>",
        "<answer>x</answer>",
        "<calc>1/2</calc>",
        "<answer>21",
        "<answer>21</answer>>>",
    ):
        observation, reward, done, _ = play(21, reply)[0]
        assert "<calc>" in observation and reward == 0 and not done


def row(n=10, replies=((3, 5), (7, 10))):
    mask = np.zeros(n, bool)
    for a, b in replies:
        mask[a:b] = True
    return Segment(
        np.arange(n, dtype=np.int32),
        mask,
        np.where(mask, -1.0, 0.0).astype(np.float32),
        np.where(mask, 3, -1).astype(np.int32),
        np.zeros((n, 2, 2), np.uint8),
        np.arange(n) < n - 1,
        [(a, b, b"x") for a, b in replies],
    )


def test_a_row_is_cut_between_replies_and_every_field_with_it():
    cut = row().cut(9)
    assert len(cut) == 5 and cut.truncated and cut.replies == [(3, 5, b"x")]
    assert {len(getattr(cut, f)) for f in ("tokens", "mask", "logprobs", "versions", "experts", "experts_ok")} == {5}
    assert not cut.experts_ok[-1] and cut.experts_ok[:-1].all()
    assert len(row().cut(10)) == 10 and not row().cut(10).truncated
    assert len(row().cut(4)) == 0


def test_a_digest_covers_prompt_reply_logprobs_versions_and_their_borders():
    args = [np.array([1, 2]), np.array([3, 4]), np.array([-0.5, -1.0]), np.array([0, 0])]
    one = digest(*args)
    assert one == digest(*[a.copy() for a in args]) and len(one) == 16
    for i in range(4):
        changed = [a.copy() for a in args]
        changed[i][-1] += 1
        assert digest(*changed) != one
    assert digest(np.array([1]), np.array([2, 3, 4]), *args[2:]) != digest(
        np.array([1, 2]), np.array([3, 4]), *args[2:]
    )
    nudged = np.nextafter(args[2].astype(np.float32), 0)
    assert digest(args[0], args[1], nudged, args[3]) != one


def test_an_agent_file_may_import_its_siblings_and_use_dataclasses(tmp_path):
    (tmp_path / "my_helper.py").write_text("VALUE = 41\n")
    (tmp_path / "my_agent.py").write_text(
        "from dataclasses import dataclass\nfrom my_helper import VALUE\nfrom agent import Env\n\n"
        "@dataclass\nclass Point:\n    x: 'int' = VALUE + 1\n\nclass Agent(Env):\n    point = Point()\n"
    )
    assert load_agent(str(tmp_path / "my_agent.py"))().point.x == 42
    assert load_agent("agent.py") is Agent


def test_a_missing_file_or_class_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--agent .*nope.py"):
        load_agent(str(tmp_path / "nope.py"))
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(AttributeError, match="no class named Agent"):
        load_agent(str(tmp_path / "empty.py"))
