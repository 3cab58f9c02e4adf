"""Where a law is bent, and why. An entry that is no longer needed fails, so the table only says what is true."""

BENT: dict[str, dict[str, str]] = {
    # law -> {path, or path:function: the reason}
    "names": {
        "xscale/nn/moe/router/base.py": "BASE is what its authors call it, and a part's file bears the part's name",
    },
}


def unbent(law: str, violations: dict[str, str]) -> list[str]:
    """The violations (place -> what) that no entry of `law` excuses, and the entries that excuse nothing."""
    excused = BENT.get(law, {})
    broken = [f"{place}: {what}" for place, what in violations.items() if place not in excused]
    idle = [f"{place}: excused from '{law}', and obeys it: take the entry out" for place in excused.keys() - violations]
    return sorted(broken + idle)
