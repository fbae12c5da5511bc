"""Two tools through an AssistantAgent of autogen, streamed or not."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def main():
    info = dict(vision=False, function_calling=True, json_output=False, structured_output=False)
    client = OpenAIChatCompletionClient(
        model="policy", model_info=info | {"family": "unknown"}, max_retries=0
    )
    agent = AssistantAgent(
        "adder",
        client,
        tools=[add],
        system_message="Use the tool.",
        max_tool_iterations=9,
        model_client_stream=bool(sys.argv[2:]),
    )
    result = await agent.run(task=sys.argv[1])
    print(result.messages[-1].content)


asyncio.run(main())
