"""An agent that fails in one of four rollouts of each prompt, each time in another way."""

import asyncio
import sys
import time

from agent import Agent as Game

WRONG = [  # what `step` does
    lambda: sys.exit(1),
    lambda: next(iter(())),
    lambda: deep(),
    lambda: time.sleep(1e6),
    lambda: (None, float("nan"), True, {}),
    lambda: (None, 1e160, True, {}),
    lambda: (None, 1.0, True, {"rewards": {"a": None}}),
    lambda: thrown(asyncio.CancelledError()),
]


def deep():
    return deep() + 1


def thrown(e):
    raise e


class Agent(Game):
    def reset(self, task):
        number = task.seed // 2  # of the rollout, with --seed 0
        self.wrong = None if number % 4 else WRONG[number // 4 % len(WRONG)]
        return super().reset(task)

    def step(self, reply):
        return self.wrong() if self.wrong else super().step(reply)

    async def close(self):
        await asyncio.sleep(0)
