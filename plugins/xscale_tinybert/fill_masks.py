"""The most probable words at masked positions, by the masked language model of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError, Problem
from xscale.data.tokenizer.huggingface import HuggingFace
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.evaluate.text_scorer import batches_of_one_length
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES
from xscale.settings.settings import Settings
from xscale_tinybert.augment import MaskedWord, ModelInput


@dataclass(frozen=True)
class MaskFiller:
    """Fills masked positions with a model on this process."""

    model: nn.Module
    device: torch.device
    rows: int
    """Rows of a forward."""

    @torch.no_grad()
    def __call__(self, words: Sequence[MaskedWord], count: int) -> list[list[int]]:
        """Return the `count` most probable allowed tokens of each word, in ascending order; all, where they are fewer.

        ConfigError where the model's logits are not finite.
        """
        self.model.eval()
        filled: list[list[int]] = [[]] * len(words)
        for batch in batches_of_one_length(
            self.model, [len(word.ids) for word in words], self.rows
        ):
            ids = torch.tensor([words[row].ids for row in batch], device=self.device)  # [B, T]
            positions = torch.tensor([words[row].position for row in batch], device=self.device)
            logits: Tensor = self.model(Tokens.from_ids(ids), None, None)  # [B, T, V]
            at_masks = logits[
                torch.arange(len(batch), device=self.device), positions
            ].cpu()  # [B, V]
            if not at_masks.isfinite().all():
                raise ConfigError(
                    "--model",
                    "its logits are not finite",
                    "Take a checkpoint of before it diverged.",
                )
            for row, scores in zip(batch, at_masks, strict=True):
                allowed = torch.from_numpy(words[row].allowed)
                best = scores[allowed].topk(min(count, len(allowed))).indices
                # Sorted, so that rounding, which depends on the batch, does not swap two candidates.
                filled[row] = sorted(allowed[best].tolist())
        return filled


def check_fills_masks(settings: Settings, tokenizer: Tokenizer, path: str) -> list[Problem]:
    """List why a run's model does not predict masked words. `path`: the option that needs it."""
    entry, objective = MODELS.of(settings.model), OBJECTIVES.of(settings.objective)
    if entry.traits.causal or entry.traits.source:
        reads = "reads a source beside the text" if entry.traits.source else "sees no later words"
        return [Problem(path, f"the model '{entry.name}' {reads}", "Take the run of an encoder.")]
    if objective.traits.causal is not False or objective.traits.source:
        able = [
            part.name
            for part in OBJECTIVES
            if part.traits.causal is False and not part.traits.source
        ]
        what = f"the objective '{objective.name}' does not train the model to predict masked words"
        return [Problem(path, what, f"Take a run of one of: {', '.join(able)}.")]
    if tokenizer.mask is None:
        return [
            Problem(
                path,
                "the run's tokenizer has no mask token",
                "Name one: data.tokenizer.mask in its config.",
            )
        ]
    return []


def model_input(settings: Settings, tokenizer: Tokenizer) -> ModelInput:
    """Return what the masked model of a run reads of a text: the text with its end, after a beginning that it knows."""
    # The beginning-of-text token of a tokenizer trained here is in no packed text that a model was trained on.
    is_imported = isinstance(tokenizer, HuggingFace) and tokenizer.config.file is not None
    knows_begin = is_imported or OBJECTIVES.of(settings.objective).traits.samples != "packed"
    begin = (tokenizer.bos,) if tokenizer.bos is not None and knows_begin else ()
    assert tokenizer.mask is not None, "`check_fills_masks` refuses such a tokenizer"
    return ModelInput(begin, tokenizer.mask, (tokenizer.eos,), settings.data.sequence_length)
