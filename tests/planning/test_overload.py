"""The busiest expert-parallel rank in a plan: stated, or measured by a run, against hand calculation."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from xscale.cli.main import app
from xscale.commands.overload import OverloadOptions, measured_overload
from xscale.core.errors import ConfigError

SIZES = ("model.width=64", "model.stack.depth=2", "data.sequence_length=64", "data.tokenizer={kind: byte}")
SMALL = (*SIZES, "train.batch_size=8", "train.micro_batch_size=1", "checkpoint.every_steps=0")
DROPLESS = "moe.capacity_factor=null"


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", "configs/run/quickstart.yaml", *SMALL, *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def planned(*words: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(invoke("--device", "h100", "--json", *words))
    return answer


def rows_bytes(plan: dict[str, Any]) -> float:
    """Bytes of the rows that travel to experts and back."""
    return sum(float(entry["bytes"]) for entry in plan["traffic"] if entry["axis"] == "ep")


def test_the_busiest_rank_computes_stores_and_waits_for_its_rows() -> None:
    balanced, busiest = (planned("parallel.mesh.ep=2", DROPLESS, "--overload", factor) for factor in ("1", "1.5"))
    (mixture,) = (rule["ffn"] for rule in yaml.safe_load(balanced["config"])["model"]["stack"]["rules"])
    # Three products of a gated expert, forward and twice backward, of 2 D F FLOPs for each of the rank's rows.
    rows = balanced["tokens_per_step"] / 2 * mixture["router"].get("top_k", 1)
    work = rows * 3 * 3 * 2 * 64 * mixture["expert"]["hidden"]
    more = busiest["flops_per_step_per_rank"][0] - balanced["flops_per_step_per_rank"][0]
    assert more == pytest.approx(0.5 * work, rel=1e-6)
    # To the experts and back, forward and backward, half of the rows to the other rank, 64 channels of float32.
    sent = rows * 64 * 4 * 4 / 2
    assert rows_bytes(busiest) - rows_bytes(balanced) == pytest.approx(0.5 * sent, rel=1e-6)
    assert busiest["memory_bytes"]["activations"] > balanced["memory_bytes"]["activations"]
    assert busiest["step_seconds"] > balanced["step_seconds"]
    assert busiest["overload"] == {"factor": 1.5, "source": "--overload"}
    assert busiest["parameters_per_rank"] == balanced["parameters_per_rank"]


def test_an_overload_of_one_is_the_plan_without() -> None:
    plain, one = planned("parallel.mesh.ep=2"), planned("parallel.mesh.ep=2", "--overload", "1.0")
    assert plain.pop("overload") == {"factor": 1.0, "source": None}
    assert one.pop("overload") == {"factor": 1.0, "source": "--overload"}
    assert one == plain


def test_a_capacity_bounds_the_rows() -> None:
    """Experts of capacity factor 1.25 take no more."""
    at_capacity, above = (planned("parallel.mesh.ep=2", "--overload", factor) for factor in ("1.25", "1.9"))
    for key in ("memory_bytes", "traffic", "step_seconds", "flops_per_step_per_rank"):
        assert above[key] == at_capacity[key]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(("--overload", "0.9"), "--overload: must be at least 1, got 0.9", id="below 1"),
        pytest.param(("--overload", "nan"), "--overload: must be at least 1, got nan", id="no number"),
        pytest.param(("--overload", "2.5"), "--overload: 2.5 is more than ep=2", id="more than all rows"),
        pytest.param(("parallel.mesh.ep=1", "--overload", "1.5"), "--overload: parallel.mesh.ep is 1", id="ep 1"),
        pytest.param(("parallel.mesh.ep=1", "--from-run", "x"), "--from-run: parallel.mesh.ep is 1", id="ep 1, run"),
        pytest.param(("--overload", "1.5", "--from-run", "x"), "cannot be combined with --from-run", id="both"),
        pytest.param(("--overload", "1.5", "--check"), "--overload: cannot be combined with --check", id="check"),
        pytest.param(("--from-run", "x", "--check"), "--from-run: cannot be combined with --check", id="check, run"),
        pytest.param(("--overload", "1.5", "--search"), "--overload: cannot be combined with --search", id="search"),
        pytest.param(("--from-run", "nowhere"), "nowhere/metrics.jsonl: cannot be read", id="no run"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        invoke("parallel.mesh.ep=2", *words)


def write_metrics(folder: Path, *rows: dict[str, Any]) -> Path:
    """Write the metrics of a run, a row for each logged step."""
    lines = [json.dumps({"step": step, "loss": 2.0} | row) for step, row in enumerate(rows, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


SKEWED, EVEN = [0.4, 0.2, 0.1, 0.3], [0.25] * 4


@pytest.mark.parametrize(
    ("rows", "ep", "factor", "words"),
    [
        pytest.param([{"a/load": SKEWED}], 2, 1.2, ("1 mixture in 1 logged step to step 1", "1.20x, in a"), id="two"),
        pytest.param([{"a/load": SKEWED}], 4, 1.6, ("at most 1.60x",), id="another ep than the run's"),
        pytest.param([{"a/load": SKEWED, "b/load": EVEN}], 4, 1.3, ("2 mixtures", "1.60x, in a at"), id="layers"),
        pytest.param([{"a/load": EVEN, "a/rows": SKEWED}], 2, 1.2, ("1.20x",), id="rows, not load"),
        pytest.param([{"a/load": SKEWED}] + [{"a/load": EVEN}] * 10, 2, 1.0, ("10 logged steps to",), id="last"),
        pytest.param([{"a/load": SKEWED}, {"a/load": [None] * 4}, {}], 2, 1.2, ("to step 1",), id="unknown loads"),
    ],
)
def test_a_run_has_measured_it(
    tmp_path: Path, rows: list[dict[str, Any]], ep: int, factor: float, words: tuple[str, ...]
) -> None:
    overload = measured_overload(write_metrics(tmp_path, *rows), ep)
    assert overload.factor == pytest.approx(factor)
    assert overload.source is not None
    assert overload.source.startswith(f"measured by {tmp_path}, mean of ")
    assert all(part in overload.source for part in words), overload.source


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"blocks.0/grad_norm": 1.0}, "its model has no mixture of experts", id="dense"),
        pytest.param({"a/load": EVEN[:3]}, "ep=2 does not divide the 3 experts of a", id="experts"),
    ],
)
def test_a_run_that_cannot_say_is_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OverloadOptions(run=write_metrics(tmp_path, row)).of(2)


def test_the_plan_says_which_run_it_is_from(tmp_path: Path) -> None:
    run = write_metrics(tmp_path, {"a/load": SKEWED})
    text = invoke("parallel.mesh.ep=2", "--from-run", str(run))
    (line,) = [line for line in text.splitlines() if line.startswith("experts ")]
    assert "the busiest of 2 expert-parallel ranks gets 1.20x the mean rows" in line
    assert f"(measured by {run}, mean of 1 mixture in 1 logged step to step 1; at most 1.20x, in a at step 1)" in line
