"""Sharing of sublayers among the blocks of a stack (Dehghani et al. 2019; Lan et al. 2020, ALBERT, section 3.1)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from xscale.core.errors import Problem
from xscale.core.requirements import change, part_paths, take
from xscale.nn.depth.depth_pass import DepthPass, StackUse
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import MIXERS, without_scores

Share = Literal["none", "all", "mixer", "ffn"]


def is_shared(sublayer: str, share: Share) -> bool:
    """Whether all blocks have the sublayer of that name in common; cross-attention goes with the mixer."""
    part = sublayer.split("_")[0]
    return share == "all" or (share == "mixer" and part in ("mixer", "cross")) or share == part


def share_sublayers(blocks: Iterable[Any], share: Share) -> dict[str, nn.Module]:
    """Return the sublayers that all blocks have in common, by name: those of the first one.

    The caller owns them, so that their parameters have one name and belong to no block. The blocks only refer to them.
    """
    owner: dict[str, nn.Module] = {}
    for block in blocks:
        for name in [name for name in block.order if is_shared(name, share)]:
            owner.setdefault(name, getattr(block, name))
            delattr(block, name)
            # Not by assignment, which would register the parameters with each block.
            vars(block)[name] = owner[name]
    return owner


class SharedSublayers(DepthPass):
    """The sublayers that all blocks have in common, under their names in a block."""

    key = "shared"
    reads_hidden_states = ""
    used_by_all_blocks = True
    has_static_form = True

    def __init__(self, sublayers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, sublayer in sublayers.items():
            self.add_module(name, sublayer)

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        return check(config, path, cross=use.cross)

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "SharedSublayers | None":
        owner = share_sublayers(blocks.values(), config.share)
        for block in blocks.values() if owner else ():
            # A mixer that is that of other blocks too keeps in the cache what it has for each.
            vars(block)["has_own_cache"] = True
        return cls(owner) if owner else None

    def keep_blocks(self, layers: Sequence[str]) -> None:
        for name in list(self._modules) if not layers else ():
            delattr(self, name)


def check(config: Any, path: str, *, cross: bool) -> list[Problem]:
    """List what a stack of this config, at `path`, cannot share."""
    if config.share == "none":
        return []
    problems = []
    blocks = [config.block_config(layer) for layer in range(config.depth)]
    named = [block.named(cross=cross) for block in blocks]
    shared = [
        {
            name: (block.config_of(entry), entry.factor, entry.parallel)
            for name, entry in names.items()
            if is_shared(name, config.share)
        }
        for block, names in zip(blocks, named, strict=True)
    ]
    if any(sublayers != shared[0] for sublayers in shared):
        what = f"share={config.share} gives all blocks the same sublayers, and the rules give them different ones"
        choices = take([]) + take("none", key=f"{path}.share")
        problems.append(Problem(f"{path}.rules", what, choices=choices))
    for name, (part, *_) in shared[0].items():
        if name.split("_")[0] != "ffn" and MIXERS.of(part).part.score_heads(part) is not None:
            what = f"the shared '{name}' hands on its scores, and is made for the first block, which reads none"
            choices = take("ffn", "none") + without_scores(config)
            problems.append(Problem(f"{path}.share", what, choices=choices))
        key = None if name.split("_")[0] == "ffn" else MIXERS.of(part).part.values_key(part)
        if key is not None:
            what = f"the shared '{name}' mixes values of the first block into its own, and is that of the first block"
            keys = [f"{where}.{key}" for where in part_paths(config, "mixer", part.kind, path)]
            choices = take("ffn", "none") + change(*[(where, None) for where in keys])
            problems.append(Problem(f"{path}.share", what, choices=choices))
    return problems
