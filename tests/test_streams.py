"""server.py: the events of a stream, folded, are the body that the same reply has without streaming, on every wire.

Each fold below is written by the specification of its API and takes nothing on trust: what an event says that something is done
must be what the events before it said. The official SDKs fold the same streams, with strict validation.
"""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replies import NODE, OTHER, SAID, WIRES, Server, plain, request

import server
from server import NODE_KEY, Answer, Stream, mint, write

THIRD = "2d" * 16
JOINED = ("content", "reasoning_content", "reasoning", "arguments")


# ---- The folds


def said(frames: list[str]) -> list:
    """The data of the frames, the keep-alives that are comments left out. What is no JSON stays text."""
    assert all(f.endswith("\n\n") and f.count("\n\n") == 1 for f in frames)
    data = [f.partition("data: ")[2].strip() for f in frames if not f.startswith(": ")]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


def fold_chat(chunks: list) -> dict:
    assert chunks[-1] == "[DONE]"
    body, choices = {}, {}
    for chunk in chunks[:-1]:
        assert chunk.pop("object") == "chat.completion.chunk" and "usage" not in body
        for piece in chunk.pop("choices"):
            add_chunk(choices.setdefault(piece["index"], {"message": {}}), piece)
        usage = {"usage": chunk.pop("usage")} if "usage" in chunk else {}
        body = (body or chunk) | usage
        assert chunk.items() <= body.items(), "all chunks are of one completion"
    for i, choice in choices.items():
        assert choice["finish_reason"], "a choice is complete when its reason was said"
        choice |= {"index": i, "logprobs": choice.get("logprobs")}
    return body | {"object": "chat.completion", "choices": [choices[i] for i in sorted(choices)]}


def add_chunk(choice: dict, piece: dict) -> None:
    assert "finish_reason" not in choice
    add_delta(choice["message"], piece["delta"])
    if piece["logprobs"]:
        content = choice.setdefault("logprobs", {"content": []})["content"]
        content += piece["logprobs"]["content"]
    if piece["finish_reason"]:
        choice["finish_reason"] = piece["finish_reason"]


def add_delta(message: dict, delta: dict) -> None:
    """Texts are joined, calls go by their index, all else is said once."""
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault(key, [])
            for call in value:
                at = call.pop("index")
                calls += [{}] if at == len(calls) else []
                add_delta(calls[at], call)
        elif isinstance(value, dict):
            add_delta(message.setdefault(key, {}), value)
        else:
            assert key in JOINED or key not in message
            message[key] = message[key] + value if key in message else value


class Responses:
    """A response and what of it is not yet done."""

    def __init__(self, events: list[dict]):
        assert [e.pop("sequence_number") for e in events] == [*range(len(events))]
        first, *events, last = events
        assert (first["type"], last["type"]) == ("response.created", "response.completed")
        self.response, self.open = first["response"], []
        for event in events:
            self.add(**event)
        ended = {k: last["response"][k] for k in ("status", "usage")}
        self.response |= ended
        assert not self.open and self.response == last["response"]
        assert ended["status"] == "completed" and ended["usage"]

    def add(self, type, response=None, **event):
        output, (*kind, moment) = self.response["output"], type.split(".")[1:]
        if moment == "in_progress":
            assert response == self.response
        elif kind == ["output_item"]:
            item, at = event["item"], event["output_index"]
            if moment == "added":
                assert at == len(output) and item["status"] == "in_progress" and not self.open
                output.append(copy.deepcopy(item))
                self.open = [item["id"]]
            else:
                output[at]["status"] = "completed"
                assert self.open.pop() == item["id"] and output[at] == item
        else:
            item = output[event.pop("output_index")]
            assert event.pop("item_id") == item["id"] == self.open[0]
            self.inside(item, *kind, moment, **event)

    def inside(self, item, kind, moment, **event):
        """What happens between an item's beginning and its end."""
        if kind == "function_call_arguments":
            if moment == "delta":
                item["arguments"] += event["delta"]
                self.open += [kind] if kind not in self.open else []
            else:
                assert self.open.pop() == kind
                assert event == {k: item[k] for k in ("name", "arguments")}
            return
        summary = kind.startswith("reasoning_summary")
        parts = item["summary" if summary else "content"]
        at = event.pop("summary_index" if summary else "content_index")
        if kind.endswith("_part"):
            if moment == "added":
                assert at == len(parts)
                parts.append(copy.deepcopy(event["part"]))
                self.open += ["part", "text"]
            else:
                assert self.open.pop() == "part" and event["part"] == parts[at]
            return
        assert kind in (parts[at]["type"], f"reasoning_{parts[at]['type']}")
        if moment == "delta":
            parts[at]["text"] += event["delta"]
        else:
            assert self.open.pop() == "text" and event["text"] == parts[at]["text"]


def fold_messages(events: list[dict]) -> dict:
    first, *events, ended, last = [e for e in events if e["type"] != "ping"]
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    assert ended["type"] == "message_delta"
    message, arguments, running = first["message"], "", False
    for event in events:
        kind, at = event["type"], event["index"]
        if kind == "content_block_start":
            assert at == len(message["content"]) and not running
            message["content"].append(event["content_block"])
            arguments, running = "", True
        elif kind == "content_block_stop":
            block, running = message["content"][at], False
            assert at == len(message["content"]) - 1
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments)
        else:
            key = event["delta"].pop("type").removesuffix("_delta")
            ((name, value),) = event["delta"].items()
            assert running and key == {"partial_json": "input_json"}.get(name, name)
            if key == "input_json":
                arguments += value
            else:
                message["content"][at][key] += value
    assert not running
    return message | ended["delta"] | {"usage": message["usage"] | ended["usage"]}


FOLD = {
    "chat": fold_chat,
    "responses": lambda events: Responses(events).response,
    "messages": fold_messages,
}


# ---- Replies of any kind

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=3).map(json.dumps) | TEXT | st.just("{}")
CALLS = st.lists(
    st.tuples(st.sampled_from(["look", "spawn"]), ARGUMENTS, st.sampled_from(["", "agents"])),
    max_size=3,
)
ENDS = st.sampled_from([("stop", ""), ("length", ""), ("stop_string", "END")])
LOGPROBS = st.none() | st.lists(st.tuples(TEXT, st.floats(-99, 0)), max_size=3)
COUNTS = st.tuples(st.integers(0, 99), *[st.integers(0, 9)] * 3)
REPLY = st.tuples(TEXT, st.none() | TEXT, CALLS, ENDS, LOGPROBS)
REPLIES = st.tuples(COUNTS, st.lists(REPLY, min_size=1, max_size=3), st.booleans())


def answers(wire: str, counts, replies) -> list[Answer]:
    """One for each choice; only the chat wire has more than one, and log-probs."""
    context, cached, *sampled = counts
    made = []
    for node, (text, thought, calls, end, logprobs) in zip((NODE, OTHER, THIRD), replies):
        turn = mint(node, wire, text, thought, calls)
        more = logprobs if wire == "chat" else None
        made.append(Answer(node, turn, *end, context + cached, cached, *sampled, more))
    return made if wire == "chat" else made[:1]


def asked(wire: str, n: int, encrypted: bool) -> dict:
    if wire == "responses":
        return {"include": ["reasoning.encrypted_content"] if encrypted else []}
    return {"stream_options": {"include_usage": True}, "n": n} if wire == "chat" else {}


def streamed(wire: str, drawn) -> tuple[dict, list[str]]:
    """(body, frames) of one reply."""
    counts, replies, encrypted = drawn
    made = answers(wire, counts, replies)
    req = request(wire, **asked(wire, len(made), encrypted))
    s = Stream(req, made[0].node, made[0].prompt_tokens, made[0].cached_tokens)
    frames = [*s.start(), s.alive(), *s.finish(made)]
    return json.loads(json.dumps(write(req, made, s.begun))), frames


@pytest.mark.parametrize("wire", WIRES)
def test_a_stream_folds_to_the_body(wire):
    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(REPLIES)
    def folds(drawn):
        body, frames = streamed(wire, drawn)
        assert FOLD[wire](said(frames)) == body

    folds()


@pytest.mark.parametrize("wire", WIRES)
def test_the_official_sdk_folds_a_stream_to_the_body(wire):
    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(REPLIES)
    def folds(drawn):
        counts, replies, encrypted = drawn
        made, transport = answers(wire, counts, replies), Server(None)
        transport.reply = lambda req: made
        options = asked(wire, len(made), encrypted)
        reply = transport.ask(wire, stream=True, **options)
        body = write(request(wire, **options), made)
        assert plain(json.loads(reply.to_json())) == plain(json.loads(json.dumps(body)))

    folds()


# ---- What the folds would see

FULL = SAID["calls"]
DRAWN = (
    (36, 64, 9, 4),
    [(*FULL, ("stop", ""), [("I", -0.5)]), (*FULL, ("length", ""), None)],
    True,
)


def silent(event) -> bool:
    """Whether an event is a keep-alive, or a delta of nothing."""
    if event == "[DONE]":
        return False
    nothing = {"type": "input_json_delta", "partial_json": ""}
    return event.get("type") in ("ping", "response.in_progress") or event.get("delta") == nothing


@pytest.mark.parametrize("wire", WIRES)
def test_planted_an_event_that_is_lost_is_seen(wire):
    body, frames = streamed(wire, DRAWN)
    frames = [f for f in frames if not f.startswith(": ")]
    for at, event in enumerate(said(frames)):
        events = said(frames[:at] + frames[at + 1 :])
        if wire == "responses":  # its numbers alone would tell: no gap is left
            for i, e in enumerate(events):
                e["sequence_number"] = i
        try:
            whole = FOLD[wire](events) == body
        except (AssertionError, LookupError, TypeError, ValueError):
            whole = False
        assert whole == silent(event), event


def test_planted_a_reasoning_s_text_that_only_the_item_has_is_seen(monkeypatch):
    body, frames = streamed("responses", DRAWN)
    assert Responses(said(frames)).response == body
    monkeypatch.setattr(server, "PARTS", {"summary": "reasoning_summary_part"})
    with pytest.raises(AssertionError):
        Responses(said(streamed("responses", DRAWN)[1]))


def test_planted_a_choice_that_ends_without_its_log_probs_is_seen(monkeypatch):
    pieces = server._pieces
    monkeypatch.setattr(server, "_pieces", lambda choice: pieces(choice | {"logprobs": None}))
    body, frames = streamed("chat", DRAWN)
    assert fold_chat(said(frames)) != body and body["choices"][0]["message"][NODE_KEY] == NODE
