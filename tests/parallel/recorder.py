"""Messages that fully_shard sends, in order, among the blocks that compute."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from xscale.nn.blocks.block import Block

KINDS = {
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce",
    "all_reduce": "sum",
}
"""torch's function -> what is written down; 2.13 has new names for two of them."""


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[str]]:
    """A list that fills: 'gather', 'reduce', 'sum', and the path of each block as its forward begins."""
    events: list[str] = []
    inside: list[str] = []

    def noting(true: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            # One name may call the other.
            if not inside:
                events.append(kind)
            inside.append(kind)
            try:
                return true(*given, **named)
            finally:
                inside.pop()

        return call

    def begun(block: nn.Module, _: Any) -> None:
        assert isinstance(block, Block)
        events.append(block.path)

    with ExitStack() as stack:
        for name, kind in KINDS.items():
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, noting(getattr(dist, name), kind)))
        for module in model.modules():
            if isinstance(module, Block):
                stack.callback(module.register_forward_pre_hook(begun).remove)
        yield events
