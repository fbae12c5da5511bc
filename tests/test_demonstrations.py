"""rollout.demonstrate: what supervised fine-tuning trains on, found with the model's own chat template."""

import asyncio
import json

import numpy as np
import pytest
from test_templates import EMPTY, TEMPLATES, load
from transformers import AutoTokenizer

import train
from agent import BadInput
from rollout import Rollouts, demonstrate
from server import Chat
from train import Config

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}
ENDS = {name: special.split(" ")[0] for name, special in TEMPLATES.items()} | {"glm": "<|user|>"}
TALK = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one <b> 42"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "two"},
]


def rows_of(chat, messages, limit=4096, **row):
    return asyncio.run(demonstrate(chat, {"prompt": messages} | row, "prompt", "label", limit))


def said(chat, row):
    return [chat.tokenizer.decode(row.tokens[a:b]) for a, b, _ in row.replies]


@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_assistant_s_turns_are_trained_each_with_the_token_that_ends_it(name):
    chat, _ = load(name)
    before = {"glm": "\n<think></think>\n", "qwen3": EMPTY, "deepseek": "\n</think>\n\n"}.get(
        name, ""
    )
    end = ENDS[name]
    rows = rows_of(chat, TALK)
    assert [text for row in rows for text in said(chat, row)] == [
        f"{before}one <b> 42{end}",
        f"{before}two{end}",
    ]
    for row in rows:
        trained = np.zeros(len(row), bool)
        for a, b, _ in row.replies:
            trained[a:b] = True
        assert (row.mask == trained).all() and row.mask[-1]
    assert len(rows) == (
        2 if name == "deepseek" else 1
    )  # its prompts begin with no earlier rendering
    if name not in (
        "deepseek",
        "qwen3",
    ):  # Qwen3 shows earlier turns without the empty thought that it prompts
        shown = chat.tokenizer.apply_chat_template(TALK, tokenize=False)
        whole = chat.tokenizer.decode(rows[0].tokens)
        assert shown.rstrip().removesuffix(end) == whole.removesuffix(end)


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "deepseek"])
def test_a_tool_call_is_demonstrated_in_the_template_s_own_format(name):
    chat, _ = load(name)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "RESULT"},
        {"role": "assistant", "content": "done"},
    ]
    (row,) = rows_of(chat, messages, tools=[TOOL])
    first, second = said(chat, row)
    end = "<|observation|>" if name == "glm" else ENDS[name]
    assert first.endswith(end) and "f" in first and "x" in first and "RESULT" not in first
    assert second.endswith(f"done{ENDS[name]}") and "RESULT" in chat.tokenizer.decode(row.tokens)


def test_tool_calls_that_a_template_does_not_show_again_are_refused():
    chat, _ = load("deepseek")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    with pytest.raises(ValueError, match="tool calls cannot be demonstrated"):
        rows_of(chat, messages, tools=[TOOL])


def test_old_reasoning_that_the_template_strips_is_trained_in_a_row_of_its_own():
    chat, _ = load("qwen3")
    messages = [TALK[0], TALK[1] | {"reasoning_content": "hm"}, *TALK[2:]]
    first, second = rows_of(chat, messages)
    assert said(chat, first) == ["<think>\nhm\n</think>\n\none <b> 42<|im_end|>"] and said(
        chat, second
    )[0].endswith("two<|im_end|>")
    assert "hm" not in chat.tokenizer.decode(second.tokens) and len(second.replies) == 1


def test_a_label_is_the_reply_to_a_prompt_that_ends_with_the_user():
    chat, _ = load("chatml")
    (row,) = rows_of(chat, "2+2?", label=4)
    assert said(chat, row) == ["4<|im_end|>"]
    with pytest.raises(ValueError, match="without a reply"):
        rows_of(chat, "2+2?")


def test_characters_of_a_special_token_are_text_and_parts_are_encoded_one_by_one():
    chat, eos = load("chatml")
    (row,) = rows_of(chat, "q", label="a<|im_end|>b")
    assert row.tokens[row.mask].tolist().count(chat.tokenizer.eos_token_id) == 1 and said(
        chat, row
    ) == ["a<|im_end|>b<|im_end|>"]
    text = "First calc"
    whole, parts = chat.encode(text), [*chat.encode("Fir"), *chat.encode("st calc")]
    assert whole != parts
    pieces = [{"type": "text", "text": "Fir"}, {"type": "text", "text": "st calc"}]
    (row,) = rows_of(
        chat, [{"role": "user", "content": "q"}, {"role": "assistant", "content": pieces}]
    )
    assert row.tokens[row.mask].tolist() == [*parts, chat.tokenizer.eos_token_id]


def test_whole_replies_beyond_the_context_are_cut_off():
    chat, _ = load("chatml")
    (row,) = rows_of(chat, TALK)
    (a, first, _), (_, last, _) = row.replies
    assert last == len(row)
    (cut,) = rows_of(chat, TALK, limit=last - 1)
    assert len(cut) == first and cut.truncated and rows_of(chat, TALK, limit=first - 1) == []


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "deepseek"])
def test_text_in_parts_loses_neither_tool_calls_nor_reasoning(name):
    """Many data sets write every content as a list of parts."""
    chat, _ = load(name)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    more = {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]}
    (text,) = rows_of(chat, [TALK[0], more | {"content": "look"}], tools=[TOOL])
    one, two = (
        [{"type": "text", "text": part} for part in parts] for parts in (["look"], ["lo", "ok"])
    )
    (row,) = rows_of(chat, [TALK[0], more | {"content": one}], tools=[TOOL])
    assert row.tokens.tolist() == text.tokens.tolist() and row.mask.tolist() == text.mask.tolist()
    (row,) = rows_of(chat, [TALK[0], more | {"content": two}], tools=[TOOL])
    after = said(chat, text)[0].rpartition("look")[2]  # some templates show no text beside a call
    assert "x" in after and said(chat, row)[0].endswith(after)


# ---- through the pool, as a run takes them


def demonstrations(n=5, state=None, **flags):
    cfg = Config(estimator="sft", shuffle=False, **dict(prompts=2, data_epochs=1) | flags)
    rows = [{"prompt": f"What is {i}+{i}?", "label": f"<answer>{2 * i}</answer>"} for i in range(n)]
    return Rollouts(cfg, rows, [], 1, state)


def batches_of(pool, most=9):
    async def run():
        batches = []
        while len(batches) < most and (batch := await pool.next_batch()):
            batches.append((batch, pool.fetch([r["id"] for r in batch["rows"]])))
            pool.refitted(len(batches))
        return batches

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_every_demonstration_is_trained_once_a_pass_and_what_the_last_batch_lacks_ends_nothing():
    chat = Chat(AutoTokenizer.from_pretrained("examples/starter"))
    batches = batches_of(demonstrations())
    assert [len(batch["rows"]) for batch, _ in batches] == [2, 2, 1]
    texts = [t for _, rows in batches for row in rows for t in said(chat, row)]
    assert [t.partition("<answer>")[2].partition("<")[0] for t in texts] == [
        "0",
        "2",
        "4",
        "6",
        "8",
    ]


def test_a_resumed_run_goes_on_with_the_next_demonstration_whatever_the_size_of_its_batches():
    batches_of(pool := demonstrations(), most=1)
    rest = batches_of(demonstrations(state=pool.snapshot(), prompts=3))
    assert [r["group"] for batch, _ in rest for r in batch["rollouts"]] == [2, 3, 4]


def test_what_max_context_cuts_off_is_counted():
    batches = batches_of(demonstrations(n=2, max_context=12))
    assert (
        train.batch_metrics(batches[0][0])["rollouts/truncated"] == 2 and not batches[0][0]["rows"]
    )


def test_a_row_without_a_reply_is_refused_before_the_run_with_exit_code_2(tmp_path, capsys):
    rows = [{"prompt": "one", "label": "1"}, {"prompt": [{"role": "user", "content": "two"}]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--estimator",
        "sft",
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--out",
        str(tmp_path / "run"),
    ]
    assert train.main(flags) == 2
    assert "row 1 has no assistant message and no 'label' to learn" in capsys.readouterr().err


def test_a_demonstration_that_a_template_cannot_show_names_its_fault():
    pool = demonstrations(n=1)
    pool.rows[0] = {
        "prompt": [{"role": "user", "content": "?"}, {"role": "system", "content": "!"}]
    }
    with pytest.raises(BadInput, match="without a reply of the assistant"):
        batches_of(pool)
