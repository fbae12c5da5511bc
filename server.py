"""Capture: turns ids and text into each other at one place, and keeps what the policy sampled as token-exact segments.

`Chat` holds a model's chat template: it encodes an opening once, and later only the run of new messages that follows a reply,
with the template's own bytes between them. `Trace` grows one sequence from engine replies and such runs; its sampled ids are
never decoded and encoded again. Text is made from ids for the agent only.

This module imports neither vllm nor ray: it is given a `generate` coroutine, so a scripted engine can stand in for tests.

    pytest tests/test_server.py
"""

from dataclasses import dataclass

import numpy as np

from agent import Result, Segment

SENTINEL = "\u2042instar\u2042"  # stands for a reply while the template is rendered around it


@dataclass
class Reply:
    """What an engine sampled for one request. N = sampled tokens, P = prompt tokens, L = MoE layers, K = top-k."""

    tokens: np.ndarray  # int32 [N], the stop token included
    logprobs: np.ndarray  # float32 [N], after temperature
    versions: np.ndarray  # int32 [N]
    digest: bytes  # of (prompt, tokens, logprobs, versions), made where they were sampled
    finish: str  # "stop", "length" or "abort"
    experts: np.ndarray | None = None  # uint8/16 [P + N - 1 - start, L, K], rows from the first token not known before


class Chat:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError("--model has no chat template: put a chat_template.jinja beside its tokenizer")
        self.tokenizer = tokenizer

    def render(self, messages: list[dict]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def opening(self, messages: list[dict]) -> list[int]:
        """Ids of a whole prompt, up to where the policy begins to speak."""
        return self.encode(self.render(messages))

    def following(self, history: list[dict], new: list[dict], last: int) -> list[int]:
        """Ids between a reply and the next one: the end of the turn, the new messages, the next generation prompt.

        history: the messages before the reply; last: the reply's last id. They are the template's own bytes, found by
        rendering a sentinel in the reply's place and encoding what follows it as one run. An end-of-turn token that the policy
        sampled itself is not repeated; a reply cut by its length gets it, as context that is not trained.
        """
        parts = self.render([*history, {"role": "assistant", "content": SENTINEL}, *new]).split(SENTINEL)
        if len(parts) != 2:
            raise ValueError(f"the chat template of --model renders a reply {len(parts) - 1} times instead of once")
        ids = self.encode(parts[1])
        return ids[1:] if ids and ids[0] == last else ids


class Trace:
    """One sequence that only grows: the prompt, then replies and what the environment put between them."""

    def __init__(self, opening: list[int]):
        self.tokens, self.mask, self.logprobs, self.versions = list(opening), [], [], []
        self.experts, self.replies = [], []
        self._pad()

    def _pad(self) -> None:
        """Context is not the policy's: no mask, no log-prob, no version."""
        n = len(self.tokens) - len(self.mask)
        self.mask += [False] * n
        self.logprobs += [0.0] * n
        self.versions += [-1] * n

    def __len__(self) -> int:
        return len(self.tokens)

    def known(self) -> int:
        """Number of leading tokens whose experts were captured; an engine need not send them again."""
        return sum(len(e) for e in self.experts)

    def context(self, ids: list[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.tokens += ids
        self._pad()

    def reply(self, r: Reply) -> None:
        """Append an engine's reply exactly as it was sampled."""
        start = len(self.tokens)
        self.tokens += r.tokens.tolist()
        self.mask += [True] * len(r.tokens)
        self.logprobs += r.logprobs.tolist()
        self.versions += r.versions.tolist()
        self.replies.append((start, len(self.tokens), r.digest))
        if r.experts is not None:
            self.experts.append(r.experts)

    def segment(self, result: Result, group_id: int, rollout_id: int) -> Segment:
        """The training row, up to the last sampled token."""
        end, experts, ok = self.replies[-1][1], None, None
        if self.experts:
            rows = np.concatenate(self.experts)[:end]  # [known, L, K]
            experts = np.zeros((end, *rows.shape[1:]), rows.dtype)
            experts[: len(rows)] = rows
            ok = np.arange(end) < len(rows)
        return Segment(
            np.asarray(self.tokens[:end], np.int32),
            np.asarray(self.mask[:end], bool),
            np.asarray(self.logprobs[:end], np.float32),
            np.asarray(self.versions[:end], np.int32),
            experts,
            ok,
            self.replies,
            group_id,
            rollout_id,
            result.reward,
            result.turn_rewards,
            result.rewards,
            result.info,
            result.truncated,
        )
