"""Errors of the file system that no command expects: a sentence with the file, and whether the disk is at fault."""

import errno
import os
from pathlib import Path

from xscale.core.errors import PATH_CHARACTERS, plain

OF_THE_DISK = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO, errno.EBUSY)
"""Errors that no other path or word of the user would end."""
REMEDIES = {
    errno.ENOSPC: "Free space",
    errno.EDQUOT: "Free space within the quota",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "Mount it for writing",
    errno.EACCES: "Let this user write there",
    errno.EPERM: "Let this user write there",
}
"""Errors of a disk that is full or may not be written -> what ends them."""
PLACES = {
    errno.ENOENT: "Make the folder first, or give another path.",
    errno.ENOTDIR: "A file stands where a folder is needed: give another path.",
    errno.EISDIR: "Give the path of a file, or remove the folder.",
    errno.EEXIST: "Remove what is there, or give another path.",
    errno.ENOTEMPTY: "Remove what is there, or give another path.",
    errno.ENAMETOOLONG: "Give a shorter path.",
    errno.ELOOP: "Its links lead to each other: give another path.",
    errno.EINVAL: "Give the path of a plain file.",
    errno.EACCES: "Let this user read and write it, or give another path.",
    errno.EPERM: "Let this user read and write it, or give another path.",
    errno.EMFILE: "Raise the limit on open files: ulimit -n.",
    errno.ENFILE: "Raise the limit on open files: ulimit -n.",
    **dict.fromkeys(OF_THE_DISK, "Look after the disk, and start the same command again."),
}
"""Errors that a file may give for whatever command -> what ends them. Others are faults of ours."""


def file_sentence(error: OSError) -> str | None:
    """Return a sentence on an error of the file system with its file; None for an error that is none.

    A write of an open file does not know the name: the sentence has the reason alone.
    """
    if error.errno not in PLACES and error.errno not in REMEDIES:
        return None
    # Of a rename the second is the one that the user knows.
    name = error.filename2 or error.filename
    if name is None and error.errno in (errno.ENOENT, errno.EEXIST, errno.EINVAL):
        return None
    path = plain(str(name), PATH_CHARACTERS) if isinstance(name, str | bytes) else "a file"
    fix = PLACES.get(error.errno) or f"{disk_remedy(error)}, or give a path on another disk."
    return f"{path}: cannot be read or written ({plain(disk_reason(error))}). {fix}"


def disk_reason(error: OSError, path: Path | None = None) -> str:
    """Return what the system says; on a disk with space that takes no more files, that no inode is left.

    `path`: a file or folder that could not be written, where the error names none.
    """
    said = error.strerror or str(error)
    return f"{said}: no inode is left" if _lacks_inodes(error, path) else said


def disk_remedy(error: OSError, path: Path | None = None) -> str:
    """Return what ends an error of a disk that is full or may not be written, as the begin of a sentence."""
    if _lacks_inodes(error, path):
        return "Delete files there"
    return REMEDIES.get(error.errno or 0, "See what is there and whether the disk works")


def _lacks_inodes(error: OSError, path: Path | None) -> bool:
    name = error.filename2 or error.filename or path
    if error.errno != errno.ENOSPC or not isinstance(name, str | Path):
        return False
    folder = Path(name).absolute()
    while not folder.is_dir():
        folder = folder.parent
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    # A file system that makes inodes as it needs them has 0 in all.
    return bool(status.f_files and not status.f_favail)
