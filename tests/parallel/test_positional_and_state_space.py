"""gMLP, MLP-Mixer, S4 and multi-linear attention on layouts that shard channels, factors, hidden units and layers; a
sharded sequence is refused but for S4."""

from typing import Any

import pytest

from tests.distributed import Pool
from tests.parallel.against_one import alone, asked, same
from tests.parallel.test_tensor import counted
from xscale.parallel import context
from xscale.parallel.tensor import apply as tensor
from xscale.settings.settings import build_on_meta

SECTIONS: dict[str, Any] = {"data": {"cross_documents": True}}
MIXERS: dict[str, dict[str, Any]] = {
    "gmlp": {"kind": "gmlp", "hidden": 24},
    "toeplitz": {"kind": "gmlp", "hidden": 20, "toeplitz": True, "bias": False},
    "amlp": {"kind": "gmlp", "hidden": 24, "attention": 4},
    "s4": {"kind": "s4", "states": 8},
    "mlp_mixer": {"kind": "mlp_mixer", "hidden": 10},
    "multi_linear": {"kind": "multi_linear", "factors": 8},
}


def model(names: list[str], kind: str = "decoder") -> dict[str, Any]:
    """A block of each mixer, in turn."""
    rules = [{"every": len(names), "at": at, "mixer": MIXERS[name]} for at, name in enumerate(names)]
    block = {"ffn": {"kind": "dense", "hidden": 48}, "dropout": 0.1}
    return {
        "kind": kind,
        "width": 32,
        "position": "none",
        "stack": {"depth": len(names), "block": block, "rules": rules},
    }


DECODER = model(["gmlp", "toeplitz", "s4", "multi_linear", "amlp"])
ENCODER = model(["gmlp", "toeplitz", "mlp_mixer", "multi_linear", "amlp"], "encoder")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "sequence": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "zero3": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}, "recompute": {"every": 1}},
}
QUICK = {("decoder", "sequence"), ("encoder", "tp")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in QUICK else [pytest.mark.long])
        for name in ("decoder", "encoder")
        for layout in LAYOUTS
    ],
)
def test_a_layout_trains_as_one_process(name: str, layout: str, pool: Pool) -> None:
    section = DECODER if name == "decoder" else ENCODER
    same(pool, alone(pool, section, **SECTIONS), 2, section, LAYOUTS[layout], **SECTIONS)


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_sent_is_what_was_estimated(sequence: bool, pool: Pool) -> None:
    """A gMLP gathers the half of its channels that it normalises, a dynamic convolution sums its logits."""
    parallel = {"mesh": {"tp": 2}, "tensor": {"sequence": sequence}}
    convolution = {"kind": "lightweight_conv", "heads": 4, "dynamic": True, "kernel_sizes": [3]}
    section = model(["gmlp", "s4"])
    section["stack"]["rules"][1]["mixer"] = convolution
    data = {"sequence_length": 24, "cross_documents": True}
    recipe = asked(section, parallel, data=data)
    expected = sum(tensor.estimate(build_on_meta(recipe, 67), recipe.parallel, 24).values())
    assert pool.run(counted, 2, section, parallel, data=data) == [expected] * 2


SCANNED: dict[str, Any] = {"mixer": {"kind": "s4", "states": 6}, "dropout": 0.1}
AFTER_ATTENTION = [{"at": 0, "every": 2, "mixer": {"kind": "attention", "heads": 2}}]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(4, {"mesh": {"cp": 4}, "context": {"style": "ring"}}, id="cp 4"),
        pytest.param(2, {"mesh": {"cp": 2}, "recompute": {"every": 1}}, id="cp 2", marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"cp": 2, "tp": 2}, "zero": {"stage": 3}}, id="cp 2 tp 2", marks=pytest.mark.long),
    ],
)
def test_s4_scans_a_sharded_sequence(ranks: int, layout: dict[str, Any], pool: Pool) -> None:
    """The sequence of 23 tokens is padded; attention by ring would take chunks from both ends of it."""
    stack = {"depth": 2, "block": SCANNED, "rules": AFTER_ATTENTION}
    section = {"kind": "decoder", "width": 12, "position": "none", "stack": stack}
    same(pool, alone(pool, section, **SECTIONS), ranks, section, layout, **SECTIONS)


def test_a_scan_sends_states_alone() -> None:
    """Each rank sends its state of N numbers a channel to the others, whatever the length."""
    for length in (64, 4096):
        recipe = asked(
            model(["s4"]), {"mesh": {"cp": 4, "tp": 2}}, data={"sequence_length": length, **SECTIONS["data"]}
        )
        sent = context.estimate(build_on_meta(recipe, 67), recipe.parallel, length)
        assert sent == {"scan": 3 * 16 * 8}


@pytest.mark.parametrize("section", [DECODER, ENCODER], ids=["decoder", "encoder"])
def test_a_sharded_sequence_and_packed_documents_are_refused(section: dict[str, Any]) -> None:
    kinds = {rule["mixer"]["kind"] for rule in section["stack"]["rules"]}
    problems = [str(problem) for problem in asked(section, {"mesh": {"cp": 2}}).check(2)]
    for kind in kinds:
        assert kind == "s4" or any(
            f"mixer '{kind}' mixes the full sequence" in problem and "Take 1" in problem for problem in problems
        )
        refusal = f"mixer '{kind}' cannot mask the documents"
        assert kind == "multi_linear" or any(refusal in problem for problem in problems)


def test_channels_that_tp_does_not_divide_are_refused() -> None:
    section = model(["s4", "gmlp"]) | {"width": 33}
    problems = {str(problem) for problem in asked(section, {"mesh": {"tp": 2}}, **SECTIONS).check(2)}
    assert any("hidden width of 33" in problem and "such as 34" in problem for problem in problems), problems
