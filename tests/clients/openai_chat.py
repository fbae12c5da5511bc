"""Two tools through Chat Completions of the openai package, streamed or not."""

import json
import sys

from openai import OpenAI

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
]
client, stream = OpenAI(), sys.argv[2:] == ["stream"]
messages = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": sys.argv[1]},
]
while True:
    body = dict(model="policy", messages=messages, tools=TOOLS)
    if stream:
        with client.chat.completions.stream(**body) as events:
            said = events.get_final_completion().choices[0].message
    else:
        said = client.chat.completions.create(**body).choices[0].message
    messages.append(said.model_dump() if stream else said)
    if not said.tool_calls:
        break
    for call in said.tool_calls:
        sum_ = str(sum(json.loads(call.function.arguments).values()))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": sum_})
print(said.content)
