"""Two tools through Messages of the anthropic package, streamed or not."""

import sys

from anthropic import Anthropic

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": ADD}]
client, stream = Anthropic(), sys.argv[2:] == ["stream"]
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    body = dict(
        model="policy", max_tokens=1000, system="Use the tool.", messages=messages, tools=TOOLS
    )
    if stream:
        with client.messages.stream(**body) as events:
            said = events.get_final_message()
    else:
        said = client.messages.create(**body)
    messages.append({"role": "assistant", "content": said.content})
    calls = [block for block in said.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": c.id, "content": str(sum(c.input.values()))}
        for c in calls
    ]
    messages.append({"role": "user", "content": results})
print(said.content[-1].text)
