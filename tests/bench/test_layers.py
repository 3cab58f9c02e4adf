"""`xscale bench layers`: what is compared with what, packages that are not installed, and invalid arguments."""

import json
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from xscale.bench.layers import PACKAGES, POSITION_CASES, PlainAttention, layer_of
from xscale.cli.main import main
from xscale.nn.position.position import POSITIONS

Run = Callable[..., str]
SMALL = ("--lengths", "32", "--rounds", "1", "--width", "16", "--heads", "2")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, status: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["xscale", "bench", "layers", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert (stopped.value.code or 0) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return call


def package(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    """Put a module in the place of a package."""
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def test_positions_are_compared_in_both_directions(run: Run) -> None:
    rows = json.loads(run("shaw", "relative", *SMALL, "--json"))
    assert [(row["name"], row["causal"], row["against"]) for row in rows] == [
        ("shaw", False, "plain attention"),
        ("shaw", True, "plain attention"),
        ("relative", False, "plain attention"),
        ("relative", True, "plain attention"),
    ]
    assert all(row["seconds"] > 0 and row["baseline_seconds"] > 0 and row["memory"] > 0 for row in rows)
    assert set(POSITION_CASES) <= set(POSITIONS.names())


def test_plain_attention_is_softmax_of_the_biased_scores() -> None:
    layer = PlainAttention(8, 2, 5, causal=True).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = (part.view(1, 5, 2, 4).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    expected = (q @ k.mT / 2 + layer.bias).softmax(-1) @ v
    torch.testing.assert_close(layer(x), layer.o(expected.transpose(1, 2).flatten(2)))
    assert (layer.bias[0].isinf() == torch.ones(5, 5).triu(1).bool()).all()


def test_a_package_is_compared_where_it_is_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class Layer(nn.Module):
        def __init__(self, width: int, length: int, k: int, heads: int) -> None:
            super().__init__()
            built.append((width, length, k, heads))
            self.map = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.map(x)
            return out

    package(monkeypatch, "linformer", LinformerSelfAttention=Layer)
    text = run("linformer", *SMALL)
    assert built == [(16, 32, 256, 2)]
    assert "linformer        bidirectional T = 32" in text
    assert "of the memory of linformer" in text


def test_a_package_that_is_not_installed_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nystrom_attention", None)
    assert "nystrom          not compared: " in (text := run("nystrom", *SMALL))
    assert "(pip install nystrom-attention)" in text


@pytest.mark.parametrize("name", PACKAGES)
def test_our_side_of_a_package_can_be_built(name: str) -> None:
    for causal in PACKAGES[name].causal:
        layer = layer_of({"heads": 2, "core": PACKAGES[name].core}, 16, 64, causal)
        assert layer(torch.randn(1, 64, 16)).shape == (1, 64, 16)


def test_bad_arguments(run: Run) -> None:
    assert "there is no such layer to compare" in run("shwa", *SMALL, status=2)
    assert "--lengths" in run("shaw", "--lengths", "0", status=2)
    assert "3 heads do not divide the width 16" in run("shaw", "--width", "16", "--heads", "3", status=2)
