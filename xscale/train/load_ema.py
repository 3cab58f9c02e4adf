"""Load the averages of the weights, which a run with `train.ema_decay` saves, in place of the weights."""

from collections.abc import Sequence
from pathlib import Path

from xscale.checkpoint.load import CheckpointReader, read_some
from xscale.core.errors import ConfigError
from xscale.parallel.ema import PREFIX
from xscale.parallel.sharded import ShardedParameter


def load_ema(path: Path, parameters: Sequence[ShardedParameter]) -> None:
    """Read the averages in the checkpoint at `path`, which is verified, into `parameters`. Collective.

    Parameters that were not trained have no average and keep their values. ConfigError where there is none at all.
    """
    entries = CheckpointReader(path, verify=False).entries
    averages = {
        f"{PREFIX}{parameter.name}": parameter.parameter.detach()
        for parameter in parameters
        if f"{PREFIX}{parameter.name}" in entries
    }
    if not averages:
        what = "the checkpoint has no moving average of the weights"
        raise ConfigError(str(path), what, "Leave out --ema, or train with train.ema_decay, such as 0.999.")
    read_some(path, averages)
