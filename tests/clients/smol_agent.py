"""Two tools through smolagents: a ToolCallingAgent or a CodeAgent, streamed or not."""

import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


kind = {"tools": ToolCallingAgent, "code": CodeAgent}[sys.argv[2]]
agent = kind(tools=[add], model=OpenAIModel("policy"), stream_outputs=bool(sys.argv[3:]))
print(agent.run(sys.argv[1]))
