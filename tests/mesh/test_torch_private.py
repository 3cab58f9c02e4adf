"""Private names of torch: each one exists, and none is used outside the one file that lists them."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

import xscale
from xscale.mesh import torch_private

PRIVATE = re.compile(r"\btorch(?:\.[a-zA-Z]\w*)*\._[a-zA-Z]\w*|from torch[\w.]* import [^\n]*\b_[a-zA-Z]\w*")
ALLOWED = {"torch.__version__"}


def used(folder: Path) -> dict[str, list[str]]:
    """Private names by file."""
    files = [file for file in folder.rglob("*.py") if file.name != "torch_private.py"]
    names = {str(file.relative_to(folder)): PRIVATE.findall(file.read_text()) for file in files}
    return {file: found for file, found in names.items() if set(found) - ALLOWED}


@pytest.mark.parametrize("name", torch_private.NAMES)
def test_that_torch_still_has_the_name(name: str) -> None:
    assert getattr(torch_private, name) is not None


def test_that_the_version_is_one_in_which_the_names_were_seen() -> None:
    if torch.__version__.partition("+")[0] not in torch_private.SEEN_IN:
        pytest.skip(f"torch {torch.__version__} is not among {torch_private.SEEN_IN}; add it when all tests pass")


def test_that_an_unlisted_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torch_private.no_such_name


def test_that_no_other_file_uses_private_names() -> None:
    assert not used(Path(xscale.__file__).parent)


def test_that_a_use_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import torch\nfrom torch.serialization import _save\nx = torch._C._is_alias_of\n")
    (tmp_path / "good.py").write_text("from torch.distributed.tensor import Shard\nname = '__all__'\n")
    assert list(used(tmp_path)) == ["bad.py"]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        x, weight = context.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def test_a_node_outlives_its_graph_in_the_versions_that_are_said_to() -> None:
    x, weight = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)

    def node() -> Any:
        last = (Product.apply(x.sin(), weight) * 2).grad_fn  # type: ignore[no-untyped-call]
        return last.next_functions[0][0]

    edge = GradientEdge(node(), 0)
    with nullcontext() if torch_private.node_outlives_graph() else pytest.raises(RuntimeError, match="_input_metadata"):
        (gradient,) = torch.autograd.grad([edge], [weight], grad_outputs=[torch.ones(2, 2)])
        assert torch.allclose(gradient, x.sin().t() @ torch.ones(2, 2))
