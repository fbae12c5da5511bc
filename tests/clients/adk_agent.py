"""Two tools through google-adk, by its LiteLLM model, streamed or not."""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def main():
    agent = LlmAgent(
        name="adder", model=LiteLlm("openai/policy"), instruction="Use the tool.", tools=[add]
    )
    runner = InMemoryRunner(agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="user")
    mode = StreamingMode.SSE if sys.argv[2:] else StreamingMode.NONE
    said = types.Content(role="user", parts=[types.Part(text=sys.argv[1])])
    async for event in runner.run_async(
        user_id="user",
        session_id=session.id,
        new_message=said,
        run_config=RunConfig(streaming_mode=mode),
    ):
        if event.is_final_response() and not event.partial:
            print("".join(part.text or "" for part in event.content.parts))


asyncio.run(main())
