"""The calculator game with tools that take INSTAR_LATENCY seconds, as real tools do: for `python tests/bench.py overlap`."""

import asyncio
import os

import agent

LATENCY = float(os.environ.get("INSTAR_LATENCY", "0"))


class Agent(agent.Agent):
    async def step(self, reply):
        await asyncio.sleep(LATENCY)
        return super().step(reply)
