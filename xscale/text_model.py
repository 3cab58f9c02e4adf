"""A model on this process that maps token ids to logits, with its recipe and tokenizer; what the Python API returns."""

from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from xscale.checkpoint.files import visible_steps
from xscale.core.errors import ConfigError
from xscale.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer
from xscale.mesh import axes
from xscale.mesh.environment import read_rank_info
from xscale.mesh.mesh import Mesh
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Stats, Tokens
from xscale.planning import vocabulary_of
from xscale.train.load_run import build_on_mesh, load_run, single_process
from xscale.train.run_facts import attention_layouts
from xscale.train.run_folder import CHECKPOINTS
from xscale.train.settings import Settings
from xscale.train.setup import device_of


class TextModel(nn.Module):
    """`model(ids)` gives logits; the parameters are those of `model.model`, under their names in checkpoints."""

    def __init__(self, model: nn.Module, settings: Settings, device: torch.device, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self.model = model
        self.recipe = settings
        """The recipe, without its layout."""
        self.device = device
        self.tokenizer = tokenizer
        """That of a loaded run, or one that needs no training; None: the recipe's is trained with the run's data."""

    @classmethod
    def built(cls, settings: Settings, vocabulary: int | None = None) -> "TextModel":
        """Build the model with its initial weights; `vocabulary`: None for that of the tokenizer's config."""
        settings = single_process(settings)
        rank_info = read_rank_info()
        if not rank_info.is_single_process:
            what = f"a model is built on one process, and this is one of {rank_info.world}"
            raise ConfigError("WORLD_SIZE", what, "Use xscale.train in a job of several.")
        mesh = Mesh(rank_info, axes.resolve(settings.parallel.mesh, 1), device_of(settings, rank_info))
        config, tokenizer = settings.data.tokenizer, None
        if vocabulary is None and not TOKENIZERS.of(config).traits.trained:
            tokenizer = TOKENIZERS.build(config, Path(settings.data.folder))
            vocabulary = tokenizer.vocabulary
        size = vocabulary_of(settings) if vocabulary is None else vocabulary
        tokens = size if tokenizer is None else tokenizer.unpadded_vocabulary
        return cls(build_on_mesh(settings, (size, tokens), mesh, draw_weights=True), settings, mesh.device, tokenizer)

    @classmethod
    def loaded(cls, folder: Path, *, plugins: bool = False) -> "TextModel":
        """Load the newest good checkpoint of a run, or the checkpoint that `folder` is."""
        is_checkpoint = folder.absolute().parent.name == CHECKPOINTS
        if is_checkpoint and folder.absolute() not in [path for _, path in visible_steps(folder.absolute().parent)]:
            raise ConfigError(str(folder), "there is no such checkpoint", f"Look into {folder.parent}.")
        run = folder.absolute().parents[1] if is_checkpoint else folder
        loaded = load_run(run, plugins=plugins, checkpoint=folder.absolute() if is_checkpoint else None)
        model = cls(loaded.model, loaded.settings, loaded.mesh.device, loaded.tokenizer)
        return model.eval()

    def forward(self, ids: Tensor, source: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of ids [B, T]; with `targets` [B, T] their summed cross-entropy in nats, -100 ignored.

        Ids that are padding of the vocabulary have the least finite logit.

        Encoder-decoders read `source` [B, S] and write `ids`, as in training. Nothing is random: no dropout.
        """
        return self._run(ids, source, targets, None)

    def statistics(self, ids: Tensor, source: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the statistics of the parts on ids [B, T], such as the load of each expert: name -> values."""
        stats = Stats()
        with torch.no_grad():
            self._run(ids, source, None, stats)
        return stats.means()

    def attention_layouts(self, length: int | None = None) -> dict[str, numpy.ndarray]:
        """Attention layout of each block-sparse layer by its path: bool [H, Q, K], true for computed blocks.

        `length`: tokens; None: the recipe's sequence length.
        """
        return attention_layouts(self.model, length or self.recipe.data.sequence_length)

    def _run(self, ids: Tensor, source: Tensor | None, targets: Tensor | None, stats: Stats | None) -> Tensor:
        kind = str(self.recipe.model.kind)
        if MODELS.get(kind).traits.source != (source is not None):
            reads = "needs `source`, the ids that it reads" if source is None else "reads one sequence, and no source"
            raise ValueError(f"the model '{kind}' {reads}")
        tokens = Tokens.from_ids(ids.to(self.device), stats=stats)
        read = None if source is None else Tokens.from_ids(source.to(self.device))
        logits: Tensor = self.model(tokens, None if targets is None else targets.to(self.device), read)
        return logits
