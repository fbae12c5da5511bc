"""server.py: requests of three wires in one canonical form, and how an echoed turn relates to the delivered one.

tests/wires/ holds recorded and shortened exchanges of real clients with a scripted server.
"""

import base64
import copy
import json
import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from server import (
    NODE_KEY,
    As,
    BadRequest,
    Call,
    In,
    read_chat,
    read_messages,
    read_responses,
    same_turn,
)

RECORDED = {
    p.name[:2]: json.loads(p.read_text())
    for p in sorted(Path(__file__).with_name("wires").glob("*.json"))
}
READ = {"chat/completions": read_chat, "responses": read_responses, "messages": read_messages}
PNG = base64.b64encode(b"\x89PNG bytes").decode()


def tool(entry, wire):
    """The recordings abbreviate a tool to its name and kind."""
    name, kind = entry["_name"], entry["_type"]
    if kind == "namespace":
        return {
            "type": kind,
            "name": name,
            "tools": [{"type": "function", "name": "spawn_agent", "parameters": {}}],
        }
    flat = {"name": name, "description": "d"}
    if wire == "messages":
        return flat | {"input_schema": {"type": "object"}}
    return {"type": kind, "function": flat} if wire == "chat/completions" else {"type": kind} | flat


def request(exchange):
    """(reader, body, headers) of a recorded exchange."""
    wire = exchange["path"].split("?")[0].removeprefix("/v1/")
    body = copy.deepcopy(exchange["request"])
    if "tools" in body:
        body["tools"] = [tool(t, wire) for t in body["tools"]]
    return READ[wire], body, exchange["headers"]


def parsed(exchange):
    read, body, headers = request(exchange)
    return read(body, headers)


def turns(req):
    return [t for t in req.turns if isinstance(t, As)]


def turn(text="", reasoning=None, calls=(), anchors=()):
    return As(text, reasoning, tuple(calls), (*(c.id for c in calls if c.id), *anchors))


def chat_reply(response):
    if "sse" not in response:
        message = response["choices"][0]["message"]
        calls = [
            Call(c["id"], c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls", [])
        ]
        return turn(message["content"] or "", message.get("reasoning_content"), calls)
    text, thought, calls = "", "", {}
    for delta in (
        c["delta"] for event in response["sse"] if isinstance(event, dict) for c in event["choices"]
    ):
        text, thought = (
            text + delta.get("content", ""),
            thought + delta.get("reasoning_content", ""),
        )
        for part in delta.get("tool_calls", []):
            call = calls.setdefault(
                part["index"], Call(part.get("id"), part["function"].get("name"), "")
            )
            calls[part["index"]] = replace(
                call, arguments=call.arguments + part["function"]["arguments"]
            )
    return turn(text, thought or None, calls.values())


def responses_reply(response):
    items, events = response.get("output"), response.get("sse", [])
    if items is None:
        events = [e for e in events if isinstance(e, dict)]
        items = {
            e["output_index"]: e["item"]
            for e in events
            if e["type"].startswith("response.output_item")
        }.values()
    text = "".join(i["content"][0]["text"] for i in items if i["type"] == "message")
    thought = "".join(i["summary"][0]["text"] for i in items if i["type"] == "reasoning")
    # the recording of one stream is cut inside its last call
    calls = [
        Call(i["call_id"], i["name"], i["arguments"] or '{"cmd": "echo two"}')
        for i in items
        if i["type"] == "function_call"
    ]
    minted = [i[k] for i in items for k in ("id", "encrypted_content") if k in i]
    return turn(text, thought or None, calls, minted)


def messages_reply(response):
    blocks = {i: dict(b) for i, b in enumerate(response.get("content", []))}
    for block in blocks.values():
        block["raw"] = json.dumps(
            block.get("input"), indent=1
        )  # sampled with other blanks than the client's
    for event in (e for e in response.get("sse", []) if isinstance(e, dict)):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"raw": ""}
        elif event["type"] == "content_block_delta":
            key, value = next(kv for kv in event["delta"].items() if kv[0] != "type")
            key = "raw" if key == "partial_json" else key
            blocks[event["index"]][key] += value
    blocks = blocks.values()
    text = "".join(b["text"] for b in blocks if b["type"] == "text")
    thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
    calls = [Call(b["id"], b["name"], b["raw"]) for b in blocks if b["type"] == "tool_use"]
    return turn(
        text, thought or None, calls, [b["signature"] for b in blocks if b["type"] == "thinking"]
    )


REPLY = {"chat/completions": chat_reply, "responses": responses_reply, "messages": messages_reply}


def delivered(exchange):
    """The turn that was sent in an exchange, made from its recorded reply without the code under test."""
    if exchange["status"] != 200 or exchange["stub_note"] or not exchange.get("response"):
        return None
    return REPLY[exchange["path"].split("?")[0].removeprefix("/v1/")](exchange["response"])


def best(echo, sent):
    return min((tier for s in sent if (tier := same_turn(echo, s))), default=None)


# ---- Recorded exchanges


@pytest.mark.parametrize(
    "name,i", [(n, i) for n, d in RECORDED.items() for i in range(len(d["exchanges"]))]
)
def test_every_recorded_request_is_read(name, i):
    exchange = RECORDED[name]["exchanges"][i]
    read, body, headers = request(exchange)
    if "thread" in body:
        with pytest.raises(BadRequest) as e:
            read(body, headers)
        assert e.value.error_code == exchange["response"]["error"]["details"]["error_code"]
        return
    req = read(body, headers)
    assert req.turns and req.model == body["model"] and req.stream == bool(body.get("stream"))
    said = [m for m in body.get("messages", []) if m["role"] == "assistant"]
    assert "messages" not in body or len(turns(req)) == len(said)
    hosted = [t for t in body.get("tools", []) if t.get("type") == "web_search"]
    assert len(req.tools) == len(body.get("tools", [])) - len(hosted)


# for each exchange, the tier of each assistant turn in it against the replies before; None: its reply was not recorded
TIERS = {
    "01": [[], ["T0"], ["T0"]],  # null fields are not read
    "02": [[], ["T0"]],
    "03": [[], ["T0"], []],
    "04": [[], ["T1"], ["T1"]],
    "07": [[], ["T1"]],
    "08": [[], ["T2"], ["T2", "T0", None]],
    "12": [[], ["T0"], ["T0", "T0"]],
    "16": [[], [], ["T1"]],
    "20": [[], ["T0"], ["T0"]],  # the reply that was dropped is not there
}


@pytest.mark.parametrize("name", TIERS)
def test_every_recorded_echo_gets_its_tier(name):
    sent, tiers = [], []
    for exchange in RECORDED[name]["exchanges"]:
        tiers.append([best(echo, sent) for echo in turns(parsed(exchange))])
        sent += [d] if (d := delivered(exchange)) else []
    assert tiers == TIERS[name]


def test_an_unthreaded_retry_echoes_the_reply_that_was_delivered():
    rejected, first, second = RECORDED["05"]["exchanges"]
    assert delivered(rejected) is None
    assert [same_turn(t, delivered(first)) for t in turns(parsed(second))] == ["T1"]
    assert [t.error for t in parsed(second).turns if isinstance(t, In) and t.role == "tool"] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    "name,at",
    [
        ("01", (0, 1)),
        ("04", (0, 1)),
        ("07", (0, 1)),
        ("08", (1, 2)),
        ("12", (0, 1)),
        ("16", (1, 2)),
    ],
)
def test_a_recorded_continuation_extends_the_history_before_it(name, at):
    before, after = (parsed(RECORDED[name]["exchanges"][i]).turns for i in at)
    assert after[: len(before)] == before and isinstance(after[len(before)], As)


def test_a_recorded_compaction_keeps_its_newest_turn_and_changes_the_input_before_it():
    before, summary, _ = (parsed(e).turns for e in RECORDED["09"]["exchanges"])
    assert turns(parsed(RECORDED["09"]["exchanges"][1])) == [t for t in before if isinstance(t, As)]
    assert (
        summary[: len(before)] == before
    )  # the moved cache_control is not seen, the block in the last message is
    assert summary[-1].role == "user" and summary[-1].text.startswith("CRITICAL")


def test_client_ids_on_input_items_do_not_matter():
    first, _, after = (parsed(e).turns for e in RECORDED["13"]["exchanges"])
    ids = [[i.get("id") for i in e["request"]["input"][:4]] for e in RECORDED["13"]["exchanges"]]
    assert ids[0] != ids[2] and first[:1] == after[:1] and first[3] == after[3]


def test_a_summary_that_comes_back_as_assistant_text_has_no_anchor():
    (echo,) = turns(parsed(RECORDED["18"]["exchanges"][2]))
    assert echo == As("SUMMARY-TEXT", None, (), ())


def test_two_wires_of_one_client_say_the_same():
    responses, messages = (turns(parsed(e))[0] for e in RECORDED["19"]["exchanges"])
    assert (responses.text, responses.reasoning) == (messages.text, messages.reasoning)
    assert (
        "ENC:2db0ff363ebe4e9d9462e7700b071135" in responses.anchors
        and "sig-stub-abc123" in messages.anchors
    )
    assert same_turn(replace(messages, calls=responses.calls), responses) == "T1"


def test_recorded_requests_say_what_they_want():
    assert parsed(RECORDED["14"]["exchanges"][0]).include_encrypted
    assert (
        parsed(RECORDED["06"]["exchanges"][0]).schema
        and not parsed(RECORDED["07"]["exchanges"][0]).schema
    )
    assert parsed(RECORDED["22"]["exchanges"][1]).previous == "resp_5611b61c48ce42fda79cc06c"


# ---- What the canonical form does not see


def said(message):
    return read_chat(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant"} | message]}, {}
    ).turns[1]


def claude(*contents, **extra):
    messages = [{"role": role, "content": content} for role, content in contents]
    return read_messages({"messages": messages} | extra, {}).turns


def test_moving_cache_control_is_not_seen():
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "text", "text": "t"},
    ]
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    histories = []
    for k in range(4):
        parts = copy.deepcopy([call, *blocks])
        if k < 3:
            parts[k]["cache_control"] = {"type": "ephemeral"}
        histories.append(claude(("user", "q"), ("assistant", parts[:1]), ("user", parts[1:])))
    assert all(h == histories[0] for h in histories) and len(histories[0]) == 4


def test_an_echo_by_object_by_dump_and_by_stream_helper_is_one_turn():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    plain = said({"content": "x", "tool_calls": [call]})
    nulls = {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    helper = copy.deepcopy(call) | {"index": 0}
    helper["function"]["parsed_arguments"] = {"a": 1}
    assert said({"content": "x", "tool_calls": [call]} | nulls) == plain
    assert said({"content": "x", "tool_calls": [helper], "parsed": None} | nulls) == plain
    assert same_turn(plain, turn("x", None, [Call("c1", "f", '{"a":  1}')])) == "T0"


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}], "absent"])
def test_every_way_to_say_nothing_is_the_same(content):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    message = (
        {"tool_calls": [call]}
        if content == "absent"
        else {"tool_calls": [call], "content": content}
    )
    assert said(message) == As("", None, (Call("c1", "f", ""),), ("c1",))


def test_a_string_is_a_list_of_one_text_on_every_wire():
    want = [In("user", "hi")]
    for content in (
        "hi",
        [{"type": "text", "text": "hi"}],
        [{"text": "hi"}, {"type": "text", "text": ""}],
    ):
        assert read_chat({"messages": [{"role": "user", "content": content}]}, {}).turns == want
        assert claude(("user", content)) == want
    assert read_responses({"input": "hi"}, {}).turns == want
    assert (
        read_responses(
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}, {}
        ).turns
        == want
    )


def test_parts_of_an_input_join_by_line_and_those_of_a_reply_without_a_separator():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [t.text for t in claude(("user", parts), ("assistant", parts))] == ["a\nb", "ab"]
    assert said({"content": parts}).text == "ab"


def test_a_message_that_says_nothing_is_still_a_message():
    assert claude(("user", ""), ("user", [])) == [In("user", ""), In("user", "")]
    chat = [{"role": "user", "content": None, "tool_call_id": "a"}, {"role": "assistant"}]
    assert read_chat({"messages": chat}, {}).turns == [In("user", ""), As("", None, (), ())]


def test_inputs_are_compared_exactly():
    assert claude(("user", "hi")) != claude(("user", "hi ")) != claude(("user", "hi\n"))


def test_a_user_message_extended_in_place_is_another_input():
    block = {"type": "text", "text": "q"}
    extended = claude(("user", [block, {"type": "text", "text": "[no visible output]"}]))
    assert extended != claude(("user", [block])) and len(extended) == 1


def test_the_billing_header_is_not_seen():
    def system(digest, style):
        head = f"x-anthropic-billing-header: cc_version=2.1;{digest}"
        return claude(
            ("user", "q"), system=[{"type": "text", "text": t} for t in (head, "You are", style)]
        )

    assert system("aaa", "x") == system("bbb", "x") == [In("system", "You are\nx"), In("user", "q")]
    assert system("aaa", "x") != system("aaa", "Today's date is another")


def test_tool_results_keep_the_order_in_which_they_came():
    blocks = [{"type": "tool_result", "tool_use_id": i, "content": i.upper()} for i in "ba"]
    want = [In("tool", "B", "b"), In("tool", "A", "a"), In("user", "go on")]
    assert claude(("user", [*blocks, {"type": "text", "text": "go on"}])) == want
    chat = [{"role": "tool", "tool_call_id": i, "content": i.upper()} for i in "ba"]
    assert read_chat({"messages": [*chat, {"role": "user", "content": "go on"}]}, {}).turns == want
    items = [{"type": "function_call_output", "call_id": i, "output": i.upper()} for i in "ba"]
    assert (
        read_responses({"input": [*items, {"role": "user", "content": "go on"}]}, {}).turns == want
    )


def test_text_between_tool_results_stays_between_them():
    block = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
    assert claude(("user", [block, {"type": "text", "text": "t"}, block])) == [
        In("tool", "1", "a"),
        In("user", "t"),
        In("tool", "1", "a"),
    ]


def test_missing_duplicate_and_unknown_tool_results_are_read():
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    results = [{"type": "tool_result", "tool_use_id": i, "content": "1"} for i in ("a", "a", "zzz")]
    got = claude(("user", "q"), ("assistant", [call, call | {"id": "b"}]), ("user", results))
    assert [t.call for t in got[2:]] == ["a", "a", "zzz"]


def test_a_tool_result_may_be_text_blocks_an_image_an_error_or_nothing():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    contents = [
        "x",
        [{"type": "text", "text": "x"}],
        [{"type": "text", "text": "x"}, image],
        None,
        [],
        "",
    ]
    blocks = [{"type": "tool_result", "tool_use_id": "a", "content": c} for c in contents]
    text, block, with_image, *nothing = claude(("user", blocks))
    assert text == block == In("tool", "x", "a") and with_image.images and with_image.text == "x"
    assert nothing == [In("tool", "", "a")] * 3
    assert claude(("user", [blocks[0] | {"is_error": True}])) == [In("tool", "x", "a", error=True)]


def test_an_image_is_its_bytes_whatever_the_wire():
    anthropic = claude(("user", [{"type": "image", "source": {"type": "base64", "data": PNG}}]))
    uri = f"data:image/png;base64,{PNG}"
    chat = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}
        ]
    }
    responses = {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri}]}]
    }
    assert read_chat(chat, {}).turns == read_responses(responses, {}).turns == anthropic
    assert anthropic != claude(
        ("user", [{"type": "image", "source": {"type": "base64", "data": PNG[:4]}}])
    )
    url = claude(("user", [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]))
    assert url[0].images == ("https://x/y.png",)


def test_system_messages_stay_where_they_are():
    roles = ("system", "user", "developer", "tool", "tool", "system", "user")
    chat = [{"role": r, "content": str(i)} for i, r in enumerate(roles)]
    got = read_chat({"messages": chat}, {}).turns
    assert [t.role for t in got] == ["system", "user", "system", "tool", "tool", "system", "user"]
    assert [t.text for t in got] == list("0123456")
    assert [t.role for t in claude(("user", "q"), ("system", "s"), system="S")] == [
        "system",
        "user",
        "system",
    ]
    items = {
        "instructions": "S",
        "input": [{"role": "user", "content": "q"}, {"role": "developer", "content": "s"}],
    }
    assert [t.role for t in read_responses(items, {}).turns] == ["system", "user", "system"]


def test_adjacent_response_items_are_one_turn():
    reasoning = {
        "type": "reasoning",
        "id": "rs",
        "summary": [{"type": "summary_text", "text": "r"}],
        "encrypted_content": "E",
    }
    message = {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "t"}],
    }
    call = {
        "type": "function_call",
        "id": "fc",
        "call_id": "c",
        "name": "f",
        "namespace": "ns",
        "arguments": "{",
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    got = read_responses(
        {"input": [reasoning, message, {"type": "web_search_call"}, call, result, message]}, {}
    ).turns
    assert got == [
        As("t", "r", (Call("c", "f", "{", "ns"),), ("c", "rs", "E", "m", "fc")),
        In("tool", "1", "c"),
        As("t", None, (), ("m",)),
    ]


def test_legacy_functions_become_tools():
    body = {
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "f", "arguments": "{}"},
            },
            {"role": "function", "name": "f", "content": "1"},
        ],
        "functions": [{"name": "f", "parameters": {"type": "object"}}],
        "function_call": {"name": "f"},
    }
    req = read_chat(body, {})
    assert req.turns == [As("", None, (Call("", "f", "{}"),), ()), In("tool", "1")]
    assert req.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ]
    assert (req.tool_choice, req.forced) == ("required", "f")


def test_tools_of_three_wires_are_one_schema_and_hosted_ones_are_dropped():
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    flat = {"name": "f", "description": "d"}
    chat = {
        "messages": [{"role": "user"}],
        "tools": [{"type": "function", "function": flat | {"parameters": schema}}],
    }
    hosted = {"type": "web_search", "filters": None}
    responses = {
        "input": "q",
        "tools": [{"type": "function", "strict": False, "parameters": schema} | flat, hosted],
    }
    cached = flat | {"input_schema": schema, "cache_control": {"type": "ephemeral"}}
    messages = {
        "messages": [{"role": "user"}],
        "tools": [cached, {"type": "web_search_20250305", "name": "web_search"}],
    }
    want = [{"type": "function", "function": flat | {"parameters": schema}}]
    assert (
        read_chat(chat, {}).tools
        == read_responses(responses, {}).tools
        == read_messages(messages, {}).tools
        == want
    )
    group = {"type": "namespace", "name": "ns", "tools": responses["tools"][:1]}
    assert read_responses({"input": "q", "tools": [group]}, {}).tools == [
        want[0] | {"namespace": "ns"}
    ]


@pytest.mark.parametrize(
    "choice,want",
    [
        (None, ("auto", "")),
        ("none", ("none", "")),
        ("required", ("required", "")),
        ({"type": "any"}, ("required", "")),
        ({"type": "tool", "name": "f"}, ("required", "f")),
        ({"type": "function", "function": {"name": "f"}}, ("required", "f")),
        ({"type": "a_new_kind"}, ("auto", "")),
    ],
)
def test_a_forced_call_is_named(choice, want):
    req = read_chat({"messages": [{"role": "user"}], "tool_choice": choice}, {})
    assert (req.tool_choice, req.forced) == want


def test_sampling_wishes_are_recorded_and_limits_read():
    body = {
        "messages": [{"role": "user"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "max_completion_tokens": 7,
        "n": 3,
    }
    body |= {"stop": "END", "stream": True, "stream_options": {"include_usage": True}, "seed": None}
    body |= {"response_format": {"type": "json_schema"}}
    req = read_chat(body, {"X-Stainless-Retry-Count": "2"})
    assert req.asked == {"temperature": 0.5} and (req.max_tokens, req.n, req.stop, req.retry) == (
        7,
        3,
        ["END"],
        2,
    )
    assert req.stream and req.include_usage and req.schema == {"type": "object"}
    plain = read_messages(
        {"messages": [{"role": "user"}], "stop_sequences": ["a", "b"]},
        {"x-stainless-retry-count": "x"},
    )
    assert (plain.max_tokens, plain.n, plain.stop, plain.retry, plain.asked) == (
        None,
        1,
        ["a", "b"],
        0,
        {},
    )


# ---- Tiers


SENT = turn(
    "\n\nLet me look.  \n",
    "\nThink\n",
    [Call("c1", "Bash", '{"command": "ls", "timeout": 5}')],
    ["sig"],
)


def echoed(raw, sent, name="f"):
    """The tier of an echo that keeps everything but one call's arguments or name."""
    a, b = (turn("t", None, [Call("c1", n, r)]) for n, r in ((name, raw), ("f", sent)))
    return same_turn(a, b)


def test_serialising_arguments_again_is_the_same_turn():
    raw = '{"city":  "Z\\u00fc", "z": 1.0, "a": 1e3, "city": "B"}'
    assert echoed('{"a":1000,"city":"B","z":1}', raw) == "T1" and echoed(raw, raw) == "T0"
    assert (
        echoed('{"a":1000,"city":"Z\\u00fc","z":1}', raw) == "T2"
    )  # of duplicate keys the last counts
    assert echoed("{}", "") == echoed("", " { } ") == echoed("{}", " ") == "T1"


@pytest.mark.parametrize(
    "echo,sent", [("9007199254740992", "9007199254740993"), ("0", "-0.0"), ("1e400", "1e400 ")]
)
def test_numbers_are_equal_if_their_doubles_are(echo, sent):
    assert echoed(f'{{"x":{echo}}}', f'{{"x":{sent}}}') == "T1"


@pytest.mark.parametrize(
    "echo,sent",
    [("1", "true"), ("0", "false"), ("9007199254740995", "9007199254740993"), ("1e400", "1e401")],
)
def test_other_numbers_are_not_equal(echo, sent):
    assert echoed(f'{{"x":{echo}}}', f'{{"x":{sent}}}') == "T2"


def test_a_default_added_or_line_tails_stripped_is_a_rewrite():
    sent = '{"file_path": "a", "new_string": "x  \\ny\\t\\n"}'
    assert (
        echoed('{"replace_all": false, "new_string": "x\\ny\\n", "file_path": "a"}', sent) == "T2"
    )
    assert (
        echoed('{"replace_all": false, "new_string": "x\\n y\\n", "file_path": "a"}', sent) == "T2"
    )
    assert echoed('{"replace_all": false, "file_path": "a"}', sent) == "T2"


COERCED = [("5000", '"5000"'), ("false", '"false"'), ("5000", '"5e3"'), ('["1"]', "[1]")]
EDITED = [('"007"', '"7"'), ("[1]", "[1,2]"), ('"a"', '["a"]'), ("null", "[]")]


@pytest.mark.parametrize("echo,sent", COERCED + EDITED)
def test_a_coerced_or_edited_value_is_a_rewrite(echo, sent):
    assert echoed(f'{{"x":{echo}}}', f'{{"x":{sent}}}') == "T2"


def test_a_renamed_tool_is_a_rewrite():
    assert echoed("{}", "{}", "F") == echoed('{"tool":"f","error":"e"}', "{}", "invalid") == "T2"


def test_arguments_that_are_no_json_match_raw_or_wrapped_only():
    raw = '{"cmd": "echo" oops'
    wrapped = json.dumps({"__unparsedToolInput": {"raw": raw, "len": len(raw)}})
    assert echoed(raw, raw) == "T0" and echoed(wrapped, raw) == "T1"
    assert (
        echoed(raw + "!", raw)
        == echoed(json.dumps({"__unparsedToolInput": {"raw": "x"}}), raw)
        == "T2"
    )
    assert echoed('{"x": NaN}', '{"x":NaN}') == "T2"
    assert (
        same_turn(turn("t"), turn("t", None, [Call("c1", "f", raw)])) is None
    )  # dropped, and nothing else joins them


def test_arguments_nested_without_end_do_not_crash_the_comparison():
    deep = '{"x":' * 5000 + "1" + "}" * 5000
    assert echoed(deep, deep) == "T0" and echoed(deep + " ", deep) == "T2"


def test_reasoning_may_be_dropped_or_moved_but_not_edited():
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "Bash", "arguments": SENT.calls[0].arguments},
    }
    message = {"content": SENT.text, "tool_calls": [call]}
    moved = said(message | {"provider_specific_fields": {"reasoning_content": SENT.reasoning}})
    assert same_turn(said(message), SENT) == "T1" and same_turn(moved, SENT) == "T0"
    assert same_turn(said(message | {"reasoning_content": "Think"}), SENT) == "T1"
    for edited in ("I think", "Thin"):
        assert same_turn(said(message | {"reasoning_content": edited}), SENT) == "T3"
    assert same_turn(turn(SENT.text, "made up", SENT.calls), replace(SENT, reasoning=None)) == "T3"


def test_both_ends_of_a_text_may_be_stripped():
    assert same_turn(replace(SENT, text="Let me look."), SENT) == "T1"
    assert same_turn(replace(SENT, text="Let me  look."), SENT) == "T3"
    assert same_turn(replace(SENT, text=""), replace(SENT, text=" \n")) == "T1"


def test_calls_keep_their_number_and_order():
    a, b = Call("a", "f", "{}"), Call("b", "f", "{}")
    sent = turn("t", None, [a, b])
    assert [same_turn(turn("t", None, c), sent) for c in ([a, b], [b, a], [a], [a, b, b])] == [
        "T0",
        "T3",
        "T3",
        "T3",
    ]


def test_a_namespace_is_part_of_a_call_s_name():
    sent = turn("t", None, [Call("c1", "f", "{}", "ns")])
    assert same_turn(turn("t", None, [Call("c1", "f", "{}")]), sent) == "T2"


def test_a_sibling_that_says_the_same_does_not_win_over_the_one_that_the_ids_name():
    first, second = (turn("t", None, (), [node]) for node in ("n1", "n2"))
    assert same_turn(said({"content": "t", NODE_KEY: "n2"}), first) == "T1"
    moved = said({"content": "t", "provider_specific_fields": {NODE_KEY: "n2"}})
    assert (
        moved.anchors == ("n2",)
        and same_turn(moved, second) == "T0"
        and same_turn(said({"content": "t"}), first) == "T0"
    )
    call = [turn("t", None, [Call(i, "f", "{}")]) for i in ("c1", "c2")]
    assert same_turn(call[1], call[0]) is None


def test_a_forged_turn_is_foreign_and_a_valid_id_with_other_text_forks():
    assert (
        same_turn(turn(SENT.text, SENT.reasoning, [replace(SENT.calls[0], id="forged")]), SENT)
        is None
    )
    assert same_turn(turn("other", None, SENT.calls), SENT) == "T3"
    assert same_turn(turn("other"), SENT) is None


# ---- Bad input


@pytest.mark.parametrize(
    "read,body,field",
    [
        (read_chat, [], "body"),
        (read_chat, {}, "messages"),
        (read_chat, {"messages": []}, "messages"),
        (read_chat, {"messages": "hi"}, "messages"),
        (read_chat, {"messages": [1]}, "messages[0]"),
        (read_chat, {"messages": [{"role": "alien"}]}, "messages[0].role"),
        (read_chat, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            read_chat,
            {"messages": [{"role": "user", "content": [{"text": 5}]}]},
            "messages[0].content[0].text",
        ),
        (read_chat, {"messages": [{"role": "user"}], "stream": "yes"}, "stream"),
        (read_chat, {"messages": [{"role": "user"}], "n": True}, "n must"),
        (read_chat, {"messages": [{"role": "user"}], "max_tokens": 0}, "max_tokens"),
        (read_chat, {"messages": [{"role": "user"}], "stop": [1]}, "stop"),
        (read_chat, {"messages": [{"role": "user"}], "temperature": "hot"}, "temperature"),
        (read_chat, {"messages": [{"role": "user"}], "tools": [{"type": "function"}]}, "tools[0]"),
        (read_chat, {"messages": [{"role": "user"}], "tool_choice": 3}, "tool_choice"),
        (read_messages, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (read_messages, {"messages": [{"role": "user"}], "system": 5}, "system"),
        (
            read_messages,
            {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
            "messages[0].content[0].type",
        ),
        (
            read_messages,
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "content[0].name",
        ),
        (
            read_messages,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        (read_responses, {}, "input"),
        (read_responses, {"input": [{"id": "x", "content": "y"}]}, "input[0].role"),
        (
            read_responses,
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0] refers to x",
        ),
        (read_responses, {"input": [{"type": None, "id": "x"}]}, "input[0] refers to x"),
        (read_responses, {"input": [{"type": "item_reference", "id": 3}]}, "input[0].id"),
        (read_responses, {"input": "q", "conversation": "c"}, "conversation"),
    ],
)
def test_bad_input_names_its_field(read, body, field):
    with pytest.raises(BadRequest, match=field.replace("[", r"\[").replace("]", r"\]")):
        read(body, {})


@pytest.mark.parametrize("data", ["%%%", "\udc80", "abc", ""])
def test_a_broken_image_is_refused(data):
    for part in (
        {"type": "image", "source": {"type": "base64", "data": data}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ):
        with pytest.raises(BadRequest, match="base64"):
            claude(("user", [part]))


def test_unknown_fields_kinds_and_tools_are_read():
    part = {"type": "document", "source": {"type": "text", "data": "D"}, "cache_control": {}}
    body = {
        "messages": [{"role": "user", "content": [part], "mood": 3}],
        "betas": [5],
        "tools": [{"type": "x", "name": 5}],
    }
    req = read_messages(body, {"anthropic-beta": "tomorrow"})
    assert req.tools == [] and json.loads(req.turns[0].text) == {
        "type": "document",
        "source": {"type": "text", "data": "D"},
    }
    assert read_responses(
        {"input": [{"type": "from_the_future", "x": 1}, {"role": "user", "content": "q"}]}, {}
    ).turns == [In("user", "q")]


def places(value):
    """Every (container, key) in a JSON value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [p for k in keys for p in [(value, k), *places(value[k])]]


def test_mutated_requests_raise_nothing_but_bad_request():
    rng = random.Random(3)
    junk = [
        None,
        True,
        -1,
        2.5,
        "",
        "x",
        "data:,%",
        [],
        [1],
        {},
        {"type": "function"},
        {"type": 7},
        [[]],
        [{}],
        [None],
        10**30,
    ]
    bodies = [request(e) for d in RECORDED.values() for e in d["exchanges"]]
    refused = 0
    for _ in range(2000):
        read, body, headers = rng.choice(bodies)
        body = copy.deepcopy(body)
        for _ in range(rng.randint(1, 3)):
            holder, key = rng.choice(places(body))
            holder[key] = copy.deepcopy(rng.choice(junk))
        try:
            echoes = turns(read(body, headers))
            for a, b in zip(echoes, echoes[1:]):
                same_turn(a, b)
        except BadRequest as e:
            refused += 1
            assert str(e)
    assert 200 < refused < 1900  # the mutations reach both sides


def test_a_custom_call_and_any_call_s_output_are_read():
    """No call's result may be lost in silence, whichever kind of tool a client has."""
    items = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** raw"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call_output", "call_id": "c2", "output": "shown"},
    ]
    req = read_responses({"input": items}, {})
    assert req.turns[1].calls == (Call("c1", "patch", "*** raw"),)
    assert [(t.role, t.text, t.call) for t in req.turns[2:]] == [
        ("tool", "done", "c1"),
        ("tool", "shown", "c2"),
    ]


def changed(rng, body):
    """A later request of some client: its list goes on, is cut, or differs in one value, perhaps in the type alone."""
    body = copy.deepcopy(body)
    key = "input" if isinstance(body.get("input"), list) else "messages"
    if not isinstance(entries := body.get(key), list) or not entries:
        return body
    kind = rng.randrange(4)
    if kind == 0:
        del entries[rng.randint(1, len(entries)) :]
    elif kind == 1:
        entries += copy.deepcopy(entries[-rng.randint(1, len(entries)) :])
    elif kind == 2:
        holder, at = rng.choice(places(entries))
        if not isinstance(holder[at], (dict, list)):
            holder[at] = rng.choice([True, 1, 1.0, "1", None, "x"])
    return body


def outcome(read, *args):
    try:
        return read(*args)
    except BadRequest as e:
        return str(e)


def test_what_was_read_before_is_read_no_differently_again():
    """Requests of many histories in turn, each read with what is remembered of those before, and read afresh."""
    rng, past = random.Random(5), deque(maxlen=8)
    bodies = [request(e) for d in RECORDED.values() for e in d["exchanges"]]
    resumed = 0
    for _ in range(3000):
        at = rng.randrange(len(bodies))
        read, body, headers = bodies[at]
        body = changed(rng, body)
        if rng.random() < 0.3:
            bodies[at] = (read, body, headers)
        known = {id(t) for *_, turns in past for t in turns}
        got, fresh = outcome(read, body, headers, past), outcome(read, body, headers)
        assert got == fresh and repr(got) == repr(fresh)  # repr: in Python True == 1 == 1.0
        resumed += not isinstance(got, str) and any(id(t) in known for t in got.turns)
    assert resumed > 300


def test_the_values_of_a_history_that_equal_each_other_only_in_python_are_told_apart():
    past = deque()
    for value in (1, True, 1.0, "1"):
        said = {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": value}}],
        }
        history = [{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}]
        req = read_messages({"messages": history}, {}, past)
        assert json.loads(req.turns[1].calls[0].arguments) == {"a": value}
        assert req.turns[1].calls[0].arguments == json.dumps({"a": value})
