"""server.py: what real clients (tests/test_clients.py) showed to be wrong, each as a test that needs no client."""

import asyncio

import openai
import pytest
from test_forest import TOOL, Client, chat, run  # noqa: F401
from test_http import gpt, serving, texts

from server import BadRequest, read_chat, read_messages, read_responses, write

PNG = "iVBORw0KGgo="
CALL = "<call>f {}</call>"


def block(call):
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    seen = [{"type": "text", "text": "x.png"}, {"type": "image", "source": source}]
    said = {"type": "tool_use", "id": call.id, "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": seen}
    return [{"role": "assistant", "content": [said]}, {"role": "user", "content": [result]}]


def item(call):
    seen = [
        {"type": "input_text", "text": "x.png"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
    ]
    said = {"type": "function_call", "call_id": call.id, "name": "f", "arguments": "{}"}
    return [said, {"type": "function_call_output", "call_id": call.id, "output": seen}]


@pytest.mark.parametrize(
    "read,key,history,tool",
    [
        (read_messages, "messages", block, {"name": "f", "input_schema": {"type": "object"}}),
        (
            read_responses,
            "input",
            item,
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
        ),
    ],
)
def test_an_image_that_a_tool_returns_is_said_to_be_unseen_and_the_run_goes_on(
    chat, read, key, history, tool
):
    """Claude Code, Codex and opencode offer to look at pictures, and a 400 ends all of them: one call would cost the run."""

    async def go():
        c = Client(chat, CALL, "done")

        async def ask(turns):
            (node,) = c.forest.answer(
                read({key: [{"role": "user", "content": "q"}, *turns], "tools": [tool]}, {})
            )
            await node.task
            c.forest.left(node, True, 0)
            return node

        first = await ask([])
        second = await ask(history(first.turn.calls[0]))
        assert second.base is first and [c.texts(r) for r in c.rows()] == [[CALL, "done"]]
        between = chat.tokenizer.decode(second.tokens)
        assert "tool\nx.png\n[an image, which this model cannot see]<|im_end|>" in between

    run(go())


def test_an_image_of_the_users_own_is_refused_as_before(chat):
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    with pytest.raises(BadRequest, match="reads text only"):
        Client(chat).forest.answer(
            read_chat({"messages": [{"role": "user", "content": [image]}], "tools": [TOOL]}, {})
        )


class Responses(Client):
    """A client of the Responses wire: what it sends goes the way of a body that came over a connection."""

    async def send(self, *items, **body):
        tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
        forest, body = self.forest, {"input": list(items), "tools": [tool]} | body
        place = self.place(read_responses(forest.resolve(body), {}))
        (node,) = forest.answer(read_responses(forest.resolve(body), {}, forest.past))
        assert node.place == place  # what is remembered of the requests before changes nothing
        await asyncio.wait([node.task])
        node.task.result()
        forest.left(node, True, 0)
        return node, write(node.request, [forest.shown(node)])["output"]


def refer(item, bare=False):
    return {"id": item["id"]} | ({} if bare else {"type": "item_reference"})


def results(items):
    calls = [i["call_id"] for i in items if i["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": c, "output": "1"} for c in calls]


QUESTION = {"role": "user", "content": "q"}
SCRIPT = [f"<think>hm</think>I look.{CALL}{CALL}", f"<think>so</think>{CALL}", "done"]


@pytest.mark.parametrize("which", range(16))
def test_a_reference_to_an_item_of_this_rollout_stands_for_it(chat, which):
    """The AI SDK sends references from its second step on, beside items that it sends whole. All ways to mix them are one row."""

    async def go():
        c, history = Responses(chat, *SCRIPT), [QUESTION]
        for _ in SCRIPT:
            node, items = await c.send(*history)
            sent = [refer(i, bool(at & 1)) if which >> at & 1 else i for at, i in enumerate(items)]
            history += [*sent, *results(items)]
        assert len(items) == 1 and [c.texts(r) for r in c.rows()] == [SCRIPT]
        assert c.forest.counts["server/echo_T0"] == 2 and node.base.base.base is None

    run(go())


def test_an_item_s_id_alone_brings_all_back_that_was_sent(chat):
    async def go():
        c = Responses(chat, *SCRIPT)
        _, items = await c.send(QUESTION)
        assert [i["type"] for i in items] == ["reasoning", "message", *["function_call"] * 2]
        body = {"input": [QUESTION, *map(refer, items)], "store": True}
        assert c.forest.resolve(body) == {"input": [QUESTION, *items], "store": True}
        assert body["input"][1] == refer(items[0])  # the body itself stays as it came

    run(go())


def test_a_reference_to_what_this_rollout_did_not_send_is_named_with_the_fix(chat):
    async def go():
        c, other = Responses(chat, *SCRIPT), Responses(chat, *SCRIPT)
        node, items = await c.send(QUESTION)
        _, foreign = await other.send(QUESTION)
        no_items = [f"resp_{node.id}", f"enc_{node.id}", items[2]["call_id"], node.id]
        for id_ in ["rs_x", "", *(i["id"] for i in foreign), *no_items]:
            with pytest.raises(BadRequest, match=rf"input\[1\] refers to {id_}, .*send the item"):
                await c.send(QUESTION, {"type": "item_reference", "id": id_})
        for odd in (None, 3, ["x"], {}):
            with pytest.raises(BadRequest, match=r"input\[1\]"):
                await c.send(QUESTION, {"type": "item_reference", "id": odd})
        history = [*map(refer, items), *results(items)]
        assert (await c.send(QUESTION, *history))[0].parent is node  # nothing of it was remembered
        assert c.forest.resolve([]) == [] and c.forest.resolve({"input": "q"}) == {"input": "q"}

    run(go())


def test_references_in_another_branch_are_its_context_and_each_branch_finds_its_own(chat):
    async def go():
        c = Responses(chat, "one", "two", "three", "four", "five")
        one, first = await c.send(QUESTION)
        two, second = await c.send({"role": "user", "content": "other"})
        again = {"role": "user", "content": "again"}
        three, _ = await c.send(QUESTION, refer(first[0]), again)
        four, _ = await c.send(QUESTION, refer(second[0]), again)  # not what was said here
        five, _ = await c.send({"role": "user", "content": "other"}, refer(second[0]), again)
        assert (three.base, four.base, five.base) == (one, None, two)
        assert "two" in chat.text(four.tokens) and "one" not in chat.text(four.tokens)
        rows = sorted(c.texts(r) for r in c.rows())
        assert rows == [["four"], ["one", "three"], ["two", "five"]]

    run(go())


def test_what_previous_response_id_holds_is_not_said_again_by_a_reference(chat):
    async def go():
        c = Responses(chat, "one", "two", "three", "four", "five")
        one, first = await c.send(QUESTION)
        two, second = await c.send({"role": "user", "content": "other"})
        again = {"role": "user", "content": "again"}
        previous = {"previous_response_id": f"resp_{one.id}", "instructions": ""}
        for said in (refer(first[0]), first[0]):
            node, _ = await c.send(said, again, **previous)
            assert node.base is one and chat.text(node.tokens).count("again") == 1
        # one of another branch is said here for the first time
        node, _ = await c.send(refer(second[0]), again, **previous)
        assert node.parent is one and "two" in chat.text(node.tokens) and two not in node.path()
        with pytest.raises(BadRequest, match="refers to rs_x"):
            await c.send({"type": "item_reference", "id": "rs_x"}, **previous)

    run(go())


def test_a_reference_is_resolved_over_a_connection_too(chat):
    async def go():
        async with serving(chat, "one", "two") as (_, forest, _, url):
            api = gpt(url).responses
            (item,) = (await api.create(model="m", input=[QUESTION])).output
            again = {"role": "user", "content": "again"}
            reference = {"type": "item_reference", "id": item.id}
            await api.create(model="m", input=[QUESTION, reference, again])
            assert texts(forest) == [["one", "two"]]
            with pytest.raises(openai.BadRequestError, match="refers to msg_x"):
                await api.create(model="m", input=[QUESTION, reference | {"id": "msg_x"}, again])

    run(go())


def test_the_reasoning_of_a_stream_comes_back_as_it_does_without_one(chat):
    """pydantic-ai keeps what the events said: without the text of the reasoning it writes the thought into the reply's text."""

    async def go():
        async with serving(chat, *SCRIPT[:1]) as (_, _, _, url):
            kinds = {}
            async for event in await gpt(url).responses.create(
                model="m", input=[QUESTION], stream=True
            ):
                if event.type.endswith(".delta"):
                    kinds[event.type] = kinds.get(event.type, "") + event.delta
            said = {"reasoning_summary_text": "hm", "reasoning_text": "hm"}
            assert {f"response.{k}.delta": v for k, v in said.items()}.items() <= kinds.items()

    run(go())
