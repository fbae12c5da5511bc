"""Any environment of the `verifiers` library as an agent: its own rollout plays, its own rubric grades.

$ pip install verifiers==0.1.14        # and the environment, which is a package too
$ PYTHONPATH=. python examples/verifiers_agent.py my-environment '{"difficulty": "easy"}' > rows.jsonl
$ python train.py --model Qwen/Qwen3-0.6B --agent examples/verifiers_agent.py --data rows.jsonl \\
      --max_tokens 512 --max_context 8192

Each row names its environment and the arguments of its load_environment, so several can be mixed in one file. Instead
of a package it may be a function `load_environment` in a file beside this one; the one below is called verifiers-agent.
0.1.14 is the last version that can be installed beside vLLM 0.30: the later ones want other versions of mcp or openai,
and 0.4 has another interface. Rewards that compare the rollouts of a group are not possible: each is graded by itself.
"""

import functools
import json
import random
import sys

import openai
import verifiers as vf
from datasets import Dataset
from verifiers.clients import OpenAIChatCompletionsClient

from agent import ChatAgent, Result, Task

HTTP = openai.DefaultAsyncHttpxClient()  # one for all rollouts


@functools.cache
def environment(name: str, arguments: str) -> vf.Environment:
    return vf.load_environment(name, **json.loads(arguments))


class Agent(ChatAgent):
    async def run(self, task: Task) -> Result:
        env = environment(task.row["environment"], task.row["arguments"])
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=HTTP)
        given = {
            key: task.row[key]
            for key in ("prompt", "answer", "info", "example_id")
            if key in task.row
        }
        done = await env.run_rollout(
            given, OpenAIChatCompletionsClient(client), task.model, sampling_args={}
        )
        if done["error"]:
            raise RuntimeError(f"the environment {task.row['environment']} failed: {done['error']}")
        usage = {
            key: value
            for key, value in (done.get("token_usage") or {}).items()
            if value is not None
        }
        return Result(
            done["reward"], rewards=done["metrics"], info=usage, truncated=done["is_truncated"]
        )


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


def correct(completion, answer) -> float:
    return float((completion[-1].content or "").strip().endswith(answer))


def load_environment(problems: int = 1000) -> vf.Environment:
    """A small environment to copy: sums of three numbers, with a tool that adds two."""
    rng, rows = random.Random(0), []
    for _ in range(problems):
        a, b, c = rng.choices(range(1000, 10000), k=3)
        rows.append(
            {"question": f"What is {a}+{b}+{c}? End with the number.", "answer": str(a + b + c)}
        )
    return vf.ToolEnv(
        tools=[add], max_turns=6, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[correct])
    )


if __name__ == "__main__":
    name, arguments = sys.argv[1], (sys.argv[2:] or ["{}"])[0]
    for row in environment(name, arguments).get_dataset():
        print(json.dumps(row | {"environment": name, "arguments": arguments}))
