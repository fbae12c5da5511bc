"""server.py: the bytes between turns, and traces that keep sampled ids."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from agent import Reply, Result, Trace, digest
from server import Chat

QUESTION = [{"role": "user", "content": "What is 17+25?"}]


@pytest.fixture(scope="module")
def chat():
    return Chat(AutoTokenizer.from_pretrained("examples/starter"))


def reply(ids, prompt=(), experts=None):
    ids = np.asarray(ids, np.int32)
    logprobs, versions = -np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32)
    return Reply(
        ids,
        logprobs,
        versions,
        digest(np.asarray(prompt), ids, logprobs, versions),
        "stop",
        experts,
    )


def test_canonical_replies_give_the_template_s_own_rendering(chat):
    eos, history, trace = chat.tokenizer.eos_token_id, list(QUESTION), Trace(chat.opening(QUESTION))
    for text, observation in (("<calc>17+25</calc>", "42"), ("<answer>42</answer>", "right")):
        trace.reply(reply([*chat.encode(text), eos]))
        new = [{"role": "user", "content": observation}]
        trace.context(chat.following(new, trace.tokens[-1])[0])
        history += [{"role": "assistant", "content": text}, *new]
        assert trace.tokens == chat.opening(history)


def test_a_reply_cut_by_its_length_gets_an_untrained_end_of_turn(chat):
    ids = chat.encode("<calc>17+")
    trace = Trace(chat.opening(QUESTION))
    trace.reply(reply(ids))
    at = len(trace)
    trace.context(chat.following([{"role": "user", "content": "?"}], trace.tokens[-1])[0])
    assert trace.tokens[at] == chat.tokenizer.eos_token_id and not trace.mask[at]
    history = [
        *QUESTION,
        {"role": "assistant", "content": "<calc>17+"},
        {"role": "user", "content": "?"},
    ]
    assert trace.tokens == chat.opening(history)


def test_sampled_ids_stay_when_their_text_encodes_to_others(chat):
    letters = [
        chat.tokenizer.convert_tokens_to_ids(c) for c in "answer"
    ]  # one token each, canonical are fewer
    assert len(chat.encode(chat.text(letters))) < len(letters)
    trace = Trace(chat.opening(QUESTION))
    trace.reply(reply([*letters, chat.tokenizer.eos_token_id], trace.tokens))
    trace.context(chat.following([{"role": "user", "content": "?"}], trace.tokens[-1])[0])
    start, end, _ = trace.replies[0]
    assert trace.tokens[start : end - 1] == letters
    row = trace.segment(Result(reward=1.0), 2, 5)
    assert row.tokens[start : end - 1].tolist() == letters and len(row) == end
    assert row.mask.sum() == len(letters) + 1 and row.mask[start:end].all()
    assert (row.versions[~row.mask] == -1).all() and (row.logprobs[~row.mask] == 0).all()


def test_expert_rows_are_asked_for_once_and_the_last_token_has_none(chat):
    trace = Trace([1, 2, 3])
    trace.reply(reply([4, 5], experts=np.full((4, 2, 2), 7, np.uint8)))  # 3 + 2 - 1 rows
    assert trace.known() == 4
    trace.context([6])
    trace.reply(reply([8, 9], experts=np.full((3, 2, 2), 1, np.uint8)))  # tokens 5, 6 and 8
    row = trace.segment(Result(), 0, 0)
    assert row.experts.shape == (8, 2, 2) and row.experts[:, 0, 0].tolist() == [
        7,
        7,
        7,
        7,
        1,
        1,
        1,
        0,
    ]
    assert row.experts_ok.tolist() == [True] * 7 + [False]


def test_a_model_without_a_chat_template_is_refused():
    tokenizer = AutoTokenizer.from_pretrained("examples/starter")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        Chat(tokenizer)
