"""Two tools through pydantic-ai: over any of the three wires, streamed or not."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

WIRES = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
agent = Agent(WIRES[sys.argv[2]]("policy"), instructions="Use the tool.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def heard(context, events):
    """Each request of the run is streamed where there is a handler of its events."""
    async for _ in events:
        pass


print(agent.run_sync(sys.argv[1], event_stream_handler=heard if sys.argv[3:] else None).output)
