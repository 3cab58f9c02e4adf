"""The parts of a model that cannot hide tokens from each other: those of other documents, and padding."""

from typing import Any

from torch import nn

from xscale.core.registry import Family
from xscale.nn.attention.core import CORES, Core
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import MIXERS, Mixer
from xscale.nn.module import Module

FAMILIES: dict[str, Family[Any]] = {"mixer": MIXERS, "core": CORES}
"""Families of the parts that move information between tokens."""


def parts_without_documents(model: nn.Module) -> list[tuple[str, str]]:
    """Return the family and kind of the mixers and cores that cannot mask the documents of a sample."""
    parts: dict[tuple[str, str], None] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            for core, _ in module.core.head_cores(module.query_channels // module.head_width):
                parts[("core", str(core.Config.kind))] = None
        elif isinstance(module, Mixer) and module.Config.kind is not None:
            parts[("mixer", module.Config.kind)] = None
    return [
        (family, kind) for family, kind in parts if not FAMILIES[family].get(kind).traits.documents
    ]


def parts_that_count_padding(
    model: nn.Module, *, is_marked: bool = False, is_packed: bool = False
) -> dict[str, str]:
    """Return the class and path of parts in which tokens compete or are averaged, so that padding would be among them.

    `is_marked`: `Tokens.padding` tells it from text. `is_packed`: it is behind packed documents, and `Tokens.real`
    tells it.
    """
    paths: dict[str, str] = {}
    for path, module in model.named_modules():
        leaves_out = isinstance(module, Module) and (
            (is_marked and module.averages_text) or (is_packed and module.averages_packed_text)
        )
        averages = isinstance(module, Module) and module.averages_tokens and not leaves_out
        if averages or (not is_marked and isinstance(module, Core) and module.traits.running_stats):
            paths.setdefault(type(module).__name__, path)
    return paths
