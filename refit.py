"""The molt: the trainer's weights go into the engines, versioned, in buckets, verified.

Trainer rank 0 and every engine worker (tensor-parallel ranks too) share one broadcast group, gloo on CPU and nccl on GPU, on a
port that the system chose. A refit pauses the engines, sends buckets of named tensors under their Hugging Face names, compares
what each worker handed to its loader with what was sent, and only then moves the version. Each bucket carries a checksum.
A failure raises `InvariantError` and leaves the engines paused, so no token is sampled from half-updated weights.

The probe, the first request after a refit, is in train.py, since it needs the trainer's forward. Nothing here knows of rollouts.

    pytest tests/test_refit.py
"""

import os
import sys
import threading
import time
from datetime import timedelta

import ray
import torch
import torch.distributed as dist

from agent import InvariantError

TIMEOUT = timedelta(seconds=120)
ALIGN, PAGE = 16, 4096  # bytes: a view of another dtype needs an aligned start; buckets are whole pages


def group(host: str, port: int, rank: int, world: int, device: str, store=None):
    """The refit group; rank 0 is the trainer and owns the store."""
    store = dist.PrefixStore("refit", store or dist.TCPStore(host, port, world, is_master=False, timeout=TIMEOUT))
    if device == "cpu":
        return dist.ProcessGroupGloo(store, rank, world, TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, world, options)


def broadcast(pg, flat: torch.Tensor) -> None:
    """Send `flat` from rank 0 to all, in place. Blocks."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    pg.broadcast([flat], options).wait()


def checksum(flat: torch.Tensor) -> int:
    """A 64-bit sum of a bucket (uint8, a multiple of PAGE bytes) that depends on every word's place, on the device where it lies."""
    words = flat.view(torch.int64).view(-1, PAGE // 8)  # [pages, 512]
    total = 0
    for sums in (words.sum(0), words.sum(1)):
        total += int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
    return total & (1 << 64) - 1


def offsets(dtypes: list[str], shapes: list[list[int]]) -> tuple[list[tuple[int, int]], int]:
    """(start, end) in bytes of each tensor of a bucket, and the bucket's size. Both sides compute it."""
    spans, at = [], 0
    for dtype, shape in zip(dtypes, shapes):
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        spans.append((at, at + size))
        at += -(-size // ALIGN) * ALIGN
    return spans, -(-at // PAGE) * PAGE


def compute_device(model) -> str:
    """The type of the device that a model computes on; with --offload its sharded weights lie in CPU memory."""
    p = next(model.parameters())
    return p.device_mesh.device_type if isinstance(p, dist.tensor.DTensor) else p.device.type


def merged(model):
    """Yield (weight, function that gives it with its adapter added) of every weight that has an adapter."""

    def added(weight, scale, left, right):
        return weight, lambda: weight + scale * (left @ right)

    for m in model.modules():
        if hasattr(m, "lora_A"):
            yield added(m.weight, m.scale, m.lora_B.weight, m.lora_A.weight)
        elif hasattr(m, "lora_down_A"):  # grouped experts [E, in, out]
            yield added(m.gate_and_up_projs, m.scale, m.lora_gate_and_up_A, m.lora_gate_and_up_B)
            yield added(m.down_projs, m.scale, m.lora_down_A, m.lora_down_B)


@torch.no_grad()
def hf_tensors(model, dtype: torch.dtype):
    """Yield (Hugging Face name, full tensor in `dtype`) of every parameter, adapters added to the weights that they belong to; a
    tied head is a parameter only once.

    Gathering a sharded parameter is a collective: every trainer rank iterates, in the same order.
    """
    adapter, sums = getattr(model, "state_dict_adapter", None), dict(merged(model))
    for name, p in model.named_parameters():
        if "lora_" in name:
            continue
        full = sums[p]() if p in sums else p.detach()
        if isinstance(full, dist.tensor.DTensor):
            full = full.to(full.device_mesh.device_type).full_tensor()
        name = name.replace("_checkpoint_wrapped_module.", "")
        for hf_name, tensor in adapter.convert_single_tensor_to_hf(name, full) if adapter else [(name, full)]:
            yield hf_name, tensor.to(dtype)


def buckets(tensors, limit: int):
    """Group (name, tensor) pairs into lists of at most `limit` bytes (a larger tensor has its own)."""
    bucket, size = [], 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def pack(bucket: list) -> tuple[torch.Tensor, dict]:
    """One bucket as (flat uint8 tensor, the description that the workers unpack it by)."""
    meta = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in bucket],
        "shapes": [list(t.shape) for _, t in bucket],
    }
    spans, size = offsets(meta["dtypes"], meta["shapes"])
    flat = torch.zeros(size, dtype=torch.uint8, device=bucket[0][1].device)  # padding has to be equal too
    for (start, end), (_, tensor) in zip(spans, bucket):
        flat[start:end] = tensor.contiguous().flatten().view(torch.uint8)
    return flat, meta | {"checksum": checksum(flat)}


class Refit:
    """The trainer's side. Every rank calls it; only rank 0 has engines and the group."""

    def __init__(self, model, engines: list, engine_tp: int, dtype: torch.dtype, bucket_mb: int, host="127.0.0.1"):
        self.model, self.engines, self.dtype, self.limit = model, engines, dtype, bucket_mb << 20
        if not engines:
            return
        device = compute_device(model)
        world = 1 + len(engines) * engine_tp
        store = dist.TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        joins = [e.join.remote(host, store.port, 1 + i * engine_tp, world, device) for i, e in enumerate(engines)]
        self.group = group(host, store.port, 0, world, device, store)
        ray.get(joins)

    def __call__(self, version: int) -> dict[str, float]:
        """Send all weights and move the engines to `version`, still closed to requests; returns the refit/… metrics.

        Raises InvariantError when a worker received or loaded something else than what was sent.
        """
        start = time.perf_counter()
        try:
            rebuilt = sum(ray.get([e.pause.remote() for e in self.engines]))
            paused = time.perf_counter() - start
            size = self.send()
            ray.get([e.resume.remote(version) for e in self.engines])
        except InvariantError:
            raise
        except (ray.exceptions.RayError, RuntimeError) as e:  # of an engine, or of the group that it has left
            raise InvariantError(f"refit: an engine did not take the weights; the engines stay paused\n{e}") from e
        seconds = time.perf_counter() - start
        speed = {"refit/seconds": seconds, "refit/pause_seconds": paused, "refit/gb_per_s": size / seconds / 1e9}
        return speed | {"refit/rebuilt_tokens": rebuilt} if self.engines else {}

    def send(self) -> int:
        """Send every bucket, compare what arrived; returns the bytes sent."""
        sent, pending = [], []
        for bucket in buckets(hf_tensors(self.model, self.dtype), self.limit):
            if self.engines:
                flat, meta = pack(bucket)
                ray.get(pending)  # the previous bucket was loaded while this one was gathered
                pending = [e.receive.remote(meta) for e in self.engines]
                broadcast(self.group, flat)
                sent.append((len(bucket), flat.numel(), meta["checksum"]))
        ray.get(pending)
        self.verify(sent, ray.get([e.finish.remote() for e in self.engines]))
        return sum(n for _, n, _ in sent)

    def verify(self, sent: list, reports: list) -> None:
        """Compare what was sent with what each worker of each engine handed to its loader."""
        want = [sum(n for n, _, _ in sent), sum(c for _, _, c in sent) & (1 << 64) - 1]
        for i, workers in enumerate(reports):
            for rank, got in enumerate(workers):
                if list(got) != want:
                    told = f"refit: engine {i} worker {rank} loaded {got[0]} tensors with checksum {got[1]:x}"
                    raise InvariantError(f"{told}, sent were {want[0]} with {want[1]:x}; the engines stay paused")


if "vllm" in sys.modules:  # an engine's process; the trainer never imports vllm, which takes 15 s
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Init(base.WeightTransferInitInfo):
        host: str
        port: int
        rank: int  # of the engine's first worker
        world: int
        device: str

    @dataclass
    class Bucket(base.WeightTransferUpdateInfo):
        names: list[str]
        dtypes: list[str]
        shapes: list[list[int]]
        checksum: int

    class Transport(base.WeightTransferEngine):
        """The worker's side, on vLLM's own seam."""

        init_info_cls, update_info_cls = Init, Bucket

        def init_transfer_engine(self, init: Init) -> None:
            threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
            self.group = group(init.host, init.port, init.rank + self.parallel_config.rank, init.world, init.device)

        def start_weight_update(self) -> None:
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None  # else vLLM 0.30 does not repack MoE experts on CPU, without a word
            initialize_layerwise_reload(self.model)
            self.loaded = [0, 0]  # tensors handed to the loader, sum of their buckets' checksums

        def receive_weights(self, bucket: Bucket) -> None:
            spans, size = offsets(bucket.dtypes, bucket.shapes)
            flat = torch.empty(size, dtype=torch.uint8, device=self.device)
            broadcast(self.group, flat)
            if (got := checksum(flat)) != bucket.checksum:
                raise RuntimeError(f"refit: a bucket arrived with checksum {got:x} instead of {bucket.checksum:x}")
            self.load(bucket, flat, spans)

        def load(self, bucket: Bucket, flat: torch.Tensor, spans: list) -> None:
            def tensors():
                for name, dtype, shape, (start, end) in zip(bucket.names, bucket.dtypes, bucket.shapes, spans):
                    self.loaded[0] += 1
                    yield name, flat[start:end].view(getattr(torch, dtype)).view(shape)

            self.model.load_weights(tensors())
            self.loaded[1] = (self.loaded[1] + bucket.checksum) & (1 << 64) - 1

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            for module in self.model.modules():
                if self.device.type == "cpu" and isinstance(module, ParallelLMHead):
                    # a tied head shares the weight but has a packed copy of its own, which vLLM 0.30 leaves stale
                    module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            self.group = None

    def end_with(parent: int) -> None:
        """End this process when its parent has: vLLM's core outlives a killed engine otherwise."""
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    class WorkerExtension:
        """Named in worker_extension_cls, so that each worker imports this module and has the methods below."""

        def refit_report(self) -> list[int]:
            return self.weight_transfer_engine.loaded

    WeightTransferEngineFactory.register_engine("instar", Transport)
