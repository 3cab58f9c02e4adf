"""Activation offload: the numbers without it, what stays on the device, what a plan counts, and what is refused."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import Pool
from tests.parallel.against_one import LENGTH, SEED, SPECIALS, VOCABULARY, alone, asked, batch_of, same
from tests.parallel.models import DENSE, MIXTURE, PAIR
from tests.parallel.test_tensor import refused
from tests.train.tiny import recipe
from xscale.mesh.axes import Degrees
from xscale.mesh.environment import RankInfo
from xscale.mesh.mesh import Mesh
from xscale.nn.blocks.stack import Stack
from xscale.nn.tokens import Stats
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.plan import ParallelPlan
from xscale.parallel.recompute.activation_checkpointing import CheckpointedBlocks
from xscale.parallel.recompute.activation_offload import ActivationOffload
from xscale.planning.simulate_step import simulate_step
from xscale.settings.settings import build_on_meta

KEPT = {"recompute": {"every": 1}}
OFFLOADED = {"recompute": {"every": 1, "offload": True}}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
SEQUENCE = {"mesh": {"tp": 2}, "tensor": {"sequence": True}}


@pytest.mark.parametrize(
    ("model", "ranks", "layouts"),
    [
        (DENSE, 1, [{}]),
        (DENSE, 2, [PIPELINE, SEQUENCE]),
        pytest.param(MIXTURE, 2, [{"zero": {"stage": 3}}, {"mesh": {"ep": 2}}], marks=pytest.mark.long),
        pytest.param(PAIR, 2, [{"mesh": {"cp": 2}}, PIPELINE], marks=pytest.mark.long),
    ],
    ids=["one process", "dense", "mixture", "pairs"],
)
def test_the_numbers_are_those_without_it(
    model: dict[str, Any], ranks: int, layouts: list[dict[str, Any]], pool: Pool
) -> None:
    expected = alone(pool, model)
    for layout in layouts:
        same(pool, expected, ranks, model, {**layout, **OFFLOADED})


def built(parallel: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A model in training on this process, and a batch of it."""
    settings = asked(DENSE, parallel)
    mesh = Mesh(RankInfo(0, 1), Degrees(), torch.device("cpu"))
    plan = ParallelPlan(settings.parallel, settings.precision, LENGTH)
    network = plan.apply(build_on_meta(settings, VOCABULARY), mesh, SEED).train()
    objective = OBJECTIVES.build(settings.objective, SPECIALS, LENGTH, SEED)
    return network, batch_of(objective, 2, 0, 0, Stats(), not settings.data.cross_documents)


def stack_of(network: nn.Module) -> Stack:
    return next(module for module in network.modules() if isinstance(module, Stack))


@pytest.mark.parametrize(("parallel", "stay"), [(KEPT, True), (OFFLOADED, False)], ids=["kept", "offloaded"])
def test_the_inputs_of_blocks_do_not_stay_on_the_device(parallel: dict[str, Any], stay: bool) -> None:
    network, batch = built(parallel)
    outputs: list[weakref.ref[Any]] = []

    def remember(_: nn.Module, __: Any, out: Tensor) -> None:
        outputs.append(weakref.ref(out.untyped_storage()))

    blocks = list(stack_of(network).blocks.values())
    hooks = [block.register_forward_hook(remember) for block in blocks[:-1]]
    loss = network(batch.tokens, batch.targets)
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert len(outputs) == len(blocks) - 1 > 0
    assert [storage() is not None for storage in outputs] == [stay] * len(outputs)
    loss.backward()


def test_copies_are_counted_and_released() -> None:
    network, batch = built(OFFLOADED)
    run = stack_of(network).run_block
    assert isinstance(run, CheckpointedBlocks)
    assert isinstance(run.offload, ActivationOffload)
    loss = network(batch.tokens, batch.targets)
    blocks, size = len(stack_of(network).blocks), batch.tokens.ids.numel() * DENSE["width"] * 8
    assert run.offload.bytes == run.offload.peak_bytes == blocks * size
    loss.backward()
    del loss
    gc.collect()
    assert run.offload.bytes == 0
    assert run.offload.peak_bytes == blocks * size
    network.eval()
    network(batch.tokens, batch.targets)
    assert run.offload.bytes == 0, "evaluation saves nothing"


def test_a_plan_counts_what_leaves_the_device() -> None:
    peaks, host = [], []
    for parallel in (KEPT, OFFLOADED):
        settings = recipe(
            Path("x"),
            model={"kind": "decoder", "width": 64, "stack": {"depth": 6}},
            objective={"kind": "causal"},
            data={"sequence_length": 512},
            parallel=parallel,
        )
        simulated = simulate_step(settings, Degrees(), 0, 1, 260)
        peaks.append(simulated.peak.kinds["activations"])
        host.append(simulated.host_bytes)
    one_input = settings.train.micro_batch_size * 512 * 64 * 4
    assert host == [0, 6 * one_input]
    # The input of the block whose backward runs is on the device.
    assert peaks[0] - peaks[1] >= 4 * one_input


def test_what_cannot_be_offloaded_is_refused() -> None:
    (problem,) = refused(DENSE, 1, recompute={"offload": True})
    assert "parallel.recompute.offload: the inputs of recomputed blocks are offloaded, and every=0" in problem
    (problem,) = refused(DENSE, 1, recompute={"offload": True, "every": 1, "granularity": "selective"})
    assert "granularity=selective keeps the outputs of matmuls on the device" in problem


def test_a_tensor_that_several_blocks_read_is_copied_once() -> None:
    """The stream of attention residuals keeps what each block has written."""
    offload = ActivationOffload()
    x, y = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    first, second = offload.copy_of(x), offload.copy_of(y)
    assert offload.copy_of(x) is first
    assert offload.copy_of(y) is second
    assert (first.requires_grad, second.requires_grad) == (False, True)
    assert offload.bytes == 2 * 24
    del x
    z = torch.zeros(2, 3)
    offload._copies[id(z)] = first  # Such as z has the id that x had.
    assert offload.copy_of(z) is not first


@pytest.mark.gpu
def test_a_gpu_has_the_numbers_and_less_memory() -> None:
    def peak(offload: ActivationOffload | None) -> tuple[list[Tensor], int]:
        generator = torch.Generator("cuda").manual_seed(0)
        weights = [(torch.randn(256, 256, device="cuda", generator=generator) / 16).requires_grad_() for _ in range(16)]
        x = torch.randn(65536, 256, device="cuda", generator=generator).requires_grad_()
        run = CheckpointedBlocks(asked(DENSE, KEPT).parallel.recompute, offload)
        torch.cuda.reset_peak_memory_stats()
        y = x
        for weight in weights:
            block = _Product(weight)
            y = run(block, y)
        y.square().mean().backward()
        torch.cuda.synchronize()
        return [x.grad, *(weight.grad for weight in weights)], torch.cuda.max_memory_allocated()  # type: ignore[list-item]

    kept, most = peak(None)
    offloaded, less = peak(ActivationOffload())
    for one, other in zip(kept, offloaded, strict=True):
        assert torch.equal(one, other)
    assert most - less > 8 * 65536 * 256 * 4, "half of the sixteen inputs of 64 MiB"


class _Product(nn.Module):
    """A block of one product."""

    path = "stack.blocks.0"

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)
