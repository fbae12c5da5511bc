"""The agents of examples/, each against the capture server with a scripted engine."""

import asyncio

import pytest
from test_forest import chat, run  # noqa: F401
from test_http import serving, texts

from agent import Task, load_agent

ADD = '<call>calculate {"a": 17, "operator": "+", "b": 25}</call>'
SCRIPT = [
    ADD + '<call>calculate {"a": 1, "operator": "-", "b": 3}</call>',
    '<call>calculate {"a": "x"}</call>',
    "It is 42",
]


@pytest.mark.parametrize("name", ["openai_agent", "anthropic_agent"])
def test_a_tool_agent_of_the_examples_makes_one_row_and_earns_its_reward(name, chat):
    async def go():
        for label, reward in ((42, 1.0), (7, 0.0)):
            async with serving(chat, *SCRIPT, max_context=3000) as (_, forest, engine, url):
                task = Task(
                    [{"role": "user", "content": "17+25?"}],
                    label,
                    base_url=f"{url}/v1",
                    api_key="k",
                    model="m",
                )
                agent = load_agent(f"examples/{name}.py")
                assert await agent().run(task) == reward
                assert texts(forest) == [SCRIPT]
                shown = chat.tokenizer.decode(engine.asked[-1][0])
                assert all(f"<|im_start|>tool\n{t}" in shown for t in ("42", "-2", "error: "))

    asyncio.run(asyncio.wait_for(go(), 60))
