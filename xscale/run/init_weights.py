"""Initial weights for fine-tuning, from a run, a checkpoint or a folder of transformers, with the run's tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from xscale.checkpoint.errors import consensus
from xscale.checkpoint.files import MANIFEST
from xscale.checkpoint.load import CheckpointReader, read_some
from xscale.checkpoint.search import find_newest, newest_on_this_process, warn_of_older
from xscale.core.errors import ConfigError, Problem
from xscale.data.config import DataConfig
from xscale.data.corpus.stored_tokenizer import (
    open_stored_tokenizer,
    require_fingerprint,
    store_tokenizer,
)
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.mesh.consensus import Consensus
from xscale.mesh.mesh import Mesh
from xscale.nn.adapt.lora import MARK
from xscale.nn.head.head import vocabulary_parameters, with_padding_rows
from xscale.objective.objective import OBJECTIVES, HeadSizes
from xscale.parallel.shard.full_tensors import ShardedWeightWriter, free_gathered_weights
from xscale.parallel.shard.sharded import ShardedParameter
from xscale.run.run_folder import CHECKPOINTS
from xscale.settings.settings import Settings, build_on_meta

HEADS = ("head.", "stack.exits.", "decoder.exits.", "mtp.")
"""Beginnings of the names of parameters that may be new, or left out: they belong to an objective, or
predict further tokens; so may LoRA's be new."""
SENTENCE_HEAD = "head.sentence."
"""Beginning of the names of the parameters of a classifier of pairs of sentences."""
LISTED = 6
"""Names that a message lists; it counts the others."""
PREFIX = "model."
"""Beginning of the names of parameters in a checkpoint."""


@dataclass(frozen=True)
class Matching:
    """Names of the parameters that the weights at a path and a model have in common, and of the others."""

    loaded: list[str]
    new: list[str]
    """Parameters of the model that are drawn from the seed."""
    left_out: list[str]
    """Parameters that the model does not have."""

    def sentences(self, path: str) -> list[str]:
        """Describe them for the log."""
        lines = [f"init.from: {len(self.loaded)} parameters loaded from {path}"]
        lines += [f"init.from: new, drawn from the seed: {_listed(self.new)}"] * bool(self.new)
        return lines + [f"init.from: left out of {path}: {_listed(self.left_out)}"] * bool(
            self.left_out
        )


def match(
    path: str, there: Mapping[str, tuple[int, ...]], model: Mapping[str, tuple[int, ...]]
) -> Matching:
    """Match parameters by name and shape; ConfigError with the names that do not fit, except those of heads."""
    loaded = [name for name, shape in model.items() if there.get(name) == shape]
    new = [name for name in model if name not in loaded]
    left_out = [name for name in there if name not in loaded]
    missing = [
        name
        for name in new
        if name not in there and not name.startswith(HEADS) and MARK not in name
    ]
    unexpected = [name for name in left_out if name not in model and not name.startswith(HEADS)]
    shapes = [
        f"{name} is {[*there[name]]} there and {[*model[name]]} here"
        for name in new
        if name in there and not name.startswith(HEADS)
    ]
    clauses = [f"it lacks {_listed(missing)}"] * bool(missing)
    clauses += [f"it has {_listed(unexpected)}, which this model lacks"] * bool(unexpected)
    clauses += [_listed(shapes)] * bool(shapes)
    if not loaded and not clauses:
        clauses = ["it has no parameter of this model"]
    if clauses:
        fix = f"Take the model section with which {path} was trained, and its tokenizer."
        raise ConfigError("init.from", f"{path} is of another model: {'; '.join(clauses)}", fix)
    return Matching(loaded, new, left_out)


def load_initial_weights(
    settings: Settings,
    model: nn.Module,
    parameters: list[ShardedParameter],
    tokenizer: Tokenizer,
    mesh: Mesh,
) -> list[str]:
    """Fill the `parameters` of `model` that the config's init.from has; returns messages. Collective."""
    source = settings.init.from_
    if source is None:
        return []
    full_model = build_on_meta(settings, tokenizer.vocabulary)
    shapes = {name: tuple(parameter.shape) for name, parameter in full_model.named_parameters()}
    path = Path(source)
    if is_hf_folder(path):
        head = OBJECTIVES.of(settings.objective).part.head_sizes(settings.objective)
        weights, unused = _read_hf(path, shapes, head)
        # An export of transformers has no padding rows.
        lacks_padding = [
            name
            for name in vocabulary_parameters(full_model) & weights.keys()
            if len(weights[name]) == tokenizer.unpadded_vocabulary < tokenizer.vocabulary
        ]
        padded = {
            name: with_padding_rows(weights[name], tokenizer.vocabulary) for name in lacks_padding
        }
        return (
            _load_hf(path, shapes, {**weights, **padded}, parameters, ShardedWeightWriter(model))
            + unused
        )
    group = mesh.background
    checkpoint = path
    if not (path / MANIFEST).exists():
        newest = find_newest(path / CHECKPOINTS, group=group)
        if newest.path is None or newest.step is None:
            raise _no_weights(source)
        checkpoint = newest.path
        warn_of_older(path / CHECKPOINTS, newest.step)
    ranks = consensus(group, "read")
    reader = ranks.on_rank0(checkpoint, lambda: _entries(checkpoint, settings.checkpoint.verify))
    fingerprint, there = reader
    fix = "Use its tokenizer: with the folder of the run as init.from, this run takes it."
    require_fingerprint(
        tokenizer, fingerprint, Path(settings.data.folder), f"{source} was trained with", fix
    )
    matching = match(source, there, shapes)
    wanted = set(matching.loaded)
    tensors = {
        f"{PREFIX}{parameter.name}": parameter.parameter.detach() for parameter in parameters
    }
    free_gathered_weights(model)
    read_some(
        checkpoint,
        {name: tensor for name, tensor in tensors.items() if name[len(PREFIX) :] in wanted},
        group,
    )
    return matching.sentences(str(checkpoint))


def _entries(checkpoint: Path, verify: bool) -> tuple[str | None, dict[str, tuple[int, ...]]]:
    """Return the tokenizer's fingerprint and the shapes of the parameters of a checkpoint."""
    from xscale.checkpoint.load import read_state

    entries = CheckpointReader(checkpoint, verify=verify).entries
    shapes = {
        name[len(PREFIX) :]: tuple(entry.shape)
        for name, entry in entries.items()
        if name.startswith(PREFIX)
    }
    return read_state(checkpoint).get("tokenizer_fingerprint"), shapes


def _read_hf(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], head: HeadSizes | None
) -> tuple[Mapping[str, Tensor], list[str]]:
    """Read the weights of a folder of transformers; the messages say what is not used. `head`: that of classes."""
    from xscale.convert.hf.import_model import import_body, import_model

    weights: Mapping[str, Tensor]
    unused: tuple[str, ...] = ()
    if head is not None:
        weights, unused = import_body(folder, dense=head.activation if head.dense else None)
    else:
        weights = import_model(
            folder, sentence_head=any(name.startswith(SENTENCE_HEAD) for name in shapes)
        ).weights
    return weights, [f"init.from: not used of {folder}: {_listed(list(unused))}"] * bool(unused)


def _load_hf(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    parameters: list[ShardedParameter],
    writer: ShardedWeightWriter,
) -> list[str]:
    """Fill the parameters from the weights of a folder of transformers, which each process reads."""
    matching = match(
        str(folder), {name: tuple(tensor.shape) for name, tensor in weights.items()}, shapes
    )
    for parameter in parameters:
        if parameter.name in set(matching.loaded):
            writer.write(parameter.parameter, weights[parameter.name])
    return matching.sentences(str(folder))


def is_hf_folder(path: Path) -> bool:
    """Return whether a folder is one of transformers: a model's, or one of its cache."""
    return ((path / "config.json").is_file() and not (path / MANIFEST).exists()) or (
        path / "snapshots"
    ).is_dir()


def check_source(settings: Settings) -> list[Problem]:
    """List what is missing at the config's init.from, where the run has not begun. Not collective."""
    source = settings.init.from_
    if source is None or newest_on_this_process(Path(settings.run.dir) / CHECKPOINTS) is not None:
        return []
    path = Path(source)
    if (
        is_hf_folder(path)
        or (path / MANIFEST).exists()
        or newest_on_this_process(path / CHECKPOINTS) is not None
    ):
        return []
    return list(_no_weights(source).problems)


def _no_weights(source: str) -> ConfigError:
    what = f"'{source}' is neither a run with a checkpoint, nor a checkpoint, nor a folder of transformers"
    return ConfigError(
        "init.from", what, "Give the run.dir of a run, or a folder that `save_pretrained` wrote."
    )


def adopt_tokenizer(settings: Settings, mesh: Mesh) -> None:
    """Copy the tokenizer of the run at init.from into the folder of a run that has not begun. Collective."""
    source, run = settings.init.from_, Path(settings.run.dir)
    if source is None:
        return

    def copy() -> None:
        if problems := check_source(settings):
            raise ConfigError(problems)
        if newest_on_this_process(run / CHECKPOINTS) is not None:
            return
        tokenizer = _tokenizer_of(Path(source))
        if tokenizer is not None:
            store_tokenizer(tokenizer, run)

    Consensus(mesh.background).on_rank0(run, copy)


def adopted_tokenizer(settings: Settings) -> Tokenizer | None:
    """Open the copy that `adopt_tokenizer` made; None where the folder has none, or another one. Not collective."""
    if (
        settings.init.from_ is None
        or (tokenizer := _tokenizer_of(Path(settings.init.from_))) is None
    ):
        return None
    copied = open_stored_tokenizer(Path(settings.run.dir))
    return copied if copied is not None and copied.fingerprint == tokenizer.fingerprint else None


def _tokenizer_of(source: Path) -> Tokenizer | None:
    """Open the tokenizer of a run, given as its folder or as one of its checkpoints; None where there is none."""
    return open_stored_tokenizer(source.parent.parent if (source / MANIFEST).exists() else source)


def data_with_adopted_tokenizer(settings: Settings, tokenizer: Tokenizer) -> DataConfig | None:
    """Return the data of a run that began at init.from, tokenised with the tokenizer in its folder; None: of another
    run."""
    if settings.init.from_ is None:
        return None
    return settings.data.model_copy(update={"tokenizer": tokenizer.config})


def _listed(names: list[str]) -> str:
    omitted = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {omitted} more" if omitted > 0 else "")
