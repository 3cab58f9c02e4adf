"""Law 7: a parameter has one name on every layout, and its axes come from the closed vocabulary."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.families import each
from xscale.core.registry import Entry
from xscale.nn.axes import AXES
from xscale.nn.init import ONES
from xscale.nn.model.model import MODELS, Model
from xscale.nn.module import Module, name_modules, parameter_axes

VOCABULARY = {"vocab", "heads", "kv_heads", "ffn", "experts", "width", "depth", "tokens", "batch", "state"}


def built(entry: Entry[Any]) -> Model:
    with torch.device("meta"):
        model: Model = entry.part(entry.part.Config(width=16), 32, 12)
    return model


def faults(model: nn.Module) -> list[str]:
    """Parameters without a declaration, with axes that do not fit, and state that no parameter name covers."""
    violations = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, Module) or name not in module.axes:
                shared = any(parameter is other for other in declared(model))
                if not shared:
                    violations.append(f"{path}.{name}: nobody said what its axes are")
            elif len(module.axes[name]) != parameter.dim() or not set(module.axes[name]) <= set(AXES):
                violations.append(f"{path}.{name}: axes {module.axes[name]} do not fit {tuple(parameter.shape)}")
        # A buffer has no axes and no start of its own: a layout could neither cut nor fill it.
        violations += [f"{path}.{name}: a buffer" for name, _ in module.named_buffers(recurse=False)]
        if isinstance(module, Module) and module.path != path:
            violations.append(f"{path}: thinks it is called '{module.path}'")
    return violations


def declared(model: nn.Module) -> list[nn.Parameter]:
    return [
        module.get_parameter(name) for module in model.modules() if isinstance(module, Module) for name in module.axes
    ]


@each(MODELS)
def test_every_parameter_is_declared(entry: Entry[Any]) -> None:
    model = built(entry)
    assert faults(model) == []
    assert parameter_axes(model).keys() == dict(model.named_parameters()).keys()


@each(MODELS)
def test_a_stage_keeps_its_blocks_names(entry: Entry[Any]) -> None:
    whole, stage = built(entry), built(entry)
    for module in list(stage.modules()):
        if isinstance(module, nn.ModuleDict):
            del module["0"]
    name_modules(stage)
    kept = {name for name in parameter_axes(whole) if not re.search(r"\bblocks\.0\.", name)}
    assert set(parameter_axes(stage)) == kept
    assert any("blocks.1." in name for name in kept)
    assert faults(stage) == []


def test_the_vocabulary_is_closed() -> None:
    assert set(AXES) == VOCABULARY
    with pytest.raises(AssertionError, match="unknown axis"):
        Module().declare("weight", (2,), ("channels",), ONES)  # type: ignore[arg-type]


class Sly(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Hoarder(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))


@pytest.mark.parametrize("module", [Sly, Hoarder])
def test_an_undeclared_parameter_is_seen(module: type[Module]) -> None:
    assert len(faults(module())) == 1
