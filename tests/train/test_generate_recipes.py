"""Every recipe whose model can generate does so by the command, and from its cache what it computes without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.golden.shrink import RECIPES, VARIANTS, small
from xscale.cli.main import app
from xscale.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer
from xscale.generate import decoders
from xscale.generate import generate as generation
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.materialize import materialize
from xscale.nn.model.model import MODELS
from xscale.objective.objective import OBJECTIVES
from xscale.parallel.precision import precision
from xscale.recipe import Recipe, read
from xscale.run.init_run import create_run
from xscale.settings.settings import build_on_meta

TOKENS = 6
PROMPT = "Of the sentences"
QUICK = ("evolved-transformer", "quickstart")
ALL_AT_ONCE = {"disco"}
"""Recipes whose model writes all tokens of a target at once."""


def can_generate(file: Path) -> bool:
    """Whether `xscale generate` writes text with a run of the recipe."""
    settings = read(file, [])[0]
    return bool(MODELS.of(settings.model).traits.decode) or file.stem in ALL_AT_ONCE


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.long, pytest.mark.sampled(4)]


CASES = [
    pytest.param(file, id=file.stem, marks=marks(file.stem)) for file in [*RECIPES, *VARIANTS] if can_generate(file)
]


def run_of(file: Path, folder: Path) -> tuple[Recipe, nn.Module, Tokenizer]:
    """A run at step 0 of a small model whose weights are random: none is 0 or 1."""
    settings = small(file, folder)
    tokenizer: Tokenizer = TOKENIZERS.build(settings.data.tokenizer, folder)
    model = build_on_meta(settings, tokenizer.vocabulary)
    materialize(model, settings.run.seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).abs())
    create_run(settings, model, folder / "run", tokenizer=tokenizer)
    precision.apply(model, torch.float64, torch.float64)
    return settings, model, tokenizer


def logits_of(
    settings: Recipe, model: nn.Module, tokenizer: Tokenizer, decoding: decoders.Decoding = generation.AUTO
) -> list[Tensor]:
    """The logits [V] of each token that is generated."""
    objective: Any = OBJECTIVES.build(
        settings.objective, generation.special_tokens_of(tokenizer), settings.data.source_length, 0
    )
    ids, source = torch.tensor(objective.prompt_of(tokenizer.encode(PROMPT))), None
    if MODELS.of(settings.model).traits.source:
        ids, source = torch.tensor([objective.start]), torch.tensor(objective.source_of(tokenizer.encode(PROMPT)))
    seen: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, inputs, logits: seen.append(logits[0, -1].clone()))
    prefix = OBJECTIVES.of(settings.objective).traits.prefix
    generation.generate(model, ids, TOKENS, end=-1, temperature=0.0, source=source, prefix=prefix, decoding=decoding)
    hook.remove()
    return seen


@pytest.mark.parametrize("file", CASES)
def test_a_recipe_generates(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, model, tokenizer = run_of(file, tmp_path)
    for options in (["--temperature", "0"], ["--beams", "2"]):
        if file.stem in ALL_AT_ONCE and "--beams" in options:
            continue
        command = ["generate", str(tmp_path / "run"), "--prompt", PROMPT, "--tokens", "5", *options]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.exception
    if file.stem in ALL_AT_ONCE:
        return
    # A token at a time never fills an expert, so generation drops nothing.
    monkeypatch.setattr(Moe, "capacity_factor", lambda module, tokens: None)
    cached = logits_of(settings, model, tokenizer)
    if not list(decoders.why_not_static(model)):
        static = logits_of(settings, model, tokenizer, decoders.Decoding(cache="static"))
        # The first step is computed once more before, to see what it writes.
        del static[1]
        compare(static, cached)
    monkeypatch.setattr(decoders, "incremental", lambda model: False)
    full = logits_of(settings, model, tokenizer)
    compare(cached, full)


def compare(logits: list[Tensor], expected: list[Tensor]) -> None:
    assert len(logits) == len(expected) == TOKENS
    for token, (one, other) in enumerate(zip(logits, expected, strict=True)):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9), (token, (one - other).abs().max())


def test_every_recipe_that_can_generate_is_there() -> None:
    assert len(CASES) > 100
