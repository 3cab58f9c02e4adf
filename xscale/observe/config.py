"""Config of the observers of a run."""

import importlib.util

from xscale.core.config import Config, PositiveInt
from xscale.core.errors import Problem
from xscale.core.requirements import take


class ProfileConfig(Config):
    at: PositiveInt = 10
    """First step that is profiled. The first steps of a run compile and allocate."""
    steps: PositiveInt = 3
    """Steps that are profiled."""


class ObserveConfig(Config):
    every_steps: PositiveInt = 1
    """Steps between entries in metrics.jsonl and TensorBoard; the first and the last step are always logged. Only then
    are the statistics of the model read from the device."""
    progress: bool = True
    """Show progress: a bar on a terminal, lines elsewhere. Messages and evaluations are always shown."""
    progress_steps: PositiveInt = 10
    """Steps between printed lines where standard output is not a terminal."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    report: bool = True
    """Write report.html at the end."""
    health_steps: PositiveInt = 50
    """Logged steps over which the load of an expert is averaged before a warning that it gets almost no tokens."""
    profile: ProfileConfig | None = None
    """Profile some steps on each rank: traces, the largest operators, memory on a GPU, in RUN/profile. null: none."""
    wandb: bool = False
    """Log to Weights & Biases too; needs the extra `wandb`."""
    wandb_project: str = "xscale"
    """Project on Weights & Biases."""
    mlflow: bool = False
    """Log to MLflow too; needs the extra `mlflow`."""
    mlflow_experiment: str = "xscale"
    """Experiment of MLflow."""
    mlflow_uri: str | None = None
    """Address of MLflow's tracking server, such as `http://localhost:5000`, or a database, such as `sqlite:///runs.db`;
    null: as MLflow's own settings say."""


def check(config: ObserveConfig, path: str = "observe") -> list[Problem]:
    """Problems of the config on this machine; `path` is its dotted path in the recipe."""
    problems = []
    trackers = (
        ("wandb", config.wandb, "pip install 'wandb>=0.19'"),
        ("mlflow", config.mlflow, "pip install 'mlflow-skinny>=3.0'"),
    )
    for name, wanted, command in trackers:
        if wanted and importlib.util.find_spec(name) is None:
            fix = f"Or install it with: {command}."
            problems.append(
                Problem(
                    f"{path}.{name}",
                    f"the package {name} is not installed",
                    fix,
                    choices=take(False),
                )
            )
    return problems


def check_profile(
    config: ProfileConfig | None, steps: int, path: str = "observe.profile"
) -> list[Problem]:
    """Problems of the profiled steps in a run of `steps`; `path` is the section's dotted path in the recipe."""
    if config is None or (last := config.at + config.steps - 1) <= steps:
        return []
    what = f"profiles steps {config.at} to {last}, and the run ends at train.steps={steps}"
    return [
        Problem(
            path,
            what,
            "Or profile fewer steps.",
            choices=take(max(1, steps - config.steps + 1), key=f"{path}.at"),
        )
    ]
