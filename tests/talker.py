"""An agent for models that cannot play: it rewards the letter a, so that rewards differ and the weights move."""

from agent import Env


class Agent(Env):
    def step(self, reply):
        return "Again.", float(reply.count("a")), False, {"letters": len(reply)}
