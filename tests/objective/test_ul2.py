"""UL2: its seven denoisers with their tokens, restored texts, lengths, and tokenizers with too few sentinels."""

from collections import Counter

import torch

from xscale.nn.head.head import IGNORE_INDEX
from xscale.objective.objective import SpecialTokens
from xscale.objective.ul2 import Ul2

LENGTH, EOS, PAD = 256, 2, 0
SENTINELS = range(900, 1000)
MODES = {997: "R", 998: "S", 999: "X"}
PAPER = {("R", 38, 13), ("R", 38, 5), ("S", 64, 1), ("X", 128, 43), ("X", 128, 16), ("X", 38, 1), ("X", 128, 2)}
"""Tay et al. 2022, table 1, in samples of 256 tokens: mode, r * 256 corrupted tokens, and those over mu spans."""


def objective(seed: int = 1) -> Ul2:
    specials = SpecialTokens(vocabulary=1000, pad=PAD, eos=EOS, mask=None, sentinels=SENTINELS)
    return Ul2(Ul2.Config(), specials, LENGTH, seed)


def test_each_sample_has_one_of_the_papers_denoisers() -> None:
    tokens = torch.randint(3, 900, (280, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    index = torch.arange(280)
    batch = objective().batch(tokens, None, index)
    assert batch.source is not None
    assert batch.source.documents is not None
    seen: Counter[tuple[str, int, int]] = Counter()
    for row in range(280):
        text = batch.source.ids[row, batch.source.documents[row] == 0].tolist()
        target = [token for token in batch.targets[row].tolist() if token != IGNORE_INDEX]
        mode, source = text[0], text[1:]
        assert source[-1] == target[-1] == EOS
        spans: dict[int, list[int]] = {}
        for token in target[:-1]:
            if token in SENTINELS:
                last = spans.setdefault(token, [])
            else:
                last.append(token)
        restored = [part for token in source[:-1] for part in spans.get(token, [token])]
        assert restored == tokens[row, :-1].tolist()
        assert batch.tokens.ids[row, : len(target)].tolist() == [PAD, *target[:-1]]
        seen[MODES[mode], sum(map(len, spans.values())), len(spans)] += 1
        if MODES[mode] == "S":
            assert source[:-2] == tokens[row, : LENGTH - 64].tolist()
    assert set(seen) == PAPER
    assert min(seen.values()) > 20
    again = objective().batch(tokens[9:10], None, index[9:10])
    assert again.source is not None
    assert torch.equal(again.source.ids, batch.source.ids[9:10])


def test_modes_and_spans_need_sentinels() -> None:
    few = SpecialTokens(vocabulary=1000, pad=PAD, eos=EOS, mask=None, sentinels=range(955, 1000))
    problems = Ul2.check(Ul2.Config(), few, LENGTH, "objective")
    assert [problem.path for problem in problems] == ["objective.denoisers.3"]
    assert "43 spans and 3 modes" in problems[0].what
    # Seven of eight tokens, a sentinel, a mode and an end are ten.
    assert "exceed 8 tokens" in Ul2.check(Ul2.Config(), None, 8, "objective")[0].what
