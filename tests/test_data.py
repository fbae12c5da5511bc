"""What rows are and where they go: files as they are, messages in one form, and faults of either
named before the start."""

import asyncio
import bz2
import copy
import gzip
import json
import lzma
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from test_forest import Client
from test_rollout import episode, scripted
from test_templates import TEMPLATES, load

import agent
import rollout
import train
from agent import BadInput, Env, Task, bad_input
from rollout import canonical, column, demonstrate, heard, load_rows
from server import read_chat

MANY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
USER = {"role": "user", "content": "go"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CHATS = {name: load(name)[0] for name in TEMPLATES}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- files

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(
    st.builds(
        lambda more, prompt: more | {"prompt": prompt},
        st.dictionaries(st.text(), JSON, max_size=4),
        st.text(min_size=1),
    ),
    min_size=1,
    max_size=4,
)


@MANY
@given(rows=ROWS)
def test_any_json_object_arrives_as_json_loads_gives_it(tmp_path, rows):
    file = lines(tmp_path / "rows.jsonl", rows)
    assert repr(load_rows(file, "prompt")) == repr(rows)  # repr: 1 is not 1.0, nan is itself
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    assert repr(load_rows(str(tmp_path / "rows.json"), "prompt")) == repr(rows)


def test_dates_digits_and_mixed_columns_stay_what_they_are_in_every_kind_of_file(tmp_path):
    labels = ["2023-05-01", "007", 3, 1, 2.5, None, [1, "a"], True, 10**30]
    rows = [{"prompt": "x", "label": label, f"k{i}": i} for i, label in enumerate(labels)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name, told in (
        ("a.jsonl", text),
        ("a.JSONL", text),
        ("bom.jsonl", b"\xef\xbb\xbf" + text),
        ("blank.jsonl", b"\n" + text.replace(b"\n", b"\r\n\r\n")),
        ("no_end.jsonl", text.rstrip()),
        ("lines.json", text),
        ("a.jsonl.gz", gzip.compress(text)),
        ("a.JSON.GZ", gzip.compress(json.dumps(rows).encode())),
        ("a.jsonl.bz2", bz2.compress(text)),
        ("a.jsonl.xz", lzma.compress(text)),
    ):
        (tmp_path / name).write_bytes(told)
        assert repr(load_rows(str(tmp_path / name), "prompt")) == repr(rows), name


def test_a_folder_of_json_files_is_read_as_text_and_one_that_declares_a_schema_by_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    plain, declared = tmp_path / "plain", tmp_path / "declared"
    for folder in (plain, declared):
        folder.mkdir()
        lines(folder / "train.jsonl", [{"prompt": "x", "label": "1"}, {"prompt": "y", "z": 2}])
    rows = [{"prompt": "x", "label": "1"}, {"prompt": "y", "z": 2}]
    assert load_rows(str(plain), "prompt") == rows
    head = "---\ndataset_info:\n  features:\n  - name: prompt\n    dtype: string\n"
    (declared / "README.md").write_text(f"{head}  - name: label\n    dtype: int64\n---\n")
    lines(declared / "train.jsonl", [{"prompt": "x", "label": "1"}])
    assert load_rows(str(declared), "prompt") == [{"prompt": "x", "label": 1}]
    (plain / "train.jsonl").rename(plain / "test.jsonl")
    with pytest.raises(BadInput, match=r"--data .*plain: it has no split 'train', only \['test'\]"):
        load_rows(str(plain), "prompt")


def test_parquet_arrives_as_its_schema_says_in_python_s_own_types(tmp_path):
    table = pa.table(
        {
            "prompt": ["x", "y"],
            "label": pa.array([1, None], pa.int32()),
            "near": pa.array([0.5, 1], pa.float32()),
            "list": pa.array([[1], []], pa.list_(pa.uint8())),
            "map": pa.array([[("a", None)], None], pa.map_(pa.string(), pa.int64())),
            "pad": pa.array([{"a": 1, "b": None}, {"a": None, "b": 2}]),
            "json": pa.array(['{"a": null}', "1.5"], pa.json_()),
        }
    )
    (tmp_path / "label=9").mkdir()  # a name that Arrow would take for a column
    path = tmp_path / "label=9" / "a.Parquet"
    parquet.write_table(table, path)
    first, second = load_rows(str(path), "prompt")
    assert json.loads(json.dumps(first)) == first and type(first["label"]) is int
    assert first == dict(
        prompt="x",
        label=1,
        near=0.5,
        list=[1],
        map={"a": None},
        pad={"a": 1, "b": None},
        json={"a": None},
    )
    assert second["label"] is None and second["pad"] == {"a": None, "b": 2}
    assert second["json"] == 1.5


# ---- the nulls of Arrow

FULL = [
    USER,
    {
        "role": "assistant",
        "content": "I look",
        "reasoning_content": "hm",
        "tool_calls": [
            CALL | {"function": {"name": "f", "arguments": {"a": 1, "query": "q", "of": {"b": 2}}}}
        ],
    },
    {"role": "tool", "content": "r", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "done"},
]
PROPERTIES = {
    "a": {"type": "integer", "description": "an a"},
    "query": {"type": "string", "enum": ["x", None]},
}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["a"]},
    },
}


@st.composite
def conversations(draw):
    """A row as FULL and SCHEMA are, with some of their keys."""

    def some(value: dict) -> dict:
        return {k: v for k, v in value.items() if draw(st.booleans())}

    messages = copy.deepcopy(FULL)
    if draw(st.booleans()):
        messages[1]["tool_calls"][0]["function"]["arguments"] = some({"a": 5, "query": "w"})
    else:
        messages[1:3] = [{"role": "assistant", "content": draw(st.sampled_from(["one", "two x"]))}]
        messages.insert(2, {"role": "user", "content": "more"})
    tool = copy.deepcopy(SCHEMA)
    tool["function"]["parameters"]["properties"] = some(
        {k: {"type": v["type"]} | some({"description": "e"}) for k, v in PROPERTIES.items()}
    )
    tools = {"tools": [tool]} if draw(st.booleans()) else {}
    return {"prompt": messages, "note": draw(st.sampled_from([None, "n"]))} | tools


def tokens(chat, row):
    """Ids of a row as a prompt and as a demonstration."""
    rows = asyncio.run(demonstrate(chat, row, "prompt", "label", 9999))
    return [(r.tokens.tolist(), r.mask.tolist()) for r in rows] + [heard(chat, "", row["prompt"])]


@pytest.mark.parametrize("name", ["qwen3", "llama31", "glm"])
@settings(MANY, max_examples=15)
@given(some=st.lists(conversations(), min_size=1, max_size=3))
def test_a_row_has_the_same_tokens_as_jsonl_and_as_parquet(tmp_path, name, some):
    rows = [{"prompt": FULL, "note": "n", "tools": [SCHEMA]}, *some]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    texts = load_rows(lines(tmp_path / "rows.jsonl", rows), "prompt")
    arrows = load_rows(str(tmp_path / "rows.parquet"), "prompt")
    for text, arrow in zip(texts, arrows):
        assert text["note"] == arrow["note"]
        assert tokens(CHATS[name], text) == tokens(CHATS[name], arrow)


def test_planted_padding_nulls_would_be_trained_and_shown(tmp_path, monkeypatch):
    chat, rows = CHATS["qwen3"], [{"prompt": FULL, "tools": [SCHEMA]}]
    rows.append(copy.deepcopy(rows[0]))
    rows[1]["prompt"][1]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    rows[1]["tools"][0]["function"]["parameters"]["properties"] = {"a": {"type": "integer"}}
    parquet.write_table(pa.Table.from_pylist(rows), path := tmp_path / "rows.parquet")

    def text():
        (segment,) = asyncio.run(
            demonstrate(chat, load_rows(str(path), "prompt")[1], "prompt", "label", 9999)
        )
        return chat.tokenizer.decode(segment.tokens)

    assert "null" not in text()
    monkeypatch.setattr(rollout, "native", lambda value, *_: value)
    assert '"query": null' in text()


def test_a_null_that_somebody_wrote_stays(tmp_path):
    tool = copy.deepcopy(SCHEMA)
    tool["function"]["parameters"]["properties"]["query"]["default"] = None
    (row,) = load_rows(lines(tmp_path / "a.jsonl", [{"prompt": FULL, "tools": [tool]}]), "prompt")
    properties = canonical(row["prompt"], row["tools"])[2][0]["function"]["parameters"][
        "properties"
    ]
    assert properties["query"] == {"type": "string", "enum": ["x", None], "default": None}
    # in Arrow: an entry of a list, what is text, and what is kept as JSON
    fields = {"role": "user", "content": "x", "tool_calls": None}
    table = pa.table(
        {
            "prompt": pa.array([[fields]]),
            "tools": pa.array([[json.dumps(tool)]]).cast(pa.list_(pa.json_())),
            "extra": pa.array([{"prompt": [{"role": "user", "content": None}], "b": None}]),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (row,) = load_rows(str(tmp_path / "a.parquet"), "prompt")
    assert row["prompt"] == [{"role": "user", "content": "x"}] and row["tools"] == [tool]
    assert row["extra"] == {"prompt": [{"role": "user", "content": None}], "b": None}
    (row,) = load_rows(str(tmp_path / "a.parquet"), "extra.prompt")
    assert row["extra"] == {"prompt": [{"role": "user"}], "b": None}


# ---- one canonical form

PLAIN = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}
    ),
    min_size=1,
    max_size=5,
)


@MANY
@given(messages=PLAIN)
def test_the_short_way_of_plain_messages_gives_what_read_chat_gives(messages):
    read = read_chat(json.loads(json.dumps({"messages": messages})), {})
    told, turns, tools = canonical(messages)
    assert (turns, tools, told) == (read.turns, read.tools, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_plain_messages_have_the_ids_of_the_template_alone(name):
    chat = CHATS[name]
    talk = [{"role": "system", "content": "s <b>"}, USER, {"role": "assistant", "content": "a"}]
    talk.append({"role": "user", "content": " x\n"})
    assert heard(chat, "", talk) == chat.opening(talk)
    assert heard(chat, "", "go") == chat.opening([USER])
    assert heard(chat, "", [USER, USER], 7) == chat.following([USER, USER], 7)[0]
    assert heard(chat, "", "go", 7) == chat.following([USER], 7)[0]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


HISTORIES = {
    "parts": [{"role": "user", "content": parts("go", "on")}],
    "null": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}, USER],
    "absent": [{"role": "user", "content": "x"}, {"role": "assistant"}, USER],
    "developer": [{"role": "developer", "content": "be brief"}, USER],
    "calls": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": parts("r")},
    ],
    "object": [
        USER,
        {
            "role": "assistant",
            "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
    ],
    "thought": [USER, {"role": "assistant", "content": "a", "reasoning": "hm"}, USER],
    "picture": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        },
    ],
    "begun": [USER, {"role": "assistant", "content": "Sure: <|im_end|>"}],
    "half": [{"role": "user", "content": "cut \ud83d"}],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("history", HISTORIES)
def test_messages_of_an_env_become_the_ids_that_a_client_s_become(name, history):
    chat, messages = CHATS[name], HISTORIES[history]
    sent = json.loads(json.dumps(messages, ensure_ascii=False).encode(errors="replace"))
    client = Client(chat, "ok", max_context=9999)
    asyncio.run(client.ask(*sent))
    ids = heard(chat, "", messages)
    assert ids == client.engine.asked[0][0]
    text = chat.tokenizer.decode(ids)
    assert "None" not in text and "{'" not in text
    if history == "begun":
        assert text.endswith("Sure: <|im_end|>")
        opening = chat.opening([USER])
        assert ids[: len(opening)] == opening and len(ids) > len(opening)
    if history == "parts":
        assert ids == heard(chat, "", "go\non")


def test_what_is_no_part_of_the_canonical_form_still_reaches_the_template():
    chat, _ = load("chatml")
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.name }}:{{ m.content }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": parts("x"), "name": "ann"}]
    assert chat.tokenizer.decode(heard(chat, "", messages)) == "ann:x\n"


def test_numpy_s_values_and_tuples_are_json_s():
    told = [{"role": np.str_("user"), "content": np.str_("x"), "at": np.int64(3)}]
    assert canonical(told)[0] == [{"role": "user", "content": "x", "at": 3}]
    assert canonical(np.array(told))[1] == canonical(np.str_("x"))[1] == canonical(tuple(told))[1]


IMAGE = {"type": "image", "image": {"bytes": b"\x89PNG"}}
FAULTS = {
    "None": (None, "neither a text nor a list"),
    "a number": (5, "5 is neither a text nor a list"),
    "one message": (USER, "neither a text nor a list"),
    "bytes": (b"x", "neither a text nor a list"),
    "texts": (["a", "b"], r"messages\[0\] must be an object"),
    "nothing": ([], "messages must not be empty"),
    "human": ([{"role": "human", "content": "x"}], r"messages\[0\].role must be one of system"),
    "sharegpt": ([{"from": "human", "value": "x"}], r"messages\[0\].role must be one of"),
    "a number's content": ([{"role": "user", "content": 5}], r"messages\[0\].content must be"),
    "an image": ([{"role": "user", "content": [*parts("x"), IMAGE]}], r"\[0\] holds an image"),
    "an image said": (
        [USER, {"role": "assistant", "content": [{"type": "image_url"}]}, USER],
        r"messages\[1\] holds an image",
    ),
    "a call without a name": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}, USER],
        "name must be a string",
    ),
    "calls at the end": (
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        "the last message is the assistant's and holds more than text",
    ),
    "the assistant alone": ([{"role": "assistant", "content": "a"}], "is the only one"),
    "keys": ([{("a", 1): "x"}], "no JSON"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_reset_or_step_returns_is_named(fault):
    said, words = FAULTS[fault]

    class Odd(Env):
        def __init__(self, where):
            self.where = where

        def reset(self, task):
            return said if self.where == "reset" else task.messages

        def step(self, reply):
            return said, 0.0, False, {}

    for where in ("reset", "step"):
        told = f"Odd.{where} returned messages that do not fit: .*{words}"
        with pytest.raises(ValueError, match=told):
            episode(CHATS["chatml"], Odd(where), scripted(CHATS["chatml"], "a"))


def test_an_env_s_prompt_that_ends_with_the_assistant_is_gone_on_from():
    class Begins(Env):
        def reset(self, task):
            return [USER, {"role": "assistant", "content": "<answer>"}]

        def step(self, reply):
            return None, float(reply == "42"), True, {}

    chat = CHATS["chatml"]
    generate = scripted(chat, "42")
    out = episode(chat, Begins(), generate)
    prompt = [*chat.opening([USER]), *chat.encode("<answer>")]
    assert generate.asked[0][0] == prompt and out.result.reward == 1.0
    assert out.segments[0].mask[: len(prompt)].sum() == 0


def test_an_agent_gets_a_text_for_each_content_and_a_label_by_a_nested_name():
    row = {
        "chat": {"prompt": [{"role": "system", "content": None}, HISTORIES["parts"][0]]},
        "reward_model": {"ground_truth": 7},
        "tools": json.dumps([SCHEMA]),
    }
    cfg = SimpleNamespace(prompt_key="chat.prompt", label_key="reward_model.ground_truth", seed=0)
    (task,) = rollout.Rollouts.tasks(SimpleNamespace(cfg=cfg), row, [1])
    assert [m["content"] for m in task.messages] == ["", "go\non"]
    assert (task.label, task.tools, task.row) == (7, [SCHEMA], row)
    assert isinstance(task, Task)


def test_a_column_of_the_dotted_name_itself_wins():
    assert column({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert column({"a": {"b": {"c": 2}}}, "a.b.c") == 2
    assert column({"a": 5}, "a.b") is None and column({}, "a") is None


# ---- faults of the inputs, before anything starts


def ends(capsys, tmp_path, *flags):
    """Exit code and message of main with bad input."""
    code = train.main(["--out", str(tmp_path / "out"), *flags])
    told = capsys.readouterr().err
    assert "Traceback" not in told and told.count("\n") <= 2, told
    return code, told


BROKEN = {
    "late.jsonl": (
        b'{"prompt": "x"}\n{"prompt": null}\n{"prompt": "s"}\n',
        "row 1 has no 'prompt'",
    ),
    "broken.jsonl": (b'{"prompt": "x"}\n\n{"prompt": \n', "line 3 is no JSON object"),
    "pretty.json": (b'{\n"prompt": "x"\n}\n', "line 1 is no JSON object .*one list of them"),
    "list.json": (b'[{"prompt": "x"},\n {"prompt": }]', "line 2 column"),
    "latin.jsonl": ('{"prompt": "ü"}\n'.encode("latin-1"), "line 1: 'utf-8' codec"),
    "deep.jsonl": (b'{"prompt": ' + b"[" * 10**6 + b"\n", "line 1: .*recursion"),
    "numbers.jsonl": (b'{"prompt": "x"}\n5\n', "row 1 is no JSON object but '5'"),
    "blank.jsonl": (b"\n\n", "there are no rows"),
    "empty.JSON": (b"", "the file is empty"),
    "cut.jsonl.gz": (gzip.compress(b'{"prompt": "x"}\n' * 99)[:-9], "EOFError: Compressed file"),
    "no.jsonl.gz": (b'{"prompt": "x"}\n', "BadGzipFile"),
    "rows.csv": (b"prompt,label\nx,1\n", "read by its suffix, .*jsonl, json"),
    "rows.parquet.gz": (b"x", "read by its suffix"),
    "rows": (b'{"prompt": "x"}\n', "read by its suffix"),
    "rows.parquet": (b"PAR1 no", ": .*Parquet"),
    "empty.jsonl": (b'{"prompt": ""}\n', "row 0 has no 'prompt'; fill it in"),
    "none.jsonl": (b'{"prompt": []}\n', "row 0 has no 'prompt'; fill it in"),
    "silent.jsonl": (b'{"prompt": [{"role": "user", "content": ""}]}\n', "row 0: .* has no text"),
    "number.jsonl": (b'{"prompt": "x"}\n{"prompt": 5}\n', "row 1: 5 is neither a text nor"),
    "texts.jsonl": (b'{"prompt": ["x"]}\n', r"row 0: messages\[0\] must be an object"),
    "human.jsonl": (b'{"prompt": [{"role": "human", "content": "x"}]}\n', "row 0: .*role must be"),
    "tools.jsonl": (b'{"prompt": "x", "tools": ["f"]}\n', r"row 0: tools\[0\] must be an object"),
    "tools2.jsonl": (b'{"prompt": "x", "tools": "f"}\n', "row 0: Expecting value"),
    "image.jsonl": (
        b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}\n',
        r"row 0: messages\[0\] holds an image",
    ),
    "last.jsonl": (
        b'{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls":'
        b' [{"function": {"name": "f"}}]}]}\n',
        "row 0: the last message is the assistant's and holds more",
    ),
}


@pytest.mark.parametrize("flag", ["data", "eval_data"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_row_or_file_is_exit_code_2_with_its_flag_file_and_row(name, flag, tmp_path, capsys):
    content, words = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    more = ["--eval_every", "1"] if flag == "eval_data" else []
    code, told = ends(capsys, tmp_path, f"--{flag}", str(tmp_path / name), *more)
    assert code == 2

    assert re.search(f"--{flag} {re.escape(str(tmp_path / name))}:? ?.*{words}", told), told


@pytest.mark.parametrize("name", ["no/such/file.csv", "nope.jsonl", "owner/no-such-set"])
def test_what_is_neither_file_nor_dataset_is_exit_code_2(name, tmp_path, capsys, monkeypatch):
    def away(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr("datasets.load_dataset_builder", away)
    code, told = ends(capsys, tmp_path, "--data", name)
    words = "ConnectionError: Couldn't reach the Hub" if "/no-" in name else "there is no such file"
    assert code == 2 and f"--data {name}: {words}" in told and "and more" not in told


def test_an_empty_folder_is_no_dataset(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, told = ends(capsys, tmp_path, "--data", str(tmp_path / "empty"))
    assert code == 2 and "empty: EmptyDatasetError: " in told


@pytest.mark.parametrize(
    "line,words",
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:", "SyntaxError: "),
        ("import sys; sys.exit('set FOO')", "SystemExit: set FOO"),
        ("exit(1)", "SystemExit: 1"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise StopIteration", "StopIteration"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
        ("open('/no/such/file')", "FileNotFoundError: "),
        ("import json; json.loads('{')", "Expecting property name"),
        ("{}['key']", "KeyError: 'key'"),
        ("raise Exception('a\\nb')", "Exception: a"),
    ],
)
@pytest.mark.parametrize("flag", ["agent", "reward"])
def test_whatever_a_user_s_file_raises_while_it_is_loaded_is_exit_code_2(
    flag, line, words, tmp_path, capsys
):
    (tmp_path / "mine.py").write_text(f"'''A file.'''\n{line}\n")
    code, told = ends(capsys, tmp_path, f"--{flag}", str(tmp_path / "mine.py"))
    assert code == 2 and words in told and f"--{flag} {tmp_path / 'mine.py'}: " in told
    assert f"({tmp_path / 'mine.py'}, line 2)" in told or "(mine.py, line 2)" in told


def test_ctrl_c_while_inputs_are_looked_at_is_no_bad_input():
    with pytest.raises(KeyboardInterrupt), bad_input("x"):
        raise KeyboardInterrupt
    assert agent.place(ValueError()) == ""


def test_a_label_key_of_no_row_is_refused_where_it_was_set(tmp_path, capsys):
    cfg = train.Config(data=lines(tmp_path / "a.jsonl", [{"prompt": "x", "a": {"b": 0}}]))
    assert train.check_data(cfg, "data", cfg.data)[0]["a"] == {"b": 0}  # the default may be absent
    train.check_data(replace(cfg, label_key="a.b"), "data", cfg.data)
    code, told = ends(capsys, tmp_path, "--data", cfg.data, "--label_key", "answer")
    assert code == 2
    assert f"--data {cfg.data}: no row has a 'answer', the first has only ['prompt', 'a']" in told
    with pytest.raises(BadInput, match="--eval_data .*a.jsonl: no row has a 'answer'"):
        train.check_data(replace(cfg, label_key="answer"), "eval_data", cfg.data)


def test_a_nested_prompt_is_asked_for_by_its_dotted_name(tmp_path):
    data = lines(tmp_path / "a.jsonl", [{"extra": {"prompt": "x"}}, {"extra": {}}])
    with pytest.raises(
        BadInput, match=r"row 0 has no 'prompt'; only \['extra'\]; set --prompt_key"
    ):
        load_rows(data, "prompt")
    with pytest.raises(BadInput, match="row 1 has no 'extra.prompt'; fill it in"):
        load_rows(data, "extra.prompt")


def test_a_demonstration_s_fault_has_the_number_of_its_row():
    cfg = train.Config(estimator="sft", shuffle=False, prompts=1, data_epochs=1)
    rows = [{"prompt": "x", "label": "a"}, {"prompt": [{"role": "human", "content": "x"}]}]
    pool = rollout.Rollouts(cfg, rows, [], 1)

    async def run():
        await pool.next_batch()
        pool.refitted(1)
        await pool.next_batch()

    with pytest.raises(BadInput, match="--data: row 1: .*role must be one of"):
        asyncio.run(asyncio.wait_for(run(), 30))
