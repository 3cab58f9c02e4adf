"""Every key of every convertible model, set to something else: it is refused, or it maps with all of its weights."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.convert.hf.models import LENGTH, SECTIONS, VOCABULARY, drawn
from xscale.convert.hf.architecture import Architecture
from xscale.convert.hf.compare import build
from xscale.convert.hf.registry import ModelSizes, model_of, select_architecture
from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens

SIZES = ModelSizes(VOCABULARY, LENGTH)
PLACEMENTS = ("pre", "post", "sandwich")
ALONE = ("eval_capacity_factor",)
"""Keys that a run's check refuses by itself, so that no checkpoint has it."""


def others(key: str, value: Any) -> list[Any]:
    """Other values, of the same type; of what is off, all that could be on."""
    if value is None:
        return [True, 4, 0.5, "rms", "gelu", {"kind": "rms"}]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value + (1 if isinstance(value, int) else 0.5)]
    return [*PLACEMENTS] if key == "residual" else []


def changes(section: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in section.items():
        if key not in ALONE:
            yield from (((*at, key), other) for other in others(key, value) if other != value)
        if isinstance(value, dict):
            yield from changes(value, (*at, key))


def changed(section: dict[str, Any], at: tuple[str, ...], value: Any) -> Any:
    """The model with this key set; None where no model is like that."""
    whole = copy.deepcopy(section)
    inner = whole
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    try:
        model = model_of(whole)
        with torch.device("meta"):
            return model, MODELS.build(model, VOCABULARY, LENGTH)
    except (ConfigError, AssertionError, RuntimeError):
        return None


def logits(architecture: Architecture, model: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    built = build(architecture.without_capacity(model), SIZES, weights)
    ids = torch.arange(1, LENGTH + 1)[None] * 7 % VOCABULARY
    source = Tokens.from_ids(ids.flip(1)) if architecture.kind == "encoder_decoder" else None
    with torch.no_grad():
        found: torch.Tensor = built(Tokens.from_ids(ids), source=source)
    return found


def tensors(architecture: Architecture, model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Files of an export."""
    written = {}
    for mapped in architecture.weights(model, SIZES):
        theirs = mapped.transform.forward([weights[name] for name in mapped.xscale_names])
        written |= dict(zip(mapped.external_names, theirs, strict=True))
    return written


def same_tensors(
    architecture: Architecture, changed: Any, first: Architecture, model: Any, weights: dict[str, torch.Tensor]
) -> bool:
    """Whether both models have these parameters, and write the same tensors for them."""
    names = [{name for one in kind.weights(made, SIZES) for name in one.xscale_names} for kind, made in
             ((architecture, changed), (first, model))]  # fmt: skip
    if names[0] != names[1]:
        return False
    before, after = tensors(first, model, weights), tensors(architecture, changed, weights)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SECTIONS)
def test_each_key_is_refused_or_maps(name: str) -> None:
    wanted, given = SECTIONS[name]
    model = model_of(given)
    section, weights = encode(model), drawn(given)
    first, data = select_architecture(model, SIZES, wanted)
    expected = logits(first, model, weights)
    refused = mapped = 0
    for at, value in changes(section):
        made = changed(section, at, value)
        if made is None:
            continue
        try:
            found, other = select_architecture(made[0], SIZES, wanted)
        except ConfigError as error:
            refused += all(one.advice for one in error.problems)
            continue
        covered = {one for weight in found.weights(made[0], SIZES) for one in weight.xscale_names}
        assert covered == {one for one, _ in made[1].named_parameters()}, (at, value)
        if other == data and same_tensors(found, made[0], first, model, weights):
            # Nothing there says it, so nothing may follow from it.
            apart = (logits(found, made[0], weights) - expected).abs().max()
            assert apart < 1e-5, (at, value, apart)
        mapped += 1
    assert refused > 3
    assert mapped > 3
