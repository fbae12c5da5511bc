"""Two tools through openai-agents: over Chat Completions, Responses, or Responses with history kept by the server."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def main():
    kind = OpenAIChatCompletionsModel if sys.argv[2] == "chat" else OpenAIResponsesModel
    agent = Agent(
        "adder", instructions="Use the tool.", tools=[add], model=kind("policy", AsyncOpenAI())
    )
    result = await Runner.run(
        agent, sys.argv[1], auto_previous_response_id=sys.argv[2] == "previous"
    )
    print(result.final_output)


asyncio.run(main())
