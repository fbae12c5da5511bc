"""vLLM or peft loads a model with an adapter, in a process of its own, and prints the log-probs of ids[1:].

python tests/load_adapter.py vllm|peft MODEL IDS ADAPTER …   # a line of JSON for each adapter; '' is the model alone
"""

import json
import os
import sys


def by_vllm(model: str, ids: list[int], adapters: list[str]):
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    args = dict(
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    llm = LLM(
        model, **args, enable_lora=True, max_lora_rank=8
    )  # vLLM has no smaller maximum that holds a rank of 4
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    for i, adapter in enumerate(adapters, 1):
        lora = LoRARequest(f"adapter-{i}", i, adapter) if adapter else None
        (out,) = llm.generate({"prompt_token_ids": ids}, params, lora_request=lora, use_tqdm=False)
        yield [row[token].logprob for row, token in zip(out.prompt_logprobs[1:], ids[1:])]


def by_peft(model: str, ids: list[int], adapters: list[str]):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for adapter in adapters:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(loaded, adapter) if adapter else loaded
        with torch.no_grad():
            logprobs = (
                loaded(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            )  # [T - 1, V]
        yield logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


if __name__ == "__main__":
    program, model, ids, *adapters = sys.argv[1:]
    for logprobs in {"vllm": by_vllm, "peft": by_peft}[program](model, json.loads(ids), adapters):
        print(json.dumps(logprobs))
