"""Tiny random models for tests: dense (own head), tied and a mixture of experts, with the starter's tokenizer.

python tests/tiny.py out/tiny        # writes out/tiny/{dense,tied,moe}
"""

import sys

import torch
from transformers import (
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

STARTER = "examples/starter"


def make(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    torch.manual_seed(0)
    common = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,  # far from uniform, so that a wrong weight or expert shows
    )
    # layer 0 is dense, as in many mixtures of experts: an expert row of the wrong layer then shows
    moe = dict(
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )
    models = {
        "dense": Qwen3ForCausalLM(Qwen3Config(**common)),
        "tied": Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True)),
        "moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**common | dict(num_hidden_layers=3), **moe, mlp_only_layers=[0])
        ),
    }
    for name, model in models.items():
        model.save_pretrained(f"{folder}/{name}")
        tokenizer.save_pretrained(f"{folder}/{name}")


def upcycle(folder: str, experts: int = 4) -> None:
    """The starter as a mixture of experts: each a copy of its MLP, so it plays as the starter does, with gates yet to learn."""
    dense = Qwen3ForCausalLM.from_pretrained(STARTER)
    config = dense.config.to_dict() | dict(
        moe_intermediate_size=dense.config.intermediate_size, num_experts=experts
    )
    config["tie_word_embeddings"] = False  # AutoModel's mixture of experts has a head of its own
    del config["model_type"], config["architectures"]
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**config, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1)
    )
    weights = {n: p for n, p in dense.state_dict().items() if ".mlp." not in n}
    for i, layer in enumerate(dense.model.layers):
        at, mlp = f"model.layers.{i}.mlp.", layer.mlp
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])  # [2 I, H]
        weights[at + "experts.gate_up_proj"] = both.expand(experts, -1, -1)
        weights[at + "experts.down_proj"] = mlp.down_proj.weight.expand(experts, -1, -1)
        weights[at + "gate.weight"] = model.model.layers[i].mlp.gate.weight
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(STARTER).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1])
