"""Compare the logits of two implementations on random token ids, which verifies a conversion."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale.convert.hf.architecture import Architecture, ModelSizes
from xscale.convert.hf.mxfp4 import loading_options
from xscale.core.foreign import foreign_errors
from xscale.nn.materialize import replace_parameters
from xscale.nn.model.model import MODELS, Model
from xscale.nn.tokens import Tokens

TOLERANCE = 1e-5
"""Largest logit difference, in float32, that a conversion of a model with little rounding may have."""
ROUNDINGS = 4
"""Multiple of a model's own float32 rounding that is no difference: each implementation rounds in an order of its
own."""
LARGEST_ROUNDING = 1e-4
"""Rounding, as a fraction of the largest logit, beyond which it is not rounding: a router chose other experts."""
SEQUENCES, LENGTH = 2, 256


@dataclass(frozen=True)
class LogitComparison:
    """The difference between the logits of both implementations for the same ids."""

    difference: float
    """Largest absolute difference of two logits; NaN if one is not a number."""
    largest: float
    """Largest absolute logit."""
    rounding: float
    """Largest difference between xscale's logits in float32 and in float64: the effect of rounding alone."""
    tokens: int
    loading_errors: tuple[str, ...] = ()
    """Tensors that the library reports as missing or of a wrong shape."""

    def sentence(self, tolerance: float) -> str:
        return (
            f"largest logit difference {self.difference:.3g} over {self.tokens} random tokens (logits up to "
            f"{self.largest:.3g}, float32 rounding {self.rounding:.3g}, tolerance {self.scaled(tolerance):.3g})"
        )

    def scaled(self, tolerance: float) -> float:
        """Return the tolerance of this model: larger by as much as `ROUNDINGS` of its rounding exceed TOLERANCE."""
        rounding = min(self.rounding, LARGEST_ROUNDING * self.largest)
        return tolerance * max(1.0, ROUNDINGS * rounding / TOLERANCE)

    def within(self, tolerance: float) -> bool:
        agrees = math.isfinite(self.difference) and self.difference <= self.scaled(tolerance)
        return agrees and not self.loading_errors


def compare_logits(
    config: Model.Config,
    sizes: ModelSizes,
    weights: Mapping[str, Tensor],
    architecture: Architecture,
    folder: Path,
) -> LogitComparison:
    """Compare xscale's model with `weights` to the model that the library loads from `folder`; CPU, float32."""
    with foreign_errors(folder, "transformers itself cannot load the model"):
        hf_model, faults = load(architecture, folder, architecture.loader_of(config))
    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCES, min(sizes.length, max(LENGTH, 2 * architecture.attention_span(config))))
    ids, source = (
        _ids(shape, sizes.vocabulary, hf_model.config.pad_token_id, generator) for _ in range(2)
    )
    encoder_decoder = architecture.kind == "encoder_decoder"
    model = build(architecture.without_capacity(config), sizes, weights, architecture)
    inputs = (
        {"input_ids": source, "decoder_input_ids": ids} if encoder_decoder else {"input_ids": ids}
    )
    tokens, head = Tokens.from_ids(ids), None
    if getattr(config, "sentence_head", None) is not None:
        head = architecture.sentence_head
        types = (torch.arange(ids.shape[1]) >= ids.shape[1] // 2).long().expand_as(ids)
        if getattr(config, "token_types", 0) > 1:
            inputs, tokens = inputs | {"token_type_ids": types}, Tokens.from_ids(ids, types=types)
    read = Tokens.from_ids(source) if encoder_decoder else None
    with torch.no_grad():
        fix = "Sizes with which transformers runs would map."
        with foreign_errors(folder, "transformers itself cannot run the model", fix):
            outputs = hf_model(**inputs, **architecture.inputs(config, ids))
        del hf_model
        if head is None:
            hf_logits = outputs.logits
            logits, exact = model(tokens, source=read), model.double()(tokens, source=read)
            if architecture.class_head is not None:
                logits, exact = map(architecture.class_head.logits, (logits, exact))
        else:
            hf_logits = _concatenate_logits(outputs.prediction_logits, outputs[head.output])
            logits, exact = _with_classes(model, tokens), _with_classes(model.double(), tokens)
    return LogitComparison(
        _max_difference(logits, hf_logits),
        logits.abs().max().item(),
        _max_difference(logits, exact),
        ids.numel(),
        faults,
    )


def _with_classes(model: Any, tokens: Tokens) -> Tensor:
    """Return the logits of all tokens and those of the class of each sequence, joined."""
    return _concatenate_logits(
        model(tokens), model.head.sentence(model.stack(model.embed(tokens), tokens))
    )


def _concatenate_logits(logits: Tensor, classes: Tensor) -> Tensor:
    """[B, T, V] and [B, C] -> [B * (T * V + C)]."""
    return torch.cat((logits.flatten(1), classes), 1).flatten()


def compare_decoder_logits(
    config: Model.Config,
    sizes: ModelSizes,
    weights: Mapping[str, Tensor],
    logits: Callable[[Tensor], Tensor],
) -> LogitComparison:
    """Compare xscale's decoder with `weights` to `logits` (ids [B, T] -> [B, T, V]); CPU, float32."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        sizes.vocabulary, (SEQUENCES, min(sizes.length, LENGTH)), generator=generator
    )
    model = build(config, sizes, weights)
    with torch.no_grad():
        other = logits(ids)
        xscale_logits = model(Tokens.from_ids(ids))
        exact = model.double()(Tokens.from_ids(ids))
    return LogitComparison(
        _max_difference(xscale_logits, other),
        xscale_logits.abs().max().item(),
        _max_difference(xscale_logits, exact),
        ids.numel(),
    )


def _max_difference(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()


def build(
    config: Model.Config,
    sizes: ModelSizes,
    weights: Mapping[str, Tensor],
    architecture: Architecture | None = None,
) -> nn.Module:
    """Build xscale's model with these weights and the head of classes that `architecture` has, if any; in float32 and
    evaluation mode."""
    with torch.device("meta"):
        model: nn.Module = MODELS.build(config, sizes.vocabulary, sizes.length)
        if architecture is not None and architecture.class_head is not None:
            architecture.class_head.put(model, config)
    replace_parameters(
        model, lambda name, old: nn.Parameter(weights[name].float(), requires_grad=False)
    )
    return model.eval()


def load(architecture: Architecture, folder: Path, loader: str) -> tuple[Any, tuple[str, ...]]:
    """Load the library's model of class `loader`.

    Also returns its missing and mismatched tensors, except those the mapping ignores.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = getattr(transformers, loader)
    # Its grouped products of experts need widths of whole 16 bytes.
    options = {"dtype": torch.float32, "experts_implementation": "eager", **architecture.overrides}
    options |= loading_options(folder)
    model, info = kind.from_pretrained(
        str(folder), output_loading_info=True, local_files_only=True, **options
    )
    faults = [
        f"{word.replace('_keys', '')}: {name}"
        for word in ("missing_keys", "mismatched_keys")
        for name in info[word]
        if not any(re.fullmatch(pattern, name) for pattern in architecture.ignored)
    ]
    return model.eval(), tuple(faults)


def _ids(
    shape: tuple[int, int], vocabulary: int, pad: int | None, generator: torch.Generator
) -> Tensor:
    ids = torch.randint(vocabulary, shape, generator=generator)
    # Some architectures derive positions from the padding tokens, so ids must not contain any.
    return ids if pad is None else torch.where(ids == pad, (pad + 1) % vocabulary, ids)
