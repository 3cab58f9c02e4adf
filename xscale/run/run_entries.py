"""Entries that a run writes into its folder, and the refusal of a folder where something else stands in their place."""

from collections.abc import Collection
from pathlib import Path

from xscale.checkpoint.files import LOCK_FILE
from xscale.core.errors import Problem
from xscale.core.files.run_files import kind_of

FILES = (
    "config.yaml",
    "name",
    LOCK_FILE,
    "log.txt",
    "metrics.jsonl",
    "report.json",
    "report.html",
    "wandb_id",
    "mlflow_id",
    "interrupted",
)
"""Files of a run folder; config.step-N.yaml are others."""
KEPT_CONFIGS = "config.step-*.yaml"
LINKABLE = ("checkpoints", "tensorboard", "profile", "wandb")
"""Folders of a run folder that run.allow_links may name: the large ones."""
FOLDERS = (
    *LINKABLE,
    "tokenizer",
    "transformers",
    "faults",
    "launch",
    "logs",
    "compile_cache",
    ".wandb",
)
"""Folders of a run folder. The package wandb writes into `.wandb`, not into `wandb`, where there is one."""


def check_entries(folder: Path, allow_links: Collection[str]) -> list[Problem]:
    """List each entry of the run folder `folder` by which a run would write elsewhere, or wait. Raises OSError.

    These are links, FIFOs and devices, except links to the folders `allow_links`. The folder itself may be a link.
    """
    kept = sorted(path.name for path in folder.glob(KEPT_CONFIGS))
    problems = [_problem(folder / name, "a file") for name in (*FILES, *kept)]
    problems += [
        _problem(folder / name, "a folder", linkable=name in LINKABLE)
        for name in FOLDERS
        if not (name in allow_links and (folder / name).is_dir())
    ]
    return [problem for problem in problems if problem is not None]


def _problem(path: Path, wanted: str, *, linkable: bool = False) -> Problem | None:
    kind = kind_of(path)
    if kind in (None, wanted):
        return None
    fix = "Remove it, or choose another run.dir."
    if kind == "a symbolic link" and linkable and path.is_dir():
        fix = f"If you made it, 'run.allow_links=[{path.name}]' writes through it; else remove it."
    return Problem(
        str(path),
        f"this is {kind}, not {wanted}, so the run would write elsewhere or not at all",
        fix,
    )
