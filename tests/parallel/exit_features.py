"""Features of exits that are compared with one process: tokens, words and examples that leave in training."""

from tests.parallel.features import (
    CP,
    PLAIN_BLOCK,
    PP,
    RING,
    SP,
    SP_RECOMPUTED,
    TP,
    TP_RECOMPUTED,
    ULYSSES,
    V_SHAPED,
    ZERO3,
    Feature,
    Section,
)


# Exits, at which tokens or examples leave in training too: their states are copied to later blocks.
def exits(kind: str, objective: str, policy: Section, layouts: dict[str, Section], quick: tuple[str, ...]) -> Feature:
    stack = {"depth": 4, "block": PLAIN_BLOCK, "exits": {"weights": "linear", "self_sampling": 0.5, "policy": policy}}
    model: Section = {"kind": kind, "width": 32, "position": "learned", "stack": stack}
    sections: Section = {"objective": {"kind": objective}}
    if objective == "seq2seq":
        plain = {"depth": 2, "block": PLAIN_BLOCK}
        model = {**{key: model[key] for key in ("kind", "width", "position")}, "encoder": plain, "decoder": stack}
        sections["data"] = {"source": {"kind": "pairs", "paths": ["x"]}, "cross_documents": False}
    elif objective in LABELS:
        sections["data"] = {"source": {"kind": "labelled", "paths": ["a.jsonl"], "labels": LABELS[objective]}}
    else:
        sections["data"] = {"cross_documents": False}
    return Feature(model, layouts, quick, sections)


LABELS = {"classify": "class", "regress": "score", "tag": "tags"}
SP_AND_PP: Section = {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence": True}}
ZERO_BUBBLE: Section = {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}}
INTERLEAVED: Section = {"mesh": {"pp": 2}, "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2}}
PATIENT: Section = {"criterion": "patience", "threshold": 1}
EXITS = {
    "exits of classes": exits(
        "encoder",
        "classify",
        PATIENT,
        {
            "tp": TP_RECOMPUTED,
            "sp": SP_RECOMPUTED,
            "cp": CP,
            "pp": PP,
            "zero3": ZERO3,
            "zero bubble": ZERO_BUBBLE,
            **V_SHAPED,
        },
        ("sp", "cp", "pp"),
    ),
    "exits of scores": exits("encoder", "regress", {**PATIENT, "tolerance": 0.05}, {"cp": CP, "pp": PP}, ()),
    "exits of tags": exits(
        "encoder",
        "tag",
        {"criterion": "uncertainty", "threshold": 0.999, "window": 1},
        {"sp": SP, "ring": RING, "ulysses": ULYSSES, "pp": PP, "sp and pp": SP_AND_PP},
        ("ring",),
    ),
    "exits of documents": exits(
        "decoder",
        "causal",
        {"criterion": "uncertainty", "threshold": 0.9983, "window": 2},
        {"sp": SP, "ring": RING, "pp": PP, "compiled": {**TP, "compile": True}},
        (),
    ),
    "exits by votes": exits(
        "encoder",
        "classify",
        {"criterion": "vote", "threshold": 1.3, "power": 0.5},
        {"pp": PP, "interleaved": INTERLEAVED, "sp and pp": SP_AND_PP},
        (),
    ),
    "exits of pairs": exits(
        "encoder_decoder",
        "seq2seq",
        {"criterion": "entropy", "threshold": 4.198},
        {
            "sp": SP,
            "cp": CP,
            "zero3": ZERO3,
            "pp": PP,
            "pp in the decoder": {**PP, "pipeline": {"schedule": "1f1b", "blocks_per_stage": [4, 2]}},
        },
        ("pp in the decoder",),
    ),
}
