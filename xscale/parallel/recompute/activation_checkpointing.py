"""Activation checkpointing (recompute, Chen et al. 2016): discard a block's activations, recompute them in backward.

With `granularity: selective` the outputs of its matmuls are saved, and only what is between them is recomputed. With
`offload` the input of a recomputed block waits in CPU memory (`activation_offload`).

The saved outputs are those of products with a weight, fused attention and the experts' products (JAX calls that policy
`dots_with_no_batch_dims_saveable`), not of a product of two activations, such as scores [T, S], which is larger than
both. Torch's own selective checkpoints require that the recomputation runs exactly the operators of the forward, and
the hooks of fully_shard run more or fewer of them in backward.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from xscale.core.errors import Problem
from xscale.core.requirements import change, take
from xscale.mesh import torch_private
from xscale.mesh.torch_private import (
    DispatchKey,
    TorchDispatchMode,
    _is_alias_of,
    _SetExcludeDispatchKeyGuard,
    tree_map_only,
)
from xscale.nn.blocks.block import Block
from xscale.nn.blocks.stack import Stack
from xscale.nn.forward import Choices
from xscale.nn.module import substitute
from xscale.nn.tokens import Tokens
from xscale.parallel.config import ParallelConfig, RecomputeConfig
from xscale.parallel.recompute.activation_offload import ActivationOffload

SAVED_OPS = frozenset(
    {
        *(f"aten::{name}" for name in ("mm", "addmm", "_scaled_mm", "_grouped_mm")),
        *(
            f"aten::_scaled_dot_product_{name}"
            for name in (
                "flash_attention",
                "flash_attention_for_cpu",
                "efficient_attention",
                "cudnn_attention",
            )
        ),
        *(
            f"xscale::{name}"
            for name in (
                "block_sparse_attention",
                "packed_attention",
                "varlen_attention",
                "linear_attention",
            )
        ),
        *(f"xscale::{name}" for name in ("grouped_gemm", "grouped_plain", "grouped_gated")),
        # What `packed_attention` calls on a GPU, outside of its operator: FlashAttention-3 and 2, and torch's copy.
        *(
            "flash_attn_3::_flash_attn_forward",
            "flash_attn_3::fwd",
            "flash_attn::_flash_attn_varlen_forward",
        ),
        "torch_attn::_varlen_attn",
    }
)
"""Operators whose outputs are saved, by name."""
Output = TypeVar("Output")


def save_matmul_outputs() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a block's forward and of its recomputation: `context_fn` of torch.utils.checkpoint."""
    saved: deque[tuple[str, Any]] = deque()
    return _InterceptMatmuls(
        lambda name, run: _save(saved, name, run),
        lambda tensor: _allow_view_in_place(saved, tensor),
    ), _InterceptMatmuls(lambda name, _: _load(saved, name), lambda _: None)


class _InterceptMatmuls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces each call of a saved operator by `result(name, call)`; runs every other operator.

    `view_in_place` is told each tensor whose shape an operator such as `squeeze_` changes.
    """

    def __init__(
        self,
        result: Callable[[str, Callable[[], Any]], Any],
        view_in_place: Callable[[Tensor], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result = result
        self.view_in_place = view_in_place
        self.is_paused = False
        """Whether saved operators run as others do, since the output of a function that calls them is saved."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name
        if name in SAVED_OPS and not self.is_paused:
            return self.result(name, lambda: func(*args, **(kwargs or {})))
        if name.endswith("_") and torch.Tag.inplace_view in func.tags:
            self.view_in_place(args[0])
        return func(*args, **(kwargs or {}))


def save_output(name: str, run: Callable[[], Output]) -> Output:
    """Return `run()`; within a selective checkpoint, save its output in place of those of the operators in it.

    For a function that reduces the outputs of several saved operators to one, and sends messages between them.
    """
    active = [
        mode
        for mode in torch_private._get_current_dispatch_mode_stack()
        if isinstance(mode, _InterceptMatmuls)
    ]
    if not active or active[-1].is_paused:
        return run()
    mode = active[-1]
    mode.is_paused = True
    try:
        output: Output = mode.result(name, run)
    finally:
        mode.is_paused = False
    return output


class _SavedOutput:
    """An operator's output, guarded against in-place writes."""

    def __init__(self, output: Tensor) -> None:
        # Shares the version counter of `output`, as a view above autograd does.
        with _SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
            self.output = output.detach()
        self.version = self.output._version

    def allow_view_in_place(self, tensor: Tensor) -> None:
        """Expect one more version if an operator changes the shape of `tensor` in place, and it is this output."""
        if _is_alias_of(tensor, self.output):
            self.version += 1

    def value(self) -> Tensor:
        assert self.output._version == self.version, "a saved matmul output was modified in place"
        return self.output


def _save(saved: deque[tuple[str, Any]], name: str, run: Callable[[], Any]) -> Any:
    output = run()
    saved.append((name, tree_map_only(Tensor, _SavedOutput, output)))
    return output


def _allow_view_in_place(saved: deque[tuple[str, Any]], tensor: Tensor) -> None:
    """Let an operator change the shape of a saved output, and none of its numbers.

    `torch.matmul` of a vector and a matrix is `mm`, and `squeeze_` of what it returns.
    """
    for _, output in saved:
        tree_map_only(
            _SavedOutput, lambda saved_output: saved_output.allow_view_in_place(tensor), output
        )


def _load(saved: deque[tuple[str, Any]], name: str) -> Any:
    forward_name, output = saved.popleft()
    assert forward_name == name, (
        f"the forward ran {forward_name} where its recomputation runs {name}"
    )
    return tree_map_only(_SavedOutput, _SavedOutput.value, output)


def check(parallel: ParallelConfig, path: str) -> list[Problem]:
    """Return problems of the settings; `path` is that of section `parallel`."""
    config, where = parallel.recompute, f"{path}.recompute"
    every, uncompiled = take(1, key=f"{where}.every"), take(False, key=f"{path}.compile")
    problems = []
    if config.granularity != "full" and not config.every:
        what = (
            f"granularity={config.granularity} needs recomputed blocks, and every=0 recomputes none"
        )
        problems.append(Problem(f"{where}.granularity", what, choices=take("full") + every))
    elif config.granularity != "full" and parallel.compile:
        what = "torch.compile chooses by itself what compiled blocks save for backward"
        problems.append(Problem(f"{where}.granularity", what, choices=take("full") + uncompiled))
    if config.offload and not config.every:
        what = "the inputs of recomputed blocks are offloaded, and every=0 recomputes none"
        problems.append(Problem(f"{where}.offload", what, choices=take(False) + every))
    elif config.offload and config.granularity != "full":
        what = f"granularity={config.granularity} keeps the outputs of matmuls on the device, far more than the inputs"
        problems.append(
            Problem(
                f"{where}.offload",
                what,
                choices=take(False) + take("full", key=f"{where}.granularity"),
            )
        )
    return [*problems, *_check_regather(parallel, where)]


def _check_regather(parallel: ParallelConfig, where: str) -> list[Problem]:
    config, problems = parallel.recompute, []
    if not config.regather_sequence_parallel_input:
        return []
    key_path = f"{where}.regather_sequence_parallel_input"
    if parallel.mesh.tp == 1 or not parallel.tensor.sequence:
        what = "no activations are all-gathered without sequence parallelism"
        sharded = change(("parallel.mesh.tp", 2), ("parallel.tensor.sequence", True))
        problems.append(Problem(key_path, what, choices=take(False) + sharded))
    if config.every == 1:
        what = "every block is recomputed, so none saves gathered activations"
        problems.append(
            Problem(key_path, what, choices=take(False) + take(0, 2, key=f"{where}.every"))
        )
    if parallel.compile:
        what = "torch.compile chooses by itself what compiled blocks save for backward"
        problems.append(
            Problem(key_path, what, choices=take(False) + take(False, key="parallel.compile"))
        )
    return problems


def is_recomputed(path: str, config: RecomputeConfig) -> bool:
    """Return whether the block that contains the module at `path`, such as stack.blocks.3.mixer, is recomputed.

    A sublayer that blocks share is where any block is.
    """
    if "blocks." not in path:
        return config.every > 0
    layer = int(path.split("blocks.")[1].split(".")[0])
    return config.every > 0 and layer % config.every == 0


def apply(model: nn.Module, config: RecomputeConfig) -> int:
    """Substitute how the stacks run those blocks; return how many blocks are recomputed."""
    if config.every == 0:
        return 0
    count = 0
    # One for all stacks, whose backwards follow each other.
    offload = ActivationOffload() if config.offload else None
    for stack in model.modules():
        if isinstance(stack, Stack):
            substitute(stack, "run_block", CheckpointedBlocks(config, offload))
            count += sum(int(layer) % config.every == 0 for layer in stack.blocks)
    return count


class CheckpointedBlocks:
    """Runs the blocks of a stack, of which some are recomputed in backward."""

    def __init__(self, config: RecomputeConfig, offload: ActivationOffload | None) -> None:
        """`offload` keeps the inputs of the recomputed blocks; None: the device does."""
        self.config = config
        self.offload = offload
        self.contexts = (
            save_matmul_outputs if config.granularity == "selective" else noop_context_fn
        )

    def __call__(self, block: Block, *inputs: Any) -> Any:
        if not is_recomputed(block.path, self.config) or not block.training:
            return block(*inputs)
        forward = with_state_of_forward(block, inputs)

        checkpointed = partial(checkpoint, use_reentrant=False, context_fn=self.contexts)
        if self.offload is None or not torch.is_grad_enabled():
            return checkpointed(forward, *inputs)
        return self.offload.run(checkpointed, forward, *inputs)


def with_state_of_forward(run: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return `run` for a forward on `inputs` and its recomputations, which start from the same shared values and
    statistics, repeat its choices, and leave the statistics as they were.

    A compiled block takes another graph, which saves other tensors, when values are already there.
    """
    tokens = [argument for argument in inputs if isinstance(argument, Tokens)]
    shared = [(about.shared_values, about.shared_values.copy()) for about in tokens]
    # The tokens of a decoder and of its source may have the same statistics.
    stats = {
        id(stats): stats for about in tokens if (stats := about.forward.stats) is not None
    }.values()
    before = [(collected, collected.copy()) for collected in stats]
    choices = Choices()
    is_recomputation = False

    def forward(*given: Any) -> Any:
        nonlocal is_recomputation
        inputs = _with_choices(given, choices)
        for values, state in shared:
            values.reset(state)
        if not is_recomputation:
            is_recomputation = True
            return run(*inputs)
        choices.begin_recomputation()
        after = [collected.copy() for collected in stats]
        for collected, observations in before:
            collected.reset(observations)
        try:
            return run(*inputs)
        finally:
            for collected, observations in zip(stats, after, strict=True):
                collected.reset(observations)

    return forward


def _with_choices(inputs: Sequence[Any], choices: Choices) -> list[Any]:
    """Return `inputs` with tokens that have these choices; tokens that come twice stay one object."""
    copies = {
        id(argument): argument.with_forward(choices=choices)
        for argument in inputs
        if isinstance(argument, Tokens)
    }
    return [copies.get(id(argument), argument) for argument in inputs]
