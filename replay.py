"""Re-run: segments -> micro-batches -> the FSDP2 forward, with the same tokens and the same experts.

Rows are padded on the right, so causal attention needs no mask and rows cannot leak into each other. Everything stays aligned
with `tokens`; the shift between a token and the position that predicts it happens once, in `forward`. The head computes
log-probs in chunks, only where a token is trained, so the logits of a batch never exist at once. For a mixture of experts the
engine's choices are replayed in the forward and in its recompute. The second half builds what is re-run: the FSDP2 model of the
policy, a critic or a reference, and the optimizer; `check_model` refuses what cannot be built. Nothing here knows of engines,
rewards or losses.

    pytest tests/test_replay.py tests/test_families.py
"""

import contextlib
import importlib.util
import json
import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from agent import BadInput, InvariantError, Segment, digest

CHUNK = 1 << 25  # logits that exist at once, in numbers: 128 MiB in fp32


@dataclass
class MicroBatch:
    """Rows of one forward, padded on the right. B rows, T tokens, L layers, K = top-k."""

    rows: list[int]  # which of the rank's rows these are
    rollout: torch.Tensor  # int64 [B], the rollout of each
    tokens: torch.Tensor  # int64 [B, T]
    mask: torch.Tensor  # bool [B, T], trained tokens
    behaviour_logprobs: torch.Tensor  # float32 [B, T]
    versions: torch.Tensor  # int32 [B, T]
    padding: torch.Tensor  # bool [B, T], True past a row's end
    experts: torch.Tensor | None = None  # int16 [B, T, L, K], -1 where nothing was captured
    # what the steps of an update add, each [B, T]
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None  # of the critic before the update
    advantages: torch.Tensor | None = None
    targets: torch.Tensor | None = None  # of the critic
    weights: torch.Tensor | None = None  # of the correction
    load: torch.Tensor | None = None  # of the experts before the update, float64 [routers, E]
    version: int = 0  # the trainer's

    @property
    def on_version(self) -> torch.Tensor:
        """Trained tokens that the trainer's own version sampled: bool [B, T]."""
        return self.mask & (self.versions == self.version)

    @property
    def real(self) -> torch.Tensor:
        """Tokens of rows: no padding, and nothing in a micro-batch without rows. bool [B, T]."""
        return ~self.padding & bool(self.rows)

    def to(self, device) -> "MicroBatch":
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), torch.Tensor):
                setattr(self, f.name, value.to(device, non_blocking=True))
        return self


def plan(lengths: list[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Deal rows to ranks as micro-batches: [rank][micro-batch][row index].

    A micro-batch holds at most `budget` tokens, padding included. Rows of like length go together, ranks get like totals and
    the same number of micro-batches (empty ones fill up), since FSDP would hang otherwise. Raises ValueError for a row that
    is longer than the budget.
    """
    if lengths and max(lengths) > budget:
        raise ValueError(f"a row of {max(lengths)} tokens exceeds --tokens_per_microbatch {budget}")
    share = max(
        max(lengths, default=0), -(-sum(lengths) // ranks)
    )  # do not leave ranks idle for want of micro-batches
    micros = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if micros and (len(micros[-1]) + 1) * lengths[micros[-1][0]] <= min(budget, share):
            micros[-1].append(i)
        else:
            micros.append([i])
    dealt, loads = [[] for _ in range(ranks)], [0] * ranks
    for micro in sorted(micros, key=lambda m: -len(m) * lengths[m[0]]):
        rank = min(range(ranks), key=lambda r: (loads[r], len(dealt[r])))
        dealt[rank].append(micro)
        loads[rank] += len(micro) * lengths[micro[0]]
    return [d + [[]] * (max(map(len, dealt)) - len(d)) for d in dealt]


def deal(cfg, batch: dict, world: int) -> None:
    """Cut a batch into minibatches of whole groups, each into micro-batches per rank: batch["plan"][minibatch][rank].

    batch["sizes"] has the rollouts of each minibatch, those without a row too.
    """
    groups, batch["plan"], batch["sizes"] = [r["group"] for r in batch["rollouts"]], [], []
    for part in np.array_split(np.unique(groups), cfg.minibatches):
        batch["sizes"].append(int(np.isin(groups, part).sum()))
        rows = [i for i, row in enumerate(batch["rows"]) if groups[row["rollout"]] in part]
        dealt = plan([batch["rows"][i]["tokens"] for i in rows], world, cfg.tokens_per_microbatch)
        batch["plan"].append([[[rows[i] for i in micro] for micro in rank] for rank in dealt])


def pack(segments: list[Segment], rows: list[int], owners: list[int] | None = None) -> MicroBatch:
    """Pad `rows` of `segments` into one micro-batch on the CPU. No rows give one dummy row that trains nothing.

    owners: the batch's rollout that each of the segments belongs to.
    """
    picked = [segments[i] for i in rows]
    shape = (
        max(1, len(picked)),
        max([2, *map(len, picked)]),
    )  # two tokens at least, to predict one from the other
    out = MicroBatch(
        rows,
        torch.tensor([owners[i] for i in rows] if owners and rows else [0] * shape[0]),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape),
        torch.full(shape, -1, dtype=torch.int32),
        torch.full(shape, bool(picked)),
    )
    with_experts = next((s.experts for s in picked if s.experts is not None), None)
    if with_experts is not None:
        out.experts = torch.full((*shape, *with_experts.shape[1:]), -1, dtype=torch.int16)
    for b, s in enumerate(picked):
        t = len(s)
        out.tokens[b, :t] = torch.tensor(s.tokens)
        out.mask[b, :t] = torch.tensor(s.mask)
        out.behaviour_logprobs[b, :t] = torch.tensor(s.logprobs)
        out.versions[b, :t] = torch.tensor(s.versions)
        out.padding[b, :t] = False
        if s.experts is not None:
            experts = torch.tensor(s.experts.astype(np.int16))
            out.experts[b, :t] = experts.masked_fill(~torch.tensor(s.experts_ok)[:, None, None], -1)
    return out


def check_identity(micro: MicroBatch, segments: list[Segment]) -> int:
    """Recompute each reply's digest from the packed tensors; returns how many tokens were checked.

    Raises InvariantError when a digest differs or when the mask is not exactly the union of the replies.
    """
    for b, row in enumerate(micro.rows):
        tokens, logprobs, versions = (
            x[b].numpy() for x in (micro.tokens, micro.behaviour_logprobs, micro.versions)
        )
        sampled, rollout = np.zeros(len(tokens), bool), f"rollout {segments[row].rollout_id}"
        for i, (start, end, mark) in enumerate(segments[row].replies):
            sampled[start:end] = True
            if (
                digest(tokens[:start], tokens[start:end], logprobs[start:end], versions[start:end])
                != mark
            ):
                reply = f"reply {i} of {rollout} (tokens {start} to {end}) is not what the engine sampled"
                why = "its ids, log-probs or versions changed on the way (tokens/digest_mismatch)"
                raise InvariantError(f"token identity: {reply}: {why}")
        if (sampled != micro.mask[b].numpy()).any():
            raise InvariantError(
                f"token identity: the mask of {rollout} is not where the engine sampled"
            )
    return int(micro.mask.sum())


class Head:
    """Stands in for the forward of `lm_head`: hidden states in, (log-prob, entropy) of the selected targets out.

    Being called in the head's place inside the model's own forward, it sees the gathered weight under FSDP2, tied or not.
    The entropy has a gradient only where a bonus needs it. tail: what the model does to its logits,
    as `tail` gives it.
    """

    def __init__(self, lm_head: torch.nn.Module, entropy_gradient=False, tail=(1.0, math.inf)):
        self.linear, self.temperature, self.entropy_gradient = lm_head, 1.0, entropy_gradient
        self.scale, self.cap = tail
        self.where = self.targets = None  # bool [B, T], int64 [N]
        lm_head.forward = self

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [B, T, H] -> [N, 2] float32."""
        picked = hidden[self.where]  # [N, H]
        size = max(1, CHUNK // self.linear.weight.shape[0])
        parts = zip(picked.split(size), self.targets.split(size))
        # the logits of a chunk are computed again in backward, not kept
        found = [checkpoint(self.chunk, h, t, use_reentrant=False) for h, t in parts]
        self.found = torch.cat(found)
        return self.found

    def chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """hidden [n, H], targets [n] -> [n, 2]: log-softmax of logits / temperature at the target, and its entropy."""
        logits = F.linear(hidden, self.linear.weight, self.linear.bias).float()  # [n, V]
        if self.cap < math.inf:
            logits = torch.tanh(logits * (self.scale / self.cap)) * (self.cap / self.temperature)
        else:
            logits = logits / (self.temperature / self.scale)
        normaliser = logits.logsumexp(-1)  # [n]
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser  # [n]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_gradient):
            entropy = normaliser - (torch.exp(logits - normaliser[:, None]) * logits).sum(-1)  # [n]
        return torch.stack([logprobs, entropy], -1)


class ValueHead(torch.nn.Linear):
    """Stands in for the forward of `lm_head` in a critic: hidden states in, the value of the state before each selected token
    out. It begins at 0. Every rank holds it whole, so its gradient is averaged over ranks apart from the model's."""

    def __init__(self, model: torch.nn.Module):
        lm_head = model.get_output_embeddings()
        super().__init__(lm_head.weight.shape[1], 1, device=next(model.parameters()).device)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
        self.where = self.targets = None  # as in Head
        self.temperature = 1.0
        lm_head.forward = self.__call__  # not the module itself: PyTorch would take it for a child
        model.value_head = self  # saved and resumed with the rest
        if lm_head.weight is not model.get_input_embeddings().weight:  # a tied one is the embedding
            # nothing reads it, and an optimizer without its state cannot be resumed
            lm_head.weight.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [B, T, H] -> [N, 1] float32."""
        self.found = F.linear(
            hidden[self.where].float(), *(p.to(hidden.device) for p in (self.weight, self.bias))
        )
        return self.found


class Router:
    """Stands in for AutoModel's RouterReplay in one MoE gate: the engine's choice where there is one, else the live choice."""

    def __init__(self, layer: int):
        self.layer, self.agree, self.total = layer, 0, 0
        self.target = self.counted = self.route = self.seen = (
            None  # route: the own `_route_scores` of a watched gate
        )

    def watch(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Stands in for the gate's `_route_scores`: logits [N, E] -> weights [N, K], experts [N, K], probabilities [N, E].

        The experts used and the probabilities are kept from the first call in `Replay.experts`: that is the forward, and what
        activation checkpointing computes again in backward is not in the graph.
        """
        found = self.route(logits)
        self.seen = found[1:] if self.seen == () else self.seen
        return found

    def apply(self, live: torch.Tensor) -> torch.Tensor:
        """live [N, K]: the gate's own top-k -> the experts to use [N, K]."""
        if self.target is None:
            return live
        if self.counted is not None:
            same = (live.sort(-1).values == self.target.sort(-1).values).all(-1)  # [N]
            self.agree += int((same & self.counted).sum())
            self.total += int(self.counted.sum())
        return torch.where(self.target < 0, live, self.target.to(live.dtype))


class Replay:
    """A model of the trainer, ready to score segments. One head, and one Router per MoE layer.

    watched: keep what the gates of a forward gave, for a load-balance loss.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        temperature: float,
        head: Head | ValueHead | None = None,
        watched=False,
    ):
        self.model, self.temperature, self.head = (
            model,
            temperature,
            head or Head(model.get_output_embeddings()),
        )
        self.routers, self.watched = [], watched
        for name, module in model.named_modules():
            if getattr(module, "router_replay", None) is not None:
                module.router_replay = router = Router(int(re.search(r"layers\.(\d+)\.", name)[1]))
                self.routers.append(router)
                if watched:
                    router.route, module._route_scores = module._route_scores, router.watch

    @contextlib.contextmanager
    def experts(self, micro: MicroBatch, counted: torch.Tensor | None = None):
        """Replay the micro-batch's experts until the block ends: it must stay open through backward, whose recompute has to
        route the same way. counted: bool [B, T], inputs on which the live choice is compared with the replayed one."""
        for r in self.routers:
            r.seen = ()
            if micro.experts is not None:
                r.target = micro.experts[:, :, r.layer].flatten(0, 1).long()  # [B * T, K]
                r.counted = (
                    None if counted is None else (counted.flatten() & (r.target >= 0).all(-1))
                )
        try:
            yield
        finally:
            for r in self.routers:
                r.target = r.counted = r.seen = None

    def load(self, micro: MicroBatch) -> torch.Tensor:
        """Tokens that each expert got in the forward in `experts`, 1 / K for each of a token's K: float64 [routers, E]."""
        real, seen = (
            micro.real.flatten(),
            [r.seen for r in self.routers],
        )  # [B * T]; [B * T, K], [B * T, E] each
        return torch.stack(
            [
                u[real].flatten().bincount(minlength=p.shape[-1]).double() / u.shape[-1]
                for u, p in seen
            ]
        )

    def expert_metrics(self, micro: MicroBatch) -> dict:
        """experts/replayed (share of token-layers), experts/agreement (since the last call), experts/missing (sampled tokens
        that were an input but have no row). Empty for a dense model or without rows."""
        if micro.experts is None or not self.routers:
            return {}
        inputs = F.pad(
            ~micro.padding[:, 1:], (0, 1)
        )  # [B, T], a row's last token is never an input that predicts
        have = (micro.experts[:, :, [r.layer for r in self.routers]] >= 0).all(
            -1
        )  # [B, T, routers]
        missing = inputs & micro.mask & ~have.all(-1)  # [B, T]
        agree, total = sum(r.agree for r in self.routers), sum(r.total for r in self.routers)
        for r in self.routers:
            r.agree = r.total = 0
        return {
            "experts/replayed": (have[inputs].sum(), have[inputs].numel()),
            "experts/agreement": (agree, total),
            "experts/missing": (missing.sum(), 0),
        }

    def forward(
        self, micro: MicroBatch, temperature: float | None = None
    ) -> tuple[torch.Tensor, ...]:
        """What the head gives for tokens[b, t] given tokens[b, :t], each [B, T], 0 off the mask: (log-probs, entropies) or
        (values,)."""
        self.head.temperature = self.temperature if temperature is None else temperature
        predicts = F.pad(
            micro.mask[:, 1:], (0, 1)
        )  # position t - 1 predicts token t: the one shift
        if not predicts.any():
            predicts[0, 0] = True  # FSDP needs a graph on every rank; what it gives is masked below
        self.head.where, self.head.targets = predicts, micro.tokens.roll(-1, 1)[predicts]
        positions = torch.arange(micro.tokens.shape[1], device=micro.tokens.device)[None].expand_as(
            micro.tokens
        )
        extra = {"padding_mask": micro.padding} if self.routers else {"use_cache": False}
        out = self.model(
            input_ids=micro.tokens, position_ids=positions, attention_mask=None, **extra
        )
        out, found, self.head.found = getattr(out, "logits", out), self.head.found, None  # [N, C]
        # what a model does to its head's logits was done in the head; FSDP's hooks need a graph
        # through the model's own output
        found = torch.where(torch.ones_like(found, dtype=torch.bool), found, out)
        full = found.new_zeros((*micro.mask.shape, found.shape[-1]))
        full[predicts] = found  # [B, T, C]
        # back to the token's own position
        return full.roll(1, 1).masked_fill(~micro.mask[..., None], 0.0).unbind(-1)


# ---- model and optimizer


def experts_of(config) -> int:
    """Number of routed experts in a transformers config, 0 for a dense model."""
    config = config.get_text_config()
    names = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    return next((n for name in names if (n := getattr(config, name, 0))), 0)


class Bare(tuple):
    """What a decoder that is not there gives: hidden states, and None for all else that is asked."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def tail(model: torch.nn.Module) -> tuple[float, float]:
    """What a class of transformers does to the logits of its head, as (scale, cap):
    x -> cap * tanh(scale * x / cap), without a cap where it is inf.

    The class is asked, so that no list of families has to be kept: the forward of an empty `model`
    (on meta) runs on a decoder and a head that give what they are told. The model is of no use
    afterwards. Raises ValueError when the answer has another form.
    """
    head = model.get_output_embeddings()
    asked = torch.tensor([2.0**-20, -0.5, 3.0, -30.0, 100.0, 2.0**40], dtype=torch.float64)
    model.base_model.forward = lambda *_, **__: Bare([torch.zeros(1, len(asked), head.in_features)])
    head.forward = lambda hidden: asked[None, :, None]
    tokens = torch.zeros(1, len(asked), dtype=torch.int64)
    told = model(input_ids=tokens, use_cache=False).logits.double().flatten()
    scale, cap = float(told[0] / asked[0]), float(told[-1])
    if math.isclose(cap, scale * float(asked[-1]), rel_tol=1e-6):
        cap = math.inf
    expected = asked * scale if cap == math.inf else cap * torch.tanh(asked * scale / cap)
    if not torch.allclose(told, expected, rtol=1e-6):
        raise ValueError("it changes the logits of its head otherwise than by a scale and a cap")
    return scale, cap


def empty(config) -> torch.nn.Module:
    """The model of transformers that a config describes, without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@contextlib.contextmanager
def cuda_means_cpu():
    """On a CPU: AutoModel 0.7 asks for torch.device("cuda", …) and torch.cuda.current_device() while it builds a model."""
    real, cpu = torch.device, torch.device("cpu")

    class Meta(type):
        def __instancecheck__(cls, x):
            return isinstance(x, real)

        def __call__(cls, *args, **kwargs):
            return cpu if args and str(args[0]).startswith("cuda") else real(*args, **kwargs)

    with (
        mock.patch("torch.device", Meta("device", (), {})),
        mock.patch("torch.cuda.current_device", lambda: cpu),
    ):
        yield


def own_class(config) -> type | None:
    """AutoModel's own class for a config; None where it takes that of transformers."""
    from nemo_automodel._transformers.model_init import get_is_hf_model
    from nemo_automodel._transformers.registry import ModelRegistry

    if get_is_hf_model(config, force_hf=False):
        return None
    return ModelRegistry.resolve_custom_model_cls(config.architectures[0], config)


def expert_options(device: str) -> dict:
    """How AutoModel's own classes of mixtures of experts are built."""
    from nemo_automodel.components.models.common.utils import BackendConfig

    # a coefficient would add a gradient of rank-local tokens
    options = dict(moe_overrides=dict(aux_loss_coeff=0.0, enable_routing_replay=True))
    if device == "cpu":
        options["backend"] = BackendConfig(
            attn="sdpa",
            rms_norm="torch_fp32",
            rope_fusion=False,
            gate_precision="float32",
            linear="torch",
            experts="torch",
            dispatcher="torch",
        )
    return options


def files_of(path: str) -> list[str]:
    """Names of a model's files: in its folder, in what is kept of the hub, or on the hub where no
    weights are kept yet."""
    import huggingface_hub

    if os.path.isdir(path):
        return os.listdir(path)
    kept = os.listdir(
        os.path.dirname(huggingface_hub.try_to_load_from_cache(path, "config.json"))
    )  # of a config that was just read
    try:
        weights = any(name.endswith(".safetensors") for name in kept)
        return kept if weights else huggingface_hub.list_repo_files(path)
    except Exception:  # of the network, or since it is not to be used
        return kept


def check_model(cfg, flag: str, path: str) -> None:
    """Look at a model before anything is started. Raises BadInput with the flag, the reason and the
    fix."""
    from transformers import AutoConfig

    def refuse(why: str):
        raise BadInput(f"--{flag} {path}: {why}")

    if not os.path.isdir(path) and os.path.isdir(os.path.dirname(path)):  # else a hub name
        refuse("there is no such folder")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        files = files_of(path)
    except Exception as e:  # whatever the files of a stranger make transformers raise
        refuse(
            "it brings Python code of its own, which is not run; take a family of transformers"
            if "trust_remote_code" in str(e)
            else f"no model there ({first_line(e)})"
        )
    flags = dict(replay_experts=cfg.replay_experts, balance_coef=cfg.balance_coef, ep=cfg.ep > 1)
    policy = flag == "model"
    why = (
        unfit_config(config, critic=flag == "critic_model")
        or unfit_files(path, files)
        or unlike(config, cfg.max_context)
        or (unfit_tokenizer(config, path) if policy else "")
        or unfit_class(config, [name for name, value in flags.items() if value and policy])
    )
    if why:
        refuse(why)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def unfit_tokenizer(config, path: str) -> str:
    """Why the tokenizer at `path` does not go with this program or with its model, and the fix;
    empty where it does."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as e:
        return f"no tokenizer there ({first_line(e)}); copy that of its base model into it"
    if not tokenizer.chat_template:
        return (
            "its tokenizer has no chat template, so nothing says how messages become tokens: put a"
            " chat_template.jinja beside it, or take the instruct model of the family"
        )
    size = config.get_text_config().vocab_size
    if len(tokenizer) > size:
        return f"its tokenizer has {len(tokenizer)} tokens and its embedding {size} rows: resize it"
    return ""


def unfit_config(config, critic=False) -> str:
    """Why no model of this config can be trained, and the fix; empty for one that can."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as classes

    kind, named = config.model_type, config.architectures or []
    if config.is_encoder_decoder:
        return f"{kind} is an encoder and a decoder; take a model that is a decoder alone"
    if config.get_text_config() is not config:
        return f"{kind} reads more than text; take a text model, or save its language model alone"
    if type(config) not in classes:
        return f"{kind} has no causal language model in transformers; take another family"
    if getattr(config, "quantization_config", None):
        return "its weights are quantised and cannot learn; take the model that was quantised"
    expected = classes[type(config)].__name__
    if not critic and named[:1] != [expected]:
        return f'config.json names the architectures {named}, and only ["{expected}"] can be played'
    return ""


def unlike(config, context: int) -> str:
    """Why the two sides compute other things for a family, and the fix: what was measured and cannot
    be asked of a class."""
    window = getattr(config, "sliding_window", None) or math.inf
    if config.model_type == "qwen3_next":
        return (
            "AutoModel 0.7 reads its last norm otherwise than transformers and vLLM; take another"
        )
    if config.model_type == "cohere2" and context > window:
        return (
            "vLLM 0.30 gives its sliding window one token more than transformers does, so"
            f" --max_context {context} may be {window} at most"
        )
    return ""


def unfit_files(path: str, files: list[str]) -> str:
    """Why the weights that a model has cannot be read, and the fix; empty where they can. Weights
    that lie here are opened."""
    from safetensors import SafetensorError, safe_open

    weights = [name for name in files if name.endswith(".safetensors")]
    if not weights:
        other = "only in another format" if any(".bin" in name for name in files) else "not there"
        return (
            f"its weights are {other}: save them as safetensors (save_pretrained of transformers)"
        )
    if not os.path.isdir(path):
        return ""
    name = "model.safetensors.index.json"
    try:
        index = json.loads(Path(path, name).read_text()) if name in files else {"weight_map": {}}
        for name in sorted({*weights, *index["weight_map"].values()}):
            with safe_open(Path(path, name), "pt"):
                pass
    except (OSError, ValueError, LookupError, SafetensorError) as e:
        return f"{name} cannot be read ({first_line(e)}); fetch or save it again"
    return ""


def vllm_registry() -> str:
    """The source of vLLM's list of models: importing it would take 15 s, and only names are asked."""
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
    return Path(folder, "model_executor/models/registry.py").read_text()


def unfit_class(config, given: list[str]) -> str:
    """Why a model's class cannot be trained with the flags of experts that were given, and the fix;
    empty for one that can.

    The classes are asked: that of transformers, and AutoModel's own where it has one, are built
    without memory for weights.
    """
    try:
        model = empty(config)
        layers = list(model.model.layers)
        attention = not model._is_stateful and all(hasattr(x, "self_attn") for x in layers)
        # vLLM runs what it has no class for on that of transformers, but not every router
        general = model.is_backend_compatible() and not experts_of(config)
        served = general or f'"{type(model).__name__}"' in vllm_registry()
        tail(model)
    except Exception as e:  # of a class that is built otherwise than those that are known
        return (
            f"{config.model_type} is built otherwise than the families that can be trained"
            f" ({first_line(e)}); docs/models.md has a list of them"
        )
    if not attention:
        return (
            f"{config.model_type} has layers that keep a state beside attention, with which trainer"
            " and engine were not seen to agree (vLLM has no float32 for it on a CPU); take another"
            " family"
        )
    if not served:
        return f"vLLM has no class for {config.model_type}; take a family that it serves"
    if not experts_of(config):
        return f"it is dense, it has no experts; drop --{given[0]}" if given else ""
    own = own_class(config)
    try:
        with cuda_means_cpu(), torch.device("meta"):
            options = expert_options("cuda" if torch.cuda.is_available() else "cpu")
            modules = list(own(config, **options).modules()) if own else []
    except Exception as e:
        return (
            f"AutoModel's {own.__name__} cannot be built on this machine ({first_line(e)}); take"
            " another family, or a machine that has it"
        )
    if given and not any(getattr(m, "router_replay", None) is not None for m in modules):
        return f"AutoModel has no class of its own for {config.model_type}, so drop --{given[0]}"
    return ""


def adapters(cfg):
    """AutoModel's description of the adapters of --lora_rank."""
    from nemo_automodel.components._peft.lora import PeftConfig

    return PeftConfig(
        target_modules=["*_proj", "*experts*"], dim=cfg.lora_rank, alpha=cfg.lora_alpha
    )


def build_model(cfg, device: str, path: str = ""):
    """The policy (or the model at `path`, without adapters) as an FSDP2 model with float32 master weights; (model, device meshes)."""
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.distributed.config import (
        DistributedSetup,
        FSDP2Config,
        MoEParallelizerConfig,
    )
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig

    bf16, world = cfg.dtype == "bfloat16", dist.get_world_size()
    config = AutoConfig.from_pretrained(path or cfg.model)
    # sdpa leaves out the soft cap of attention, without a word
    capped = getattr(config, "attn_logit_softcapping", None)
    # AutoModel reads mp_policy=None as bfloat16, so float32 is said with an empty policy
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if cfg.offload == "optimizer" else None
    fsdp = FSDP2Config(mp_policy=policy, offload_policy=offload, defer_fsdp_grad_sync=False)
    experts = MoEParallelizerConfig(mp_policy=policy) if cfg.ep > 1 else None
    parallel = dict(
        parallelism_sizes=ParallelismSizes(ep_size=cfg.ep),
        moe_parallel_config=experts,
        world_size=world,
    )
    setup = DistributedSetup.build(
        fsdp, activation_checkpointing=cfg.checkpoint_activations, **parallel
    )
    how = dict(
        torch_dtype=torch.float32,
        attn_implementation="eager" if capped else "sdpa",
        use_liger_kernel=False,
        distributed_setup=setup,
        trust_remote_code=False,  # AutoModel's default is True for the hub's nvidia/ models
    )
    how["peft_config"] = adapters(cfg) if cfg.lora_rank and not path else None
    if experts_of(config) and own_class(config):
        how |= expert_options(device)
    with cuda_means_cpu() if device == "cpu" else contextlib.nullcontext():
        model = NeMoAutoModelForCausalLM.from_pretrained(path or cfg.model, **how)
    if world == 1 and (
        bf16 or offload
    ):  # AutoModel shards nothing on one rank, and so would neither cast nor move
        model.float()  # but what has adapters, which it leaves in bfloat16, too coarse for small steps
        mesh = dist.init_device_mesh(device, (1,), mesh_dim_names=("dp",))  # export needs a name
        for part in [*model.model.layers.children(), model]:
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for (
        buffer
    ) in model.buffers():  # AutoModel leaves them beside the weights, and FSDP moves only those
        buffer.data = buffer.to(device)
    return model, setup.mesh_context


class Optimizer(torch.optim.Optimizer):
    """torch.optim.Muon for the groups marked muon, AdamW for the others: one optimizer to the schedule and the checkpoints."""

    @torch.no_grad()
    def step(self, closure=None):
        for kind in (torch.optim.AdamW, torch.optim.Muon):
            if groups := [g for g in self.param_groups if g["muon"] == (kind is torch.optim.Muon)]:
                part = kind(
                    groups
                )  # made at each step, on the same groups and state, since loading replaces both
                part.state = self.state
                part.step()


def build_optimizer(cfg, model, lr: float = 0.0):
    """The optimizer and its schedule. One parameter group per device mesh, since foreach kernels cannot mix meshes."""
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            muon = (
                cfg.optimizer == "muon" and p.ndim == 2 and ".layers." in name
            )  # no embedding and no head
            groups.setdefault((str(getattr(p, "device_mesh", None)), muon), []).append(p)
    groups = [{"params": g, "muon": muon} for (_, muon), g in groups.items()]
    settings = dict(
        lr=lr or cfg.lr,
        betas=cfg.betas,
        weight_decay=cfg.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    optimizer = Optimizer(groups, settings)

    def scale(step: int) -> float:
        if step < cfg.warmup:
            return (step + 1) / cfg.warmup
        done = min(1.0, (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup))
        return {
            "constant": 1.0,
            "linear": 1.0 - done,
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        }[cfg.schedule]

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


@dataclass
class Learner:
    """A model that learns, the policy or the critic."""

    replay: Replay
    mesh: Any  # device meshes
    optimizer: torch.optim.Optimizer
    scheduler: Any


def policy_head(model: torch.nn.Module, entropy_gradient=False) -> Head:
    return Head(model.get_output_embeddings(), entropy_gradient, tail(empty(model.config)))


def build_policy(cfg, device: str) -> Learner:
    model, mesh = build_model(cfg, device)
    head = policy_head(model, cfg.entropy_coef != 0)
    return Learner(
        Replay(model, cfg.temperature, head, cfg.balance_coef != 0),
        mesh,
        *build_optimizer(cfg, model),
    )


def build_critic(cfg, device: str) -> Learner:
    """The critic of gae: --critic_model with a scalar head in its lm_head's place."""
    model, mesh = build_model(cfg, device, cfg.critic_model)
    return Learner(
        Replay(model, 1.0, ValueHead(model)), mesh, *build_optimizer(cfg, model, cfg.critic_lr)
    )


def build_reference(cfg, device: str) -> Replay:
    """The frozen model that a KL is to: the reference, or a teacher."""
    model = build_model(cfg, device, cfg.ref_model)[0].requires_grad_(False)
    return Replay(model, cfg.temperature, policy_head(model))


def clip_gradients(cfg, replay: Replay, mesh) -> float:
    """Scale expert gradients for EP, clip all to --max_grad_norm, return the norm before."""
    from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

    world = dist.get_world_size()
    for p in (
        replay.head.parameters() if isinstance(replay.head, ValueHead) else ()
    ):  # FSDP does not know it
        dist.all_reduce(p.grad)
        p.grad /= world
    where = dict(
        device_mesh=mesh.device_mesh, moe_mesh=mesh.moe_mesh, ep_axis_name="ep", dp_group_size=world
    )
    return float(scale_grads_and_clip_grad_norm(cfg.max_grad_norm, [replay.model], **where))


def take(cfg, learner: Learner, lost: torch.Tensor) -> float:
    """An optimizer step on gradients clipped to --max_grad_norm; returns their norm before. Where
    that is not finite, or the loss of
    a rank, whose `lost` is then nan and not 0, the step is left out, and the answer is nan."""
    norm = clip_gradients(cfg, learner.replay, learner.mesh)
    dist.all_reduce(lost)
    norm += float(lost)
    if math.isfinite(norm):
        learner.optimizer.step()
    learner.optimizer.zero_grad()
    return norm
