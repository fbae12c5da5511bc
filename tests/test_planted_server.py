"""Bugs planted in the capture server, one at a time: a test of the suite must fail under each."""

import asyncio

import pytest
import test_forest as suite
from test_forest import chat  # noqa: F401

import server
from server import Chat, Forest, In, Node


def retokenised(self):
    """Replies as their text encodes."""
    ids = []
    for node in self.path():
        ids += node.tokens
        if node.reply:
            ids += PLANTED["chat"].encode(PLANTED["chat"].tokenizer.decode(node.reply.tokens))
    return ids


PLANTED = {}
prompt, following, child, attach = Forest._prompt, Chat.following, Forest._child, Forest.attach


def last_message_only(self, parent, since, req):
    return prompt(self, parent, since[-1:], req)


def lost_newline(self, *args):
    ids, kept = following(self, *args)
    return ids[1:], kept


def found_anywhere(self, place, echo):
    """A turn that reappears under another prefix is taken for its first appearance."""
    return next((self.anchors[a] for a in echo.anchors if a in self.anchors), None) or child(
        self, place, echo
    )


def one_place_for_all(self, req):
    node, (before, tools, since) = attach(self, req)
    return node, (before, tools, since[:1])


def remembered_by_length(body, key, read, past):
    """A history is taken for the one before as far as that went, whatever it says."""
    n, turns = past[-1][2:] if past else (0, [])
    turns = (
        [*turns, *read(body.each(key, start=n))] if n < len(body[key]) else [*read(body.each(key))]
    )
    if past is not None and turns and isinstance(turns[-1], In):
        past.append((read, b"", len(body[key]), turns))
    return turns


BUGS = {
    "retokenise a reply": (Node, "ids", retokenised, ["a_conversation_is_one_row"]),
    "drop all but the last new message": (
        Forest,
        "_prompt",
        last_message_only,
        ["all_new_messages"],
    ),
    "ignore an edited assistant turn": (
        server,
        "same_turn",
        lambda echo, sent: "T0",
        ["a_forged_turn"],
    ),
    "lose the newline": (
        Chat,
        "following",
        lost_newline,
        ["a_conversation_is_one_row", "all_new_messages"],
    ),
    "reuse a turn that reappears": (Forest, "_child", found_anywhere, ["a_turn_that_reappears"]),
    "share a node between sub-agents": (Forest, "attach", one_place_for_all, ["sub_agents_and"]),
    "count an undelivered reply": (
        Forest,
        "left",
        lambda self, node, *_: setattr(node, "delivered", True),
        ["an_undelivered"],
    ),
    "take every repeat for a retry": (
        Forest,
        "_again",
        lambda self, node, req: True,
        ["a_repeated_request"],
    ),
    "remember a history by its length": (
        server,
        "_turns",
        remembered_by_length,
        ["a_changed_beginning"],
    ),
    "train a shared prefix twice": (set, None, None, ["a_changed_beginning"]),
    "let text close a turn": (
        Chat,
        "plain",
        lambda self, value: value,
        ["characters_of_a_special_token"],
    ),
}


class Forgetful(set):
    def add(self, _):
        pass


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug, chat, monkeypatch):
    owner, name, broken, words = BUGS[bug]
    PLANTED["chat"] = chat
    if name:
        monkeypatch.setattr(owner, name, broken)
    else:
        monkeypatch.setattr(server, "set", lambda *args: Forgetful(*args), raising=False)
    for word in words:
        (test,) = [f for n, f in vars(suite).items() if n.startswith(f"test_{word}")]
        with pytest.raises((AssertionError, TimeoutError, asyncio.TimeoutError)):
            test(chat)
