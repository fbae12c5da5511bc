"""server.py: what real clients (tests/test_clients.py) showed to be wrong, each as a test that needs no client."""

import pytest
from test_forest import TOOL, Client, chat, run  # noqa: F401

from server import BadRequest, read_chat, read_messages, read_responses

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
