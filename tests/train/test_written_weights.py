"""Weights that something other than the optimizer writes: on every layout, among evaluations and resumed, those of one
process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.train.tiny import losses, metrics, recipe, run
from xscale.checkpoint.load import load_tensors
from xscale.commands.checkpoints.convert import export_checkpoint
from xscale.commands.checkpoints.merge_lora import merge_run
from xscale.commands.checkpoints.upcycle import upcycle_run
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.train.optimizer_step.decision import StepDecision

Section = dict[str, Any]
DOUBLE = {"compute": "float64", "master": "float64"}
STEPS = 4
TRAIN: Section = {"steps": STEPS, "batch_size": 4, "micro_batch_size": 1, "eval_every": 1, "eval_sequences": 4}
FFN: Section = {"kind": "dense", "hidden": 24}


def model(mixer: Section | None = None, kind: str = "decoder", **block: Any) -> Section:
    """Two blocks with dropout."""
    mixer = {"kind": "attention", "heads": 4, **(mixer or {})}
    block = {"mixer": mixer, "ffn": FFN, "dropout": 0.1, **block}
    return {"kind": kind, "width": 32, "position": "learned", "stack": {"depth": 2, "block": block}}


def mixture(**router: Any) -> Section:
    ffn = {"kind": "moe", "experts": 4, "router": {"kind": "topk", **router}, "expert": FFN}
    return model(ffn={**ffn, "allow_noncausal_routing": True})


ROUTED = {"core": {"kind": "routing_transformer", "clusters": 3, "window": 8, "decay": 0.5}}
CLUSTERED = {"core": {"kind": "cluster_former", "clusters": 3, "chunk_length": 8, "update_every": 2}}
ENCODED: Section = {"objective": {"kind": "masked"}}
PACKED: Section = {"data": {"cross_documents": True}}
CONSTANT: Section = {"schedule": {"kind": "constant"}}
PAIRS: Section = {"train": {"micro_batch_size": 2}}
LORA: Section = {"rank": 2, "match": ["*.q", "*.down"]}
LLAMA: Section = {
    **model(ffn={"kind": "gated", "hidden": 24}, norm="rms"),
    "position": "rope",
    "tied": False,
}
PLACES: dict[str, Section] = {
    "residual gains": {"model": model(residual="admin")},
    "a router's bias": {"model": mixture(bias_update_rate=0.1)},
    "a router's load": {"model": mixture(balance_over="global_batch", aux_loss_weight=0.1)},
    "centroids": {"model": model(ROUTED), **PACKED},
    "a memory of clusters": {"model": model(CLUSTERED, "encoder"), **ENCODED, **PACKED},
    "batch norm": {
        "model": model(kind="encoder", norm={"kind": "batch"}, residual="post", dropout=0.0),
        **ENCODED,
        **PAIRS,
    },
    "power norm": {"model": model(kind="encoder", norm={"kind": "power"}, residual="post"), **ENCODED},
    "a simplex": {"model": model({"kind": "branched_attention"})},
    "moving average": {"model": model(), "train": {"ema_decay": 0.5}},
    "average of the optimizer": {"model": model(), "optimizer": {"kind": "schedule_free_adamw"}, **CONSTANT},
    "initial weights of a run": {"model": model(), "init": {"from": "first"}},
    "adapters": {"model": model(), "init": {"from": "first"}, "lora": LORA},
    "adapters merged": {"model": model(), "init": {"from": "merged"}},
    "upcycling": {"model": mixture(), "init": {"from": "upcycled"}},
    "an import of transformers": {"model": LLAMA, "init": {"from": "exported"}},
    "a teacher's weights": {"model": model(), "distill": {"teacher": "first", "init_from_teacher": True}},
    "rollback": {"model": model(), "train": {"spike": {"policy": "rollback"}}, "checkpoint": {"every_steps": 2}},
}
"""Writer of weights other than the optimizer -> a recipe in which it writes."""


def merge(folder: Path) -> None:
    """Train adapters on the first run, and merge them."""
    assert trained(folder, "adapted", "adapters", optimizer={"kind": "adamw", "lr": 0.05}) == EXIT_DONE
    assert merge_run(folder / "adapted", folder / "merged") == EXIT_DONE


def upcycle(folder: Path) -> None:
    overrides = [f"model.stack.block.ffn={json.dumps(mixture()['stack']['block']['ffn'])}"]
    assert upcycle_run(folder / "first", folder / "upcycled", overrides, 4) == EXIT_DONE


def export(folder: Path) -> None:
    assert trained(folder, "llama", "first", model=LLAMA) == EXIT_DONE
    assert export_checkpoint(folder / "llama", folder / "exported", "hf", None, 1e-3) == EXIT_DONE


SOURCES = {"merged": merge, "upcycled": upcycle, "exported": export}
"""Folder that a place begins from -> what makes it."""
LAYOUTS: dict[str, Section] = {
    **{f"zero{stage}": {"zero": {"stage": stage}} for stage in range(4)},
    "tp2": {"mesh": {"tp": 2}},
    "pp2": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
}
QUICK = ("residual gains-zero2",)


def trained(folder: Path, name: str, place: str, stop: int | None = None, **sections: Any) -> int:
    """Run the place's recipe; one that rolls back does so at its third step."""
    from xscale.train.optimizer_step import loss_spikes

    given = {**PLACES.get(place, {"model": model()}), **sections}
    train = {**TRAIN, "stop_after": stop, "baseline": False, **given.pop("train", {})}
    for key, value in (("init", "from"), ("distill", "teacher")):
        if key in given:
            given[key] = {**given[key], value: str(folder / given[key][value])}
    decide, calls = loss_spikes.decide, [0]

    def decided(*arguments: Any) -> StepDecision:
        calls[0] += 1
        spikes = calls[0] == 3 - (0 if stop or name.endswith("single") else 2)
        return StepDecision("rollback", "a test") if spikes else decide(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        if place == "rollback":
            patched.setattr(loss_spikes, "decide", decided)
        return run(recipe(folder, name, precision=DOUBLE, train=train, **given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the prepared data and a run to begin from."""
    folder = tmp_path_factory.mktemp("written")
    assert trained(folder, "first", "first", run={"seed": 8}) == EXIT_DONE
    return folder


def weights(folder: Path, name: str) -> dict[str, Tensor]:
    tensors = load_tensors(folder / name / "checkpoints" / f"step-{STEPS:08d}")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}


def evaluations(folder: Path, name: str) -> list[float]:
    keys = ("eval_loss", "ema_eval_loss")
    return [line[key] for line in metrics(folder, name) for key in keys if key in line]


CASES = [
    pytest.param(
        place, layout, marks=() if f"{place}-{layout}" in QUICK else [pytest.mark.long, pytest.mark.sampled(3)]
    )
    for place in PLACES
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("place", "layout"), CASES)
def test_a_layout_writes_what_one_process_does(place: str, layout: str, folder: Path, pool: Pool) -> None:
    source = PLACES[place].get("init", {}).get("from")
    if source in SOURCES and not (folder / source).exists():
        SOURCES[source](folder)
    single, name = f"{place}-single", f"{place}-{layout}"
    if not (folder / single).exists():
        assert trained(folder, single, place) == EXIT_DONE
    parallel = {"parallel": LAYOUTS[layout]}
    if place == "batch norm" and "zero" in layout:
        # It sees the tokens of both ranks at once.
        parallel["train"] = {"micro_batch_size": 1}
    assert pool.run(trained, 2, folder, name, place, 2, **parallel) == [EXIT_REQUEUE] * 2
    assert pool.run(trained, 2, folder, name, place, **parallel) == [EXIT_DONE] * 2
    assert losses(folder, name) == pytest.approx(losses(folder, single), rel=1e-9)
    assert evaluations(folder, name) == pytest.approx(evaluations(folder, single), rel=1e-9)
    alone, sharded = weights(folder, single), weights(folder, name)
    assert alone.keys() == sharded.keys()
    for key, expected in alone.items():
        assert torch.allclose(sharded[key], expected, rtol=1e-9, atol=1e-10), key
