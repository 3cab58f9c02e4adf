"""Where a law is bent, and why. An entry that is no longer needed fails, so the table only says what is true."""

BENT: dict[str, dict[str, str]] = {
    # law -> {path, or path:function: the reason}
    "imports": {
        "launch/xscale_launch/mpi_rank.py": "ranks come over MPI itself; imported where used, done without if absent",
    },
    "names": {
        "xscale/nn/moe/router/base.py": "BASE is what its authors call it, and a part's file bears the part's name",
    },
}


def unbent(law: str, violations: dict[str, str]) -> list[str]:
    """The violations (place -> what) that no entry of `law` excuses, and the entries that excuse nothing."""
    excused = BENT.get(law, {})
    # A place may go on behind its path (a line, a function); an entry for the path excuses it too.
    entries = {
        place: next((key for key in (place, place.partition(":")[0]) if key in excused), None) for place in violations
    }
    broken = [f"{place}: {violations[place]}" for place, entry in entries.items() if entry is None]
    idle = [
        f"{place}: excused from '{law}', and obeys it: take the entry out"
        for place in excused.keys() - set(entries.values())
    ]
    return sorted(broken + idle)
