"""Prefix language models: the draws, the mask against one written from the paper, generation, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import dims, drawn, ready
from tests.distributed import Pool
from tests.train.test_generate import BLOCK, MODELS_THAT_WRITE, V, model_of
from tests.train.tiny import losses, recipe, run
from xscale.core.errors import EXIT_DONE
from xscale.generate.beam_search import beam_search
from xscale.generate.generate import generate
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.mixer.attention import Attention
from xscale.nn.position.rope import Rope
from xscale.nn.tokens import Tokens
from xscale.objective.objective import SpecialTokens
from xscale.objective.prefix_lm import PrefixLm

LENGTH = 24
MODEL: dict[str, Any] = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": {**BLOCK, "dropout": 0.1}}}
DOCUMENTS = [0] * 9 + [1] + [2] * 15


def objective(seed: int = 1) -> PrefixLm:
    specials = SpecialTokens(vocabulary=V, pad=0, eos=2, mask=None, sentinels=range(0))
    return PrefixLm(PrefixLm.Config(), specials, LENGTH, seed)


def packed(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(3, V, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens, torch.tensor(DOCUMENTS).expand(rows, -1), torch.arange(rows)


def test_each_document_is_split_once_and_predicted_after_its_prefix() -> None:
    tokens, documents, index = packed(400)
    batch = objective().batch(tokens, documents, index)
    assert batch.tokens.prefix is not None
    lengths: dict[int, set[int]] = {0: set(), 2: set()}
    for row in range(len(tokens)):
        for first, end, number in ((0, 9, 0), (10, 25, 2)):
            prefix = batch.tokens.prefix[row, first : min(end, LENGTH)].tolist()
            length = sum(prefix)
            assert prefix == [True] * length + [False] * (len(prefix) - length)
            lengths[number].add(length)
            targets = batch.targets[row, first : end - 1]
            assert targets[: length - 1].eq(IGNORE_INDEX).all()
            assert targets[length - 1 :].equal(tokens[row, first + length : end])
        # No document's last token predicts the next one's first; a document of one token predicts nothing.
        assert batch.targets[row, [8, 9]].tolist() == [IGNORE_INDEX] * 2
    assert lengths == {0: set(range(1, 9)), 2: set(range(1, 15))}
    again = objective().batch(tokens[7:8], documents[7:8], index[7:8])
    assert again.targets.equal(batch.targets[7:8])
    assert not objective(seed=2).batch(tokens, documents, index).targets.equal(batch.targets)


def test_attention_is_that_of_the_paper() -> None:
    """Dong et al. 2019, equation 3: M_ij is 0 where i may attend to j, and minus infinity elsewhere."""
    tokens, documents, index = packed(2)
    batch = objective().batch(tokens, documents, index).tokens
    assert batch.prefix is not None
    mixer = ready(Attention(Attention.Config(heads=4, kv_heads=2), dims(position=Rope.Config())))
    x = drawn(2, LENGTH, 32)
    out = mixer(x, batch)
    mask = torch.full((2, 1, LENGTH, LENGTH), float("-inf"), dtype=x.dtype)
    for row in range(2):
        for i in range(LENGTH):
            for j in range(LENGTH):
                if DOCUMENTS[i] == DOCUMENTS[j] and (j <= i or batch.prefix[row, j]):
                    mask[row, 0, i, j] = 0
    q, k, v = mixer.project(x, batch)
    assert mixer.position is not None
    q, k = mixer.position.rotate_both(q, k, batch)
    weights = (q @ k.repeat_interleave(2, 1).mT / 8**0.5 + mask).softmax(-1)
    torch.testing.assert_close(out, mixer.project_output(weights @ v.repeat_interleave(2, 1)))
    # In training too no token sees one after it that is not of its prefix.
    changed = torch.where(batch.prefix[..., None], x, x + drawn(2, LENGTH, 32, seed=3))
    mixer.train()
    torch.testing.assert_close(mixer(changed, batch)[batch.prefix], out[batch.prefix])


@torch.no_grad()
def test_a_prompt_is_a_prefix() -> None:
    """Over caches as by whole forwards in which the prompt is the prefix, and otherwise than a causal model."""
    model = model_of(MODELS_THAT_WRITE["softmax"]).eval()
    prompt = torch.randint(V, (9,), generator=torch.Generator().manual_seed(0))
    ids, total = prompt, 0.0
    for _ in range(8):
        seen = Tokens.from_ids(ids[None], prefix=(torch.arange(len(ids)) < len(prompt))[None])
        logits = model(seen)[0, -1]
        ids, total = torch.cat((ids, logits.argmax()[None])), total + float(F.log_softmax(logits, -1).max())
    written = generate(model, prompt, 8, end=-1, temperature=0, prefix=True)
    assert written.tolist() == ids[len(prompt) :].tolist()
    assert written.tolist() != generate(model, prompt, 8, end=-1, temperature=0).tolist()
    hypotheses = beam_search(model, prompt, 8, end=-1, beams=1, length_penalty=0.0, prefix=True)
    assert hypotheses[0].score == pytest.approx(total)


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        ({"position": "alibi"}, "model.position", "tells no distances to later tokens"),
        ({"stack": {"block": {"mixer": {"kind": "s4"}}}}, "objective", "mixer 's4'"),
        (
            {"stack": {"block": {"mixer": {"kind": "attention", "heads": 4, "core": "linear"}}}},
            "objective",
            "core 'linear' the tokens of a prefix would not see its later tokens",
        ),
    ],
)
def test_a_model_that_hides_the_prefix_is_refused(tmp_path: Path, sections: Any, path: str, words: str) -> None:
    model, data = {"kind": "decoder", "width": 32, **sections}, {"cross_documents": True}
    asked = recipe(tmp_path, model=model, objective={"kind": "prefix_lm"}, data=data)
    assert [(problem.path, words in problem.what) for problem in asked.check()] == [(path, True)]


def test_sharded_sequences_need_ulysses(tmp_path: Path) -> None:
    def problems(style: str) -> list[str]:
        parallel = {"mesh": {"cp": 2}, "context": {"style": style}}
        sections: dict[str, Any] = {"model": MODEL, "objective": {"kind": "prefix_lm"}, "parallel": parallel}
        return [problem.path for problem in recipe(tmp_path, **sections).check(2)]

    assert problems("ulysses") == []
    assert problems("ring") == ["parallel.context.style"]


def trained(folder: Path, name: str, mesh: dict[str, int]) -> int:
    parallel = {"mesh": mesh, "context": {"style": "ulysses"}}
    exact = {"compute": "float64", "master": "float64"}
    sections: dict[str, Any] = {"model": MODEL, "objective": {"kind": "prefix_lm"}, "parallel": parallel}
    train = {"steps": 3, "eval_every": 0}
    return run(recipe(folder, name, precision=exact, data={"cross_documents": False}, train=train, **sections))


@pytest.mark.long
def test_layouts_learn_as_one_process_does(tmp_path: Path, pool: Pool) -> None:
    assert trained(tmp_path, "one", {}) == EXIT_DONE
    for name, mesh in {"cp": {"cp": 2}, "pp": {"pp": 2}}.items():
        assert pool.run(trained, 2, tmp_path, name, mesh) == [EXIT_DONE] * 2
        assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "one"), rel=1e-9), name
