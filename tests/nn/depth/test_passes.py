"""The list of passes over the depth: the stack names none of them, and the guide to adding one names real files."""

import ast
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, ready, tokens
from xscale.nn import depth
from xscale.nn.blocks import stack
from xscale.nn.blocks.block import BlockConfig
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.depth import PASSES, DepthConfig
from xscale.nn.depth.depth_pass import DepthPass, DepthState
from xscale.nn.depth.halting import Halting, HaltingConfig
from xscale.nn.ffn.ffn import Dense
from xscale.nn.mixer.attention import Attention

ROOT = Path(__file__).parents[3]
SMALL = BlockConfig(mixer=Attention.Config(heads=2), ffn=Dense.Config(hidden=8))
LONGEST = 30
"""Lines of `Stack.forward`, with its signature and docstring."""


def class_of(name: str, file: str | None = stack.__file__) -> ast.ClassDef:
    assert file is not None
    classes = [node for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.ClassDef)]
    return next(node for node in classes if node.name == name)


def test_each_pass_has_a_name_of_its_own() -> None:
    keys = [part.key for part in PASSES]
    assert len(set(keys)) == len(keys)
    assert not set(keys) & {"blocks", "norm", "position", "core_tables", "position_tables"}


def test_the_stack_names_no_pass() -> None:
    words = {node.id for node in ast.walk(class_of("Stack")) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(class_of("Stack")) if isinstance(node, ast.Attribute)}
    named = {part.__name__ for part in PASSES} | {part.key for part in PASSES} | set(DepthConfig.model_fields)
    assert not words & named


def test_the_forward_fits_on_a_screen() -> None:
    (forward,) = [node for node in class_of("Stack").body if getattr(node, "name", "") == "forward"]
    assert forward.end_lineno is not None
    assert forward.end_lineno - forward.lineno + 1 <= LONGEST


def test_the_guide_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("### Adding a depth pass") :].split("\n## ")[0]
    named = re.findall(r"`((?:xscale|tests|configs)/[\w/.]*)`", section)
    assert "xscale/nn/depth/__init__.py" in named
    assert [path for path in named if not (ROOT / path).exists()] == []


class Told(DepthPass):
    """Writes down each hook with the number of the block, and adds 1 to what each block reads."""

    key = "told"
    calls: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def build(cls, *_: Any) -> "Told":
        return cls()

    def start(self, state: DepthState) -> None:
        self.calls.append(("start", state.layer))

    def before_block(self, state: DepthState) -> None:
        self.calls.append(("before", state.layer))
        state.x = state.x + 1

    def after_block(self, state: DepthState) -> None:
        self.calls.append(("after", state.layer))
        state.kept[self.key] = state.before

    def finish(self, state: DepthState) -> None:
        self.calls.append(("finish", state.layer))

    def map_output(self, x: Tensor, state: DepthState) -> Tensor:
        self.calls.append(("output", state.layer))
        return torch.stack((x, state.kept[self.key]))


def test_hooks_are_called_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "PASSES", (*PASSES, Told))
    config, x, about = StackConfig(depth=2, block=SMALL), drawn(2, 5, 8), tokens(5)
    made: Any = ready(Stack(config, dims(width=8)))
    Told.calls.clear()
    out, before_last = made(x, about)
    assert Told.calls == [
        ("start", -1), ("before", 0), ("after", 0), ("before", 1), ("after", 1), ("finish", 1), ("output", 1),
    ]  # fmt: skip
    first, second = made.blocks.values()
    assert close(before_last, first(x + 1, about))
    assert close(out, made.norm(second(before_last + 1, about)))


def test_a_stack_is_asked_for_its_passes() -> None:
    plain = Stack(StackConfig(depth=2, block=SMALL), dims(width=8))
    halts = Stack(StackConfig(depth=2, block=SMALL, halting=HaltingConfig()), dims(width=8))
    assert plain.passes() == []
    assert plain.find(Halting) is None
    assert [part.key for part in halts.passes()] == ["halting"]
    assert halts.find(Halting) is halts.get_submodule("halting")
    assert {name for name, _ in halts.named_parameters()} >= {"halting.weight", "halting.bias"}
    assert depth.PASSES is PASSES
