"""The calculator game as an ordinary program with streamed replies: half of the rollouts on OpenAI's SDK, half on Anthropic's."""

import operator

import anthropic
import openai

from agent import ANSWER, CALL, ChatAgent, Result, Task

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
# one for all rollouts: making a client takes tens of milliseconds, for its certificates
HTTP, HTTP2 = openai.DefaultAsyncHttpxClient(), anthropic.DefaultAsyncHttpxClient()


async def gpt(task: Task, messages: list[dict]) -> str:
    client, text = (
        openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=HTTP),
        "",
    )
    async for chunk in await client.chat.completions.create(
        model=task.model, messages=messages, stream=True
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return text


async def claude(task: Task, messages: list[dict]) -> str:
    root = task.base_url.removesuffix("/v1")
    client = anthropic.AsyncAnthropic(base_url=root, api_key=task.api_key, http_client=HTTP2)
    async with client.messages.stream(
        model=task.model, messages=messages, max_tokens=4096
    ) as stream:
        return await stream.get_final_text()


class Agent(ChatAgent):
    async def run(self, task: Task) -> Result:
        ask, messages = (gpt if task.seed % 4 < 2 else claude), list(task.messages)
        for calls in range(4):
            text = await ask(task, messages)
            if answer := ANSWER.search(text):
                return Result(
                    float(int(answer[1]) == int(task.label)),
                    info={"calls": calls, "claude": ask is claude},
                )
            value = "Use <calc>1+2</calc> or <answer>3</answer>."
            if call := CALL.search(text):
                value = OPERATORS[call[2]](int(call[1]), int(call[3]))
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": str(value)},
            ]
        return Result(0.0, truncated=True)
