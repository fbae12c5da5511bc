"""rollout.py: vLLM's own parsers, chosen by real chat templates. They run in a process of their own: no test's process may
import vLLM, since modules that are imported later behave as in an engine then."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from test_templates import load

from rollout import parser

pytestmark = pytest.mark.e2e
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
SAID = {
    "qwen3": '<think>\nhm\n</think>\n\nlook<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "qwen3_coder": "look<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<think>hm</think>look<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "llama31": '{"name": "f", "parameters": {"x": 1}}',
    "qwen25": 'look<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
}
CUT = '<tool_call>\n{"name": "f", "argu'


def parsed(name: str, texts: list[str], tool: str = "auto", reasoning: str = "auto") -> list[tuple]:
    chat, _ = load(name)
    chat.tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    parse = parser(SimpleNamespace(tool_parser=tool, reasoning_parser=reasoning), chat)
    return [parse(text, TOOLS) for text in texts]


@pytest.fixture(scope="module")
def elsewhere():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda *args: pool.submit(parsed, *args).result(timeout=120)


@pytest.mark.parametrize("name", SAID)
def test_the_template_chooses_a_parser_that_reads_its_calls(name, elsewhere):
    (reasoning, text, calls), plain, cut = elsewhere(name, [SAID[name], "just text", CUT])
    assert [(n, json.loads(a)) for _, n, a in calls] == [("f", {"x": 1})]
    assert (reasoning or "").strip() == ("hm" if "hm" in SAID[name] else "")
    assert text.strip() == ("look" if "look" in SAID[name] else "")
    assert plain[1:] == ("just text", []) and cut[2] == []  # one cut by its length calls nothing


def test_a_model_without_tools_and_thoughts_needs_no_parser():
    text = "<tool_call>x</tool_call>"
    assert parsed("chatml", [text]) == [(None, text, [])]


def test_an_unknown_parser_is_named(elsewhere):
    with pytest.raises(ValueError, match="--tool_parser nothing"):
        elsewhere("qwen3", [], "nothing", "none")
