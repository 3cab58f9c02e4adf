"""Errors of checkpoints: one that could not be written or read, and one whose files are not what was written."""

import errno
import shlex
from pathlib import Path

import torch.distributed as dist

from xscale.core.errors import FaultError, plain
from xscale.core.files.file_errors import REMEDIES, disk_reason, disk_remedy
from xscale.mesh.consensus import Consensus

SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Errors that fewer checkpoints may end."""
KEEP_LESS = "keep fewer checkpoints (checkpoint.keep_last) or give another run.dir."
FIXES = {
    errno.ENOENT: "Put the folder back (was it deleted or unmounted during the run?) or give another run.dir.",
}


class CheckpointError(FaultError):
    """A checkpoint could not be written or read; every rank raises the same error."""

    def __init__(self, path: object, what: str, fix: str = "") -> None:
        self.path = str(path)
        self.what = plain(what)
        self.fix = fix
        super().__init__(f"{path}: {self.what}. {fix}".rstrip() if fix else f"{path}: {self.what}")

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.path, self.what, self.fix)


class DamageError(CheckpointError):
    """A checkpoint on disk is not what was written: a file is missing, truncated or changed."""

    def __init__(self, path: object, what: str, fix: str = "", label: str = "damaged") -> None:
        super().__init__(path, what, fix)
        self.label = label
        """One word for the name of the folder when it is set aside: missing, size, hash, manifest."""

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.path, self.what, self.fix, self.label)


def explain(path: Path, error: OSError, doing: str = "written") -> CheckpointError:
    """The CheckpointError for an error of the file system, with its usual fix."""
    fix = FIXES.get(error.errno or 0, "Check the disk, or give another run.dir.")
    if error.errno in REMEDIES:
        more = KEEP_LESS if error.errno in SPACE else "or give another run.dir."
        fix = f"{disk_remedy(error, path)}, {more}"
    if error.errno in SPACE and doing.startswith("written"):
        folder = shlex.quote(str(path.parent))
        fix += f" `xscale checkpoint prune {folder} --keep-last 1` deletes the older checkpoints."
    return CheckpointError(
        path, f"the checkpoint cannot be {doing}: {disk_reason(error, path)}", fix
    )


def consensus(
    group: dist.ProcessGroup | None = None, doing: str = "written", *, single_process: bool = False
) -> Consensus:
    """A Consensus whose file system errors become CheckpointErrors."""
    return Consensus(group, doing, explain, single_process=single_process)
