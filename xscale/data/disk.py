"""Writing to a disk that may be full."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xscale.core.errors import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """A disk that is full while `path` is written becomes a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        what = f"this cannot be written ({error.strerror}; {free / 1e6:.0f} MB are free there)"
        raise ConfigError(
            str(path), what, "Make room, or set another `data.folder`; what is finished is kept."
        ) from None
