"""The table of refused streams of text, and of models with a memory that read no streams; see `refusals`."""

from tests.requirements.depth_refusals import remembering
from tests.requirements.sections import APART, PAIR, Sections, decoder

STREAMED: Sections = {"order": "streams"}
REMEMBERING: Sections = {"model": remembering(), "data": STREAMED}
STREAMS: dict[str, tuple[str, Sections, int]] = {
    "memory of samples in a random order": ("memory_reads_streams", {"model": remembering()}, 1),
    "memory of samples in the order of the text": (
        "memory_reads_streams",
        {"model": remembering(), "data": {"order": "text"}},
        1,
    ),
    "streams of pairs": (
        "streams_are_of_one_text",
        {
            "model": PAIR,
            "objective": {"kind": "seq2seq"},
            "data": {**APART, **STREAMED, "source": {"kind": "stdlib_pairs"}},
        },
        1,
    ),
    "streams of a blend": (
        "streams_are_of_one_text",
        {"data": {**STREAMED, "blend": ({"prepared": "a"}, {"prepared": "b"})}},
        1,
    ),
    "streams of the caller's samples": ("streams_are_of_one_text", {"data": {**STREAMED, "from_caller": True}}, 1),
    "streams of another batch": (
        "streams_stay_as_they_began",
        {"data": STREAMED, "run": {"allow_changed": ("train.batch_size",)}},
        1,
    ),
    "a summary of the blocks of other stages": (
        "needs_of_modules_are_met",
        {"model": decoder({"segment_summary": {}}), "data": STREAMED, "parallel": {"mesh": {"pp": 2}}},
        2,
    ),
    **{
        f"feedback with {name}": (
            "needs_of_modules_are_met",
            {"model": decoder({"feedback": {"length": 8}}), "data": STREAMED, "parallel": parallel},
            ranks,
        )
        for name, (parallel, ranks) in {
            "stages": ({"mesh": {"pp": 2}}, 2),
            "shards of a sequence": ({"mesh": {"cp": 2}}, 2),
            "recomputed blocks": ({"recompute": {"every": 1}}, 1),
            "compiled blocks": ({"compile": True}, 1),
        }.items()
    },
    "memory of text that is moved": (
        "memory_reads_text_as_it_is",
        {**REMEMBERING, "objective": {"kind": "fill_in_middle"}},
        1,
    ),
    "memory of positions in a segment": (
        "distances_to_memory_are_told",
        {**REMEMBERING, "model": {**remembering(), "position": "learned"}},
        1,
    ),
    "memory of shards of a segment": (
        "needs_of_modules_are_met",
        {**REMEMBERING, "parallel": {"mesh": {"cp": 2}}},
        2,
    ),
    "memory of shards between regions": (
        "tensor can be applied to the model",
        {**REMEMBERING, "parallel": {"mesh": {"tp": 2}, "tensor": {"sequence": True}}},
        2,
    ),
}
