"""Capture: any agent's requests in, token-exact segments out.

`Chat` holds a model's chat template: it encodes an opening once, and later only the run of new messages that follows a reply,
with the template's own bytes between them. Sampled ids are never decoded and encoded again; text is made from them for the
agent only.

`read_chat`, `read_responses` and `read_messages` bring a request of each wire into one canonical form, and `same_turn` says how
an assistant turn that a client echoes relates to the one that it was sent; both serve to compare histories only. `Forest` keeps
the requests of one rollout, each attached to the reply that its history ends with. `write` and `Stream` answer in the words of
the wire; `Server` is what clients connect to.

This module imports neither vllm nor ray: it is given a `generate` coroutine, so a scripted engine can stand in for tests.

    pytest tests/test_server.py tests/test_wires.py tests/test_forest.py tests/test_http.py tests/test_templates.py
"""

import asyncio
import base64
import gc
import hashlib
import hmac
import json
import marshal
import math
import re
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby

import uvicorn

from agent import Reply, Result, Segment, Trace

SENTINEL = "\u2042instar\u2042"  # stands for a reply while the template is rendered around it
THOUGHT = "\u2042thought\u2042"  # stands for its reasoning
PLAIN = "\ufdd0"  # no character of any text; stands around what only looks like a special token
CALL = "abcdefghi"  # a tool-call id that the strictest template takes


class Chat:
    """A tokenizer and its chat template. Messages are rendered by the template alone; what it would refuse, drop or move to
    another place (a late system message, a tool's result) is said in a user message that stands where it was."""

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError(
                "--model has no chat template: put a chat_template.jinja beside its tokenizer"
            )
        self.tokenizer = tokenizer
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self.special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self.ends = re.compile(
            rf"(?:{self.special.pattern})+\Z"
        )  # the end-of-turn token behind a reply
        encode = partial(tokenizer.encode, add_special_tokens=False)
        self.recent = lru_cache(256)(
            lambda text, plain: tuple(encode(text, split_special_tokens=plain))
        )
        self.longest = max(map(len, tokenizer.get_vocab()))  # characters of one token, at most
        self.takes_first_system = self._takes("system", "user")
        self.takes_system = self._takes("user", "assistant", "system")
        self.takes_users = self._takes("user", "user")
        self.takes_tools = self._takes("user", "assistant", "tool", "tool")
        self.arguments = (
            dict if self._calls(1, dict(k="v")) or not self._calls(1, "{}") else str
        )  # or as text
        value = self.arguments(k="v") if self.arguments is dict else "{}"
        self.calls = (
            math.inf if self._calls(2, value) else int(self._calls(1, value))
        )  # in one turn

    def _takes(self, *roles: str) -> bool:
        """Whether the template renders the content of messages of all these roles, each once and in order."""
        marked = [
            {"role": role, "content": f"{SENTINEL}{i}{SENTINEL}"} for i, role in enumerate(roles)
        ]
        answers = [m | {"tool_call_id": CALL} if m["role"] == "tool" else m for m in marked]
        return self._found(answers) == [str(i) for i in range(len(roles))]

    def _calls(self, n: int, arguments: dict | str) -> bool:
        """Whether it renders n tool calls in one turn."""
        names = [f"{SENTINEL}{i}{SENTINEL}" for i in range(n)]
        calls = [
            {"id": CALL, "type": "function", "function": {"name": f, "arguments": arguments}}
            for f in names
        ]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        results = [{"role": "tool", "content": "d", "tool_call_id": CALL}] * n
        return self._found([{"role": "user", "content": "a"}, message, *results]) == [
            str(i) for i in range(n)
        ]

    def _found(self, messages: list[dict]) -> list[str]:
        try:
            return re.findall(f"{SENTINEL}(.*?){SENTINEL}", self._render(messages))
        except Exception:  # whatever a template raises
            return []

    def _render(self, messages: list[dict], tools: list[dict] | None = None) -> str:
        asks = (
            messages[-1]["role"] != "assistant"
        )  # a conversation that ends with the assistant is a demonstration
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=asks
        )

    def fit(self, messages: list[dict], bare: bool = False) -> list[dict]:
        """Messages of a whole conversation as the template takes them; `bare`: users and the assistant in turns, no more."""
        fitted, leading = [], True
        for m in messages:
            leading = leading and m["role"] == "system"
            if m["role"] == "system" and (
                bare or not (self.takes_first_system if leading else self.takes_system)
            ):
                text = (
                    m["content"]
                    if leading
                    else f"<system-reminder>\n{m['content']}\n</system-reminder>"
                )
                m = {"role": "user", "content": text}
            elif m["role"] == "tool" and (bare or not self.takes_tools):
                m = {
                    "role": "user",
                    "content": f"<tool_response>\n{m['content']}\n</tool_response>",
                }
            elif m.get("tool_calls") and (bare or len(m["tool_calls"]) > self.calls):
                said = [json.dumps(c["function"], ensure_ascii=False) for c in m["tool_calls"]]
                said = "\n".join([m["content"], *(f"<tool_call>\n{c}\n</tool_call>" for c in said)])
                m = {k: v for k, v in m.items() if k != "tool_calls"} | {"content": said}
            again = fitted and fitted[-1]["role"] == m["role"]
            if again and (
                m["role"] == "user"
                and (bare or not self.takes_users)
                or m["role"] == "system"
                and leading
            ):
                fitted[-1] = fitted[-1] | {"content": f"{fitted[-1]['content']}\n\n{m['content']}"}
            else:
                fitted.append(m)
        return fitted

    def spelled(self, call: "Call") -> dict | str:
        """A call's arguments as the template takes them: most dump an object themselves."""
        value = _object(call.arguments) if self.arguments is dict else None
        return call.arguments if value is None else value

    def plain(self, value):
        """A JSON value in which the characters of a special token are marked, so that `encode` makes no such token of them."""
        if isinstance(value, str):
            return self.special.sub(lambda m: f"{PLAIN}{m[0]}{PLAIN}", value.replace(PLAIN, ""))
        if isinstance(value, list):
            return [self.plain(v) for v in value]
        return {k: self.plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    def render(self, messages: list[dict], tools: list[dict] | None = None) -> str:
        """Text of a prompt, up to where the policy begins to speak. Raises BadRequest where the template refuses it."""
        tools = self.plain(tools) if tools else None
        for bare in (False, True):
            try:
                return self._render(self.plain(self.fit(messages, bare)), tools)
            except Exception as e:  # whatever a template raises
                refused = e
        raise BadRequest(
            f"the chat template of --model refuses these messages: {refused}"
        ) from refused

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Rollouts of one prompt share their texts, so the latest are kept."""
        return [
            i
            for n, part in enumerate(text.split(PLAIN))
            if part
            for i in self.recent(part, n % 2 == 1)
        ]

    def text(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def opening(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Ids of a whole prompt, up to where the policy begins to speak."""
        return self.encode(self.render(messages, tools))

    def following(
        self,
        new: list[dict],
        last: int,
        tools: list[dict] | None = None,
        system: bool = False,
        reasoned: bool = False,
    ) -> tuple[list[int], bool]:
        """Ids between a reply and the next one: the end of the turn, the new messages, the next generation prompt.

        last: the reply's last id; system: the history begins with a system message; reasoned: a reply in it holds reasoning.
        The ids are the template's own bytes, found by rendering a sentinel in the reply's place and encoding what follows it as
        one run; a short stand-in for the history keeps the cost of a turn flat. An end-of-turn token that the policy sampled
        itself is not repeated; a reply cut by its length gets it, as context that is not trained. Also returned: whether the
        template leaves what came before as it was; it does not when it strips old reasoning, or moves the tools to the last
        user message.
        """
        history = [
            {"role": role, "content": "?"} for role in (["system"] if system else []) + ["user"]
        ]
        reply = {"role": "assistant", "content": SENTINEL} | (
            {"reasoning_content": THOUGHT} if reasoned else {}
        )
        head, *tail = self.render([*history, reply, *new], tools).split(SENTINEL)
        if len(tail) != 1:
            raise BadRequest(
                f"the chat template of --model renders a reply {len(tail)} times instead of once"
            )
        ids = self.encode(tail[0])
        kept = head.startswith(self.render(history, tools)) and (not reasoned or THOUGHT in head)
        return (ids[1:] if ids and ids[0] == last else ids), kept


# ---- The canonical form of requests: what a client's history says, without the way in which its wire says it


class BadRequest(ValueError):
    """A request that cannot be answered. The message names the field; error_code is for clients that act on it, else ""."""

    def __init__(self, message: str, error_code: str = "", status: int = 400):
        super().__init__(message)
        self.error_code, self.status = error_code, status


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
    anchors = ()


@dataclass(frozen=True)
class As:
    """What the policy said. anchors: minted ids, the calls' own included; no other join key survives every client."""

    text: str
    reasoning: str | None
    calls: tuple[Call, ...]
    anchors: tuple[str, ...]
    role = "assistant"


@dataclass
class Request:
    """One request in canonical form."""

    wire: str  # "chat", "responses" or "messages"
    model: str
    turns: list[In | As]
    asked: dict  # what the client wants of the sampling; recorded only, the rollout owns it
    stream: bool
    retry: int  # attempts before this one, as the SDK counts them; many clients always say 0
    tools: list[dict] = field(
        default_factory=list
    )  # chat function schemas, "namespace" beside "function"; none hosted
    tool_choice: str = "auto"  # "auto", "none" or "required"
    forced: str = ""  # the one tool that tool_choice names
    schema: dict | None = None  # what the reply is wanted in, a JSON schema
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
CHOICES = {
    "none": "none",
    "required": "required",
    "any": "required",
    "tool": "required",
    "function": "required",
}
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed")
IMAGES = ("image", "image_url", "input_image")
KINDS = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
}


class Fields(dict):
    """A JSON object of a request, and where it stands there. What is absent or null reads as empty: clients mean the same."""

    def __init__(self, value, where: str = ""):
        if not isinstance(value, dict):
            raise BadRequest("the body must be a JSON object")
        super().__init__(value)
        self.where = where

    def read(self, key: str, *kinds: type):
        """The value of a field, a string where no other kinds are given. Raises BadRequest, which names the field."""
        kinds, where = kinds or (str,), f"{self.where}.{key}" if self.where else key
        value = kinds[0]() if self.get(key) is None else self[key]
        if type(value) not in kinds:
            raise BadRequest(f"{where} must be {' or '.join(KINDS[k] for k in kinds)}")
        return Fields(value, where) if type(value) is dict else value

    def each(self, key: str, kind: type = dict, start: int = 0) -> list:
        """Entries of a list, all of one kind. A string stands for a list of itself, or of one text."""
        values = self.read(key, list, str)
        if isinstance(values, str):
            values = [values if kind is str else {"text": values}]
        entries = Fields({f"{key}[{i}]": values[i] for i in range(start, len(values))}, self.where)
        return [entries.read(k, kind) for k in entries]

    def count(self, key: str) -> int | None:
        """A number of at least one, None where it is absent."""
        if self.get(key) is not None and self.read(key, int) < 1:
            raise BadRequest(f"{key} must be at least 1")
        return self.get(key)


def read_chat(body, headers, past: deque | None = None) -> Request:
    """Request of a Chat Completions body (parsed JSON) and its headers (a mapping). Raises BadRequest.

    past: what `_turns` remembers of the requests before.
    """
    body = Fields(body)
    turns = _turns(body, "messages", _chat_turns, past)
    req = _request("chat", body, headers, turns, body.read("response_format", dict))
    req.n = body.count("n") or 1
    req.include_usage = body.read("stream_options", dict).read("include_usage", bool)
    return req


def read_responses(body, headers, past: deque | None = None) -> Request:
    """Request of a Responses body. `conversation` needs a store that is not here: BadRequest, as for an item reference that
    `Forest.resolve` has left."""
    body = Fields(body)
    if body.get("conversation") is not None:
        raise BadRequest("conversation is not supported: send the items, or previous_response_id")
    text = body.get("input")
    turns = (
        [In("user", text)]
        if isinstance(text, str)
        else _turns(body, "input", _response_turns, past)
    )
    system = In("system", body.read("instructions"))
    req = _request(
        "responses", body, headers, turns, body.read("text", dict).read("format", dict), system
    )
    req.include_encrypted = "reasoning.encrypted_content" in body.each("include", str)
    return req


def read_messages(body, headers, past: deque | None = None) -> Request:
    """Request of an Anthropic Messages body. A server-side thread raises the error that makes the SDK do without."""
    body = Fields(body)
    if body.get("thread") not in (None, False):
        raise BadRequest(
            "thread is not supported: send the whole history", "thread_unsupported_request"
        )
    turns = _turns(body, "messages", _message_turns, past)
    system = _input("system", [p for p in body.each("system") if not _text(p).startswith(BILLING)])
    return _request(
        "messages",
        body,
        headers,
        turns,
        body.read("output_config", dict).read("format", dict),
        system,
    )


def _request(
    wire: str, body: Fields, headers, turns: list, form: Fields, system: In | None = None
) -> Request:
    """What all wires share, or name apart. form: the format that the reply is wanted in; system: what stands before turns."""
    previous = body.read("previous_response_id")
    if not turns and not previous:
        raise BadRequest(f"{'input' if wire == 'responses' else 'messages'} must not be empty")
    asked = {k: body.read(k, int, float) for k in NUMBERS if body.get(k) is not None}
    asked |= {
        k: body[k] for k in ("logprobs", "top_logprobs", "logit_bias") if body.get(k) is not None
    }
    retry = {k.lower(): v for k, v in headers.items()}.get("x-stainless-retry-count", "")
    retry = int(retry) if re.fullmatch("[0-9]{1,9}", retry) else 0
    choice = body.read("tool_choice", str, dict) or body.read("function_call", str, dict) or "auto"
    named = choice if isinstance(choice, dict) else Fields({"type": choice})
    turns = [system, *turns] if system and system.text else turns
    req = Request(
        wire, body.read("model"), turns, asked, body.read("stream", bool), retry, previous=previous
    )
    req.tools = [*_tools(body.each("tools") + body.each("functions"))]
    req.tool_choice = CHOICES.get(named.read("type") or "function", "auto")
    req.forced = named.read("name") or named.read("function", dict).read("name")
    if form.read("type") in ("json_schema", "json_object"):
        req.schema = (form.read("json_schema", dict) or form).read("schema", dict) or {
            "type": "object"
        }
    req.max_tokens = (
        body.count("max_completion_tokens")
        or body.count("max_output_tokens")
        or body.count("max_tokens")
    )
    req.stop = [s for s in body.each("stop", str) + body.each("stop_sequences", str) if s]
    return req


def _turns(body: Fields, key: str, read, past: deque | None) -> list[In | As]:
    """Turns of a list. Clients resend their history whole: where `past` has a list that this one begins with, the turns of that
    are taken as they are, and only the rest is read."""
    raw = marshal.dumps(body.get(key), 2)[
        5:
    ]  # the entries one after the other, behind the list's kind and length
    if past is None or type(body.get(key)) is not list:
        return [*read(body.each(key))]
    known = [(n, turns) for wire, old, n, turns in past if wire is read and raw.startswith(old)]
    n, turns = max(known, key=lambda k: k[0], default=(0, []))
    turns = [*turns, *read(body.each(key, start=n))]
    if (
        turns and turns[-1].role != "assistant"
    ):  # more may be said to an unfinished turn of the assistant
        past.append((read, raw, len(body[key]), turns))
    return turns


def _role(message: Fields, roles: dict) -> str:
    role = message.read("role")
    if role not in roles:
        raise BadRequest(f"{message.where}.role must be one of {', '.join(roles)}")
    return roles[role]


def _tools(tools: list[Fields], namespace: str = "") -> Iterator[dict]:
    """Function schemas of any wire's tools. What a provider hosts (web search and the like) is dropped."""
    for tool in tools:
        kind = tool.read("type") or "function"
        if kind == "namespace" and not namespace:
            yield from _tools(tool.each("tools"), tool.read("name"))
        elif kind == "function" or "input_schema" in tool:
            yield _schema(tool.read("function", dict) or tool, namespace)


def _schema(tool: Fields, namespace: str) -> dict:
    function = {k: v for k in ("name", "description") if (v := tool.read(k))}
    if "name" not in function:
        raise BadRequest(f"{tool.where} needs a name")
    parameters = tool.read("parameters", dict) or tool.read("input_schema", dict)
    function["parameters"] = dict(parameters) or {"type": "object", "properties": {}}
    return {"type": "function", "function": function} | (
        {"namespace": namespace} if namespace else {}
    )


def _text(part: Fields) -> str:
    """The text of a part, none of an image. A kind without text stays as its JSON, so that nothing is lost."""
    if not part or "text" in part or part.read("type") in IMAGES:
        return part.read("text")
    return json.dumps(
        {k: v for k, v in part.items() if v is not None and k != "cache_control"},
        ensure_ascii=False,
    )


def _image(part: Fields) -> str:
    """sha256 of the bytes that a part carries, so that a data URI and Anthropic's base64 agree; else its URL."""
    source = part.read("source", dict) or part.read("image_url", str, dict)
    url = source if isinstance(source, str) else source.read("url") or source.read("data")
    if "://" in url:
        return url
    try:
        data = base64.b64decode(url.rpartition(",")[2], validate=True)
    except ValueError:
        data = b""
    if not data:
        raise BadRequest(f"{part.where} holds no image: send its bytes in base64 or a URL")
    return hashlib.sha256(data).hexdigest()


def _input(role: str, parts: list[Fields], call: str = "", error: bool = False) -> In:
    """Parts of an input join by line, empty ones left out."""
    images = tuple(_image(p) for p in parts if p.read("type") in IMAGES)
    return In(role, "\n".join(text for p in parts if (text := _text(p))), call, images, error)


def _reply(parts) -> As:
    """What a client keeps of a reply: a chat message and its calls, items of Responses, or blocks of Messages.

    Its texts join without a separator: they were sampled as one.
    """
    texts, thoughts, calls, anchors = [], [], [], []
    for part in parts:
        kind = part.read("type")
        anchors += [part.get(k) for k in ("id", "encrypted_content", "signature", NODE_KEY)]
        if kind in ("function", "function_call", "custom_tool_call", "tool_use"):
            calls.append(
                _call(part.read("function", dict) or part, part.read("call_id") or part.read("id"))
            )
        elif kind == "thinking":
            thoughts.append(part.read("thinking"))
        elif kind == "reasoning":
            # both hold the same text; the AI SDK sends the summary back alone
            thoughts += map(_text, part.each("content") or part.each("summary"))
        elif "role" in part:
            thoughts.append(part.read("reasoning_content") or part.read("reasoning"))
            texts += map(_text, part.each("content"))
        else:
            texts.append(_text(part))
    anchors = dict.fromkeys(
        a for a in (*(c.id for c in calls), *anchors) if a and isinstance(a, str)
    )
    return As("".join(texts), "".join(thoughts) or None, tuple(calls), tuple(anchors))


def _call(function: Fields, id_: str) -> Call:
    """A call whose arguments are a text, or an object in `input`."""
    name, raw = (
        function.read("name"),
        function.read("arguments", str, dict) or function.read("input", str, dict),
    )
    if not name:
        raise BadRequest(f"{function.where}.name must be a string")
    raw = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False)
    return Call(id_, name, raw, function.read("namespace"))


def _chat_turns(messages: list[Fields]) -> Iterator[In | As]:
    for m in messages:
        role = _role(m, CHAT_ROLES)
        call = m.read("tool_call_id") if role == "tool" else ""
        yield (
            _reply(_chat_parts(m)) if role == "assistant" else _input(role, m.each("content"), call)
        )


def _chat_parts(m: Fields) -> list[Fields]:
    """A message and its calls, as `_reply` takes them."""
    # litellm moves the fields that it does not know
    message = m.read("provider_specific_fields", dict) | {
        k: v for k, v in m.items() if v is not None
    }
    calls = [c for c in (*m.each("tool_calls"), m.read("function_call", dict)) if c]
    return [Fields(message, m.where), *(Fields(c | {"type": "function"}, c.where) for c in calls)]


def _response_turns(items: list[Fields]) -> Iterator[In | As]:
    """Adjacent items of the assistant become one turn. Items of hosted tools and of unknown types are left out."""
    said, heard = (
        ("reasoning", "function_call", "custom_tool_call"),
        ("", "message", "item_reference"),
    )
    items = [
        i
        for i in items
        if i.read("type") in said + heard or i.read("type").endswith("_call_output")
    ]
    for reply, run in groupby(
        items, lambda i: i.read("type") in said or i.read("role") == "assistant"
    ):
        run = list(run)
        yield from [_reply(run)] if reply else map(_response_input, run)


def _refers(item: dict) -> bool:
    """Whether an item of Responses is no more than the id of another one; its type may be left out."""
    return item.get("type") == "item_reference" or [k for k in item if item[k] is not None] == [
        "id"
    ]


def _response_input(item: Fields) -> In:
    if _refers(item):
        raise BadRequest(
            f"{item.where} refers to {item.read('id')}, which is no item of this rollout's replies: "
            "send the item itself (store: false)"
        )
    if item.read("type").endswith("_call_output"):
        return _input("tool", item.each("output"), item.read("call_id"))
    return _input(_role(item, ROLES), item.each("content"))


def _message_turns(messages: list[Fields]) -> Iterator[In | As]:
    for m in messages:
        role, blocks = _role(m, ROLES), m.each("content")
        yield from [_reply(blocks)] if role == "assistant" else _message_inputs(role, blocks)


def _message_inputs(role: str, blocks: list[Fields]) -> list[In]:
    """Turns of a message that is not the assistant's: in the order of its blocks, tool results and what stands between."""
    turns = []
    for result, run in groupby(blocks, lambda b: b.read("type") == "tool_result"):
        if result:
            turns += [
                _input("tool", b.each("content"), b.read("tool_use_id"), b.read("is_error", bool))
                for b in run
            ]
        else:
            turns.append(_input(role, list(run)))
    # nothing said between two results is no turn
    return [t for t in turns if t.role == "tool" or t.text or t.images] or [In(role, "")]


def same_turn(echo: As, sent: As) -> str | None:
    """How the turn that a client echoes relates to the one that it was sent, whose anchors are all that were minted for it.

    T0: the same text, reasoning, ids and raw arguments. T1: the same up to what clients do by serialising.
    T2: anchored, but a tool was renamed or arguments are others, as where they were coerced through its schema.
    T3: anchored, but text, reasoning or the calls were edited: another turn. None: nothing says that they are related.
    """
    anchored = not set(echo.anchors).isdisjoint(sent.anchors)
    ids = len(echo.calls) == len(sent.calls) and all(
        e.id in ("", s.id) for e, s in zip(echo.calls, sent.calls)
    )
    thought = (echo.reasoning or "").strip()  # clients may drop it, not change it
    kept = echo.text.strip() == sent.text.strip() and thought in (
        "",
        (sent.reasoning or "").strip(),
    )
    if kept and ids and all(map(_same_call, echo.calls, sent.calls)):
        raw = (echo.text, echo.reasoning, echo.calls) == (sent.text, sent.reasoning, sent.calls)
        # ids of another turn: a sibling that says the same must not win over the one that the ids name
        return "T0" if raw and (anchored or not echo.anchors) else "T1"
    return ("T2" if kept and ids else "T3") if anchored else None


def _same_call(echo: Call, sent: Call) -> bool:
    """Whether two calls say the same, up to what serialising does to their arguments."""
    named = (echo.namespace, echo.name) == (sent.namespace, sent.name)
    return named and (
        echo.arguments == sent.arguments or _canonical(echo.arguments) == _canonical(sent.arguments)
    )


def _number(text: str) -> float | str:
    """A number as the double that JavaScript makes of it; one beyond its range stays text, marked as no JSON string."""
    value = float(text) + 0.0  # no negative zero
    return value if math.isfinite(value) else f"\0{text}"


def _canonical(raw: str) -> str:
    """Arguments as one text: the last of duplicate keys, numbers as doubles, {} for nothing, what is no JSON wrapped, and what
    is too deep to compare by value."""
    try:
        value = json.loads(
            raw.strip() or "{}", parse_int=_number, parse_float=_number, parse_constant=int
        )  # no NaN
        inner = value.get(UNPARSED) if isinstance(value, dict) else None
        wrapped = inner.get("raw") if isinstance(inner, dict) else None
        # a text, since in Python True == 1.0
        return (
            _canonical(wrapped) if isinstance(wrapped, str) else json.dumps(value, sort_keys=True)
        )
    except (ValueError, RecursionError):
        return json.dumps({UNPARSED: raw})


# ---- The forest: a rollout's requests, each attached to the node that its history ends with

TIERS = ("T2", "T1", "T0")  # what counts as the same turn, the surest last
RECENT = 8  # histories that go on at the same time, as those of sub-agents
YOUNG = 60.0  # seconds in which an SDK that counts its retries still means the same request


@dataclass(eq=False)
class Node:
    """One reply and what was said since the reply before it. Its sampled ids never change."""

    id: str
    place: tuple  # (id of the node before, digest of the tools, turns since): requests of one place ask for the same
    request: Request  # its turns are dropped: they are those of the nodes before, and the place's
    parent: "Node | None"  # the node before
    base: "Node | None" = None  # whose ids this node's follow: the parent, or None where the template rewrites the past
    start: int = 0  # tokens of the base's path, its reply included
    tokens: list[int] = field(default_factory=list)  # context between the base's reply and this one
    whole: list[int] | None = None  # ids(), held by the last node of a path only
    reply: Reply | None = None  # None while it runs
    turn: As | None = None  # the reply as a client gets it
    finish: str = ""  # "stop", "length" or "stop_string"
    stop: str = ""  # the stop string that ended it
    grammar: dict | None = (
        None  # what the engine kept the reply to; its log-probs are not the policy's then
    )
    listeners: int = 0  # connections that wait for it
    delivered: bool = False  # one of them got it to the last byte
    acked: bool = False  # a later request builds on it
    ended: float = math.inf  # when it was done
    task: asyncio.Task | None = None
    timer: asyncio.TimerHandle | None = None  # ends the task when nobody comes back

    def path(self, parents: bool = False) -> list["Node"]:
        """The nodes whose ids these are, this one last; or all that came before, also where the template rewrites it."""
        nodes, node = [], self
        while node:
            nodes.append(node)
            node = node.parent if parents else node.base
        return nodes[::-1]

    def history(self) -> list[In | As]:
        return [turn for node in self.path(parents=True) for turn in (*node.place[2], node.turn)]

    def ids(self) -> list[int]:
        """Prompt and reply, from the first token on."""
        return self.whole or [
            i for n in self.path() for part in (n.tokens, n.reply.tokens.tolist()) for i in part
        ]


@dataclass(eq=False, repr=False)
class Forest:
    """The requests of one rollout. Nothing is locked while a reply is sampled; equal requests that run at once are siblings."""

    chat: Chat
    generate: Callable  # coroutine (ids, max_tokens, known, stop, grammar) -> Reply
    parse: Callable  # (text, tools) -> (reasoning or None, text, calls), a call (the model's own id or "", name, arguments)
    max_tokens: int
    max_context: int
    sampling: dict  # the run's own values of what clients may ask for
    max_turns: float = math.inf
    grammar: Callable = lambda req: (
        None
    )  # Request -> what its forced call or JSON schema is for the engine, or None
    preserve: bool = (
        False  # go on from the sampled ids also where the template would rewrite the past
    )

    def __post_init__(self):
        self.places: dict[tuple, list[Node]] = {}
        self.past, self.matched = (
            deque(maxlen=RECENT),
            deque(maxlen=RECENT),
        )  # of the latest requests: _turns, attach
        self.tools: dict[str, list[dict]] = {}
        self.anchors: dict[str, Node] = {}
        self.calls: dict[str, tuple[str, str]] = {}  # minted call id -> (id in the prompt, name)
        self.nodes: list[Node] = []  # in the order in which they were done
        self.counts, self.truncated = Counter(), False

    def attach(self, req: Request) -> tuple[Node | None, tuple]:
        """The node that the request's history ends with, and the place of its own node."""
        if req.previous:
            self._expand(req)
        *before, last = req.turns
        if before and not all(node.delivered for node in self._shown(last)):
            req.turns = before  # what a client kept of a reply whose stream broke: it asks for the whole again
        tools = hashlib.sha256(json.dumps(req.tools).encode()).hexdigest() if req.tools else ""
        req.tools = self.tools.setdefault(tools, req.tools)  # one copy, not one of each turn
        # resent turns are the very objects of `_turns`, which makes comparing them cheap
        same = [m for m in self.matched if m[1] == tools and req.turns[: len(m[0])] == m[0]]
        old, _, node, since = max(same, key=lambda m: len(m[0]), default=((), "", None, ()))
        since = list(since)
        for at, turn in enumerate(req.turns[len(old) :], len(old) + 1):
            if turn.role == "assistant":
                # the last turn is never matched: a client that sends one begins the reply itself
                place = (node.id if node else "", tools, tuple(since))
                if at < len(req.turns) and (found := self._child(place, turn)):
                    node, since = found, []
                    continue
                turn = replace(turn, anchors=())  # what is foreign here is told by its words alone
            since.append(turn)
        if req.turns[-1].role != "assistant":
            self.matched.append((req.turns, tools, node, since))
        return node, (node.id if node else "", tools, tuple(since))

    def _shown(self, turn: In | As) -> set[Node]:
        """The nodes whose ids a turn has."""
        return {self.anchors[a] for a in turn.anchors if a in self.anchors}

    def _child(self, place: tuple, echo: As) -> Node | None:
        """The node of this place that the echoed turn shows, if any."""
        ranks = {}
        for node in reversed(self.places.get(place, ())):  # of equal ones the newest
            if node.turn and (tier := same_turn(echo, node.turn)) in TIERS:
                anchored = not set(echo.anchors).isdisjoint(node.turn.anchors)
                ranks[node] = (TIERS.index(tier), anchored, node.acked, node.delivered)
        best = max(ranks, key=ranks.get, default=None)
        if best:
            self.counts[f"server/echo_{TIERS[ranks[best][0]]}"] += 1
        return best

    def _expand(self, req: Request) -> None:
        """Put the history of previous_response_id before the new items; the instructions are this request's own."""
        node = self.anchors.get(req.previous)
        if not node:
            raise BadRequest(
                f"previous_response_id {req.previous} is not known here",
                "previous_response_not_found",
            )
        own, old = [t for t in req.turns[:1] if t.role == "system"], node.history()
        if own and old[0].role == "system":
            old = old[1:]
        path = set(node.path(parents=True))
        # what that history holds already is not said again
        new = [t for t in req.turns[len(own) :] if not (shown := self._shown(t)) or shown - path]
        req.turns = [*own, *old, *new]

    def resolve(self, body):
        """A Responses body with this rollout's own items in the place of references to them; those to others stay."""
        items = body.get("input") if isinstance(body, dict) else None
        return body | {"input": [*map(self._item, items)]} if isinstance(items, list) else body

    def _item(self, item):
        id_ = str(item.get("id")) if isinstance(item, dict) and _refers(item) else ""
        node = self.anchors.get(id_)
        sent = _items(node.id, node.turn) if node else []
        return next((i for i in sent if i["id"] == id_), item)

    def answer(self, req: Request) -> list[Node]:
        """Nodes that answer a request, `req.n` of them; done, or running with their `task`. Raises BadRequest."""
        node, place = self.attach(req)
        if any(t.images for t in place[2] if t.role in ("system", "user")):
            raise BadRequest("this model reads text only: the request holds an image")
        if node:
            node.acked = True
        nodes = []
        for _ in range(req.n):
            again = next(
                (n for n in self.places.get(place, ()) if n not in nodes and self._again(n, req)),
                None,
            )
            self.counts["server/replayed"] += again is not None
            nodes.append(again or self._start(node, place, req))
        for n in nodes:
            n.listeners += 1
        req.turns = []
        return nodes

    def _again(self, node: Node, req: Request) -> bool:
        """Whether a request means this node, and not another sample at the same place: by its connections, as most clients
        do not say that they retry."""
        if (node.request.wire, node.request.max_tokens) != (req.wire, req.max_tokens):
            return False
        lost = not node.delivered if node.reply else not node.listeners
        return lost or req.retry > 0 and time.monotonic() - node.ended < YOUNG

    def _start(self, parent: Node | None, place: tuple, req: Request) -> Node:
        if sum(map(len, self.places.values())) >= self.max_turns:
            self.truncated = True
            raise BadRequest(
                f"this rollout has had its --max_turns {self.max_turns} replies", "max_turns"
            )
        least = sum(len(t.text) for t in place[2]) // self.chat.longest
        if least > self.max_context:  # rather than encode megabytes
            raise self._too_long(least)
        node = Node(secrets.token_hex(16), place, req, parent, grammar=self.grammar(req))
        node.base, node.tokens = self._prompt(parent, place[2], req)
        before = node.base.ids() if node.base else []
        node.start, ids = len(before), before + node.tokens
        room = self.max_context - len(ids)
        if room < 1:
            raise self._too_long(len(ids))
        limit = min(req.max_tokens or room, self.max_tokens, room)
        self.counts["server/asked_other"] += any(
            self.sampling.get(k, v) != v for k, v in req.asked.items()
        )
        self.places.setdefault(place, []).append(node)
        node.task = asyncio.create_task(self._sample(node, ids, limit))
        return node

    def _too_long(self, tokens: int) -> BadRequest:
        self.truncated = True
        # the words of both providers: clients look for them
        text = "prompt is too long: {} tokens > {most} maximum. This model's maximum context length is {most} tokens."
        return BadRequest(text.format(tokens, most=self.max_context - 1), "context_length_exceeded")

    def _prompt(
        self, parent: Node | None, since: tuple, req: Request
    ) -> tuple[Node | None, list[int]]:
        """(node whose ids come first, ids behind them). Without such a node all is rendered, as context."""
        opened = since[-1].role == "assistant"  # the client began the reply itself
        begun = self.chat.encode(self.chat.plain(since[-1].text)) if opened else []
        end = -1 if opened else None
        if parent:
            new = [self.message(t) for t in since[:end]]
            system, reasoned = (
                req.turns[0].role == "system",
                any(n.turn.reasoning for n in parent.path()),
            )
            ids, kept = self.chat.following(
                new, int(parent.reply.tokens[-1]), req.tools, system, reasoned
            )
            self.counts["server/rewritten"] += not kept
            if kept or self.preserve:
                return parent, ids + begun
        return None, self.chat.opening(
            [self.message(t) for t in req.turns[:end]], req.tools
        ) + begun

    def message(self, turn: In | As) -> dict:
        """A turn as chat templates take it. Tool calls get the ids that the model itself gave, or short ones."""
        message = {"role": turn.role, "content": turn.text}
        if turn.role == "tool":
            # a tool's picture is no reason to end a run
            pictures = ["[an image, which this model cannot see]"] * len(turn.images)
            id_, name = self.calls.get(turn.call, (short(turn.call), ""))
            message |= {
                "content": "\n".join(filter(None, [turn.text, *pictures])),
                "tool_call_id": id_,
            }
            message |= {"name": name} if name else {}
        if turn.role == "assistant":
            message |= {"reasoning_content": turn.reasoning} if turn.reasoning else {}
            ids = [self.calls.get(c.id, (short(c.id),))[0] for c in turn.calls]
            functions = [{"name": c.name, "arguments": self.chat.spelled(c)} for c in turn.calls]
            calls = [dict(id=i, type="function", function=f) for i, f in zip(ids, functions)]
            message |= {"tool_calls": calls} if calls else {}
        return message

    async def _sample(self, node: Node, ids: list[int], limit: int) -> None:
        try:
            replayed = node.base and node.base.reply.experts is not None
            known = node.start - 1 if replayed else 0  # a reply's last token was no input yet
            reply = await self.generate(ids, limit, known, node.request.stop, node.grammar)
            if reply.finish == "abort":
                raise RuntimeError("the engine gave a reply up")
            reasoning, text, calls, node.finish, node.stop = self._read(reply, node.request)
        except BaseException:
            self.places[node.place].remove(
                node
            )  # nothing was recorded: the same request runs again
            raise
        spaces = {t["function"]["name"]: t.get("namespace", "") for t in node.request.tools}
        minted = [(name, raw, spaces.get(name, "")) for _, name, raw in calls]
        node.turn = mint(node.id, node.request.wire, text, reasoning, minted)
        own = {(name, raw): id_ for id_, name, raw in calls}
        for call in node.turn.calls:
            self.calls[call.id] = (own[call.name, call.arguments] or short(call.id), call.name)
        node.reply, node.ended, node.whole = reply, time.monotonic(), ids + reply.tokens.tolist()
        if node.base:
            node.base.whole = None
        self.anchors |= {a: node for a in node.turn.anchors}
        self.nodes.append(node)
        self.counts["server/constrained"] += node.grammar is not None

    def _read(self, reply: Reply, req: Request) -> tuple[str | None, str, list, str, str]:
        """(reasoning, text, calls, finish, stop string) of what was sampled."""
        text = self.chat.tokenizer.decode(reply.tokens)
        hits = [(at, s) for s in req.stop if (at := text.find(s)) >= 0]
        end, stop = min(hits, default=(None, ""))
        text, finish = self.chat.ends.sub("", text[:end]), "stop_string" if stop else reply.finish
        return *self.parse(text, [] if req.tool_choice == "none" else req.tools), finish, stop

    def left(self, node: Node, delivered: bool, linger: float) -> None:
        """A connection that waited for the node is gone. When it was the last, sampling goes on for `linger` seconds."""
        node.listeners -= 1
        node.delivered |= delivered
        if node.timer:
            node.timer.cancel()  # of a connection that left before
        if not node.listeners and not node.reply:
            node.timer = asyncio.get_running_loop().call_later(
                linger, lambda: node.listeners or node.task.cancel()
            )

    def count(self, req: Request) -> int:
        """Tokens of a request's prompt."""
        node, place = self.attach(req)
        base, tokens = self._prompt(node, place[2], req)
        return len(tokens) + (len(base.ids()) if base else 0)

    def shown(self, node: Node) -> "Answer":
        """A node that is done, as a client gets it."""
        r, prompt = node.reply, node.start + len(node.tokens)
        thought = len(self.chat.encode(node.turn.reasoning or ""))
        logprobs = None
        if node.request.asked.get("logprobs") is True:
            logprobs = [
                (self.chat.tokenizer.decode([t]), float(p)) for t, p in zip(r.tokens, r.logprobs)
            ]
        return Answer(
            node.id,
            node.turn,
            node.finish,
            node.stop,
            prompt,
            node.start,
            len(r.tokens),
            thought,
            logprobs,
        )

    async def close(self) -> None:
        """What still runs is cancelled."""
        tasks = [n.task for nodes in self.places.values() for n in nodes if not n.reply and n.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def segments(self, result: Result, group_id: int, rollout_id: int) -> list[Segment]:
        """One row for each path that ends in a reply that a client got. A reply on several paths is trained in the first of
        them, elsewhere it is context; a constrained one is context everywhere."""
        kept = [n for n in self.nodes if n.delivered or n.acked]
        inner, owned, rows = {n.base for n in kept}, set(), []
        for leaf in (n for n in kept if n not in inner):
            trace = Trace([])
            for node in leaf.path():
                trace.context(node.tokens)
                trace.reply(node.reply, node not in owned and node.grammar is None)
                self.counts["tokens/recomputed"] += len(node.reply.tokens) if node in owned else 0
                owned.add(node)
            if trace.replies:
                rows.append(trace.segment(result, group_id, rollout_id))
        return rows


def short(id_: str) -> str:
    """A tool-call id of nine letters and digits, as the strictest template wants it."""
    return hashlib.sha256(id_.encode()).hexdigest()[:9]


# ---- Replies: what a client gets, in the words of its wire


@dataclass
class Answer:
    """One reply as a client gets it, whichever wire and whether streamed or not."""

    node: str  # id of the node (hex): every id below is made from it, so that a replay has the same ids
    turn: As  # as mint made it for the same wire
    finish: str  # "stop", "length" or "stop_string"
    stop: str  # the stop string that ended it, else ""
    prompt_tokens: int
    cached_tokens: int  # of the prompt, those that the parent node already held
    sampled_tokens: int
    reasoning_tokens: int
    logprobs: list[tuple[str, float]] | None = (
        None  # (token text, log-prob), only if a chat client asked for them
    )


ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
PARTS = {
    "summary": "reasoning_summary_part",
    "content": "content_part",
}  # an item's lists, and what their parts are called
NODE_IDS = (
    "",
    "chatcmpl-",
    "resp_",
    "msg_",
    "rs_",
    "enc_",
    "sig_",
)  # each stands before the node's id
STREAMED = (
    "text",
    "thinking",
    "signature",
    "input",
    "summary",
    "content",
    "arguments",
)  # empty before the deltas


def mint(
    node: str, wire: str, text: str, reasoning: str | None, calls: list[tuple[str, str, str]]
) -> As:
    """The turn as its wire says it, with ids for its calls and every anchor that a writer below may send.

    calls: (name, arguments, namespace). An Anthropic call carries an object; one whose arguments are none becomes text.
    """
    if wire == "messages":
        broken = [
            f"{name}({arguments})" for name, arguments, _ in calls if _object(arguments) is None
        ]
        text, calls = (
            "\n".join([text, *broken] if text else broken),
            [c for c in calls if _object(c[1]) is not None],
        )
    minted = tuple(
        Call(f"{'toolu' if wire == 'messages' else 'call'}_{node}_{i}", *c)
        for i, c in enumerate(calls)
    )
    ids = (
        [c.id for c in minted] + [f"fc_{c.id}" for c in minted] + [kind + node for kind in NODE_IDS]
    )
    return As(text, reasoning or None, minted, tuple(ids))


def write(req: Request, answers: list[Answer], begun: dict | None = None) -> dict:
    """The body of a reply that is not streamed. Only the chat wire has more than one answer."""
    a = answers[0]
    begun = begun or _begun(req, a.node, a.prompt_tokens, a.cached_tokens)
    if req.wire == "responses":
        # a reply cut by its length is "completed" as well: Codex fails the whole run on "incomplete"
        return begun | {
            "status": "completed",
            "output": _items(a.node, a.turn, req.include_encrypted),
            "usage": _usage(answers, "input", "output"),
        }
    if req.wire == "messages":
        ended = {"stop_reason": _reason(a, "max_tokens", "tool_use", "stop_sequence", "end_turn")}
        ended |= {
            "stop_sequence": a.stop or None,
            "usage": begun["usage"] | {"output_tokens": a.sampled_tokens},
        }
        return begun | ended | {"content": _blocks(a.node, a.turn)}
    return begun | {
        "choices": [_chat_choice(i, a) for i, a in enumerate(answers)],
        "usage": _usage(answers),
    }


class Stream:
    """The SSE frames of one reply: start(), then alive() while the engine works, then finish().

    node: that of the first answer. The prompt's tokens are counted before sampling: Anthropic's first event has them.
    """

    def __init__(self, req: Request, node: str, prompt_tokens: int, cached_tokens: int = 0):
        self.req, self.wire, self.sequence = req, req.wire, 0
        self.begun = _begun(req, node, prompt_tokens, cached_tokens)

    def start(self) -> list[str]:
        """What to send once the engine has accepted the request."""
        if self.wire == "chat":
            return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(self.req.n)]
        kind, key = (
            ("message_start", "message")
            if self.wire == "messages"
            else ("response.created", "response")
        )
        return [self._frame({"type": kind, key: self.begun}), self.alive()]

    def alive(self) -> str:
        """What resets the idle timers of the wire's clients. Codex ignores comments, the AI SDK dies of pings."""
        event = (
            dict(type="ping")
            if self.wire == "messages"
            else dict(type="response.in_progress", response=self.begun)
        )
        return ": keep-alive\n\n" if self.wire == "chat" else self._frame(event)

    def finish(self, answers: list[Answer]) -> list[str]:
        """All that remains, made from the body that the client would get without streaming."""
        body = write(self.req, answers, self.begun)
        if self.wire != "chat":
            events = _message_events if self.wire == "messages" else _response_events
            return [self._frame(event) for event in events(body)]
        frames = [
            self._chunk(choice["index"], *piece)
            for choice in body["choices"]
            for piece in _pieces(choice)
        ]
        usage = self.begun | {
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": body["usage"],
        }
        return (
            frames + ([self._frame(usage)] if self.req.include_usage else []) + ["data: [DONE]\n\n"]
        )

    def _chunk(
        self, i: int, delta: dict, logprobs: dict | None = None, reason: str | None = None
    ) -> str:
        choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._frame(self.begun | {"object": "chat.completion.chunk", "choices": [choice]})

    def _frame(self, data: dict) -> str:
        if self.wire == "responses":
            data, self.sequence = data | {"sequence_number": self.sequence}, self.sequence + 1
        event = "" if self.wire == "chat" else f"event: {data['type']}\n"
        # dumps keeps to ASCII: some clients split lines at Unicode's line separators too
        return f"{event}data: {json.dumps(data)}\n\n"


def error(wire: str, status: int, message: str, code: str = "") -> dict:
    """The body of an error. Clients act on its code: they compact their context, or do without a thread."""
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if wire != "messages":
        return {"error": {"message": message, "type": kind, "param": None, "code": code or None}}
    details = {"error_code": code} | (
        {"unsupported": ["thread"]} if code == "thread_unsupported_request" else {}
    )
    return {
        "type": "error",
        "error": {"type": kind, "message": message} | ({"details": details} if code else {}),
    }


def _object(arguments: str) -> dict | None:
    """The object that arguments spell, None where they spell none that every client can read."""
    try:
        value = json.loads(arguments.strip() or "{}")
        json.dumps(
            value, allow_nan=False, ensure_ascii=False
        ).encode()  # no NaN, no 1e999, no half of a surrogate pair
        return (
            value if isinstance(value, dict) and _depth(value) <= 100 else None
        )  # some parsers refuse more
    except (ValueError, RecursionError):
        return None


def _depth(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _begun(req: Request, node: str, prompt: int, cached: int) -> dict:
    """A reply's body before anything was sampled."""
    if req.wire == "chat":
        return dict(
            id=f"chatcmpl-{node}",
            object="chat.completion",
            created=int(time.time()),
            model=req.model,
        )
    if req.wire == "messages":
        # what a cache held is counted apart: the prompt is the sum of the three inputs
        usage = {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }
        head = {
            "id": f"msg_{node}",
            "type": "message",
            "role": "assistant",
            "model": req.model,
            "content": [],
        }
        return head | {
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage | {"output_tokens": 0},
        }
    body = dict(
        id=f"resp_{node}",
        object="response",
        created_at=int(time.time()),
        model=req.model,
        output=[],
    )
    body |= dict(status="in_progress", usage=None, error=None, incomplete_details=None, tools=[])
    return body | dict(
        tool_choice=req.tool_choice,
        parallel_tool_calls=True,
        previous_response_id=req.previous or None,
    )


def _reason(a: Answer, length="length", calls="tool_calls", stop_string="stop", stop="stop") -> str:
    """The wire's word for how a reply ended. Clients run its calls only if the word names them."""
    word = calls if a.turn.calls else stop_string if a.finish == "stop_string" else stop
    return length if a.finish == "length" else word


def _usage(answers: list[Answer], prompt="prompt", reply="completion") -> dict:
    """OpenAI's, with the words of one of its two wires. The answers share one prompt."""
    total, sampled = answers[0].prompt_tokens, sum(a.sampled_tokens for a in answers)
    details = {
        f"{prompt}_tokens_details": {
            "cached_tokens": answers[0].cached_tokens,
            "cache_write_tokens": 0,
        }
    }
    details |= {
        f"{reply}_tokens_details": {"reasoning_tokens": sum(a.reasoning_tokens for a in answers)}
    }
    return {
        f"{prompt}_tokens": total,
        f"{reply}_tokens": sampled,
        "total_tokens": total + sampled,
    } | details


def _function(c: Call, **args) -> dict:
    """A call's name, its namespace apart from it, and its arguments: the raw text if they are not given otherwise."""
    return (
        {"name": c.name}
        | (args or {"arguments": c.arguments})
        | ({"namespace": c.namespace} if c.namespace else {})
    )


def _blank(block: dict) -> dict:
    """A block or item as it is before its deltas."""
    return block | {k: type(block[k])() for k in STREAMED if k in block}


def _chat_choice(i: int, a: Answer) -> dict:
    message, logprobs = {"role": "assistant", "content": a.turn.text, NODE_KEY: a.node}, None
    message |= (
        {"reasoning_content": a.turn.reasoning, "reasoning": a.turn.reasoning}
        if a.turn.reasoning
        else {}
    )
    if a.turn.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": _function(c)} for c in a.turn.calls
        ]
    if a.logprobs is not None:
        # no bytes: the text of a token may be half a character
        logprobs = {
            "content": [
                {"token": t, "logprob": p, "bytes": None, "top_logprobs": []} for t, p in a.logprobs
            ]
        }
    return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": _reason(a)}


def _pieces(choice: dict) -> list[tuple]:
    """(delta, log-probs, finish reason) of each chunk; the role was said when the stream started."""
    message = choice["message"]
    deltas = (
        [{k: message[k] for k in ("reasoning_content", "reasoning")}]
        if "reasoning" in message
        else []
    )
    deltas.append({k: message[k] for k in ("content", NODE_KEY)})
    for at, call in enumerate(message.get("tool_calls", [])):
        deltas.append(
            {"tool_calls": [{"index": at} | call | {"function": _blank(call["function"])}]}
        )
        deltas.append(
            {
                "tool_calls": [
                    {"index": at, "function": {"arguments": call["function"]["arguments"]}}
                ]
            }
        )
    return [(delta,) for delta in deltas] + [({}, choice["logprobs"], choice["finish_reason"])]


def _items(node: str, turn: As, encrypted: bool = False) -> list[dict]:
    items = []
    if turn.reasoning:
        # Codex sends both back, the AI SDK the summary alone
        summary, content = (
            [{"type": f"{k}_text", "text": turn.reasoning}] for k in ("summary", "reasoning")
        )
        items.append(
            {"id": f"rs_{node}", "type": "reasoning", "summary": summary, "content": content}
        )
        items[0] |= {"encrypted_content": f"enc_{node}"} if encrypted else {}
    if turn.text or not (turn.reasoning or turn.calls):
        text = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
        items.append(
            {"id": f"msg_{node}", "type": "message", "role": "assistant", "content": [text]}
        )
    items += [
        {"id": f"fc_{c.id}", "type": "function_call", "call_id": c.id} | _function(c)
        for c in turn.calls
    ]
    return [item | {"status": "completed"} for item in items]


def _response_events(body: dict):
    for i, item in enumerate(body["output"]):
        yield dict(
            type="response.output_item.added",
            output_index=i,
            item=_blank(item) | {"status": "in_progress"},
        )
        for kind, fields in _item_events(item):
            yield dict(type=f"response.{kind}", output_index=i, item_id=item["id"], **fields)
        yield dict(type="response.output_item.done", output_index=i, item=item)
    yield {"type": "response.completed", "response": body}


def _item_events(item: dict) -> list[tuple[str, dict]]:
    """(kind, fields) of what happens between an item's beginning and its end."""
    if item["type"] == "function_call":
        name, done = "function_call_arguments", {k: item[k] for k in ("name", "arguments")}
        return [(f"{name}.delta", {"delta": item["arguments"]}), (f"{name}.done", done)]
    parts = [(k, i, part) for k in PARTS for i, part in enumerate(item.get(k, []))]
    return [event for place in parts for event in _part_events(*place)]


def _part_events(key: str, i: int, part: dict) -> list[tuple[str, dict]]:
    """(kind, fields) of the events of the part item[key][i]."""
    name, at = PARTS[key], {f"{key}_index": i}
    text = f"reasoning_{part['type']}" if key == "summary" else part["type"]
    said = at | ({"logprobs": []} if text == "output_text" else {})
    return [
        (f"{name}.added", at | {"part": _blank(part)}),
        (f"{text}.delta", said | {"delta": part["text"]}),
        (f"{text}.done", said | {"text": part["text"]}),
        (f"{name}.done", at | {"part": part}),
    ]


def _blocks(node: str, turn: As) -> list[dict]:
    blocks = (
        [dict(type="thinking", thinking=turn.reasoning, signature=f"sig_{node}")]
        if turn.reasoning
        else []
    )
    blocks += (
        [{"type": "text", "text": turn.text}]
        if turn.text or not (turn.reasoning or turn.calls)
        else []
    )
    return blocks + [
        {"type": "tool_use", "id": c.id} | _function(c, input=_object(c.arguments))
        for c in turn.calls
    ]


def _message_events(body: dict):
    for i, block in enumerate(body["content"]):
        yield {"type": "content_block_start", "index": i, "content_block": _blank(block)}
        deltas = [
            (f"{k}_delta", k, block[k]) for k in ("text", "thinking", "signature") if k in block
        ]
        if block["type"] == "tool_use":
            deltas = [
                ("input_json_delta", "partial_json", part)
                for part in ("", json.dumps(block["input"]))
            ]
        for kind, key, value in deltas:
            yield {"type": "content_block_delta", "index": i, "delta": {"type": kind, key: value}}
        yield {"type": "content_block_stop", "index": i}
    ended = {k: body[k] for k in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": body["usage"]}
    yield {"type": "message_stop"}


# ---- The server: connections in, forests behind them

COUNT = "messages/count_tokens"
READERS = {
    "chat/completions": read_chat,
    "responses": read_responses,
    "messages": read_messages,
    COUNT: read_messages,
}
LARGEST = 64 << 20  # bytes of a body; a turn of a coding agent starts at 80 kB
ALIVE = 5.0  # seconds between two keep-alives
RETRIES = {
    410: [(b"x-should-retry", b"false")],
    503: [(b"retry-after", b"1")],
}  # headers that SDKs go by


class Server:
    """An ASGI app that speaks to the clients of many rollouts, each under a key of its own: the path /r/<key>, or else the
    header x-rollout-id or the API key. Keys are signed, so that one which was closed is told from one that never was."""

    def __init__(self, model: str, host: str = "127.0.0.1", linger: float = 60.0):
        self.model, self.host, self.linger = model, host, linger
        self.forests: dict[str, Forest] = {}
        self.secret, self.opened, self.port = secrets.token_bytes(32), 0, 0

    def open(self, forest: Forest) -> str:
        """The key of a new rollout."""
        self.opened += 1
        key = self._signed(str(self.opened))
        self.forests[key] = forest
        return key

    def _signed(self, number: str) -> str:
        return f"{number}-{hmac.new(self.secret, number.encode(), 'sha256').hexdigest()[:32]}"

    async def close(self, key: str) -> None:
        """From here on requests get 410, which the Python SDKs do not retry."""
        await self.forests.pop(key).close()

    def start(self) -> None:
        """Listen on a free port, which is then `port`; within a running event loop."""
        gc.collect()
        gc.freeze()  # what was imported stays: walking it anew stops every session for a quarter of a second
        listener = socket.create_server((self.host, 0), backlog=2048)
        self.port = listener.getsockname()[1]
        quiet = dict(log_level="critical", access_log=False, lifespan="off", ws="none")
        config = uvicorn.Config(self, timeout_keep_alive=600, **quiet)
        self.task = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))

    async def __call__(self, scope, receive, send) -> None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        parts = scope["path"].strip("/").split("/")
        key, parts = (parts[1], parts[2:]) if parts[0] == "r" and len(parts) > 1 else ("", parts)
        route = "/".join(parts[1:] if parts[:1] == ["v1"] else parts)
        wire = "messages" if route.startswith("messages") else "chat"
        try:
            await self._route(scope["method"], route, key, headers, receive, send)
        except Exception as e:
            if not isinstance(
                e, BadRequest
            ):  # the engine's fault: nothing was recorded, and a retry is welcome
                e = BadRequest(f"the engine could not answer: {type(e).__name__}: {e}", status=503)
            await self._send(
                send,
                e.status,
                error(wire, e.status, str(e), e.error_code),
                *RETRIES.get(e.status, ()),
            )

    async def _route(self, method: str, route: str, key: str, headers: dict, receive, send) -> None:
        if method in ("GET", "HEAD") and route in ("", "health"):
            return await self._send(send, 200, {"status": "ok", "model": self.model})
        if method == "GET" and route == "responses":
            raise BadRequest("there are no WebSockets here: use HTTP", status=426)
        forest = self._forest(key, headers)
        if method == "GET" and (route == "models" or route.startswith("models/")):
            return await self._send(send, 200, self._models(route, forest.max_context))
        if method != "POST" or route not in READERS:
            raise BadRequest(f"there is no {method} /{route} here", "not_found", 404)
        body = await self._body(receive)
        if route == "responses":
            body = forest.resolve(body)
        req = READERS[route](body, headers, forest.past)
        req.model = req.model or self.model
        if route == COUNT:
            return await self._send(send, 200, {"input_tokens": forest.count(req)})
        return await self._answer(forest, req, receive, send)

    def _forest(self, path: str, headers: dict) -> Forest:
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        carried = [path, headers.get("x-rollout-id", ""), headers.get("x-api-key", ""), bearer]
        named = [
            k
            for k in carried
            if k and hmac.compare_digest(k.encode(), self._signed(k.split("-")[0]).encode())
        ]
        if path and path not in named or not named:
            raise BadRequest(
                "this rollout is not known: take base_url or api_key from the task",
                "not_found",
                404,
            )
        if len(set(named)) > 1:
            raise BadRequest("the path and the headers name different rollouts")
        if self.host not in ("127.0.0.1", "::1", "localhost") and named[0] not in carried[1:]:
            raise BadRequest("beyond loopback the rollout's key must be the API key", status=401)
        if named[0] not in self.forests:
            raise BadRequest("this rollout has ended", "rollout_ended", 410)
        return self.forests[named[0]]

    def _models(self, route: str, max_context: int) -> dict:
        """The policy as both providers describe a model, each with fields that the other's clients do not read."""
        model = dict(
            id=self.model,
            object="model",
            type="model",
            display_name=self.model,
            owned_by="instar",
            created=0,
        )
        model |= dict(created_at="1970-01-01T00:00:00Z", max_model_len=max_context)
        ends = dict(first_id=self.model, last_id=self.model, has_more=False)
        return model if "/" in route else dict(object="list", data=[model]) | ends

    async def _body(self, receive):
        raw, event = bytearray(), {"more_body": True}
        while event.get(
            "more_body"
        ):  # where the connection closed, what came of the body is no JSON
            event = await receive()
            raw += event.get("body", b"")
            if len(raw) > LARGEST:
                raise BadRequest(
                    f"the body is larger than {LARGEST >> 20} MB", "request_too_large", 413
                )
        try:
            body = json.loads(raw)
            if re.search(
                rb"\\u[dD][89a-fA-F]", raw
            ):  # half a character, as programs leave that cut texts
                body = json.loads(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))
            return body
        except (ValueError, RecursionError) as e:
            raise BadRequest(f"the body is no JSON: {e}") from e

    async def _answer(self, forest: Forest, req: Request, receive, send) -> None:
        """Wait for the nodes, keep the connection alive, write the reply; note whether the client got it."""
        nodes = forest.answer(req)
        gone = asyncio.ensure_future(
            receive()
        )  # after the body only the end of the connection comes
        begun = delivered = False
        stream = Stream(req, nodes[0].id, nodes[0].start + len(nodes[0].tokens), nodes[0].start)
        try:
            while running := [n.task for n in nodes if not n.task.done()]:
                done, _ = await asyncio.wait(
                    [gone, *running], timeout=ALIVE, return_when=asyncio.FIRST_COMPLETED
                )
                if gone in done:
                    return
                if not done and req.stream:
                    await self._frames(
                        send, [stream.alive()] if begun else stream.start(), not begun
                    )
                    begun = True
            ended = BadRequest("this rollout has ended", status=410)
            if broken := [
                e for n in nodes if (e := ended if n.task.cancelled() else n.task.exception())
            ]:
                if begun:
                    return  # no wire has a good word for it: the stream breaks off, and the client tries again
                raise broken[0]
            answers = [forest.shown(n) for n in nodes]
            if req.stream:
                await self._frames(
                    send, [*([] if begun else stream.start()), *stream.finish(answers)], not begun
                )
                delivered = not gone.done()
                await send({"type": "http.response.body"})
            else:
                delivered = not gone.done()
                await self._send(send, 200, write(req, answers))
        finally:
            gone.cancel()
            for n in nodes:
                forest.left(n, delivered, self.linger)

    async def _frames(self, send, frames: list[str], first: bool) -> None:
        if first:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(
            {"type": "http.response.body", "body": "".join(frames).encode(), "more_body": True}
        )

    async def _send(self, send, status: int, body: dict, *headers: tuple) -> None:
        data = json.dumps(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            *headers,
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})
