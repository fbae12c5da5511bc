"""Tiny random models of many families, as transformers makes them, with the starter's tokenizer.

python tests/families.py out/families [name …]        # writes out/families/<name>
"""

import sys

import torch
import transformers

STARTER = "examples/starter"
COMMON = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=1024,
    bos_token_id=None,
    initializer_range=0.1,  # far from uniform, so that a wrong weight or expert shows
)
WINDOW = dict(sliding_window=16)
CAPS = dict(final_logit_softcapping=2.0, attn_logit_softcapping=0.5)  # so low that they show
GRANITE = dict(
    logits_scaling=4.0,
    attention_multiplier=0.2,
    residual_multiplier=0.5,
    embedding_multiplier=2.0,
)
# layer 0 is dense, as in many mixtures of experts: an expert row of the wrong layer then shows
EXPERTS = dict(num_hidden_layers=3, moe_intermediate_size=64, num_experts_per_tok=2)
FIRST_DENSE = EXPERTS | dict(first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=1)
LATENT = dict(
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    n_group=1,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    num_key_value_heads=2,
    head_dim=16,
)
FEW = dict(num_local_experts=4, num_experts_per_tok=2)
# family -> (prefix of its classes in transformers, what its config needs beside COMMON)
FAMILIES = {
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "cohere": ("Cohere", dict(logit_scale=0.25)),
    "cohere2": ("Cohere2", dict(logit_scale=0.25, sliding_window=512)),
    "ernie4_5": ("Ernie4_5", {}),
    "exaone4": ("Exaone4", WINDOW),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", WINDOW | CAPS | dict(query_pre_attn_scalar=32)),
    "gemma3_text": ("Gemma3Text", WINDOW | dict(query_pre_attn_scalar=32)),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "granite": ("Granite", GRANITE),
    "helium": ("Helium", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {}),
    "llama": ("Llama", {}),
    "ministral": ("Ministral", WINDOW),
    "mistral": ("Mistral", {}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", WINDOW),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "seed_oss": ("SeedOss", {}),
    "smollm3": ("SmolLM3", {}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", {}),
    "deepseek_v3": ("DeepseekV3", FIRST_DENSE | LATENT),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        EXPERTS
        | dict(moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1),
    ),
    "glm4_moe": ("Glm4Moe", FIRST_DENSE),
    "gpt_oss": ("GptOss", WINDOW | FEW),
    "granitemoe": ("GraniteMoe", GRANITE | FEW),
    "minimax_m2": ("MiniMaxM2", FEW | dict(use_qk_norm=True, rotary_dim=16)),
    "mixtral": ("Mixtral", FEW),
    "olmoe": ("Olmoe", dict(num_experts=8, num_experts_per_tok=2)),
    "phimoe": ("Phimoe", FEW),
    "qwen2_moe": (
        "Qwen2Moe",
        EXPERTS | dict(num_experts=8, shared_expert_intermediate_size=64),
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | dict(num_experts=8, mlp_only_layers=[0])),
    "qwen3_next": ("Qwen3Next", EXPERTS | dict(num_experts=8)),
    "qwen3_5": ("Qwen3_5Text", {}),
    "bamba": ("Bamba", {}),
    "falcon_h1": ("FalconH1", {}),
    "lfm2": ("Lfm2", dict(layer_types=["conv", "full_attention"])),
    "mamba": ("Mamba", {}),
    "gpt2": ("GPT2", {}),
    "gpt_neox": ("GPTNeoX", {}),
}


def make(family: str, folder: str, **flags) -> str:
    """Write the model of a family, its vectors moved from what they begin with; returns the folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(STARTER)
    prefix, extra = FAMILIES[family]
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    common = COMMON | ends | dict(vocab_size=len(tokenizer))
    config = getattr(transformers, f"{prefix}Config")(**common | extra | flags)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if (
                p.ndim == 1
            ):  # norms begin with ones and biases with zeros, where a lost one is not seen
                p += 0.1 * torch.randn_like(p)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    for name in sys.argv[2:] or FAMILIES:
        print(make(name, f"{sys.argv[1]}/{name}"))
