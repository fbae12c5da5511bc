"""One rollout of an agent of examples/, where its library is installed: python rollout.py agent.py row.json"""

import asyncio
import inspect
import json
import os
import sys
from dataclasses import asdict

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
sys.path.remove(os.path.dirname(__file__))  # rollout.py of this folder is no module
from agent import Result, Task, load_agent

row = json.load(open(sys.argv[2]))
prompt, label = row["prompt"], row.get("label")
messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
task = Task(messages, label, row, base_url=os.environ["OPENAI_BASE_URL"], model="policy")
task.api_key = os.environ["OPENAI_API_KEY"]
run = load_agent(sys.argv[1])().run
result = asyncio.run(run(task)) if inspect.iscoroutinefunction(run) else run(task)
print(json.dumps(asdict(result if isinstance(result, Result) else Result(result))))
