"""Two tools through Responses of the openai package: with the whole history (streamed or not), or by previous_response_id."""

import json
import sys

from openai import OpenAI

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": False}
]
client, mode = OpenAI(), sys.argv[2]
items, previous = [{"role": "user", "content": sys.argv[1]}], {}
while True:
    body = dict(model="policy", input=items, tools=TOOLS, instructions="Use the tool.", **previous)
    if mode == "stream":
        with client.responses.stream(**body) as events:
            said = events.get_final_response()
    else:
        said = client.responses.create(**body)
    calls = [item for item in said.output if item.type == "function_call"]
    if not calls:
        break
    if mode == "previous":
        items, previous = [], {"previous_response_id": said.id}
    else:
        items += [item.to_dict(exclude_unset=False) for item in said.output]
    for call in calls:
        sum_ = str(sum(json.loads(call.arguments).values()))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": sum_})
print(said.output_text)
