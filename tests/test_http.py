"""server.py over connections: the official SDKs against a scripted engine, keep-alives, broken connections, bad input."""

import asyncio
import contextlib
import json

import anthropic
import httpx
import openai
import pytest
from test_forest import TOOL, Engine, chat, parse, run  # noqa: F401

import server
from agent import Result
from server import Forest, Server

QUESTION = [{"role": "user", "content": "q"}]
SCHEMA = {"name": "f", "description": "", "input_schema": {"type": "object"}}


@contextlib.asynccontextmanager
async def serving(chat, *script, linger=0.05, max_tokens=200, max_context=900, gate=False):
    """A server with one open rollout: (server, forest, engine, base URL without /v1)."""
    app, engine = Server("policy", linger=linger), Engine(chat, *script)
    engine.gate = asyncio.Event() if gate else None
    forest = Forest(chat, engine.generate, parse, max_tokens, max_context, {"temperature": 1.0})
    key = app.open(forest)
    app.start()
    try:
        yield app, forest, engine, f"http://127.0.0.1:{app.port}/r/{key}"
    finally:
        app.task.cancel()
        await asyncio.gather(app.task, return_exceptions=True)


def gpt(url, retries=0):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=retries)


def claude(url, retries=0):
    return anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=retries)


def texts(forest, rows=None):
    rows = forest.segments(Result(), 0, 0)
    return [[forest.chat.text(r.tokens[a:b]) for a, b, _ in r.replies] for r in rows]


SCRIPT = ('<think>hm</think>look<call>f {}</call><call>f {"x": 1}</call>', "done ü")


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_make_one_row_of_a_tool_conversation(chat, stream):
    async def go():
        async with serving(chat, *SCRIPT) as (_, forest, _, url):
            messages = list(QUESTION)
            for _ in range(2):
                body = dict(model="m", messages=messages, tools=[TOOL])
                if stream:
                    async with gpt(url).chat.completions.stream(**body) as s:
                        reply = (await s.get_final_completion()).choices[0].message
                else:
                    reply = (await gpt(url).chat.completions.create(**body)).choices[0].message
                messages.append(reply)
                messages += [
                    {"role": "tool", "tool_call_id": c.id, "content": "1"}
                    for c in reply.tool_calls or []
                ]
            assert reply.content == "done ü" and texts(forest) == [list(SCRIPT)]

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_responses_make_one_row_of_a_tool_conversation(chat, stream):
    async def go():
        async with serving(chat, *SCRIPT) as (_, forest, _, url):
            items, tool = (
                list(QUESTION),
                {
                    "type": "function",
                    "name": "f",
                    "parameters": {"type": "object"},
                    "strict": False,
                },
            )
            for _ in range(2):
                body = dict(model="m", input=items, tools=[tool])
                if stream:
                    async with gpt(url).responses.stream(**body) as s:
                        reply = await s.get_final_response()
                else:
                    reply = await gpt(url).responses.create(**body)
                items += [
                    o.model_dump(exclude_none=True, exclude={"parsed_arguments"})
                    for o in reply.output
                ]
                calls = [o for o in reply.output if o.type == "function_call"]
                items += [
                    {"type": "function_call_output", "call_id": c.call_id, "output": "1"}
                    for c in calls
                ]
            assert reply.output_text == "done ü" and texts(forest) == [list(SCRIPT)]

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_messages_make_one_row_of_a_tool_conversation(chat, stream):
    async def go():
        async with serving(chat, *SCRIPT) as (_, forest, _, url):
            messages = list(QUESTION)
            for _ in range(2):
                body = dict(model="m", messages=messages, tools=[SCHEMA], max_tokens=99)
                counted = await claude(url).messages.count_tokens(
                    **{k: v for k, v in body.items() if k != "max_tokens"}
                )
                if stream:
                    async with claude(url).messages.stream(**body) as s:
                        reply = await s.get_final_message()
                else:
                    reply = await claude(url).messages.create(**body)
                usage = reply.usage
                assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
                messages.append({"role": "assistant", "content": reply.content})
                calls = [b for b in reply.content if b.type == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": c.id, "content": "1"}
                    for c in reversed(calls)
                ]
                messages += [{"role": "user", "content": results}] if results else []
            assert reply.content[0].text == "done ü" and texts(forest) == [list(SCRIPT)]

    run(go())


def test_every_wire_is_kept_alive_while_the_engines_are_paused(chat, monkeypatch):
    async def go():
        async with serving(chat, "a", "b", "c", gate=True) as (_, forest, engine, url):
            bodies = {
                "chat/completions": {"messages": QUESTION},
                "responses": {"input": "q"},
                "messages": {"messages": QUESTION, "max_tokens": 9},
            }

            async def ask(route, body, lines):
                async with (
                    httpx.AsyncClient() as c,
                    c.stream("POST", f"{url}/v1/{route}", json=body | {"stream": True}) as r,
                ):
                    async for line in r.aiter_lines():
                        lines.append(line)

            chats, responses, messages = seen = [], [], []
            alive = ": keep-alive", "event: response.in_progress", "event: ping"
            asks = [
                asyncio.create_task(ask(*item, lines)) for item, lines in zip(bodies.items(), seen)
            ]
            while not all(lines.count(line) > 3 for lines, line in zip(seen, alive)):
                await asyncio.sleep(0.02)
            engine.gate.set()
            await asyncio.gather(*asks)
            assert chats[-2] == "data: [DONE]" and "event: message_stop" in messages
            assert any(line.startswith("event: response.completed") for line in responses)
            assert sorted(texts(forest)) == [["a"], ["b"], ["c"]]

    monkeypatch.setattr(server, "ALIVE", 0.05)
    run(go())


def test_a_client_that_times_out_and_posts_again_shares_one_node(chat):
    async def go():
        async with serving(chat, "a", gate=True, linger=5) as (_, forest, engine, url):
            client = gpt(url).with_options(timeout=0.3)
            for _ in range(2):
                with pytest.raises(openai.APITimeoutError):
                    await client.chat.completions.create(model="m", messages=QUESTION)
            engine.gate.set()
            reply = await gpt(url).chat.completions.create(model="m", messages=QUESTION)
            assert (
                reply.choices[0].message.content == "a"
                and len(engine.asked) == 1
                and texts(forest) == [["a"]]
            )

    run(go())


def test_a_stream_that_is_cut_is_repeated_with_the_same_ids(chat, monkeypatch):
    async def go():
        async with serving(chat, "a", gate=True, linger=5) as (_, forest, engine, url):
            body = {"messages": QUESTION}
            post = "POST", f"{url}/v1/chat/completions"
            async with httpx.AsyncClient() as c, c.stream(*post, json=body | {"stream": True}) as r:
                async for _ in r.aiter_lines():
                    break
            engine.gate.set()
            await asyncio.sleep(0.2)
            assert texts(forest) == []
            reply = await gpt(url).chat.completions.create(model="m", messages=QUESTION)
            assert (
                reply.choices[0].message.content == "a"
                and len(engine.asked) == 1
                and texts(forest) == [["a"]]
            )

    monkeypatch.setattr(server, "ALIVE", 0.05)
    run(go())


def test_a_client_that_never_returns_frees_its_engine(chat):
    async def go():
        async with serving(chat, "a", gate=True) as (_, forest, engine, url):
            with pytest.raises(openai.APITimeoutError):
                await (
                    gpt(url)
                    .with_options(timeout=0.2)
                    .chat.completions.create(model="m", messages=QUESTION)
                )
            for _ in range(100):
                if not any(forest.places.values()):
                    break
                await asyncio.sleep(0.05)
            assert not any(forest.places.values()) and texts(forest) == []

    run(go())


def test_an_engine_error_is_retried_by_the_sdk_and_leaves_one_node(chat):
    async def go():
        async with serving(chat, RuntimeError("boom"), "a", RuntimeError("boom"), "b") as (
            _,
            forest,
            engine,
            url,
        ):
            await gpt(url, retries=1).chat.completions.create(model="m", messages=QUESTION)
            async with claude(url, retries=1).messages.stream(
                model="m", messages=QUESTION, max_tokens=9
            ) as s:
                await s.get_final_message()
            assert texts(forest) == [["a"], ["b"]] and len(engine.asked) == 4

    run(go())


def test_a_rollout_that_has_ended_gets_410_once_and_an_unknown_one_404(chat):
    async def go():
        async with serving(chat, "a", "b", gate=True) as (app, forest, engine, url):
            late = asyncio.create_task(
                gpt(url, retries=5).chat.completions.create(model="m", messages=QUESTION)
            )
            while not engine.asked:
                await asyncio.sleep(0.02)
            await app.close(url.split("/")[-1])
            for ask in (
                late,
                gpt(url, retries=5).chat.completions.create(model="m", messages=QUESTION),
            ):
                with pytest.raises(openai.APIStatusError) as e:
                    await asyncio.wait_for(ask, 3)
                assert e.value.status_code == 410
            with pytest.raises(anthropic.NotFoundError):
                await claude(url + "0", retries=5).messages.create(
                    model="m", messages=QUESTION, max_tokens=9
                )
            assert len(engine.asked) == 1

    run(go())


def test_a_rollout_is_named_by_its_path_its_key_or_its_header(chat):
    async def go():
        async with serving(chat, "a", "b", "c", "d") as (app, forest, engine, url):
            root, _, key = url.rpartition("/r/")
            other = app.open(Forest(chat, engine.generate, parse, 9, 99, {}))
            body = {"messages": QUESTION}
            async with httpx.AsyncClient() as c:

                async def status(url, **headers):
                    return (
                        await c.post(f"{url}/v1/chat/completions", json=body, headers=headers)
                    ).status_code

                assert await status(root, authorization=f"Bearer {key}") == 200
                assert await status(root, **{"x-api-key": key}) == 200
                assert (
                    await status(root, **{"x-rollout-id": key, "authorization": "Bearer sk-mine"})
                    == 200
                )
                assert await status(url, authorization=f"Bearer {other}") == 400
                assert await status(root, authorization="Bearer sk-mine") == 404
                assert await status(root) == 404
                app.host = "0.0.0.0"
                assert await status(url) == 401
                assert await status(url, authorization=f"Bearer {key}") == 200

    run(go())


def test_small_routes_answer_as_clients_expect(chat):
    async def go():
        async with serving(chat) as (_, _, _, url), httpx.AsyncClient() as c:
            assert (await c.get(f"{url.split('/r/')[0]}/health")).json()["status"] == "ok"
            assert (await c.head(url)).status_code == 200
            assert [m.id async for m in gpt(url).models.list()] == ["policy"]
            assert [m.id async for m in claude(url).models.list(limit=1000)] == ["policy"]
            assert (await gpt(url).models.retrieve("policy")).max_model_len == 900
            assert (
                await c.get(
                    f"{url}/v1/responses", headers={"upgrade": "websocket", "connection": "upgrade"}
                )
            ).status_code == 426
            assert (await c.post(f"{url}/v1/messages?beta=true", json={})).status_code == 400
            assert (await c.get(f"{url}/v1/nothing")).json()["error"]["type"] == "not_found_error"

    run(go())


BAD = [
    b"{",
    b"[]",
    b"null",
    b'{"messages": []}',
    b'{"messages": "x"}',
    b'{"messages": [{"role": "alien", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,%"}}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}',
    b'{"messages": [{"role": "user", "content": 7}]}',
    b'{"input": 7}',
    b'{"messages": [{"role": "user", "content": "x"}], "thread": {"type": "create"}, "input": {}}',
    b"[" * 100_000,
    json.dumps(
        {"messages": [{"role": "user", "content": "y" * 5000}], "input": "y" * 5000}
    ).encode(),
    b"\xff\xfe",
]


@pytest.mark.parametrize(
    "route", ["chat/completions", "responses", "messages", "messages/count_tokens"]
)
def test_bad_input_is_a_4xx_in_the_wires_own_shape_and_the_session_goes_on(chat, route):
    async def go():
        async with (
            serving(chat, "a", "b", "c") as (_, forest, engine, url),
            httpx.AsyncClient() as c,
        ):
            for raw in BAD:
                if (
                    route == "messages/count_tokens"
                    and raw is BAD[-2]
                    or route == "chat/completions"
                    and b"thread" in raw
                ):
                    continue  # a long prompt can be counted, and only Anthropic knows threads
                r = await c.post(f"{url}/v1/{route}", content=raw)
                assert 400 <= r.status_code < 500, (raw[:80], r.status_code, r.text)
                shape = r.json()
                assert shape.get("type", "") == (
                    "error" if "messages" in route and "chat" not in route else ""
                )
                assert shape["error"]["message"] and shape["error"]["type"].endswith("error")
            assert engine.asked == [] and forest.nodes == []
            await gpt(url).chat.completions.create(model="m", messages=QUESTION)
            assert texts(forest) == [["a"]]

    run(go())


def test_a_body_beyond_the_limit_is_refused_and_a_prompt_of_50_mb_is_too_long(chat):
    async def go():
        async with serving(chat, "a") as (_, forest, _, url), httpx.AsyncClient(timeout=60) as c:
            for size, status in ((50 << 20, 400), (65 << 20, 413)):
                body = {"messages": [{"role": "user", "content": "x" * size}]}
                r = await c.post(f"{url}/v1/chat/completions", json=body)
                assert (r.status_code, "too l" in r.text or "larger" in r.text) == (status, True)
            await gpt(url).chat.completions.create(model="m", messages=QUESTION)
            assert texts(forest) == [["a"]]

    asyncio.run(asyncio.wait_for(go(), 60))


def test_threads_are_refused_so_that_the_tool_runner_does_without(chat):
    async def go():
        async with serving(chat, *SCRIPT) as (_, forest, _, url):

            @anthropic.beta_async_tool
            async def f(x: int = 0) -> str:
                """A tool."""
                return "1"

            runner = claude(url).beta.messages.tool_runner(
                model="m", max_tokens=99, tools=[f], messages=QUESTION
            )
            last = await runner.until_done()
            assert last.content[0].text == "done ü" and texts(forest) == [list(SCRIPT)]

    run(go())


async def call_app(app, path, body, headers=()):
    """One request to the app without a connection: (status, body)."""
    sent, left = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if left:
            return left.pop()
        await asyncio.sleep(3600)

    async def send(message):
        sent.append(message)

    await app(
        {"type": "http", "method": "POST", "path": path, "headers": list(headers)}, receive, send
    )
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


def mutated(rng, value, share):
    """A JSON value in which about this share of the parts is wrong."""
    if rng.random() < share:
        return rng.choice(
            [
                None,
                True,
                -1,
                1.5,
                "",
                "x",
                [],
                {},
                [None],
                {"a": 1},
                "\ud800",
                "9" * 400,
                {"type": "text"},
            ]
        )
    if isinstance(value, dict):
        items = [(k, mutated(rng, v, share)) for k, v in value.items() if rng.random() > share / 2]
        return dict(items) | (
            {rng.choice(["type", "role", "n", "stream", "extra"]): 3}
            if rng.random() < share
            else {}
        )
    if isinstance(value, list):
        values = [mutated(rng, v, share) for v in value if rng.random() > share]
        return values + values[:1] if rng.random() < share else values
    return value


def test_ten_thousand_odd_requests_get_an_answer_and_never_a_500(chat):
    """Requests of real clients with something wrong in each: served, or refused by a 4xx in the wire's own shape."""
    import random

    from test_wires import RECORDED, request

    exchanges = [e for r in RECORDED.values() for e in r["exchanges"]]

    async def go():
        rng, seen, app, engine = random.Random(0), {}, Server("policy"), Engine(chat)

        def parse_all(text, tools):
            return None, text, []

        for i in range(10_000):
            if i % 50 == 0:
                forest = Forest(chat, engine.generate, parse_all, 20, 4000, {"temperature": 1.0})
                key = app.open(forest)
            engine.script = ["said"] * 200
            exchange = rng.choice(exchanges)
            _, body, headers = request(exchange)
            body = mutated(rng, body, rng.choice([0.001, 0.01, 0.1]))
            route = exchange["path"].split("?")[0]
            raw = [(k.encode(), str(v).encode("latin-1", "replace")) for k, v in headers.items()]
            status, reply = await asyncio.wait_for(
                call_app(app, f"/r/{key}{route}", json.dumps(body).encode(), raw), 20
            )
            seen[status] = seen.get(status, 0) + 1
            assert status in (200, 400), (i, status, reply[:300], json.dumps(body)[:2000])
            if status == 400:
                shape = json.loads(reply)
                assert (shape.get("type") == "error") == ("messages" in route) and shape["error"][
                    "message"
                ]
        assert seen[200] > 1000 and seen[400] > 1000, seen

    asyncio.run(asyncio.wait_for(go(), 300))
