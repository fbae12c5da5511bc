"""Two tools through litellm, by any of its providers: the model's name says which."""

import json
import sys

import litellm

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
]
messages = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": sys.argv[1]},
]
while True:
    said = litellm.completion(model=sys.argv[2], messages=messages, tools=TOOLS).choices[0].message
    messages.append(said)
    if not said.tool_calls:
        break
    for call in said.tool_calls:
        sum_ = str(sum(json.loads(call.function.arguments).values()))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": sum_})
print(said.content)
