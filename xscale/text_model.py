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
from xscale.nn.forward import Forward, Stats
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.model import MODELS
from xscale.nn.tokens import Tokens
from xscale.planning import vocabulary_of
from xscale.run.load_run import build_on_mesh, load_run, single_process
from xscale.run.parts import device_of
from xscale.run.run_facts import attention_layouts
from xscale.run.run_folder import CHECKPOINTS
from xscale.settings.settings import Settings


class TextModel(nn.Module):
    """`model(ids)` gives logits; the parameters are those of `model.model`, under their names in checkpoints."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        device: torch.device,
        tokenizer: Tokenizer | None,
    ) -> None:
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
        mesh = Mesh(
            rank_info, axes.resolve(settings.parallel.mesh, 1), device_of(settings, rank_info)
        )
        config, tokenizer = settings.data.tokenizer, None
        if vocabulary is None and not TOKENIZERS.of(config).traits.trained:
            tokenizer = TOKENIZERS.build(config, Path(settings.data.folder))
            vocabulary = tokenizer.vocabulary
        size = vocabulary_of(settings) if vocabulary is None else vocabulary
        tokens = size if tokenizer is None else tokenizer.unpadded_vocabulary
        return cls(
            build_on_mesh(settings, (size, tokens), mesh, draw_weights=True),
            settings,
            mesh.device,
            tokenizer,
        )

    @classmethod
    def loaded(cls, folder: Path, *, plugins: bool = False) -> "TextModel":
        """Load the newest good checkpoint of a run, or the checkpoint that `folder` is."""
        is_checkpoint = folder.absolute().parent.name == CHECKPOINTS
        if is_checkpoint and folder.absolute() not in [
            path for _, path in visible_steps(folder.absolute().parent)
        ]:
            raise ConfigError(
                str(folder), "there is no such checkpoint", f"Look into {folder.parent}."
            )
        run = folder.absolute().parents[1] if is_checkpoint else folder
        loaded = load_run(
            run, plugins=plugins, checkpoint=folder.absolute() if is_checkpoint else None
        )
        model = cls(loaded.model, loaded.settings, loaded.mesh.device, loaded.tokenizer)
        return model.eval()

    def forward(
        self,
        ids: Tensor,
        source: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        share: float = 1.0,
    ) -> Tensor:
        """Logits [B, T, V] of ids [B, T]; with `targets` [B, T] their summed loss in nats, -100 ignored.

        Ids that are padding of the vocabulary have the least finite logit.

        Encoder-decoders read `source` [B, S] and write `ids`, as in training.

        In training mode it is the loss of a run. Dropout and the noise of routers draw from torch's default generator.
        The label smoothing and z-loss of the recipe's objective are in it. A backward from it, divided by the number of
        targets, also adds the gradients of the auxiliary losses, such as load balance, which are not in its value.
        `share` is the part of an optimizer step's samples that these are: 1 / n with n micro-batches a step. In
        evaluation mode it is the cross-entropy, and nothing is random.
        """
        return self._run(
            ids,
            source,
            targets,
            self._training_forward(targets, share) if self.training else Forward(),
        )

    def _training_forward(self, targets: Tensor | None, share: float) -> Forward:
        """Return the seed of a training forward, and with `targets` the weights of its losses."""
        seed = int(torch.randint(2**62, ()))
        if targets is None:
            return Forward(rng_seed=seed)
        objective = self.recipe.objective
        return Forward(
            rng_seed=seed,
            aux_loss_weight=share,
            target_weight=share / max(1, int((targets != IGNORE_INDEX).sum())),
            label_smoothing=objective.label_smoothing,
            z_loss_weight=objective.z_loss_weight,
        )

    def statistics(self, ids: Tensor, source: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the statistics of the parts on ids [B, T], such as the load of each expert: name -> values."""
        stats = Stats()
        with torch.no_grad():
            self._run(ids, source, None, Forward(stats=stats))
        return stats.means()

    def attention_layouts(self, length: int | None = None) -> dict[str, numpy.ndarray]:
        """Attention layout of each block-sparse layer by its path: bool [H, Q, K], true for computed blocks.

        `length`: tokens; None: the recipe's sequence length.
        """
        return attention_layouts(self.model, length or self.recipe.data.sequence_length)

    def _run(
        self, ids: Tensor, source: Tensor | None, targets: Tensor | None, forward: Forward
    ) -> Tensor:
        kind = str(self.recipe.model.kind)
        if MODELS.get(kind).traits.source != (source is not None):
            reads = (
                "needs `source`, the ids that it reads"
                if source is None
                else "reads one sequence, and no source"
            )
            raise ValueError(f"the model '{kind}' {reads}")
        tokens = Tokens.from_ids(ids.to(self.device), forward=forward)
        read = None if source is None else Tokens.from_ids(source.to(self.device), forward=forward)
        logits: Tensor = self.model(
            tokens, None if targets is None else targets.to(self.device), read
        )
        return logits
