"""SentencePiece: exact both ways, deterministic, special ids in place; what it refuses."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale.convert.hf.tokenizer import export_tokenizer
from xscale.core.errors import ConfigError
from xscale.data.tokenizer.sentencepiece import FILE, SentencePiece, _sentences

TEXTS = [Path(__file__).read_text(encoding="utf-8"), "def f(x):\n    return x ▁ + 1\n" * 50, "æøå"]


def trained(folder: Path, **fields: Any) -> SentencePiece:
    config = SentencePiece.Config(**{"vocabulary": 420, "sentinels": 20, **fields})
    SentencePiece.train(config, TEXTS, folder)
    return SentencePiece(config, folder)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SentencePiece:
    return trained(tmp_path_factory.mktemp("tokenizer"), model=request.param)


HARD = st.text() | st.lists(
    st.sampled_from(
        ["▁", " ", "  ", "\n", "\t", "\r\n", "def ", "<s>", "<mask>", "<extra_0>", "<0x41>", "é", "𝄞", "\0"]
    )
).map("".join)


@settings(deadline=None)
@given(text=HARD)
def test_every_text_comes_back(tokenizer: SentencePiece, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.byte_lengths()[tokens].sum() == len(text.encode())
    # No text can write a special token: its spelling is text too.
    assert not {*tokens} & {*range(tokenizer.sentinels.stop)}


def test_ids_are_laid_out(tokenizer: SentencePiece) -> None:
    assert tokenizer.vocabulary == 420
    assert [tokenizer.piece(token) for token in range(6)] == ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<extra_0>"]
    assert tokenizer.piece(tokenizer.sentinels[-1]) == "<extra_19>"
    assert tokenizer.decode([0, 1, 2, 3, 4, 5, *tokenizer.encode("x")]) == "x"


def test_it_compresses_and_pieces_hold_line_ends(tokenizer: SentencePiece) -> None:
    text = "def f(x):\n    return x\n"
    assert len(tokenizer.encode(text)) < len(text) * 2 / 3
    assert any(len(piece) > 1 and b"\n" in piece for piece in tokenizer.token_bytes())
    assert b"    " in tokenizer.token_bytes()


def test_training_twice_gives_the_same_file(tokenizer: SentencePiece, tmp_path: Path) -> None:
    again = trained(tmp_path, model=tokenizer.config.model)
    assert again.fingerprint == tokenizer.fingerprint
    assert trained(tmp_path / "b", model=tokenizer.config.model, vocabulary=410).fingerprint != tokenizer.fingerprint


@settings(max_examples=30)
@given(st.lists(st.text(alphabet="ab\n\r é", max_size=60)), st.integers(1, 20))
def test_sentences_are_the_text_in_short_stretches(texts: list[str], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xscale.data.tokenizer.sentencepiece.SENTENCE", limit)
        found = list(_sentences(texts))
    assert "".join(found) == "".join(texts)
    assert all(0 < len(one) <= 2 * limit for one in found)


def test_an_existing_file_is_used(tokenizer: SentencePiece, tmp_path: Path) -> None:
    written = tmp_path / "mine.model"
    written.write_bytes(tokenizer.processor.serialized_model_proto())
    config = SentencePiece.Config(file=str(written), sentinels=20)
    assert not SentencePiece.missing(config, tmp_path)
    assert SentencePiece.sample_bytes(config) == 0
    SentencePiece.train(config, [], tmp_path)
    assert SentencePiece(config, tmp_path).fingerprint == tokenizer.fingerprint
    assert [one.name for one in tmp_path.iterdir()] == ["mine.model"]
    with pytest.raises(ConfigError, match="id 25 of this model is not <extra_20>"):
        SentencePiece(SentencePiece.Config(file=str(written)), tmp_path)


def test_no_file_and_a_wrong_file_are_refused(tmp_path: Path) -> None:
    config = SentencePiece.Config()
    assert SentencePiece.missing(config, tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.model: the tokenizer cannot be read.*xscale data tokenizer"):
        SentencePiece(config, tmp_path)
    (tmp_path / FILE).write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="not a SentencePiece model"):
        SentencePiece(config, tmp_path)


def test_a_model_without_bytes_to_fall_back_on_is_refused(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=30,
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        control_symbols=["<mask>"],
        minloglevel=2,
    )
    with pytest.raises(ConfigError, match="no byte fallback"):
        SentencePiece(SentencePiece.Config(sentinels=0), tmp_path)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (
            {"vocabulary": 50_000},
            r"data\.tokenizer\.vocabulary: the text is too short for 50000 pieces. At most \d+ would",
        ),
        ({"vocabulary": 300}, r"data\.tokenizer\.vocabulary: 300 ids are too few"),
    ],
)
@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_a_vocabulary_that_does_not_fit_says_what_would(
    tmp_path: Path, model: str, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        trained(tmp_path, model=model, **fields)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("texts", [[], [""], ["\n", " \n"]])
def test_a_sample_without_text_is_said_without_the_library_s_words(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        SentencePiece.train(SentencePiece.example(), texts, tmp_path)
    assert "INTERNAL" not in str(refused.value)
    assert ".cc" not in str(refused.value)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Internal: src/trainer_interface.cc(408) [(vocab_size()) == (size)] The sizes differ", "The sizes differ"),
        ("INTERNAL: (../src/trainer.cc(58)) [!sentences.bad()]", "the library does not say why"),
        ("", "the library does not say why"),
    ],
)
def test_a_message_of_the_library_is_said_without_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, said: str
) -> None:
    import sentencepiece

    def train(**_: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "Train", train)
    with pytest.raises(ConfigError) as refused:
        SentencePiece.train(SentencePiece.example(), TEXTS, tmp_path)
    assert f"SentencePiece cannot be trained on this text: {said}. Try another" in str(refused.value)


def test_a_damaged_model_is_refused_or_works(tmp_path: Path) -> None:
    """Bytes changed anywhere in a model: a sentence with the file's name, or a tokenizer, never a traceback."""
    config = SentencePiece.example()
    SentencePiece.train(config, [f"the quick brown fox jumps {number}" for number in range(500)], tmp_path)
    file = tmp_path / "tokenizer.model"
    whole, draw, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 1, 3, 20])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        file.write_bytes(content)
        try:
            tokenizer = SentencePiece(config, tmp_path)
        except ConfigError as error:
            refused += str(file) in str(error)
        else:
            tokenizer.decode(tokenizer.encode("the quick \u2581 fox\n 12"))
    assert refused > 50


FOREIGN: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True},
    "t5": {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "gemma": {"model_type": "bpe", "byte_fallback": True, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    | {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>", "user_defined_symbols": ["<mask>"]},
}
IDS = {"llama": (2, 1, 2, 0, None), "t5": (1, None, 0, 2, None), "gemma": (1, 2, 0, 3, 4)}
"""End, begin, padding, unknown and mask of each."""


def foreign(folder: Path, kind: str, **settings: Any) -> Path:
    """A model that another program trained, with the library's normalisation and a space before a text."""
    import sentencepiece

    written = io.BytesIO()
    fields = {"vocab_size": 400, "character_coverage": 1.0, "minloglevel": 2} | FOREIGN[kind]
    lines = (line for text in TEXTS for line in text.splitlines())
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=lines, model_writer=written, **fields)
    (folder / FILE).write_bytes(written.getvalue())
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / FILE


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_model_that_was_trained_elsewhere(kind: str, tmp_path: Path) -> None:
    import sentencepiece

    file = foreign(tmp_path, kind)
    tokenizer = SentencePiece(SentencePiece.Config(file=str(file)), tmp_path / "elsewhere")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    assert (tokenizer.eos, tokenizer.bos, tokenizer.pad, tokenizer.unk, tokenizer.mask) == IDS[kind]
    assert tokenizer.vocabulary == SentencePiece.planned_vocabulary(tokenizer.config) == 400
    assert (tokenizer.prefix, len(tokenizer.sentinels)) == ((), 0)
    for text in (*TEXTS, "", "a ▁ 𝄞 ä  b", "</s> <s>"):
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert tokenizer.encode(text) == ids == processor.EncodeAsIds(text)
        assert len(offsets) == len(ids)
        assert offsets == sorted(offsets)
    text = "def f(x): return x + 1"
    assert tokenizer.decode(tokenizer.encode(text)) == f" {text}", "the space that the model puts first"
    assert tokenizer.encode_document(text) == [*tokenizer.encode(text), tokenizer.eos]


def test_a_model_begins_a_text_as_the_file_beside_it_says(tmp_path: Path) -> None:
    """Against transformers, which converts the same folder."""
    import transformers

    file = foreign(tmp_path, "llama", add_bos_token=True, tokenizer_class="LlamaTokenizer")
    tokenizer = SentencePiece(SentencePiece.Config(file=str(file)), tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in ("def f(x): return x", "Köln"):
        assert tokenizer.encode_prompt(text) == reference(text)["input_ids"]
    assert SentencePiece(SentencePiece.Config(file=str(file), add_bos=False), tmp_path).prefix == ()
    (tmp_path / "out").mkdir()
    assert "transformers converts it" in export_tokenizer(tokenizer, tmp_path / "out")[0]
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    (tmp_path / "out" / "tokenizer_config.json").write_text(
        json.dumps(settings | {"tokenizer_class": "LlamaTokenizer"})
    )
    exported = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert exported("Köln")["input_ids"] == tokenizer.encode_prompt("Köln")
    assert exported.eos_token == "</s>"


def test_the_end_of_a_model_that_names_none(tmp_path: Path) -> None:
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXTS[0].splitlines()), model_writer=written, vocab_size=300, eos_id=-1, minloglevel=2
    )
    (tmp_path / FILE).write_bytes(written.getvalue())
    config = SentencePiece.Config(file=str(tmp_path / FILE))
    with pytest.raises(ConfigError, match=r"names no end-of-document token\. Set data\.tokenizer\.eos"):
        SentencePiece(config, tmp_path)
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.eos: .* has no token '<end>'"):
        SentencePiece(config.model_copy(update={"eos": "<end>"}), tmp_path)
    assert SentencePiece(config.model_copy(update={"eos": "<s>"}), tmp_path).eos == 1
