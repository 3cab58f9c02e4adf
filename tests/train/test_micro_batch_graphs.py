"""A run whose micro-batches are CUDA graphs takes the steps of a run without; what cannot be captured is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_graphs import Captures
from tests.train.test_generate import model_of
from tests.train.test_static_decoding import MODELS, prompt_of
from tests.train.tiny import MIXTURE, recipe, run
from xscale.core.errors import ConfigError
from xscale.generate.decoders import Decoding, StaticDecoder
from xscale.generate.generate import GROWING, generate
from xscale.parallel import cuda_graph

ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2}
BLOCK = {"mixer": ATTENTION, "ffn": {"kind": "gated", "hidden": 48}}
DENSE = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": BLOCK}}
ONE_DOCUMENT = {"cross_documents": True}


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.long
@pytest.mark.parametrize("compute", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_run_takes_the_same_steps(compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures(monkeypatch)
    monkeypatch.setattr(cuda_graph, "require_cuda", lambda device: None)
    # Eight sequences of a step in four micro-batches: all but the first add to gradients that are there.
    sections: dict[str, Any] = {"model": DENSE, "data": ONE_DOCUMENT, "precision": {"compute": compute}}
    for name, graphs in (("plain", False), ("graphs", True)):
        assert run(recipe(tmp_path, name, **sections, parallel={"cuda_graphs": graphs})) == 0
    plain, captured = (losses(tmp_path / name) for name in ("plain", "graphs"))
    assert len(plain) == 6
    assert captured == plain
    assert len(captures.graphs) == 1


def test_a_graph_is_captured_after_its_warm_up_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures(monkeypatch)
    total, calls = torch.zeros(2), []

    def call() -> torch.Tensor:
        calls.append("call")
        return total.add_(1)

    graph = cuda_graph.CudaGraph(call)
    sections = ["begin side stream", "end side stream", "wait", "begin capture", "end capture"]
    assert captures.events == ["wait", *sections]
    assert len(calls) == cuda_graph.WARMUPS + 1
    before = total.clone()
    assert graph.replay() is total
    assert torch.equal(total, before + 1)
    assert len(calls) == cuda_graph.WARMUPS + 1


@pytest.mark.parametrize("name", ["softmax", "window", "mla"])
@torch.no_grad()
def test_decoding_replays_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures, model = Captures(monkeypatch), model_of(MODELS[name]).eval()
    decoder = StaticDecoder(model, 24)
    decoder.captures = True
    for length in (5, 2):
        expected = generate(model, prompt_of(length), 12, end=-1, temperature=0, decoding=GROWING)
        written = generate(model, prompt_of(length), 12, end=-1, temperature=0, decoding=Decoding(decoder=decoder))
        assert written.tolist() == expected.tolist()
    assert len(captures.graphs) == 1


def with_block(**changes: Any) -> dict[str, Any]:
    return {**DENSE, "stack": {"depth": 2, "block": {**BLOCK, **changes}}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "packed documents": ({"data": {}}, "packed documents are masked from each other"),
    "dropout": ({"model": with_block(dropout=0.1)}, "dropout draws random numbers"),
    "experts": ({"model": MIXTURE}, "the dispatch of tokens to experts has statistics"),
    "recomputation": ({"parallel": {"recompute": {"every": 1}}}, "recomputation sets the state of random generators"),
    "reversible blocks": ({"model": with_block(residual="reversible")}, "freed and written again, which a graph"),
    "ranks": ({"parallel": {"mesh": {"dp_shard": 2}}}, "the collectives of 2 ranks are not captured"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused(name: str, tmp_path: Path) -> None:
    sections, reason = REFUSED[name]
    parallel = {"cuda_graphs": True, **sections.get("parallel", {})}
    sections = {"model": DENSE, "data": ONE_DOCUMENT, **sections, "parallel": parallel}
    problems = [problem for problem in recipe(tmp_path, **sections).check(1) if "cuda_graphs" in problem.path]
    assert any(reason in problem.what for problem in problems), problems


def test_a_run_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        run(recipe(tmp_path, model=DENSE, data=ONE_DOCUMENT, parallel={"cuda_graphs": True}))
    (problem,) = refused.value.problems
    assert problem.path == "parallel.cuda_graphs"
    assert problem.what == "CUDA graphs need a CUDA device, and this run is on cpu"


def test_a_part_that_draws_is_found_at_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key of it is called dropout."""
    Captures(monkeypatch)
    monkeypatch.setattr(cuda_graph, "require_cuda", lambda device: None)
    model = with_block(ffn={"kind": "sparse", "hidden": 64})
    with pytest.raises(ConfigError, match="draws random numbers, which are seeded by the host"):
        run(recipe(tmp_path, model=model, data=ONE_DOCUMENT, parallel={"cuda_graphs": True}))


def test_every_part_that_reads_the_progress_says_so() -> None:
    """A graph has it for a constant."""
    import inspect

    from xscale.nn.depth.exits import Exits
    from xscale.nn.depth.gates import GateBudget
    from xscale.nn.mixer.guided_attention import GuidedAttention

    root = Path(__file__).parents[2] / "xscale" / "nn"
    readers = {file.name for file in root.rglob("*.py") if "forward.progress" in file.read_text(encoding="utf-8")}
    # Distillation is refused by its states.
    declared = {Path(inspect.getfile(part)).name for part in (Exits, GateBudget, GuidedAttention)}
    assert readers == declared | {"distillation.py"}
    assert all(part.reads_progress for part in (Exits, GateBudget, GuidedAttention))
