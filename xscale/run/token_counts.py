"""Set what follows from the counts of the token ids in a run's training data, before its first step."""

from pathlib import Path

from torch import nn

from xscale.core.errors import ConfigError
from xscale.data.token_counts import count_training_tokens
from xscale.mesh.consensus import Consensus
from xscale.nn.module import Module
from xscale.observe.format import quantity
from xscale.parallel.shard.full_tensors import ShardedWeightWriter
from xscale.run.parts import RunParts
from xscale.settings.settings import build_on_meta


def parts_that_count(model: nn.Module) -> dict[str, Module]:
    """Return the modules of a model that read the counts, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, Module) and module.reads_token_counts
    }


def init_from_token_counts(parts: RunParts) -> list[str]:
    """Set the state of a run before its first step; return the lines to log, none where no part reads the counts.

    Rank 0 counts, so that all ranks have the same numbers; checkpoints have the state. Collective.
    """
    # A stage of a pipeline has only some of the blocks, and all ranks take part.
    reading = list(
        parts_that_count(build_on_meta(parts.settings, parts.corpus.tokenizer.vocabulary))
    )
    if not reading:
        return []
    path = Path(parts.corpus.sets[0].path)
    counts = Consensus(parts.mesh.background, "counted").on_rank0(
        path, lambda: count_training_tokens(parts.corpus)
    )
    weights = ShardedWeightWriter(parts.model)
    for module in parts_that_count(parts.model).values():
        module.set_token_counts(counts.tolist(), weights)
    used = int((counts > 0).sum())
    return [
        f"counted the ids of {quantity(counts.sum())} training tokens, of which {used} of {len(counts)} occur, for "
        f"{', '.join(reading)}"
    ]


def require_no_counts(model: nn.Module, key: str, fix: str) -> None:
    """Raise ConfigError at `key` where the model of a run that is made without its data has a part that reads them."""
    for path in parts_that_count(model):
        raise ConfigError(
            key,
            f"{path} follows from the counts of the ids in the training data, which are absent",
            fix,
        )
