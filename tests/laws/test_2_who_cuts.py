"""Law 2: a module says what may be cut, a plan says what is cut, `parallel` cuts. So modules know no rank.

Law 3 (cut, guard, substitute) is held by the parity tests of xscale.parallel; here, that nobody else plays those moves.
"""

from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, files, identifiers, plant, words

STRANGERS = (
    ("mesh",),
    ("rank",),
    ("ranks",),
    ("world", "size"),
    ("process", "group"),
    ("d", "tensor"),
    ("placement", "mesh"),
    ("all", "reduce"),
    ("all", "gather"),
    ("all", "to", "all"),
    ("reduce", "scatter"),
    ("broadcast", "object"),
    ("distribute", "tensor"),
    ("fully", "shard"),
    ("get", "rank"),
)
"""Words of names that a single-device module has no use for. Prose may use them."""
APPLY = (("apply", "tp"), ("apply", "fsdp"), ("apply", "ep"), ("apply", "cp"), ("apply", "pp"), ("parallelize",))
"""A module that cuts itself."""


def violations(root: Path) -> dict[str, str]:
    found = {}
    for file in files(root):
        if file.package not in ("nn", "objective", "data", "optim", "core"):
            continue
        strange = STRANGERS + APPLY if file.package in ("nn", "objective") else APPLY
        for node, name in identifiers(file):
            if hit := next((one for one in strange if within(one, words(name))), None):
                found[file.at(node, name)] = f"{file.package} knows nothing of '{' '.join(hit)}'"
    return found


def within(wanted: tuple[str, ...], have: list[str]) -> bool:
    """Whether the words stand next to each other in the name."""
    return any(tuple(have[at : at + len(wanted)]) == wanted for at in range(len(have)))


def test_modules_know_no_rank() -> None:
    assert unbent("who cuts", violations(ROOT)) == []


@pytest.mark.parametrize(
    "text",
    [
        "def forward(x, process_group): ...",
        "heads = heads // mesh.size()",
        "class DTensorLinear: ...",
        "y = all_reduce(x)",
        "def apply_tp(self): ...",
        "world_size = 2",
        "from x import ProcessGroup",
    ],
)
def test_a_module_that_knows_ranks_is_seen(tmp_path: Path, text: str) -> None:
    assert violations(plant(tmp_path, xscale__nn__bad=text))


def test_prose_and_other_packages_may_speak_of_them(tmp_path: Path) -> None:
    plant(tmp_path, xscale__nn__good='"""Same on every rank."""\nx = 1', xscale__parallel__good="mesh = 1")
    assert violations(tmp_path) == {}
