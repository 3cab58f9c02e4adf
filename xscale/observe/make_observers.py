"""The observers that a config asks for, as one."""

from pathlib import Path

from xscale.core.errors import ConfigError
from xscale.observe.config import ObserveConfig, check
from xscale.observe.observer import ObserverGroup


def make_observers(config: ObserveConfig, folder: Path) -> ObserverGroup:
    """The observers that `config` asks for, as one. Errors: ConfigError where one cannot run on this machine."""
    from xscale.observe.health import Health
    from xscale.observe.log import Log
    from xscale.observe.metrics import Metrics
    from xscale.observe.progress import Progress

    if problems := check(config):
        raise ConfigError(problems)
    every = config.every_steps
    # Progress first: it shows the warning when another observer fails.
    group = ObserverGroup(
        [Progress(steps=config.progress, every=config.progress_steps), Log(folder)]
    )
    group.add(Health(group.message, config.health_steps))
    group.add(Metrics(folder, every))
    if config.tensorboard:
        from xscale.observe.trackers.tensorboard import TensorBoard

        group.add(TensorBoard(folder, every))
    if config.wandb:
        from xscale.observe.trackers.wandb import Wandb

        group.add(Wandb(folder, config.wandb_project, every))
    if config.mlflow:
        from xscale.observe.trackers.mlflow import Mlflow

        group.add(Mlflow(folder, config.mlflow_experiment, config.mlflow_uri, every))
    if config.report:
        from xscale.observe.html import HtmlReport

        # Last: it reads the file that Metrics writes.
        group.add(HtmlReport(folder, group.message))
    return group
