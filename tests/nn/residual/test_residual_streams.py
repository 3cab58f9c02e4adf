"""Residual streams as a family: no shared class names one, and what needs hidden states is refused with others."""

import ast
from pathlib import Path
from typing import Any

import pytest

from xscale.core.config import decode
from xscale.nn.blocks import block, stack
from xscale.nn.depth import PASSES
from xscale.nn.depth.depth_pass import DepthPass
from xscale.nn.model.decoder import Decoder
from xscale.nn.residual import sublayer
from xscale.nn.residual.checks import hidden_state_readers
from xscale.nn.residual.residual_stream import RESIDUALS

LONGEST = 30
SHARED = {"Stack": stack.__file__, "Block": block.__file__, "Sublayer": sublayer.__file__}


def class_of(name: str) -> ast.ClassDef:
    tree = ast.parse(Path(SHARED[name]).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_class_names_no_stream(name: str) -> None:
    words = {node.id for node in ast.walk(class_of(name)) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(class_of(name)) if isinstance(node, ast.Attribute)}
    words |= {node.value for node in ast.walk(class_of(name)) if isinstance(node, ast.Constant)}
    # `parallel` is a key of each entry of a list of sublayers too.
    named = {entry.part.__name__ for entry in RESIDUALS} | set(RESIDUALS.names()) - {"parallel"}
    assert not words & named


@pytest.mark.parametrize("name", SHARED)
def test_the_forward_fits_on_a_screen(name: str) -> None:
    (forward,) = [node for node in class_of(name).body if getattr(node, "name", "") == "forward"]
    assert forward.end_lineno is not None
    assert forward.end_lineno - forward.lineno + 1 <= LONGEST


READERS = hidden_state_readers(PASSES)
WITH: dict[str, dict[str, Any]] = {
    "block.position": {"block": {"position": "learned"}},
    "block.gates": {"block": {"gates": {}}},
    "step_signal": {"step_signal": True},
    "exits": {"exits": {}},
    "halting": {"halting": {}},
    "pooling": {"pooling": {"before": [1]}},
    "mask_decoder": {"mask_decoder": {}},
    "segment_memory": {"segment_memory": {"length": 4}},
    "segment_summary": {"segment_summary": {}},
    "feedback": {"feedback": {"length": 4}},
}


@pytest.mark.parametrize("kind", [entry.name for entry in RESIDUALS if not entry.traits.hidden_states])
@pytest.mark.parametrize("key", READERS)
def test_what_reads_hidden_states_between_blocks_is_refused(key: str, kind: str) -> None:
    changes = WITH[key]
    config: Any = {"depth": 2, **changes, "block": {"residual": kind, **changes.get("block", {})}}
    problems = Decoder.check(decode(Decoder.Config, {"width": 12, "stack": config}), (17, 9), "model")
    form = RESIDUALS.get(kind).part.form
    (problem,) = [problem for problem in problems if problem.what.startswith(form) and problem.path.endswith(key)]
    assert problem.path == f"model.stack.{key}"
    assert problem.choices


def test_every_reader_has_a_case() -> None:
    assert set(WITH) == set(READERS)


def test_a_pass_that_says_nothing_goes_with_hidden_states_alone() -> None:
    class Silent(DepthPass):
        key = "halting"

    assert hidden_state_readers([Silent])["halting"] == "a pass over the depth reads one"
