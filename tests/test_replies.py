"""server.py: replies in the words of their wire, read by the official SDKs.

The SDKs talk to a scripted server through a mock transport, with strict validation: a field that lacks is an error.
"""

import json
from types import SimpleNamespace

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server import (
    NODE_KEY,
    Answer,
    As,
    BadRequest,
    Stream,
    error,
    mint,
    read_chat,
    read_messages,
    read_responses,
    same_turn,
    write,
)

NODE, OTHER = "0f" * 16, "1e" * 16
READ = {"chat/completions": read_chat, "responses": read_responses, "messages": read_messages}
WIRES = ("chat", "responses", "messages")
ODD = '{"city":  "Z\\u00fcrich",\n "z": 1.0, "a": 1e3, "n": null, "city": "\U0001f600"}'
SAID = {  # text, reasoning, calls
    "text": ("\n\nLet me look. \u00e9\U0001f600\u2028\x85\r\n\n", None, []),
    "thought": ("Four.", "\ntwo and two\n\n  is \U0001f600", []),
    "calls": (
        "I look.",
        "hm",
        [("look", ODD, ""), ("look", '{"city":"B"}', ""), ("spawn", "{}", "agents")],
    ),
    "only a call": ("", None, [("look", '{"city": "B"}', "")]),
    "no arguments": ("", None, [("now", "", "")]),
    "thought only": ("", "hm", []),
    "nothing": ("", None, []),
    "blank": (" \n", None, []),
    "malformed": (
        "I try.",
        "hm",
        [("look", '{"city": "B', ""), ("look", '{"city": "C"}', ""), ("look", "[1]", "")],
    ),
    "only malformed": ("", None, [("look", "{'city'", "")]),
}


def answer(wire, said, node=NODE, finish="stop", stop="", logprobs=None):
    return Answer(node, mint(node, wire, *said), finish, stop, 100, 64, 9, 4, logprobs)


class Server:
    """A transport for the SDKs. It reads each request and gives the scripted reply, one node per choice."""

    def __init__(self, said, **more):
        self.said, self.more, self.requests, self.text = said, more, [], ""

    def __call__(self, http):
        body = json.loads(http.content)
        try:
            req = READ[http.url.path.removeprefix("/v1/")](body, http.headers)
        except BadRequest as e:
            wire = "messages" if http.url.path.endswith("messages") else "chat"
            return httpx2.Response(400, json=error(wire, 400, str(e), e.error_code))
        self.requests.append(req)
        self.answers = self.reply(req)
        if not req.stream:
            return httpx2.Response(200, json=write(req, self.answers))
        self.text = "".join(streamed(req, self.answers))
        return httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=self.text.encode()
        )

    def reply(self, req):
        nodes = (NODE, OTHER)[: req.n]
        return [answer(req.wire, self.said, node, **self.more) for node in nodes]

    def openai(self, **more):
        http = httpx2.Client(transport=httpx2.MockTransport(self))
        more = {
            "base_url": "http://s/v1",
            "max_retries": 0,
            "_strict_response_validation": True,
        } | more
        return openai.OpenAI(api_key="k", http_client=http, **more)

    def anthropic(self):
        http, strict = (
            httpx2.Client(transport=httpx2.MockTransport(self)),
            {"_strict_response_validation": True},
        )
        return anthropic.Anthropic(
            api_key="k", base_url="http://s", http_client=http, max_retries=0, **strict
        )

    def ask(self, wire, history=(), stream=False, **more):
        """What the wire's SDK makes of the reply, by its stream helper or not."""
        messages = [{"role": "user", "content": "hi"}, *history]
        if wire == "messages":
            api, more = self.anthropic().messages, dict(messages=messages, max_tokens=99) | more
        elif wire == "chat":
            api, more = self.openai().chat.completions, dict(messages=messages) | more
        else:
            api, more = (
                self.openai().responses,
                dict(input=messages, include=["reasoning.encrypted_content"]) | more,
            )
        if not stream:
            return api.create(model="m", **more)
        with api.stream(model="m", **more) as events:
            list(events)
            if wire == "messages":
                return events.get_final_message()
            try:
                return (
                    events.get_final_completion() if wire == "chat" else events.get_final_response()
                )
            except (
                openai.LengthFinishReasonError
            ) as e:  # the helper's own word for a reply that was cut
                return e.completion


def streamed(req, answers):
    s = Stream(req, answers[0].node, answers[0].prompt_tokens, answers[0].cached_tokens)
    frames = [*s.start(), s.alive(), s.alive(), *s.finish(answers)]
    assert all(f.endswith("\n\n") and f.count("\n\n") == 1 and f.isascii() for f in frames)
    return frames


def request(wire, **body):
    path = {"chat": "chat/completions"}.get(wire, wire)
    key = "input" if wire == "responses" else "messages"
    return READ[path]({"model": "m", key: [{"role": "user", "content": "hi"}]} | body, {})


def events(wire, said, body=(), **more):
    """The data of all frames, without the keep-alives' and the end's."""
    req = request(wire, **dict(body))
    frames = streamed(req, [answer(wire, said, node, **more) for node in (NODE, OTHER)[: req.n]])
    return [
        json.loads(f.partition("data: ")[2]) for f in frames if "data: " in f and "[DONE]" not in f
    ]


def plain(message):
    """A reply without what depends on the moment and without the nulls and extras that the SDKs add."""
    if isinstance(message, list):
        return [plain(m) for m in message]
    if not isinstance(message, dict):
        return message
    added = ("created", "created_at", "parsed", "parsed_arguments", "parsed_output", "index")
    return {k: plain(v) for k, v in message.items() if v is not None and k not in added}


def echoes(wire, reply):
    """The ways in which programs put a reply back into their history."""
    if wire == "messages":
        dumps = [
            reply.content,
            [b.model_dump() for b in reply.content],
            [b.to_dict() for b in reply.content],
        ]
        return [[{"role": "assistant", "content": blocks}] for blocks in dumps]
    if wire == "responses":
        return [
            reply.output,
            [i.model_dump() for i in reply.output],
            [i.to_dict() for i in reply.output],
        ]
    message = reply.choices[-1].message
    return [[message], [message.model_dump()], [message.to_dict()]]


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("wire", WIRES)
def test_every_field_that_the_official_types_require_is_there(wire, said):
    kind = {"chat": ChatCompletion, "responses": Response, "messages": Message}[wire]
    body = write(request(wire), [answer(wire, said)])
    assert kind.model_validate(body).model == "m"
    chunk = {
        "chat": ChatCompletionChunk,
        "responses": ResponseStreamEvent,
        "messages": RawMessageStreamEvent,
    }[wire]
    for event in events(
        wire, said, {"stream_options": {"include_usage": True}} if wire == "chat" else ()
    ):
        if event.get("type") != "ping":
            TypeAdapter(chunk).validate_python(event)


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("wire", WIRES)
def test_a_stream_adds_up_to_the_body_that_is_not_streamed(wire, said):
    options = {"stream_options": {"include_usage": True}} if wire == "chat" else {}
    server = Server(said)
    whole = server.ask(wire)
    assert plain(server.ask(wire, stream=True, **options).to_dict()) == plain(whole.to_dict())
    assert [r.stream for r in server.requests] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("wire", WIRES)
def test_an_echo_is_the_turn_that_was_sent(wire, said, stream):
    server = Server(said)
    for echo in echoes(wire, server.ask(wire, stream=stream)):
        server.ask(wire, [*echo, {"role": "user", "content": "go on"}])
        [got] = [t for t in server.requests[-1].turns if isinstance(t, As)]
        sent = server.answers[0].turn
        # an object's text is the client's own
        assert same_turn(got, sent) in (
            ("T0", "T1") if wire == "messages" and sent.calls else ("T0",)
        )
        # the one place without an id that comes back
        bare = wire == "messages" and not (sent.reasoning or sent.calls)
        assert set(got.anchors) <= set(sent.anchors) and bool(got.anchors) != bare


@pytest.mark.parametrize("wire", WIRES)
def test_every_id_that_is_sent_is_an_anchor_and_the_same_on_a_replay(wire):
    def ids(value):
        if isinstance(value, list):
            return {i for v in value for i in ids(v)}
        if not isinstance(value, dict):
            return set()
        named = ("id", "call_id", "item_id", "signature", "encrypted_content", NODE_KEY)
        return {value[k] for k in named if value.get(k)} | {
            i for v in value.values() for i in ids(v)
        }

    body = {"include": ["reasoning.encrypted_content"]} if wire == "responses" else {}
    whole = ids(write(request(wire, **body), [answer(wire, SAID["calls"])]))
    assert whole == ids(write(request(wire, **body), [answer(wire, SAID["calls"])]))
    assert whole == ids(events(wire, SAID["calls"], body))
    assert whole <= set(mint(NODE, wire, *SAID["calls"]).anchors)
    assert set(mint(NODE, wire, *SAID["calls"]).anchors).isdisjoint(
        mint(OTHER, wire, *SAID["calls"]).anchors
    )
    prefix = "toolu_" if wire == "messages" else "call_"
    assert {c.id.startswith(prefix) for c in mint(NODE, wire, *SAID["calls"]).calls} == {True}
    assert all(len(i) <= 64 and i.replace("-", "_").isidentifier() for i in whole - {NODE})


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_arguments_are_the_raw_text_on_both_openai_wires(said):
    raw = [(name, arguments, namespace) for name, arguments, namespace in said[2]]
    [choice] = write(request("chat"), [answer("chat", said)])["choices"]
    functions = [c["function"] for c in choice["message"].get("tool_calls", [])]
    assert [(f["name"], f["arguments"], f.get("namespace", "")) for f in functions] == raw
    output = write(request("responses"), [answer("responses", said)])["output"]
    items = [i for i in output if i["type"] == "function_call"]
    assert [(i["name"], i["arguments"], i.get("namespace", "")) for i in items] == raw


DEEP = '{"a": ' + "[" * 250 + "]" * 250 + "}"  # more than the stream helper's parser takes
BROKEN = [
    '{"a": ',
    "[1]",
    "null",
    '"x"',
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"a": "\\ud800"}',
    "{} b",
    "[" * 9999,
    DEEP,
]


@pytest.mark.parametrize("arguments", BROKEN)
def test_arguments_that_spell_no_object_are_text_on_the_anthropic_wire(arguments):
    server = Server(("So:", None, [("look", arguments, "")]))
    for stream in (False, True):
        reply = server.ask("messages", stream=stream)
        assert [b.to_dict() for b in reply.content] == [
            {"type": "text", "text": f"So:\nlook({arguments})"}
        ]
        assert reply.stop_reason == "end_turn"


def test_the_calls_beside_a_malformed_one_are_still_made():
    reply = Server(SAID["malformed"]).ask("messages", stream=True)
    assert [b.type for b in reply.content] == ["thinking", "text", "tool_use"]
    assert reply.content[1].text == 'I try.\nlook({"city": "B)\nlook([1])' and reply.content[
        2
    ].input == {"city": "C"}
    assert reply.stop_reason == "tool_use"


@pytest.mark.parametrize("text", ["", "I look."])
def test_chat_chunks_open_a_call_with_empty_arguments(text):
    role, *deltas = [
        e["choices"][0]["delta"]
        for e in events("chat", (text, "hm", [("look", ODD, ""), ("now", "", "")]))
    ]
    calls = mint(NODE, "chat", text, "hm", [("look", ODD, ""), ("now", "", "")]).calls
    opened = [
        {"index": i, "id": c.id, "type": "function", "function": {"name": c.name, "arguments": ""}}
        for i, c in enumerate(calls)
    ]
    assert role == {"role": "assistant", "content": ""}
    assert deltas == [
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": text, NODE_KEY: NODE},
        {"tool_calls": [opened[0]]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ODD}}]},
        {"tool_calls": [opened[1]]},
        {"tool_calls": [{"index": 1, "function": {"arguments": ""}}]},
        {},
    ]


def test_responses_events_come_in_the_order_that_codex_reads():
    found = events("responses", ("I look.", "hm", [("spawn", ODD, "agents")]))
    item = ["response.output_item.added", "response.output_item.done"]
    part = "response.reasoning_summary_part.added", "response.reasoning_summary_part.done"
    assert [e["type"] for e in found] == [
        "response.created",
        *["response.in_progress"] * 3,
        *(
            item[0],
            part[0],
            "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.done",
            part[1],
        ),
        *(
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
        ),
        *(
            item[1],
            item[0],
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
        ),
        *("response.content_part.done", item[1], item[0], "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", item[1], "response.completed"),
    ]
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    added = [e["item"] for e in found if e["type"] == item[0]]
    assert [(i.get("summary"), i.get("content"), i.get("arguments")) for i in added] == [
        ([], [], None),
        (None, [], None),
        (None, None, ""),
    ]
    assert {i["status"] for i in added} == {"in_progress"} and added[2]["namespace"] == "agents"
    # Codex takes the items from here
    assert [e["item"] for e in found if e["type"] == item[1]] == found[-1]["response"]["output"]
    deltas = [e["delta"] for e in found if e["type"].endswith("delta")]
    assert deltas == ["hm", "hm", "I look.", ODD]
    places = [e["output_index"] for e in found if "output_index" in e]
    assert places == sorted(places) and set(places) == {0, 1, 2}


def test_anthropic_events_stream_each_block_from_nothing():
    found = events("messages", ("I look.", "hm", [("look", ODD, "")]))
    call, value = mint(NODE, "messages", "", None, [("look", ODD, "")]).calls[0].id, json.loads(ODD)
    assert found[0]["message"]["content"] == [] and found[0]["message"]["stop_reason"] is None
    assert [e["type"] for e in found[:4]] == ["message_start", "ping", "ping", "ping"]
    kinds = [(e["type"], e.get("index")) for e in found[4:]]
    start, delta, stop = (f"content_block_{k}" for k in ("start", "delta", "stop"))
    assert kinds == [
        *((start, 0), (delta, 0), (delta, 0), (stop, 0), (start, 1), (delta, 1), (stop, 1)),
        *(
            (start, 2),
            (delta, 2),
            (delta, 2),
            (stop, 2),
            ("message_delta", None),
            ("message_stop", None),
        ),
    ]
    assert [e["content_block"] for e in found if e["type"] == start] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": call, "name": "look", "input": {}},
    ]
    *deltas, arguments = [e["delta"] for e in found if e["type"] == delta]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "signature_delta", "signature": f"sig_{NODE}"},
        {"type": "text_delta", "text": "I look."},
        {"type": "input_json_delta", "partial_json": ""},
    ]
    assert json.loads(arguments["partial_json"]) == value


def test_a_keep_alive_is_what_the_wire_s_clients_bear():
    assert Stream(request("chat"), NODE, 1).alive().startswith(": ")
    assert Stream(request("messages"), NODE, 1).alive() == 'event: ping\ndata: {"type": "ping"}\n\n'
    progress = Stream(request("responses"), NODE, 1)
    first, second = (json.loads(progress.alive().partition("data: ")[2]) for _ in range(2))
    assert first["type"] == "response.in_progress" and first["response"]["status"] == "in_progress"
    assert (first["sequence_number"], second["sequence_number"]) == (0, 1)


@pytest.mark.parametrize("wire", ["chat", "responses"])
def test_a_stream_has_one_time_of_creation(monkeypatch, wire):
    clock = iter(range(1000, 2000))
    monkeypatch.setattr("time.time", lambda: next(clock))
    bodies = [e.get("response", e) for e in events(wire, SAID["calls"])]
    assert len({b[k] for b in bodies for k in ("created", "created_at") if k in b}) == 1


def test_a_response_names_the_one_that_it_continues():
    reply = Server(SAID["text"]).ask("responses", previous_response_id=f"resp_{OTHER}")
    assert reply.previous_response_id == f"resp_{OTHER}" and reply.id == f"resp_{NODE}"


def test_frames_name_their_event_except_on_the_chat_wire():
    for wire in WIRES:
        for frame in streamed(request(wire), [answer(wire, SAID["calls"])]):
            head, _, data = frame.partition("data: ")
            named = f"event: {json.loads(data)['type']}\n" if wire != "chat" else ""
            assert head == named or frame.startswith(": ")


@pytest.mark.parametrize(
    "finish,stop,called,chat,messages",
    [
        ("stop", "", False, "stop", ("end_turn", None)),
        ("stop", "", True, "tool_calls", ("tool_use", None)),
        ("length", "", False, "length", ("max_tokens", None)),
        ("length", "", True, "length", ("max_tokens", None)),
        ("stop_string", "END", False, "stop", ("stop_sequence", "END")),
        ("stop_string", "END", True, "tool_calls", ("tool_use", "END")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_wire_has_its_own_word_for_the_end(finish, stop, called, chat, messages, stream):
    server = Server(("t", None, [("look", "{}", "")] if called else []), finish=finish, stop=stop)
    assert server.ask("chat", stream=stream).choices[0].finish_reason == chat
    reply = server.ask("messages", stream=stream)
    assert (reply.stop_reason, reply.stop_sequence) == messages
    # Codex fails the run on "incomplete"
    reply = server.ask("responses", stream=stream)
    assert reply.status == "completed" and reply.incomplete_details is None


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_whole_prompt_and_its_cached_part(stream):
    server, options = (
        Server(SAID["calls"]),
        {"stream_options": {"include_usage": True}} if stream else {},
    )
    usage = server.ask("chat", stream=stream, **options).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (100, 9, 109)
    assert (
        usage.prompt_tokens_details.cached_tokens == 64
        and usage.completion_tokens_details.reasoning_tokens == 4
    )
    usage = server.ask("responses", stream=stream).usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (100, 9, 109)
    assert (
        usage.input_tokens_details.cached_tokens == 64
        and usage.output_tokens_details.reasoning_tokens == 4
    )
    usage = server.ask("messages", stream=stream).usage
    # a client adds up the three to know how full its context is
    assert (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        == 100
    )
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (36, 64, 9)


def test_the_first_anthropic_event_counts_the_prompt_already():
    first, last = (
        events("messages", SAID["text"])[0]["message"]["usage"],
        events("messages", SAID["text"])[-2]["usage"],
    )
    assert first | {"output_tokens": 9} == last


def test_the_usage_chunk_comes_only_if_asked_for_and_before_the_end():
    bare = streamed(request("chat"), [answer("chat", SAID["text"])])
    assert bare[-1] == "data: [DONE]\n\n" and not any("usage" in f for f in bare)
    asked = streamed(
        request("chat", stream_options={"include_usage": True}), [answer("chat", SAID["text"])]
    )
    usage = json.loads(asked[-2].removeprefix("data: "))
    assert (
        usage["choices"] == []
        and usage["usage"]["total_tokens"] == 109
        and len(asked) == len(bare) + 1
    )


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_is_its_own_node_and_the_prompt_counts_once(stream):
    server, options = (
        Server(SAID["calls"]),
        {"stream_options": {"include_usage": True}} if stream else {},
    )
    reply = server.ask("chat", stream=stream, n=2, **options)
    assert [c.index for c in reply.choices] == [0, 1] and reply.id == f"chatcmpl-{NODE}"
    assert [getattr(c.message, NODE_KEY) for c in reply.choices] == [NODE, OTHER]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, 18)
    assert reply.usage.completion_tokens_details.reasoning_tokens == 8
    # the client goes on with the second
    [echo, *_] = echoes("chat", reply)
    server.ask("chat", echo)
    [got] = [t for t in server.requests[-1].turns if isinstance(t, As)]
    assert (
        same_turn(got, answer("chat", SAID["calls"], OTHER).turn) == "T0" and OTHER in got.anchors
    )


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_given_token_by_token(stream):
    server = Server(SAID["text"], logprobs=[("Let", -0.5), ("\ufffd", -1.25)])
    found = server.ask("chat", stream=stream, logprobs=True).choices[0].logprobs.content
    assert [(t.token, t.logprob) for t in found] == [("Let", -0.5), ("\ufffd", -1.25)]
    assert Server(SAID["text"]).ask("chat", stream=stream).choices[0].logprobs is None


def test_reasoning_is_in_every_place_where_a_client_looks():
    [choice] = Server(SAID["thought"]).ask("chat").choices
    assert choice.message.reasoning_content == choice.message.reasoning == SAID["thought"][1]
    thought = Server(SAID["thought"]).ask("responses").output[0]
    assert (
        thought.summary[0].text == thought.content[0].text == SAID["thought"][1]
        and thought.encrypted_content
    )
    assert Server(SAID["thought"]).ask("responses", include=[]).output[0].encrypted_content is None
    assert Server(SAID["thought"]).ask("messages").content[0].thinking == SAID["thought"][1]


def test_an_empty_completion_is_one_empty_text():
    assert [b.to_dict() for b in Server(SAID["nothing"]).ask("messages").content] == [
        {"type": "text", "text": ""}
    ]
    [item] = Server(SAID["nothing"]).ask("responses").output
    assert item.type == "message" and item.content[0].text == ""
    assert Server(SAID["nothing"]).ask("chat").choices[0].message.content == ""


ERRORS = [
    (400, "invalid_request_error", "BadRequestError", "BadRequestError"),
    (401, "authentication_error", "AuthenticationError", "AuthenticationError"),
    (404, "not_found_error", "NotFoundError", "NotFoundError"),
    (410, "invalid_request_error", "APIStatusError", "APIStatusError"),
    (413, "request_too_large", "APIStatusError", "ContentTooLargeError"),
    (500, "api_error", "InternalServerError", "InternalServerError"),
    (503, "overloaded_error", "InternalServerError", "ServiceUnavailableError"),
]


@pytest.mark.parametrize("status,kind,of_openai,of_anthropic", ERRORS)
@pytest.mark.parametrize("wire", WIRES)
def test_an_error_raises_the_sdk_s_own_class(
    monkeypatch, wire, status, kind, of_openai, of_anthropic
):
    server = Server(SAID["text"])
    monkeypatch.setattr(
        Server,
        "__call__",
        lambda *_: httpx2.Response(status, json=error(wire, status, "too bad", "c")),
    )
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as e:
        server.ask(wire)
    assert type(e.value).__name__ == (of_anthropic if wire == "messages" else of_openai)
    assert "too bad" in str(e.value) and e.value.type == kind
    assert (e.value.error_code if wire == "messages" else e.value.code) == "c"


def test_the_shape_of_an_error_without_a_code():
    assert error("messages", 400, "m") == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "m"},
    }
    plain_error = {"message": "m", "type": "invalid_request_error", "param": None, "code": None}
    assert error("responses", 400, "m") == error("chat", 400, "m") == {"error": plain_error}


def test_a_thread_is_refused_in_the_shape_that_the_sdk_acts_on():
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    body = {"type": "invalid_request_error", "message": "m", "details": details}
    assert error("messages", 400, "m", "thread_unsupported_request") == {
        "type": "error",
        "error": body,
    }
    assert error("messages", 400, "m", "other")["error"]["details"] == {"error_code": "other"}


@pytest.mark.parametrize("wire", ["chat", "responses"])
def test_a_prompt_that_is_too_long_is_named_by_its_code(monkeypatch, wire):
    body = error(wire, 400, "maximum context length is 9 tokens", "context_length_exceeded")
    monkeypatch.setattr(Server, "__call__", lambda *_: httpx2.Response(400, json=body))
    with pytest.raises(openai.BadRequestError) as e:
        Server(SAID["text"]).ask(wire)
    assert e.value.code == "context_length_exceeded"


def test_the_tool_runner_does_without_a_thread_when_told_so():
    @anthropic.beta_tool
    def look(city: str) -> str:
        """Look.

        Args:
            city: where
        """
        server.said = SAID["thought"]
        return f"sun in {city}"

    server = Server(SAID["only a call"])
    ask = dict(model="m", max_tokens=99, tools=[look], messages=[{"role": "user", "content": "hi"}])
    last = server.anthropic().beta.messages.tool_runner(**ask).until_done()
    assert last.content[-1].text == "Four." and [len(r.turns) for r in server.requests] == [1, 3]
    first = answer("messages", SAID["only a call"]).turn
    assert (
        same_turn(server.requests[-1].turns[1], first) == "T0"
        and server.requests[-1].turns[2].text == "sun in B"
    )


def test_a_reply_is_made_from_what_it_is_given_alone():
    a = SimpleNamespace(**vars(answer("messages", SAID["calls"])))
    before = repr(vars(a))
    write(request("messages"), [a])
    write(request("messages"), [a])["usage"]["output_tokens"] = 0
    assert (
        repr(vars(a)) == before and write(request("messages"), [a])["usage"]["output_tokens"] == 9
    )
