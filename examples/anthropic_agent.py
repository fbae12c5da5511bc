"""The same tool agent on Anthropic's SDK, with streamed replies. The SDK takes the base URL without the /v1.

$ python train.py --model Qwen/Qwen3-0.6B --agent examples/anthropic_agent.py --data examples/starter/train.jsonl \\
      --max_turns 8 --max_tokens 512 --max_context 8192
"""

import json

import anthropic
from openai_agent import CALCULATE, calculate

from agent import ChatAgent, Task

HTTP = anthropic.DefaultAsyncHttpxClient()
TOOL = {k: CALCULATE[k] for k in ("name", "description")} | {
    "input_schema": CALCULATE["parameters"]
}


class Agent(ChatAgent):
    async def run(self, task: Task) -> float:
        root = task.base_url.removesuffix("/v1")
        client = anthropic.AsyncAnthropic(base_url=root, api_key=task.api_key, http_client=HTTP)
        messages = list(task.messages)
        for _ in range(6):
            async with client.messages.stream(
                model=task.model, messages=messages, tools=[TOOL], max_tokens=4096
            ) as stream:
                reply = await stream.get_final_message()
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                text = "".join(block.text for block in reply.content if block.type == "text")
                return float(text.strip().endswith(str(task.label)))
            results = [(call.id, calculate(json.dumps(call.input))) for call in calls]
            results = [
                {"type": "tool_result", "tool_use_id": id_, "content": text}
                for id_, text in results
            ]
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": results},
            ]
        return 0.0
