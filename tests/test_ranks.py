"""The same batch on 1 and 2 gloo ranks, in few and in many micro-batches, dense and a mixture of experts with EP 2."""

import subprocess
import sys

import families
import pytest
import torch

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def result(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("cohere", "gemma2", "mixtral"):
        families.make(name, f"{tiny}/{name}")
    for world in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(world),
        ]
        out = subprocess.run(
            [*command, "tests/ranks.py", tiny, str(folder)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert out.returncode == 0, out.stderr[-3000:]
    return lambda name, world: torch.load(folder / f"{name}-{world}.pt")


def same(a, b, what):
    (key,) = {"loss/policy", "loss/critic"} & a["metrics"].keys()
    assert a["metrics"][key] == pytest.approx(b["metrics"][key], rel=1e-6, abs=1e-7)
    for kind in ("gradients", "weights"):
        assert a[kind].keys() == b[kind].keys()
        for name in a[kind]:
            scale = a[kind][name].abs().max().clamp(min=1e-6)
            gap = ((a[kind][name] - b[kind][name]).abs().max() / scale).item()
            assert gap <= 1e-6 * (1 if kind == "weights" else 3), (
                f"{what}: {kind} of {name} differ by {gap:.1e}"
            )


OTHERS = ["scaled", "capped", "experts-of-transformers"]


@pytest.mark.parametrize(
    "model", ["dense", "tied", "moe", "sequences", "critic", "critic-tied", *OTHERS]
)
def test_two_ranks_give_the_loss_gradient_and_weights_of_one(result, model):
    same(result(model, 1), result(model, 2), f"{model} on 2 ranks")


def test_many_micro_batches_give_the_gradient_of_few(result):
    same(result("dense", 1), result("dense-many", 1), "100 tokens a micro-batch")
    same(result("dense", 1), result("dense-many", 2), "2 ranks, 100 tokens a micro-batch")
    for name in ("sequences", "critic"):
        same(result(name, 1), result(f"{name}-many", 1), f"{name}, 100 tokens a micro-batch")
        same(
            result(name, 1), result(f"{name}-many", 2), f"{name}, 2 ranks, 100 tokens a micro-batch"
        )


def test_the_loss_of_two_ranks_is_that_of_one_to_a_millionth(result):
    """With rewards that do not cancel, so that a relative difference of the sum means something."""
    one, two = (result("dense-positive", world)["metrics"]["loss/policy"] for world in (1, 2))
    assert one == pytest.approx(two, rel=1e-6) and abs(one) > 0.1


def test_every_weight_moved(result):
    """A parameter that no optimizer holds would be the same on any number of ranks."""
    for name in ("dense", "tied", "moe", *OTHERS):
        for world in (1, 2):
            r = result(name, world)
            assert r["gradients"].keys() == r["weights"].keys()
            still = [n for n in r["weights"] if torch.equal(r["weights"][n], r["start"][n])]
            assert not still, f"{name} on {world} ranks: {still} did not move"


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_activations_computed_again_in_backward_give_the_same_gradient(result, model):
    """For a mixture of experts the recompute must route as the forward did, here to experts that the gate would not choose."""
    for world in (1, 2):
        assert result(f"{model}-again", world)["wrapped"] > 0 == result(model, world)["wrapped"]
        same(
            result(model, 1),
            result(f"{model}-again", world),
            f"{model} computed again on {world} ranks",
        )


def test_the_load_balance_of_experts_is_that_of_all_ranks_and_micro_batches(result):
    """Of one rank in one micro-batch: with EP 2, without, and with activations computed again; one of two ranks has a
    micro-batch without rows."""
    one = result("moe-balance", 1)
    for name in ("moe-balance", "moe-balance-many", "moe-balance-again", "moe-balance-ep-1"):
        for world in (1, 2):
            other = result(name, world)
            same(one, other, f"{name} on {world} ranks")
            assert other["metrics"]["loss/balance"] == pytest.approx(
                one["metrics"]["loss/balance"], rel=1e-6
            )
    plain = result("moe", 1)
    for name, gradient in one["gradients"].items():
        if name.endswith("gate.weight"):
            assert (gradient - plain["gradients"][name]).norm() > 0.1 * gradient.norm(), name


@pytest.mark.parametrize("model", ["dense-adapted", "moe-adapted"])
def test_two_ranks_give_the_adapters_of_one_and_send_the_same_sums(result, model):
    one, two = result(model, 1), result(model, 2)
    same(one, two, f"{model} on 2 ranks")
    assert one["sent"].keys() == two["sent"].keys() and not [n for n in one["sent"] if "lora_" in n]
    for name, tensor in one["sent"].items():
        assert torch.allclose(tensor, two["sent"][name], atol=1e-6), name
    for r in (one, two):
        moved = {n for n in r["weights"] if not torch.equal(r["weights"][n], r["start"][n])}
        assert moved == {n for n in r["weights"] if "lora_" in n} == r["gradients"].keys()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model", ["dense-many", "moe-flat", "dense-adapted", "critic-tied"])
def test_weights_that_stay_in_cpu_memory_learn_the_same(result, model, world):
    """The policy has to be that of every group of FSDP's: where it is dropped, a CPU would not show it otherwise."""
    plain, offloaded = result(model, world), result(f"{model}-offloaded", world)
    assert set(plain["homes"].values()) <= {"NoneType"} and set(offloaded["homes"].values()) == {
        "CPUOffloadPolicy"
    }
    assert offloaded["weights"].keys() - offloaded["homes"].keys() == {
        n for n in plain["weights"] if "value_head" in n
    }
    for kind in ("gradients", "weights", "sent"):
        assert plain[kind].keys() == offloaded[kind].keys()
        unequal = [n for n in plain[kind] if not torch.equal(plain[kind][n], offloaded[kind][n])]
        assert not unequal, f"{kind} of {unequal}"


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_goes_to_weights_in_cpu_memory_and_back(result, world):
    for saved, (went_on, resumed) in result("exchanged", world).items():
        assert went_on.keys() == resumed.keys()
        assert all(torch.equal(went_on[n], resumed[n]) for n in went_on), (
            f"saved with --offload {saved}"
        )


def test_muon_steps_on_two_ranks_as_on_one(result):
    """It multiplies whole matrices, of which each rank has a part; in bfloat16, hence the bar."""
    one, two = result("moe-muon", 1), result("moe-muon", 2)
    for name, start in one["start"].items():
        step, gap = one["weights"][name] - start, one["weights"][name] - two["weights"][name]
        assert gap.norm() <= 0.05 * step.norm() and step.norm() > 0, name
