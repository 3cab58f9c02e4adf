"""Heads of classes, scores and tags on layouts: the numbers, the weights and the metrics of one process."""

import copy
from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same

BLOCK = {
    "mixer": {"kind": "attention", "heads": 4, "bias": True},
    "ffn": {"kind": "dense", "hidden": 24, "bias": True},
    "norm": "layer",
    "residual": "post",
    "dropout": 0.1,
}
STACK: dict[str, Any] = {"depth": 2, "block": BLOCK}
ENCODER: dict[str, Any] = {"kind": "encoder", "width": 32, "position": "learned", "stack": STACK}
DECODER: dict[str, Any] = {"kind": "decoder", "width": 32, "stack": STACK}
LABELS = {"classify": "class", "regress": "score", "tag": "tags"}
LAYOUTS: dict[str, Any] = {
    "dp": {"mesh": {"dp_shard": 2}},
    "tp": {"mesh": {"tp": 2}},
    "sp": {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
    "ring": {"mesh": {"cp": 2}},
    "ulysses": {"mesh": {"cp": 2}, "context": {"style": "ulysses", "gather": True}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "zero3": {"zero": {"stage": 3}},
}


def sections(kind: str, **objective: Any) -> dict[str, Any]:
    source = {"kind": "labelled", "paths": ["a.jsonl"], "labels": LABELS[kind]}
    return {"objective": {"kind": kind, **objective}, "data": {"source": source}}


@pytest.fixture(scope="module")
def one(pool: Pool) -> dict[str, Found]:
    return {
        "classify": alone(pool, ENCODER, **sections("classify", dense=True, label_smoothing=0.1)),
        "tag": alone(pool, ENCODER, **sections("tag")),
        "regress": alone(pool, DECODER, **sections("regress", pool="last")),
    }


@pytest.mark.parametrize("layout", ["tp", "sp", "ring", "pp"])
def test_a_classifier_has_the_numbers_of_one_process(pool: Pool, one: dict[str, Found], layout: str) -> None:
    wanted = sections("classify", dense=True, label_smoothing=0.1)
    same(pool, one["classify"], 2, ENCODER, LAYOUTS[layout], **wanted)


@pytest.mark.long
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ulysses"])
@pytest.mark.parametrize("kind", ["tag", "regress"])
def test_taggers_and_scores_have_the_numbers_of_one_process(
    pool: Pool, one: dict[str, Found], kind: str, layout: str
) -> None:
    model, wanted = (ENCODER, sections("tag")) if kind == "tag" else (DECODER, sections("regress", pool="last"))
    same(pool, one[kind], 2, model, LAYOUTS[layout], **wanted)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp", "zero3"])
def test_a_classifier_is_sharded_over_data(pool: Pool, one: dict[str, Found], layout: str) -> None:
    wanted = sections("classify", dense=True, label_smoothing=0.1)
    same(pool, one["classify"], 2, ENCODER, LAYOUTS[layout], **wanted)


def without_masks(core: dict[str, Any]) -> dict[str, Any]:
    """ENCODER with a mixer that hides no tokens in its first block, and a core that hides none in the others."""
    model = copy.deepcopy(ENCODER)
    stack = model["stack"]
    stack["block"]["mixer"] = {"kind": "attention", "heads": 4, "core": core}
    stack["rules"] = [{"first": 1, "mixer": {"kind": "fourier"}}]
    return model


UNMASKED = without_masks({"kind": "linformer", "projected_length": 4, "sharing": "none"})


@pytest.fixture(scope="module")
def unmasked(pool: Pool) -> Found:
    return alone(pool, UNMASKED, **sections("classify"))


@pytest.mark.parametrize(
    "layout", ["ulysses", *(pytest.param(name, marks=pytest.mark.long) for name in ("pp", "zero3"))]
)
def test_parts_without_a_mask_never_see_padding_on_a_layout(pool: Pool, unmasked: Found, layout: str) -> None:
    same(pool, unmasked, 2, UNMASKED, LAYOUTS[layout], **sections("classify"))


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_frozen_parameters_stay_as_they_are(pool: Pool, layout: str) -> None:
    frozen = {**sections("classify"), "train": {"freeze": ["embed.*", "stack.blocks.0.*"]}}
    found = alone(pool, ENCODER, **frozen)
    for name, (_, value) in found.started.items():
        is_frozen = name.startswith(("embed.", "stack.blocks.0."))
        assert value.equal(found.ended[name][1]) == is_frozen, name
    assert not any(name.startswith("embed.") for name in found.gradients)
    same(pool, found, 2, ENCODER, LAYOUTS[layout], **frozen)


LORA = {"rank": 3, "alpha": 12.0, "match": ["*.q", "*.o", "*.up"]}


@pytest.fixture(scope="module")
def adapted(pool: Pool) -> Found:
    return alone(pool, ENCODER, **sections("classify"), lora=LORA, train={"clip_grad_norm": None})


@pytest.mark.parametrize("layout", ["tp", pytest.param("sp", marks=pytest.mark.long), "zero3"])
def test_lora_has_the_numbers_of_one_process(pool: Pool, adapted: Found, layout: str) -> None:
    names = {name.rpartition(".")[0] for name in adapted.gradients}
    assert "stack.blocks.0.mixer.part.o.lora" in names
    assert all(name.endswith(".lora") or name.startswith("head.") for name in names)
    wanted: dict[str, Any] = {**sections("classify"), "lora": LORA, "train": {"clip_grad_norm": None}}
    same(pool, adapted, 2, ENCODER, LAYOUTS[layout], **wanted)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ring", "dp", "pp"])
def test_lora_goes_with_other_layouts(pool: Pool, adapted: Found, layout: str) -> None:
    wanted: dict[str, Any] = {**sections("classify"), "lora": LORA, "train": {"clip_grad_norm": None}}
    same(pool, adapted, 2, ENCODER, LAYOUTS[layout], **wanted)
