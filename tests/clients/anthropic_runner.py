"""Two tools through the anthropic package's tool runner, which asks for threads on the server first."""

import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


messages = [{"role": "user", "content": sys.argv[1]}]
runner = Anthropic().beta.messages.tool_runner(
    model="policy", max_tokens=1000, system="Use the tool.", tools=[add], messages=messages
)
print(runner.until_done().content[-1].text)
