"""A tool agent on OpenAI's SDK: the program that you already have, with task.base_url in the place of the provider's.

$ python train.py --model Qwen/Qwen3-0.6B --agent examples/openai_agent.py --data examples/starter/train.jsonl \\
      --max_turns 8 --max_tokens 512 --max_context 8192
"""

import json
import operator

import openai

from agent import ChatAgent, Task

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALCULATE = {
    "name": "calculate",
    "description": "One operation on two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "operator": {"type": "string", "enum": list(OPERATORS)},
            "b": {"type": "integer"},
        },
        "required": ["a", "operator", "b"],
    },
}
# one for all rollouts: making a client takes tens of milliseconds, for its certificates
HTTP = openai.DefaultAsyncHttpxClient()


def calculate(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(OPERATORS[given["operator"]](int(given["a"]), int(given["b"])))
    except (ValueError, KeyError, TypeError) as e:
        return f"error: {e!r}"  # the policy reads it and may try again


class Agent(ChatAgent):
    async def run(self, task: Task) -> float:
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=HTTP)
        messages, tools = list(task.messages), [{"type": "function", "function": CALCULATE}]
        for _ in range(6):
            reply = await client.chat.completions.create(
                model=task.model, messages=messages, tools=tools
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip().endswith(str(task.label)))
            messages.append(message)
            for call in message.tool_calls:
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": calculate(call.function.arguments),
                    }
                )
        return 0.0
