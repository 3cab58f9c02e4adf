"""Errors of the file system that no command expects: a sentence with the file, and whether the disk is at fault."""

import errno

from xscale.core.errors import PATH_CHARACTERS, plain

OF_THE_DISK = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO, errno.EBUSY)
"""Errors that no other path or word of the user would end."""
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
    errno.EROFS: "Give a path on a disk that can be written.",
    errno.ENOSPC: "Free space, or give a path on another disk.",
    errno.EDQUOT: "Free space, or give a path on another disk.",
    errno.EFBIG: "Raise the limit on the size of files, or give a path on another disk.",
    errno.EMFILE: "Raise the limit on open files: ulimit -n.",
    errno.ENFILE: "Raise the limit on open files: ulimit -n.",
    **dict.fromkeys(OF_THE_DISK, "Look after the disk, and start the same command again."),
}
"""Errors that a file may give for whatever command -> what ends them. Others are faults of ours."""


def file_sentence(error: OSError) -> str | None:
    """Return a sentence on an error of the file system with its file; None for an error that is none.

    A write of an open file does not know the name: the sentence has the reason alone.
    """
    if error.errno not in PLACES:
        return None
    # Of a rename the second is the one that the user knows.
    name = error.filename2 or error.filename
    if name is None and error.errno in (errno.ENOENT, errno.EEXIST, errno.EINVAL):
        return None
    path = plain(str(name), PATH_CHARACTERS) if isinstance(name, str | bytes) else "a file"
    return (
        f"{path}: cannot be read or written ({plain(str(error.strerror))}). {PLACES[error.errno]}"
    )
