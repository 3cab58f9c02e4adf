"""The children of a process, from /proc: for a process that would not pass a signal on to them."""

from pathlib import Path


def children(pid: int) -> list[int]:
    """The process ids of the direct children of `pid`; none where there is no /proc."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold spaces and brackets: what counts comes after the last one.
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it ended in between
            continue
        if int(fields[1]) == pid:
            found.append(int(entry.parent.name))
    return found
