"""The calculator game as a plain script that knows nothing of instar: OpenAI's SDK, and the variables that it reads."""

import os
import re
import sys

import openai

client, messages = openai.OpenAI(), [{"role": "user", "content": sys.argv[1]}]
for _ in range(4):
    reply = client.chat.completions.create(model=os.environ["INSTAR_MODEL"], messages=messages)
    text = reply.choices[0].message.content
    if re.search(r"<answer>.*</answer>\s*$", text):
        print(text)
        break
    call = re.search(r"<calc>\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*</calc>\s*$", text)
    value = "Use <calc>1+2</calc> or <answer>3</answer>."
    if call:
        a, b = int(call[1]), int(call[3])
        value = {"+": a + b, "-": a - b, "*": a * b}[call[2]]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(value)}]
