"""server.py: recorded exchanges of real clients, sent again to one forest: each request attaches where it should."""

import pytest
from test_forest import Engine, chat, grammar, run  # noqa: F401
from test_wires import RECORDED, delivered, request

import server
from agent import Result
from server import As, BadRequest, Forest

# for each exchange the one before it in the tree, None for a root, "again" for the node before, "refused"; and the rows
PARENTS = {
    "01": ([None, 0, 0], 2),  # an echo by object and one by dump
    "02": ([None, 0], 1),
    "03": ([None, 0, 0], 2),  # the third by previous_response_id
    "04": ([None, 0, None], 2),  # the third has no system prompt
    "05": (["refused", None, 1], 1),  # a thread, then without
    "06": ([None], 0),  # a title in JSON: constrained, not trained
    "07": ([None, 0], 1),
    "08": ([None, 0, 1], 1),
    "09": ([None, None, None], 3),  # the replies before were not recorded; the three prompts differ
    "11": ([None, "again"], 1),  # a broken stream, then the same request without
    "12": ([None, 0, 1], 1),
    "13": ([None, None, None], 3),
    "14": ([None], 1),
    "16": ([None, None, 1], 2),  # a title, then two turns
    "18": ([None, None, None], 3),
    "19": ([None, None], 2),
    "20": ([None, 0, 0], 2),  # a turn in the wrong format was dropped by the client
    "22": ([None, 0], 1),
}


def reply_of(exchanges, i):
    """The turn that was delivered, with the id of its response; a stand-in where the reply was not recorded."""
    if not (sent := delivered(exchanges[i])):
        later = [e["request"].get("previous_response_id") for e in exchanges[i + 1 : i + 2]]
        return As("not recorded", None, (), tuple(a for a in later if a))
    own = (exchanges[i].get("response") or {}).get("id")
    return As(sent.text, sent.reasoning, sent.calls, (*sent.anchors, *([own] if own else [])))


@pytest.mark.parametrize("name", PARENTS)
def test_every_recorded_request_attaches_where_it_should(name, chat, monkeypatch):
    async def go():
        exchanges, engine, nodes, parents = RECORDED[name]["exchanges"], Engine(chat), [], []
        forest = Forest(chat, engine.generate, None, 200, 1_000_000, {}, grammar=grammar)
        for i, exchange in enumerate(exchanges):
            sent, (reader, body, headers) = reply_of(exchanges, i), request(exchange)
            monkeypatch.setattr(server, "mint", lambda *_, sent=sent: sent)
            forest.parse = lambda *_, sent=sent: (
                None,
                "",
                [("", c.name, c.arguments) for c in sent.calls],
            )
            engine.script = ["x"]
            try:
                (node,) = forest.answer(reader(body, headers, forest.past))
            except BadRequest:
                nodes.append(None)
                parents.append("refused")
                continue
            await node.task
            forest.left(node, not (exchange["stub_note"] or "").startswith("FAULT"), 0)
            parents.append(
                "again" if node in nodes else nodes.index(node.parent) if node.parent else None
            )
            nodes.append(node)
            if node.base:  # an extension holds what was sampled before, id by id
                assert engine.asked[-1][0][: len(node.base.ids())] == node.base.ids()
        rows = forest.segments(Result(), 0, 0)
        assert (parents, len(rows)) == PARENTS[name]
        trained = [n for n in set(nodes) if n and not n.grammar]
        assert sum(int(r.mask.sum()) for r in rows) == sum(len(n.reply.tokens) for n in trained)

    run(go())


def test_every_recording_is_sent():
    assert set(PARENTS) == set(RECORDED)
