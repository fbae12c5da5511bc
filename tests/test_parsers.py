"""rollout.py: vLLM's own parsers, chosen by real chat templates. They run in a process of their own: no test's process may
import vLLM, since modules that are imported later behave as in an engine then."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from test_templates import load

from rollout import parser
from server import BadRequest, read_chat

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


KIMI = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]
KIMI += ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]


def made(name: str, tool: str = "auto", reasoning: str = "auto", constrained: str = "mask"):
    chat, _ = load(name)
    chat.tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", *KIMI])
    return parser(
        SimpleNamespace(tool_parser=tool, reasoning_parser=reasoning, constrained=constrained), chat
    )


def parsed(name: str, texts: list[str], *args) -> list[tuple]:
    parse, _ = made(name, *args)
    return [parse(text, TOOLS) for text in texts]


def grammars(name: str, bodies: list[dict], *args) -> list[dict | str | None]:
    _, grammar = made(name, *args)
    found = []
    for body in bodies:
        try:
            found.append(
                grammar(read_chat({"messages": [{"role": "user"}], "tools": TOOLS} | body, {}))
            )
        except BadRequest as e:
            found.append(str(e))
    return found


@pytest.fixture(scope="module")
def elsewhere():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda *args, of=parsed: pool.submit(of, *args).result(timeout=120)


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


def test_the_ids_that_a_model_gives_its_calls_itself_are_kept(elsewhere):
    begin, end, call, argument, closed = KIMI
    said = f'look{begin}{call}functions.f:0{argument}{{"x": 1}}{closed}{call}functions.f:1{argument}{{"x": 2}}{closed}{end}'
    ((_, text, calls),) = elsewhere("chatml", [said], "kimi_k2", "none")
    assert text == "look" and calls == [
        ("functions.f:0", "f", '{"x": 1}'),
        ("functions.f:1", "f", '{"x": 2}'),
    ]
    ((_, _, calls),) = elsewhere("qwen25", [SAID["qwen25"]])
    assert [own for own, _, _ in calls] == [""]  # made up by the parser


def test_json_schemas_and_forced_calls_become_grammars_of_the_model_s_own_format(elsewhere):
    wanted = {"type": "object", "properties": {"y": {"type": "string"}}, "required": ["y"]}
    schema = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": wanted}}
    }
    broken = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    }
    bodies = [
        schema,
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {},
        broken,
    ]
    bodies.append({"tool_choice": {"type": "function", "function": {"name": "unknown"}}})
    json_schema, json_object, call, nothing, refused, unknown = elsewhere(
        "qwen25", bodies, of=grammars
    )
    assert json.loads(json_schema["json"]) == wanted and json.loads(json_object["json"]) == {
        "type": "object"
    }
    tags = [tag["begin"] for tag in json.loads(call["structural_tag"])["format"]["tags"]]
    assert tags and all(tag.startswith("<tool_call>") and '"f"' in tag for tag in tags)
    assert (
        nothing is None
        and unknown is None
        and refused.startswith("the engine can keep to no such JSON schema")
    )
    assert elsewhere("qwen25", bodies[:3], "auto", "auto", "free", of=grammars) == [None] * 3
    assert elsewhere("chatml", bodies[:3], of=grammars)[1:] == [
        json_object,
        None,
    ]  # no format to call in
