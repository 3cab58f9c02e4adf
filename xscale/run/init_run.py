"""Create a run folder at step 0 from given weights, as importing and upcycling do."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from xscale.checkpoint.save import save
from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.core.files.file_safety import remove_file, remove_folder
from xscale.data.corpus.stored_tokenizer import store_tokenizer
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.nn.head.head import vocabulary_parameters, with_padding_rows
from xscale.nn.materialize import replace_parameters
from xscale.optim.optimizer.optimizer import OPTIMIZERS, Optimizer
from xscale.parallel.engine.fsdp import full_state, optimizer_weights
from xscale.parallel.plan import DTYPES
from xscale.parallel.shard.sharded import sharded_parameters
from xscale.run.run_entries import check_entries
from xscale.run.run_folder import CHECKPOINTS, CONFIG, write_config
from xscale.run.state import State
from xscale.settings.settings import Settings, build_on_meta


def require_no_run(folder: Path) -> None:
    """Raise ConfigError where `folder` already contains a run, or an entry by which one would write elsewhere."""
    if problems := check_entries(folder, ()):
        raise ConfigError(problems)
    if (folder / CONFIG).exists() or (folder / CHECKPOINTS).exists():
        raise ConfigError(str(folder), "the folder already contains a run", "Give another folder.")


@contextmanager
def removed_on_failure(run: Path) -> Iterator[None]:
    """Remove what is written into the new run folder `run` when its import does not end well."""
    before = {path.name for path in run.iterdir()} if run.is_dir() else None
    try:
        yield
    except BaseException:
        if before is None:
            remove_folder(run.parent, run.name)
        else:
            for path in [path for path in run.iterdir() if path.name not in before]:
                remove_folder(run, path.name) if path.is_dir() else remove_file(run, path.name)
        raise


def model_from_weights(
    settings: Settings,
    vocabulary: int,
    weights: Mapping[str, Tensor],
    unpadded_vocabulary: int | None = None,
) -> nn.Module:
    """The model of `settings` on one device, with these weights (by parameter name) in master precision.

    Weights for fewer tokens than `vocabulary` get rows of padding, zeros. `unpadded_vocabulary`: rows of the
    vocabulary that have a probability; None: all.
    """
    model = build_on_meta(settings, vocabulary, unpadded_vocabulary)
    master, padded = DTYPES[settings.precision.master], vocabulary_parameters(model)

    def replacement(name: str, old: nn.Parameter) -> nn.Parameter:
        weight = weights[name].to(master)
        if name in padded and len(weight) < len(old):
            weight = with_padding_rows(weight, len(old))
        return nn.Parameter(weight, requires_grad=old.requires_grad)

    replace_parameters(model, replacement)
    return model


def create_run(
    settings: Settings,
    model: nn.Module,
    run: Path,
    states: Mapping[str, Mapping[str, Tensor]] | None = None,
    optimizer_steps: int = 0,
    tokenizer: Tokenizer | None = None,
    unpadded_vocabulary: int | None = None,
) -> Path:
    """Write the config and the checkpoint of step 0 into `run`; returns the checkpoint's path.

    `states` (kind -> parameter name -> tensor) are the optimizer's after `optimizer_steps` steps; None: fresh ones.
    `tokenizer` is copied into `run`; None: the first training run copies its own. `unpadded_vocabulary`: rows of the
    vocabulary that have a probability; None: all.
    """
    parameters = sharded_parameters(model)
    trained = [parameter for parameter in parameters if parameter.parameter.requires_grad]
    optimizer: Optimizer = OPTIMIZERS.build(settings.optimizer, optimizer_weights(trained))
    with torch.no_grad():
        tensors = full_state(parameters, optimizer)
        for kind, values in (states or {}).items():
            for name, value in values.items():
                tensors[f"optimizer.{kind}.{name}"].copy_(value)
    optimizer.set_counters({**optimizer.counters(), "step": optimizer_steps})
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    state = State(tokenizer_fingerprint=fingerprint, unpadded_vocabulary=unpadded_vocabulary)
    with removed_on_failure(run):
        path = save(run / CHECKPOINTS, 0, tensors, state.encode(optimizer), encode(settings))
        if tokenizer is not None:
            store_tokenizer(tokenizer, run)
        write_config(settings, run)
    return path
