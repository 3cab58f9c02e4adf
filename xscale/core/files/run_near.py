"""The run that is meant by a word that is no run: a run below `runs`, above a folder of checkpoints, or in a folder."""

from pathlib import Path

CONFIG = "config.yaml"
"""The file that each run folder has."""
RUNS = "runs"
"""Where recipes put the folders of their runs."""
LISTED = 3
"""At most so many runs are named."""


def run_near(folder: Path) -> str:
    """Return a sentence on the run that `folder`, which is none, is meant for; empty if there is none near."""
    if not folder.is_absolute() and _is_run(below := Path(RUNS) / folder):
        return f"Did you mean {below}?"
    if _is_run(folder.parent) and folder.is_dir():
        return f"Did you mean {folder.parent}?"
    try:
        inside = sorted(path for path in folder.iterdir() if _is_run(path))
    except OSError:
        # A folder that is not there, or may not be listed, has no runs to name.
        return ""
    if not inside:
        return ""
    more = f" and {len(inside) - LISTED} more" if len(inside) > LISTED else ""
    return f"Its runs are {', '.join(map(str, inside[:LISTED]))}{more}."


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()
