"""The benchmark of a mixture layer: equal outputs before any speed, phases that add up, and processes."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from tests.distributed import Pool
from xscale.bench.moe import run as bench
from xscale.bench.moe.layers import LayerSizes, TimedLayer, dense_ffn, topk_moe
from xscale.bench.moe.run import PHASES
from xscale.cli.main import app
from xscale.core.errors import ConfigError

SMALL = LayerSizes(width=16, hidden=24, experts=4, top_k=2, tokens=64)


def call(*words: str) -> str:
    found = CliRunner().invoke(app, ["bench", "moe", "--hidden", "24", "--experts", "4", "--rounds", "1", *words])
    if isinstance(found.exception, ConfigError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


def test_the_table_and_the_record(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the transformers library is not installed")
    file = tmp_path / "moe.json"
    with patch.object(bench, "require_passing_tests"):
        said = call("--width", "16", "--width", "32", "--tokens", "64", "--record", str(file))
    found = json.loads(file.read_text())
    assert [one["width"] for one in found["sizes"]] == [16, 32]
    for one in found["sizes"]:
        assert set(one["phases"]) == set(PHASES) - {"all-to-all"}, "nothing travels in one process"
        assert set(one["speed"]) == set(one["milliseconds"]) - {"xscale", "xscale, switch"}
        assert {"transformers Mixtral, eager", "loop over experts", "transformers Switch"} < set(one["speed"])
        assert one["speed"]["loop over experts"] == pytest.approx(
            one["milliseconds"]["loop over experts"] / one["milliseconds"]["xscale"]
        )
    assert {"torch", "transformers", "commit", "device", "date"} < set(found)
    assert "width 32, 4 experts of hidden 24, top-2, 64 tokens" in said


def test_the_dense_layer_has_the_active_weights() -> None:
    device = torch.device("cpu")
    moe, dense = topk_moe(SMALL, device, torch.float32), dense_ffn(SMALL, device, torch.float32)
    experts = sum(parameter.numel() for parameter in moe.experts.parameters())
    assert experts * SMALL.top_k // SMALL.experts == sum(parameter.numel() for parameter in dense.parameters())


def test_no_speed_of_a_layer_that_gives_something_else() -> None:
    layers = [TimedLayer("xscale", lambda x: x, ()), TimedLayer("broken", lambda x: x * 1.001, (), "xscale")]
    with pytest.raises(ConfigError, match=r"outputs of broken and xscale differ by 0\.001"):
        bench._check_same_outputs(layers, torch.ones(1, 2, 3))


def test_no_speed_on_red() -> None:
    with (
        patch.object(bench, "TESTS", ("tests/conftest.py", "tests/none_such.py")),
        pytest.raises(ConfigError, match="its tests are missing"),
    ):
        call()


def bench_on_rank(sizes: LayerSizes) -> dict[str, object]:
    """A worker's part."""
    with patch.object(bench, "leave_process_group"):
        return bench.bench_moe([sizes.width], sizes, 1)


@pytest.mark.parametrize("ranks", [2])
def test_processes_time_the_all_to_all(pool: Pool, ranks: int) -> None:
    everyone = pool.run(bench_on_rank, ranks, SMALL)
    assert [one["first"] for one in everyone] == [True, False]
    (found,) = everyone[0]["sizes"]
    assert set(found["phases"]) == set(PHASES)
    assert set(found["speed"]) == {"dense of equal active FLOPs", "xscale, balanced routing"}
    # Of the busiest rank: round-robin sends each as many rows.
    assert found["overload"]["xscale, balanced routing"] == pytest.approx(1.0, abs=0.02)
    assert found["overload"]["xscale"] >= 1.0
    assert everyone[1]["sizes"][0]["overload"] == found["overload"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--top-k", "5"), "--top-k: top_k=5 is not between 1 and experts=4"),
        (("--processes", "3"), "--processes: processes=3 does not divide experts=4"),
        (("--tokens", "0"), "--tokens: must be at least 1"),
        (("--rounds", "0"), "--rounds: must be at least 1"),
    ],
)
def test_what_is_refused(words: tuple[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call(*words)
