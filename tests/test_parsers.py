"""rollout.py: vLLM's own parsers, chosen by real chat templates. Importing vLLM takes a quarter of a minute."""

import json
from types import SimpleNamespace

import pytest
from test_templates import load

from rollout import parser

pytestmark = pytest.mark.e2e
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
]
SAID = {
    "qwen3": '<think>\nhm\n</think>\n\nlook<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "qwen3_coder": "look<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<think>hm</think>look<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "llama31": '{"name": "f", "parameters": {"x": 1}}',
    "qwen25": 'look<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
}
AUTO = SimpleNamespace(tool_parser="auto", reasoning_parser="auto")


def chat_of(name):
    chat, _ = load(name)
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    chat.tokenizer.add_tokens(marks)
    return chat


@pytest.mark.parametrize("name", SAID)
def test_the_template_chooses_a_parser_that_reads_its_calls(name):
    parse = parser(AUTO, chat_of(name))
    reasoning, text, calls = parse(SAID[name], TOOLS)
    assert [(n, json.loads(a)) for _, n, a in calls] == [("f", {"x": 1})]
    assert (reasoning or "").strip() == ("hm" if "hm" in SAID[name] else "")
    assert text.strip() == ("look" if "look" in SAID[name] else "")
    assert parse("just text", TOOLS)[1:] == ("just text", [])
    assert parse('<tool_call>\n{"name": "f", "argu', TOOLS)[2] == []  # cut by its length


def test_a_model_without_tools_and_thoughts_needs_no_parser():
    assert parser(AUTO, load("chatml")[0])("<tool_call>x</tool_call>", TOOLS) == (None, "<tool_call>x</tool_call>", [])


def test_an_unknown_parser_is_named():
    with pytest.raises(ValueError, match="--tool_parser nothing"):
        parser(SimpleNamespace(tool_parser="nothing", reasoning_parser="none"), chat_of("qwen3"))
