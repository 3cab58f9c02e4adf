"""Huang et al. 2020 (T-Fixup), section 3.2: initial weights of an encoder-decoder without norms and warm-up.

Linear maps start by Glorot and Bengio 2010 (Xavier), embeddings with variance 1 / D. With N blocks in the encoder and M
in the decoder, the value and output projections of attention and the feed-forward maps are then multiplied by
0.67 N^(-1/4) in the encoder and (9M)^(-1/4) in the decoder, and the embeddings by (9N)^(-1/4).
"""

from dataclasses import replace
from typing import Any

from torch import nn

from xscale.core.errors import Problem
from xscale.core.requirements import kinds, take
from xscale.nn.ffn.ffn import Ffn
from xscale.nn.linear import Embedding
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.mixer.sparse_qkv import SparseQkv
from xscale.nn.module import Module


def init_by_t_fixup(embedding: Embedding, encoder: nn.ModuleDict, decoder: nn.ModuleDict) -> None:
    """Set the initialisers of the table [V, D] and of the linear maps in the blocks of both stacks."""
    _set_std(embedding, "weight", embedding.weight.shape[1] ** -0.5 * (9 * len(encoder)) ** -0.25)
    for blocks, factor in (
        (encoder, 0.67 * len(encoder) ** -0.25),
        (decoder, (9 * len(decoder)) ** -0.25),
    ):
        scaled = {id(linear) for module in blocks.modules() for linear in _scaled(module)}
        for module in blocks.modules():
            if isinstance(module, Module):
                for name in module.linear_maps:
                    outputs, inputs = module.get_parameter(name).shape[-2:]
                    xavier: float = (2 / (inputs + outputs)) ** 0.5
                    _set_std(module, name, xavier * (factor if id(module) in scaled else 1))


def check_mixers(stack: Any, path: str) -> list[Problem]:
    """List why T-Fixup has no scale for the mixers of a stack's config."""
    mixers = [mixer for layer in range(stack.depth) for mixer in stack.block_config(layer).mixers()]
    if not any(issubclass(MIXERS.of(mixer).part, SparseQkv) for mixer in mixers):
        return []
    what = "t_fixup scales the value and output projections of attention, and mixer 'sparse_qkv' has none"
    return [
        Problem(
            f"{path}.block.mixer",
            what,
            choices=kinds(["attention"], f"{path}.block.mixer") + take("normal", key="model.init"),
        )
    ]


def _scaled(module: nn.Module) -> list[nn.Module]:
    """Return the modules below whose linear maps are scaled by the depth."""
    if isinstance(module, Attention):
        return [module.v, module.o]
    return list(module.modules()) if isinstance(module, Ffn) else []


def _set_std(module: Module, name: str, std: float) -> None:
    module.init[name] = replace(module.init[name], std=std)
