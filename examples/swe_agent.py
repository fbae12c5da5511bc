"""mini-swe-agent as the agent: it fixes a bug in a small repository with bash commands, which run in a sandbox.

$ pip install mini-swe-agent==2.4.6
$ python examples/toy_repos.py fix 2000 > fix.jsonl
$ python train.py --model Qwen/Qwen3-4B --agent examples/swe_agent.py --data fix.jsonl \\
      --max_turns 16 --max_tokens 1024 --max_context 16384

The agent is mini-swe-agent's own, with its own prompts and tool (mini.yaml); only the place where commands run is ours
(sandbox.py). For your repositories change `Agent.run`: what is put into the folder, and how the folder is graded. It
runs in a thread, as `run` is no coroutine.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}  # no banner; no call home
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = (
    "1"  # LiteLLM tries again by itself; a rollout that is over stays so
)

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from sandbox import run
from toy_repos import reward

from agent import ChatAgent, Result, Task

CONFIG = get_config_from_spec("mini.yaml")
PROMPTS = {name: CONFIG["agent"][name] for name in ("system_template", "instance_template")}
TEMPLATES = {
    name: CONFIG["model"][name] for name in ("observation_template", "format_error_template")
}


class Sandbox(LocalEnvironment):
    """Where the agent's commands run. One that says COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT ends the task."""

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict:
        code, text = run(action["command"], self.config.cwd, seconds=timeout or self.config.timeout)
        output = {"output": text, "returncode": code, "exception_info": ""}
        self._check_finished(output)
        return output


class Agent(ChatAgent):
    def run(self, task: Task) -> Result:
        where = {"api_base": task.base_url, "api_key": task.api_key, "drop_params": True}
        with tempfile.TemporaryDirectory() as folder:
            for name, text in task.row["files"].items():
                (Path(folder) / name).write_text(text)
            model = LitellmModel(
                model_name=f"openai/{task.model}",
                model_kwargs=where,
                cost_tracking="ignore_errors",
                **TEMPLATES,
            )
            agent = DefaultAgent(model, Sandbox(cwd=folder, timeout=30), step_limit=30, **PROMPTS)
            end = agent.run(task.messages[-1]["content"])
            earned = reward("", task.label, "", folder)
        info = {"steps": agent.n_calls, "submitted": end["exit_status"] == "Submitted"}
        return Result(reward=earned, rewards={"solved": earned}, info=info)
