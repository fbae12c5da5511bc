"""Capture: turns ids and text into each other at one place, and keeps what the policy sampled as token-exact segments.

`Chat` holds a model's chat template: it encodes an opening once, and later only the run of new messages that follows a reply,
with the template's own bytes between them. `Trace` grows one sequence from engine replies and such runs; its sampled ids are
never decoded and encoded again. Text is made from ids for the agent only.

`read_chat`, `read_responses` and `read_messages` bring a request of each wire into one canonical form, and `same_turn` says how
an assistant turn that a client echoes relates to the one that it was sent. Both serve to compare histories only.

This module imports neither vllm nor ray: it is given a `generate` coroutine, so a scripted engine can stand in for tests.

    pytest tests/test_server.py tests/test_wires.py
"""

import base64
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from agent import Result, Segment

SENTINEL = "\u2042instar\u2042"  # stands for a reply while the template is rendered around it


@dataclass
class Reply:
    """What an engine sampled for one request. N = sampled tokens, P = prompt tokens, L = MoE layers, K = top-k."""

    tokens: np.ndarray  # int32 [N], the stop token included
    logprobs: np.ndarray  # float32 [N], after temperature
    versions: np.ndarray  # int32 [N]
    digest: bytes  # of (prompt, tokens, logprobs, versions), made where they were sampled
    finish: str  # "stop", "length" or "abort"
    experts: np.ndarray | None = None  # uint8/16 [P + N - 1 - start, L, K], rows from the first token not known before


class Chat:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError("--model has no chat template: put a chat_template.jinja beside its tokenizer")
        self.tokenizer = tokenizer
        self.recent = lru_cache(256)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def render(self, messages: list[dict]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Rollouts of one prompt share their texts, so the latest are kept."""
        return list(self.recent(text))

    def text(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def opening(self, messages: list[dict]) -> list[int]:
        """Ids of a whole prompt, up to where the policy begins to speak."""
        return self.encode(self.render(messages))

    def following(self, history: list[dict], new: list[dict], last: int) -> list[int]:
        """Ids between a reply and the next one: the end of the turn, the new messages, the next generation prompt.

        history: the messages before the reply; last: the reply's last id. They are the template's own bytes, found by
        rendering a sentinel in the reply's place and encoding what follows it as one run. An end-of-turn token that the policy
        sampled itself is not repeated; a reply cut by its length gets it, as context that is not trained.
        """
        parts = self.render([*history, {"role": "assistant", "content": SENTINEL}, *new]).split(SENTINEL)
        if len(parts) != 2:
            raise ValueError(f"the chat template of --model renders a reply {len(parts) - 1} times instead of once")
        ids = self.encode(parts[1])
        return ids[1:] if ids and ids[0] == last else ids


class Trace:
    """One sequence that only grows: the prompt, then replies and what the environment put between them."""

    def __init__(self, opening: list[int]):
        self.tokens, self.mask, self.logprobs, self.versions = list(opening), [], [], []
        self.experts, self.replies = [], []
        self._pad()

    def _pad(self) -> None:
        """Context is not the policy's: no mask, no log-prob, no version."""
        n = len(self.tokens) - len(self.mask)
        self.mask += [False] * n
        self.logprobs += [0.0] * n
        self.versions += [-1] * n

    def __len__(self) -> int:
        return len(self.tokens)

    def known(self) -> int:
        """Number of leading tokens whose experts were captured; an engine need not send them again."""
        return sum(len(e) for e in self.experts)

    def context(self, ids: list[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.tokens += ids
        self._pad()

    def reply(self, r: Reply) -> None:
        """Append an engine's reply exactly as it was sampled."""
        start = len(self.tokens)
        self.tokens += r.tokens.tolist()
        self.mask += [True] * len(r.tokens)
        self.logprobs += r.logprobs.tolist()
        self.versions += r.versions.tolist()
        self.replies.append((start, len(self.tokens), r.digest))
        if r.experts is not None:
            self.experts.append(r.experts)

    def segment(self, result: Result, group_id: int, rollout_id: int) -> Segment:
        """The training row, up to the last sampled token."""
        end, experts, ok = self.replies[-1][1], None, None
        if self.experts:
            rows = np.concatenate(self.experts)[:end]  # [known, L, K]
            experts = np.zeros((end, *rows.shape[1:]), rows.dtype)
            experts[: len(rows)] = rows
            ok = np.arange(end) < len(rows)
        return Segment(
            np.asarray(self.tokens[:end], np.int32),
            np.asarray(self.mask[:end], bool),
            np.asarray(self.logprobs[:end], np.float32),
            np.asarray(self.versions[:end], np.int32),
            experts,
            ok,
            self.replies,
            group_id,
            rollout_id,
            result.reward,
            result.turn_rewards,
            result.rewards,
            result.info,
            result.truncated,
        )


# ---- The canonical form of requests: what a client's history says, without the way in which its wire says it


class BadRequest(ValueError):
    """A request that cannot be read. The message names the field; error_code is for clients that act on it, else ""."""

    def __init__(self, message: str, error_code: str = ""):
        super().__init__(message)
        self.error_code = error_code


@dataclass(frozen=True)
class Call:
    """A tool call. arguments: the raw text as it came; serialised here only where the wire carries an object."""

    id: str
    name: str
    arguments: str
    namespace: str = ""


@dataclass(frozen=True)
class In:
    """What the policy reads. It is compared exactly: it is what gets tokenized, so a changed input is a new branch."""

    role: str  # "system", "user" or "tool"
    text: str
    call: str = ""  # the id of the call that a tool result answers
    images: tuple[str, ...] = ()  # sha256 of the bytes, or the URL
    error: bool = False  # a tool result that reports a failure


@dataclass(frozen=True)
class As:
    """What the policy said. anchors: minted ids, the calls' own included; no other join key survives every client."""

    text: str
    reasoning: str | None
    calls: tuple[Call, ...]
    anchors: tuple[str, ...]


@dataclass
class Request:
    """One request in canonical form."""

    wire: str  # "chat", "responses" or "messages"
    model: str
    turns: list[In | As]
    asked: dict  # what the client wants of the sampling; recorded only, the rollout owns it
    stream: bool
    retry: int  # attempts before this one, as the SDK counts them; many clients always say 0
    labels: (
        dict  # "session", "agent", "parent", "kind", "client", where headers say so; structure never depends on them
    )
    tools: list[dict] = field(default_factory=list)  # chat function schemas, "namespace" beside "function"; none hosted
    tool_choice: str = "auto"  # "auto", "none" or "required"
    forced: str = ""  # the name of the one tool that is asked for
    constrained: bool = False  # a forced call or a JSON schema: log-probs of a masked distribution
    max_tokens: int | None = None
    n: int = 1
    stop: list[str] = field(default_factory=list)
    previous: str = ""  # previous_response_id: turns holds the new items only, behind the instructions if there are any
    include_usage: bool = False  # the chat wire's last stream chunk
    include_encrypted: bool = False  # reasoning items carry encrypted_content


NODE_KEY = "x_node_id"  # the extra field of a chat message that names its node
UNPARSED = "__unparsedToolInput"  # Claude Code wraps arguments that are no JSON
BILLING = "x-anthropic-billing-header"  # Claude Code's first system block; its hash changes between requests
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
CHAT_ROLES = ROLES | {"tool": "tool", "function": "tool"}
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", *PENALTIES)
KINDS = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", int: "an integer", float: "a number"}
LABELS = {
    "user-agent": "client",
    "session-id": "session",
    "x-session-id": "session",
    "x-claude-code-session-id": "session",
    "thread-id": "agent",
    "x-claude-code-agent-id": "agent",
    "x-codex-parent-thread-id": "parent",
    "x-parent-session-id": "parent",
    "x-openai-subagent": "kind",
}


def read_chat(body, headers) -> Request:
    """Request of a Chat Completions body (parsed JSON) and its headers (a mapping). Raises BadRequest."""
    req = _request("chat", body, headers)
    for where, m in _objects(body, "messages"):
        role = _role(m, where, CHAT_ROLES)
        if role == "assistant":
            req.turns.append(_chat_turn(m, where))
        else:
            call = _field(m, "tool_call_id", str, where) or ""
            parts = _parts(m.get("content"), f"{where}.content")
            req.turns.append(_input(role, parts, call if role == "tool" else ""))
    if not req.turns:
        raise BadRequest("messages must not be empty")
    req.tools = _tools(_objects(body, "tools")) + _tools(_objects(body, "functions"))
    req.max_tokens = _count(body, "max_completion_tokens") or _count(body, "max_tokens")
    req.n = _count(body, "n") or 1
    req.stop = _strings([body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop"), "stop")
    options = _field(body, "stream_options", dict) or {}
    req.include_usage = bool(_field(options, "include_usage", bool, "stream_options"))
    choice = "tool_choice" if body.get("tool_choice") is not None else "function_call"
    _constrain(req, body.get(choice), choice, _field(body, "response_format", dict))
    return req


def read_responses(body, headers) -> Request:
    """Request of a Responses body. `conversation` and item references need a store that is not here: BadRequest."""
    req = _request("responses", body, headers)
    if body.get("conversation") is not None:
        raise BadRequest("conversation is not supported: send the items, or previous_response_id")
    items = body.get("input")
    if isinstance(items, str):
        body = body | {"input": [{"role": "user", "content": items}] if items else []}
    turns = _response_turns(_objects(body, "input"))
    req.previous = _field(body, "previous_response_id", str) or ""
    if not turns and not req.previous:
        raise BadRequest("input must not be empty")
    instructions = _field(body, "instructions", str)
    req.turns = [In("system", instructions), *turns] if instructions else turns
    req.tools = _tools(_objects(body, "tools"))
    req.max_tokens = _count(body, "max_output_tokens")
    req.include_encrypted = "reasoning.encrypted_content" in _strings(body.get("include"), "include")
    text = _field(body, "text", dict) or {}
    _constrain(req, body.get("tool_choice"), "tool_choice", _field(text, "format", dict, "text"))
    return req


def read_messages(body, headers) -> Request:
    """Request of an Anthropic Messages body. A server-side thread raises the error that makes the SDK do without."""
    req = _request("messages", body, headers)
    if body.get("thread") not in (None, False):
        raise BadRequest("thread is not supported: send the whole history", "thread_unsupported_request")
    system = _input("system", [p for p in _parts(body.get("system"), "system") if not p[0].startswith(BILLING)])
    req.turns += [system] if system.text else []
    messages = _objects(body, "messages")
    if not messages:
        raise BadRequest("messages must not be empty")
    for where, m in messages:
        req.turns += _message_turns(_role(m, where, ROLES), m.get("content"), f"{where}.content")
    req.tools = _tools(_objects(body, "tools"))
    req.max_tokens = _count(body, "max_tokens")
    req.stop = _strings(body.get("stop_sequences"), "stop_sequences")
    output = _field(body, "output_config", dict) or {}
    _constrain(req, body.get("tool_choice"), "tool_choice", _field(output, "format", dict, "output_config"))
    return req


def _field(obj: dict, key: str, kind: type, where: str = ""):
    """obj[key], None where it is absent or null; any other type raises and names the field."""
    value = obj.get(key)
    good = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if value is not None and not good:
        raise BadRequest(f"{where}{'.' if where else ''}{key} must be {KINDS[kind]}")
    return value


def _objects(obj: dict, key: str, where: str = "") -> list[tuple[str, dict]]:
    """(path, object) for each entry of a list of objects."""
    path = f"{where}{'.' if where else ''}{key}"
    values = [(f"{path}[{i}]", v) for i, v in enumerate(_field(obj, key, list, where) or [])]
    for at, v in values:
        if not isinstance(v, dict):
            raise BadRequest(f"{at} must be an object")
    return values


def _strings(values, where: str) -> list[str]:
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise BadRequest(f"{where} must be a list of strings")
    return [v for v in values if v]


def _count(body: dict, key: str) -> int | None:
    value = _field(body, key, int)
    if value is not None and value < 1:
        raise BadRequest(f"{key} must be at least 1")
    return value


def _role(message: dict, where: str, roles: dict) -> str:
    role = _field(message, "role", str, where)
    if role not in roles:
        raise BadRequest(f"{where}.role must be one of {', '.join(roles)}")
    return roles[role]


def _dump(value, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError) as e:
        raise BadRequest(f"{where} is nested too deeply or holds a number that is too long") from e


def _request(wire: str, body, headers) -> Request:
    """What all wires share."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    asked = {k: _field(body, k, float) for k in NUMBERS}
    asked |= {k: body.get(k) for k in ("logprobs", "top_logprobs", "logit_bias")}
    headers = {k.lower(): v for k, v in headers.items()}
    retry = headers.get("x-stainless-retry-count", "")
    labels = {LABELS[k]: v for k, v in headers.items() if k in LABELS}
    kind = re.search(r'"request_kind": *"(\w+)"', headers.get("x-codex-turn-metadata", ""))
    return Request(
        wire,
        _field(body, "model", str) or "",
        [],
        {k: v for k, v in asked.items() if v is not None},
        bool(_field(body, "stream", bool)),
        int(retry) if re.fullmatch("[0-9]{1,9}", retry) else 0,
        labels | ({"kind": kind[1]} if kind and "kind" not in labels else {}),
    )


def _constrain(req: Request, choice, where: str, form: dict | None) -> None:
    """Set tool_choice, forced and constrained from a choice of tools and a format of the output."""
    req.tool_choice, req.forced = _choice({"type": choice} if isinstance(choice, str) else choice, where)
    kind = _field(form or {}, "type", str, "format")
    req.constrained = req.tool_choice == "required" or kind in ("json_schema", "json_object")


def _choice(value, where: str) -> tuple[str, str]:
    """(choice, name of the one tool asked for or ""). A kind that nobody has heard of means "auto"."""
    choice = _field({where: value}, where, dict) or {}
    kind = _field(choice, "type", str, where)
    if kind == "allowed_tools":
        kind = _field(_field(choice, "allowed_tools", dict, where) or choice, "mode", str, where)
    if kind in ("auto", "none", "required", "any"):
        return ("required" if kind == "any" else kind), ""
    name = _field(_field(choice, "function", dict, where) or choice, "name", str, where)
    return ("required", name) if name else ("auto", "")


def _tools(tools: list[tuple[str, dict]], namespace: str = "") -> list[dict]:
    """Function schemas of any wire's tools. What a provider hosts (web search and the like) is dropped."""
    found = []
    for where, tool in tools:
        kind = _field(tool, "type", str, where) or "function"
        if kind == "namespace" and not namespace:
            found += _tools(_objects(tool, "tools", where), _field(tool, "name", str, where) or "")
        elif kind == "function" or kind == "custom" and "input_schema" in tool:
            found.append(_schema(_field(tool, "function", dict, where) or tool, where, namespace))
    return found


def _schema(tool: dict, where: str, namespace: str) -> dict:
    name, description = _field(tool, "name", str, where), _field(tool, "description", str, where)
    if not name:
        raise BadRequest(f"{where} needs a name")
    parameters = _field(tool, "parameters", dict, where) or _field(tool, "input_schema", dict, where)
    function = {"name": name} | ({"description": description} if description else {})
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function} | ({"namespace": namespace} if namespace else {})


def _parts(value, where: str) -> list[tuple[str, str]]:
    """(text, image) for each part of a message's content: a string, a list of parts or null."""
    if value is None or isinstance(value, str):
        return [(value or "", "")]
    return [_part(part, at) for at, part in _objects({where: value}, where)]


def _part(part: dict, where: str) -> tuple[str, str]:
    """(text, image) of one part, one of them empty. A kind without text stays as its JSON, so that nothing is lost."""
    kind = _field(part, "type", str, where) or "text"
    if kind in ("image", "image_url", "input_image"):
        return "", _image(part, where)
    key = "refusal" if kind == "refusal" else "text"
    if kind in ("text", "input_text", "output_text", "refusal") or key in part:
        return _field(part, key, str, where) or "", ""
    return _dump({k: v for k, v in part.items() if v is not None and k != "cache_control"}, where), ""


def _image(part: dict, where: str) -> str:
    """sha256 of the bytes that a part carries, so that a data URI and Anthropic's base64 agree; else its URL."""
    source = _field(part, "source", dict, where) or {}
    holder, key = (part["image_url"], "url") if isinstance(part.get("image_url"), dict) else (part, "image_url")
    url = _field(holder, key, str, where) or _field(source, "url", str, where) or ""
    data = url.partition(",")[2] if url.startswith("data:") else _field(source, "data", str, where)
    if url and not url.startswith("data:"):
        return url
    if not data:
        raise BadRequest(f"{where} holds no image: send its bytes in base64 or a URL")
    try:
        return hashlib.sha256(base64.b64decode(data, validate=True)).hexdigest()
    except ValueError as e:
        raise BadRequest(f"{where} is not valid base64") from e


def _input(role: str, parts: list[tuple[str, str]], call: str = "", error: bool = False) -> In:
    """Parts of an input join by line, empty ones left out."""
    images = tuple(image for _, image in parts if image)
    return In(role, "\n".join(text for text, _ in parts if text), call, images, error)


def _assistant(texts: list[str], thoughts: list[str], calls: list[Call], anchors: list) -> As:
    """Parts of a reply join without a separator: it was sampled as one text."""
    anchors = [*(c.id for c in calls), *anchors]
    return As("".join(texts), "".join(thoughts) or None, tuple(calls), tuple(dict.fromkeys(a for a in anchors if a)))


def _call(id_: str | None, obj: dict, key: str, where: str) -> Call:
    """A call whose arguments stand in obj[key], as text or as an object."""
    name, raw = _field(obj, "name", str, where), obj.get(key)
    if not name:
        raise BadRequest(f"{where}.name must be a string")
    if not isinstance(raw, str):
        raw = "" if _field(obj, key, dict, where) is None else _dump(raw, f"{where}.{key}")
    return Call(id_ or "", name, raw, _field(obj, "namespace", str, where) or "")


def _chat_turn(m: dict, where: str) -> As:
    calls = []
    for at, call in _objects(m, "tool_calls", where):
        custom = _field(call, "custom", dict, at)
        function = custom or _field(call, "function", dict, at) or {}
        calls.append(_call(_field(call, "id", str, at), function, "input" if custom else "arguments", f"{at}.function"))
    legacy = _field(m, "function_call", dict, where)
    if legacy:
        calls.append(_call("", legacy, "arguments", f"{where}.function_call"))
    texts = [text for text, _ in _parts(m.get("content"), f"{where}.content")]
    # litellm moves the fields that it does not know
    moved, at = _field(m, "provider_specific_fields", dict, where) or {}, f"{where}.provider_specific_fields"
    thoughts = [_field(o, k, str, w) for o, w in ((m, where), (moved, at)) for k in ("reasoning_content", "reasoning")]
    anchors = [_field(m, NODE_KEY, str, where), _field(moved, NODE_KEY, str, at)]
    return _assistant(texts, [t for t in thoughts if t][:1], calls, anchors)


def _response_turns(items: list[tuple[str, dict]]) -> list[In | As]:
    """Adjacent items of the assistant become one turn. Items of hosted tools and of unknown types are left out."""
    turns, run = [], []
    for where, item in items:
        kind = _field(item, "type", str, where) or "message"
        role = _role(item, where, ROLES) if kind == "message" else ""
        if kind == "item_reference":
            raise BadRequest(f"{where} refers to a stored item: send the item itself (store: false)")
        if role == "assistant" or kind in ("reasoning", "function_call", "custom_tool_call"):
            run.append((where, kind, item))
            continue
        if role or kind.endswith("_call_output"):
            turns += [_response_turn(run)] if run else []
            run = []
        if role:
            turns.append(_input(role, _parts(item.get("content"), f"{where}.content")))
        elif kind.endswith("_call_output"):
            call = _field(item, "call_id", str, where) or ""
            turns.append(_input("tool", _parts(item.get("output"), f"{where}.output"), call))
    return turns + ([_response_turn(run)] if run else [])


def _response_turn(run: list[tuple[str, str, dict]]) -> As:
    texts, thoughts, calls, anchors = [], [], [], []
    for where, kind, item in run:
        anchors += [_field(item, "id", str, where), _field(item, "encrypted_content", str, where)]
        if kind == "message":
            texts += [text for text, _ in _parts(item.get("content"), f"{where}.content")]
        elif kind == "reasoning":
            # both hold the same text; the AI SDK sends the summary back alone
            content, summary = (_parts(item.get(k), f"{where}.{k}") for k in ("content", "summary"))
            thoughts.append("".join(t for t, _ in content) or "".join(t for t, _ in summary))
        else:
            key = "arguments" if kind == "function_call" else "input"
            calls.append(_call(_field(item, "call_id", str, where), item, key, where))
    return _assistant(texts, thoughts, calls, anchors)


def _message_turns(role: str, content, where: str) -> list[In | As]:
    """Turns of one Anthropic message. A user's is split, in block order, into tool results and what stands between."""
    if isinstance(content, str) or content is None:
        content = [{"type": "text", "text": content}]
    blocks = _objects({where: content}, where)
    if role == "assistant":
        return [_message_turn(blocks)]
    turns, run = [], []
    for at, block in blocks:
        if _field(block, "type", str, at) != "tool_result":
            run.append(_part(block, at))
            continue
        turns, run = [*turns, _input(role, run)], []
        call, error = _field(block, "tool_use_id", str, at) or "", bool(_field(block, "is_error", bool, at))
        turns.append(_input("tool", _parts(block.get("content"), f"{at}.content"), call, error))
    # nothing said between two results is no turn
    turns = [t for t in (*turns, _input(role, run)) if t.role == "tool" or t.text or t.images]
    return turns or [In(role, "")]


def _message_turn(blocks: list[tuple[str, dict]]) -> As:
    texts, thoughts, calls, anchors = [], [], [], []
    for where, block in blocks:
        kind = _field(block, "type", str, where)
        if kind == "thinking":
            thoughts.append(_field(block, "thinking", str, where) or "")
            anchors.append(_field(block, "signature", str, where))
        elif kind == "redacted_thinking":
            anchors.append(_field(block, "data", str, where))
        elif kind == "tool_use":
            calls.append(_call(_field(block, "id", str, where), block, "input", where))
        else:
            texts.append(_part(block, where)[0])
    return _assistant(texts, thoughts, calls, anchors)


def same_turn(echo: As, sent: As) -> str | None:
    """How the turn that a client echoes relates to the one that it was sent, whose anchors are all that were minted for it.

    T0: the same text, reasoning, ids and raw arguments. T1: the same up to what clients do by serialising.
    T2a: anchored, with arguments coerced through the tool's schema. T2b: anchored, a tool renamed or its arguments replaced.
    T2c: anchored, but text, reasoning or the calls were edited: another turn. None: nothing says that they are related.
    """
    anchored = not set(echo.anchors).isdisjoint(sent.anchors)
    pairs = list(zip(echo.calls, sent.calls))
    ids = len(echo.calls) == len(sent.calls) and all(e.id in ("", s.id) for e, s in pairs)
    thought = (echo.reasoning or "").strip()  # clients may drop it, not change it
    kept = echo.text.strip() == sent.text.strip() and thought in ("", (sent.reasoning or "").strip())
    if kept and ids and all(_same_call(e, s, _equal) for e, s in pairs):
        raw = (echo.text, echo.reasoning, echo.calls) == (sent.text, sent.reasoning, sent.calls)
        # ids of another turn: a sibling that says the same must not win over the one that the ids name
        return "T0" if raw and (anchored or not echo.anchors) else "T1"
    if not anchored:
        return None
    if not (kept and ids):
        return "T2c"
    return "T2a" if all(_same_call(e, s, _loosely) for e, s in pairs) else "T2b"


def _same_call(echo: Call, sent: Call, same) -> bool:
    if (echo.namespace, echo.name) != (sent.namespace, sent.name):
        return False
    if echo.arguments == sent.arguments:
        return True
    try:
        return same(_parse(echo.arguments), _parse(sent.arguments))
    except RecursionError:  # too deep to compare by value
        return False


def _number(text: str) -> float | str:
    """A number as the double that JavaScript makes of it; one beyond its range stays text, marked as no JSON string."""
    value = float(text) + 0.0  # no negative zero
    return value if math.isfinite(value) else f"\0{text}"


def _refuse(constant: str):
    raise ValueError(f"{constant} is no JSON")


def _parse(raw: str):
    """The value of arguments: the last of duplicate keys, numbers as doubles, {} for nothing, what is no JSON wrapped."""
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw, parse_int=_number, parse_float=_number, parse_constant=_refuse)
    except ValueError:
        return {UNPARSED: raw}
    inner = value.get(UNPARSED) if isinstance(value, dict) else None
    wrapped = inner.get("raw") if isinstance(inner, dict) else None
    return _parse(wrapped) if isinstance(wrapped, str) else value


def _equal(echo, sent) -> bool:
    # as text, because in Python True == 1.0
    return json.dumps(echo, sort_keys=True) == json.dumps(sent, sort_keys=True)


def _loosely(echo, sent) -> bool:
    """Every sampled key is there; scalars agree as text and strings up to blanks at the ends of their lines."""
    if isinstance(echo, dict) and isinstance(sent, dict):
        return all(k in echo and _loosely(echo[k], v) for k, v in sent.items())
    if isinstance(echo, list) and isinstance(sent, list):
        return len(echo) == len(sent) and all(_loosely(e, s) for e, s in zip(echo, sent))
    if isinstance(echo, str) and isinstance(sent, str):
        return re.sub(r"[ \t\r]+(?=\n|$)", "", echo) == re.sub(r"[ \t\r]+(?=\n|$)", "", sent)
    return not isinstance(echo, (dict, list)) and not isinstance(sent, (dict, list)) and _scalar(echo) == _scalar(sent)


def _scalar(value) -> str:
    if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", value, re.ASCII):
        value = _number(value)
    return value if isinstance(value, str) else json.dumps(value)
