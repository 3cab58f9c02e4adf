"""Law 3: parallelism is cut, guard, substitute. Who talks to other ranks is therefore a short list of packages."""

import ast
from pathlib import Path

import pytest

from tests.laws.bent import unbent
from tests.laws.tree import ROOT, dotted, files, imports, meaning, plant

SPEAKERS = frozenset({"mesh", "parallel", "checkpoint", "bench"})
"""Packages that may name torch.distributed. The loop asks these; `bench` has torch's own parallelism as a baseline."""
MAKER = "xscale/mesh/mesh.py"
GROUPS = frozenset({"init_process_group", "new_group", "new_subgroups", "init_device_mesh", "DeviceMesh"})
"""Calls that make process groups."""


def violations(root: Path) -> dict[str, str]:
    found = {}
    for file in files(root):
        means = meaning(file)
        spoken = list(imports(file))
        for node in file.nodes:
            first, _, rest = dotted(node).partition(".")
            if isinstance(node, ast.Attribute):
                spoken.append((node, f"{means.get(first)}.{rest}"))
            if isinstance(node, ast.Call) and file.path != MAKER and makes_group(node, means):
                found[file.at(node, dotted(node.func))] = f"process groups are made in {MAKER}"
        for node, name in spoken:
            if f"{name}.".startswith("torch.distributed.") and file.package not in SPEAKERS:
                found[file.at(node, name)] = f"only {', '.join(sorted(SPEAKERS))} talk to other ranks"
    return found


def makes_group(call: ast.Call, means: dict[str, str]) -> bool:
    """Whether it is torch's call, not one of the project's under the same name."""
    first = dotted(call.func).split(".")[0]
    return dotted(call.func).split(".")[-1] in GROUPS and not means.get(first, "").startswith("xscale.")


def test_few_talk_to_other_ranks() -> None:
    assert unbent("three moves", violations(ROOT)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("xscale__train__bad", "import torch.distributed as dist"),
        ("xscale__train__bad", "import torch\ndef f():\n    torch.distributed.barrier()"),
        ("xscale__optim__bad", "def f():\n    from torch.distributed.tensor import DTensor"),
        ("xscale__parallel__bad", "import torch.distributed as dist\ndef f():\n    dist.new_group([0])"),
    ],
)
def test_others_who_talk_are_seen(tmp_path: Path, name: str, text: str) -> None:
    assert violations(plant(tmp_path, **{name: text}))


def test_those_who_may_pass(tmp_path: Path) -> None:
    plant(
        tmp_path,
        xscale__mesh__mesh="import torch.distributed as dist\ndef f():\n    dist.new_group([0])",
        xscale__parallel__good="from torch.distributed.fsdp import fully_shard",
    )
    assert violations(tmp_path) == {}
