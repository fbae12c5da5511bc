"""Bugs planted in a real engine, for the tests that show a gate catching them. `Engine.plant(name)` breaks one mechanism in
the engine's processes, `Engine.heal()` mends it. Run as a program it breaks the trainer's side and starts a real run:

    python tests/planted.py temperature --steps 2 …
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ.setdefault("RAY_AUTH_MODE", "token")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import refit
import rollout


class Engine(rollout.Engine):
    """The real engine, with a door for the bugs."""

    def __init__(self, cfg, index, cpu):
        args = json.loads(cfg.engine_args) | {"worker_extension_cls": "planted.WorkerExtension"}
        super().__init__(
            SimpleNamespace(**vars(cfg) | {"engine_args": json.dumps(args)}), index, cpu
        )
        self.bug = ""

    async def plant(self, bug: str) -> None:
        self.bug = bug  # "cache stale" and "cache not emptied" are in pause
        await self.llm.collective_rpc("plant", args=(bug,))

    async def heal(self) -> None:
        await self.plant("")

    async def set(self, flags: dict) -> None:
        self.cfg = SimpleNamespace(**vars(self.cfg) | flags)

    async def output(self, name: str, ids: list[int], **params):
        """With "budget not reduced" a request that a pause has ended goes on as a new one, with --max_tokens anew."""
        out = await super().output(name, ids, **params)
        first = out.outputs[0]
        if self.bug != "budget not reduced" or first.finish_reason != "abort":
            return out
        await self.released.wait()
        more = (await super().output(name + "+", [*ids, *first.token_ids], **params)).outputs[0]
        both = dict(
            token_ids=[*first.token_ids, *more.token_ids],
            routed_experts=None,
            finish_reason=more.finish_reason,
        )
        both["logprobs"] = SimpleNamespace(
            logprobs=[*first.logprobs.logprobs, *more.logprobs.logprobs]
        )
        return SimpleNamespace(outputs=[SimpleNamespace(**both)])

    async def pause(self) -> int:
        if self.bug == "budget not reduced":
            rebuilt = await super().pause()
            await self.llm.abort(list(self.counts), internal=False)
            return rebuilt
        if self.bug == "no pause":  # weights move under running requests
            self.counts = {}
            return 0
        if not self.bug.startswith("cache"):
            return await super().pause()
        pause, reset = self.llm.pause_generation, self.llm.reset_prefix_cache

        async def keeps_the_cache(mode: str, clear_cache: bool) -> None:
            await pause(mode=mode, clear_cache=False)

        async def does_nothing() -> bool:
            return self.bug == "cache stale"

        self.llm.pause_generation, self.llm.reset_prefix_cache = keeps_the_cache, does_nothing
        try:
            return await super().pause()
        finally:
            self.llm.pause_generation, self.llm.reset_prefix_cache = pause, reset

    async def running(self) -> int:
        return self.llm.output_processor.get_num_unfinished_requests()

    async def resume(self, version: int) -> None:
        await super().resume(version)
        if self.bug == "version not moved":
            self.version = version - 1
        if self.bug == "version stamped at completion":
            self.spans |= {name: [(0, version)] for name in self.spans}


if "vllm" in sys.modules:

    class WorkerExtension(refit.WorkerExtension):
        """Runs inside the worker."""

        def plant(self, bug: str) -> None:
            transport = self.weight_transfer_engine
            sampler = self.model_runner.sampler
            mode = "raw_logprobs" if bug == "raw log-probs" else "processed_logprobs"
            sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode
            for name in ("load", "start_weight_update", "finish_weight_update"):
                transport.__dict__.pop(name, None)
            if bug == "one bucket lost":
                lost = []

                def load(bucket, flat, spans):
                    if lost:
                        type(transport).load(transport, bucket, flat, spans)
                    lost.append(bucket)

                transport.load = load
            if bug == "tied head not repacked":
                transport.finish_weight_update = lambda: refit.finalize_layerwise_reload(
                    transport.model, transport.model_config
                )
            if bug == "experts not repacked":

                def start_weight_update():
                    refit.initialize_layerwise_reload(transport.model)
                    transport.loaded = [0, 0]

                transport.start_weight_update = start_weight_update


def main() -> int:
    import train

    bug = sys.argv[1]
    if bug == "temperature":  # the trainer scores at another temperature than the engine sampled at
        forward = train.Replay.forward
        train.Replay.forward = lambda self, micro, temperature=None: forward(
            self, micro, temperature or 1.3
        )
    elif bug == "weights":  # one tensor is never sent
        tensors = refit.hf_tensors
        refit.hf_tensors = lambda model, dtype: (
            x for x in tensors(model, dtype) if "layers.0.mlp.up_proj" not in x[0]
        )
    else:
        raise SystemExit(f"no bug is called {bug}")
    return train.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
