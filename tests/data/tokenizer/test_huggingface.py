"""Files of the `tokenizers` library: what each kind of decoder makes of its pieces, and what a file has to say."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from xscale.core.errors import ConfigError
from xscale.data.tokenizer.decoder import byte_letters, piece_decoder
from xscale.data.tokenizer.huggingface import FILE, HuggingFace
from xscale.objective.masked import Masked
from xscale.objective.objective import SpecialTokens
from xscale.run.run_data import padding_note, special_tokens_of

TEXT = "a b  bab\n</s> é"


def existing(folder: Path, made: Any, specials: tuple[str, ...] = ("</s>",), **fields: Any) -> HuggingFace:
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in specials])
    made.save(str(folder / FILE))
    return HuggingFace(HuggingFace.Config(**{"vocabulary": 300, "file": str(folder / FILE), **fields}), Path("nowhere"))


def byte_level() -> Any:
    made = HfTokenizer(models.BPE(vocab={one: place for place, one in enumerate(sorted(byte_letters()))}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def fallback() -> Any:
    pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "\u2581", "a", "b", "\u2581b"]
    vocab = {one: place for place, one in enumerate(pieces)}
    made = HfTokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "b")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def metaspace() -> Any:
    made = HfTokenizer(models.Unigram([("<unk>", 0.0), ("\u2581", -2.0), ("\u2581a", -1.0), ("b", -1.0)], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def words(decoder: Any = None) -> Any:
    vocab = {"[UNK]": 0, "a": 1, "b": 2, "ba": 3, "##b": 4}
    made = HfTokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoder or decoders.WordPiece(cleanup=False)
    return made


@pytest.mark.parametrize(
    ("made", "text", "said"),
    [
        (byte_level, TEXT, TEXT),
        (fallback, TEXT, TEXT),
        (metaspace, "a ab", " a ab"),
        (words, "a bab", " a bab"),
    ],
)
def test_ids_and_bytes(made: Any, text: str, said: str, tmp_path: Path) -> None:
    """The ids are the library's own; their bytes, joined, are the text."""
    tokenizer = existing(tmp_path, made())
    ids = tokenizer.encode(text)
    plain = made()
    assert ids == plain.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == plain.decode(ids)
    assert b"".join(tokenizer.iterate_bytes(ids)).decode() == said
    assert tokenizer.eos not in ids, "no text can write a special token"
    assert tokenizer.decode([tokenizer.eos]) == ""
    assert tokenizer.vocabulary == len(tokenizer.token_bytes()) == 300


def test_letters_are_the_librarys() -> None:
    made = byte_level()
    for value, word in ((value, bytes([value])) for value in range(128)):
        (found,) = made.encode(chr(value)).tokens
        assert byte_letters()[found] == word, value
    assert sorted(byte_letters().values()) == [bytes([value]) for value in range(256)]


def test_what_a_file_says_of_itself(tmp_path: Path) -> None:
    names = ("<|end|>", "[MASK]", "<extra_id_2>", "<extra_id_1>", "<extra_id_0>")
    with pytest.raises(
        ConfigError, match=r"no end-of-document token is given\. Set data\.tokenizer\.eos; .*<\|end\|>, \[MA"
    ):
        existing(tmp_path, byte_level(), names)
    one = existing(tmp_path, byte_level(), names, eos="<|end|>", vocabulary=320)
    assert (one.eos, one.pad, one.bos, one.mask) == (256, 256, None, None)
    assert one.sentinels == range(260, 257, -1), "T5's go downwards"
    assert one.vocabulary == 320
    assert one.piece(319) == "<unused>"
    refusals = Masked.check(
        Masked.Config(), SpecialTokens(320, one.pad, one.eos, one.mask, one.sentinels), 8, "objective"
    )
    assert [problem.what for problem in refusals] == ["the tokenizer has no mask token"]
    other = existing(tmp_path, byte_level(), names, eos="<|end|>", mask="[MASK]", pad="[MASK]")
    assert (other.pad, other.mask) == (257, 257)
    assert other.fingerprint == one.fingerprint
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.mask: .*has no token '<hide>'"):
        existing(tmp_path, byte_level(), names, eos="<|end|>", mask="<hide>")
    assert one.fim is None


@pytest.mark.parametrize("pattern", ["<fim_{}>", "<|fim_{}|>", "<fim-{}>"])
def test_tokens_for_filling_in_the_middle(tmp_path: Path, pattern: str) -> None:
    names = ("</s>", *(pattern.format(section) for section in ("prefix", "middle", "suffix")))
    tokenizer = existing(tmp_path, byte_level(), names)
    assert tokenizer.fim == (257, 259, 258)
    assert special_tokens_of(tokenizer).fim == tokenizer.fim
    assert max(tokenizer.encode(names[1])) < 256, "a text cannot spell them"
    assert existing(tmp_path, byte_level(), names[:3]).fim is None
    ordinary = byte_level()
    ordinary.add_tokens([AddedToken(name, special=False, normalized=False) for name in names[1:]])
    assert existing(tmp_path, ordinary).fim is None, "a text can spell them"


def test_texts_are_neither_cut_nor_filled(tmp_path: Path) -> None:
    """Files of encoders often ask for both."""
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=16)
    assert len(existing(tmp_path, made).encode("abcdefg")) == 7


@pytest.mark.parametrize(
    ("fields", "vocabulary"),
    [({}, 257), ({"vocabulary": 23}, 257), ({"vocabulary": 320}, 320), ({"vocabulary": None}, 257)],
)
def test_the_vocabulary_is_that_of_the_file(tmp_path: Path, fields: dict[str, Any], vocabulary: int) -> None:
    """Whatever tokenizers that are trained need; only a larger number pads."""
    made = byte_level()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / FILE))
    config = HuggingFace.Config(file=str(tmp_path / FILE), **fields)
    tokenizer = HuggingFace(config, tmp_path)
    assert tokenizer.vocabulary == len(tokenizer.token_bytes()) == vocabulary
    assert HuggingFace.planned_vocabulary(config) == vocabulary
    said = padding_note(tokenizer)
    assert said == (
        [] if vocabulary == 257 else ["vocabulary: 320 rows for 257 tokens; no text has the 63 further ones"]
    )


def test_the_bound_is_of_training_alone() -> None:
    assert HuggingFace.Config().vocabulary == 8192
    assert HuggingFace.Config(vocabulary=None).vocabulary == 8192
    assert HuggingFace.Config(file="a").vocabulary is None
    assert HuggingFace.planned_vocabulary(HuggingFace.Config(file="there is none")) == 8192
    with pytest.raises(ValueError, match="at least 300 ids"):
        HuggingFace.Config(vocabulary=23)


def test_data_of_before_the_default_was_the_file_s_keeps_its_folder() -> None:
    for fields in ({}, {"file": "a"}):
        assert HuggingFace.identity(HuggingFace.Config(**fields))["vocabulary"] == 8192


UNKNOWN = {
    "WordPiece": models.WordPiece({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"),
    "WordLevel": models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"),
    "BPE": models.BPE({"[UNK]": 0, "a": 1, "</s>": 2}, [], unk_token="[UNK]"),
    "Unigram": models.Unigram([("[UNK]", 0.0), ("a", -1.0), ("</s>", -9.0)], unk_id=0),
    "Unigram without": models.Unigram([("a", -1.0), ("</s>", -9.0)]),
    "<unk> alone": models.BPE({"<unk>": 0, "a": 1, "</s>": 2}, []),
    "none": models.BPE({"b": 0, "a": 1, "</s>": 2}, []),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_the_unknown_token_is_that_of_the_model(kind: str, tmp_path: Path) -> None:
    made = HfTokenizer(UNKNOWN[kind])
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer = existing(tmp_path, made, vocabulary=None)
    if kind in ("Unigram without", "none"):
        assert tokenizer.unk == tokenizer.eos
        return
    assert tokenizer.unk == 0
    if kind != "<unk> alone":
        assert tokenizer.encode("a z") == [1, 0]


def test_what_is_refused(tmp_path: Path) -> None:
    made = json.loads(byte_level().to_str())
    file, config = tmp_path / FILE, HuggingFace.Config(file=str(tmp_path / FILE))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizer cannot be read: No such file"):
        HuggingFace(config, tmp_path)
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json that tokenizers \S+ reads"):
        HuggingFace(config, tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"this is not a tokenizer\.json"):
        HuggingFace(config, tmp_path)
    ctc = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    file.write_text(json.dumps(made | {"decoder": ctc}))
    with pytest.raises(ConfigError, match="the text of its tokens is unknown: its decoder is of kind CTC"):
        HuggingFace(HuggingFace.Config(file=str(file), eos="a"), tmp_path)
    with pytest.raises(ConfigError, match=r"300 ids are too few\. Special tokens and bytes alone are 361"):
        HuggingFace.train(HuggingFace.Config(vocabulary=300), ["a"], tmp_path)
    with pytest.raises(ConfigError, match=r"the text is too short for 5000 pieces\. At most \d+ would work"):
        HuggingFace.train(HuggingFace.Config(vocabulary=5000), ["ab ab"], tmp_path)


def test_other_decoders() -> None:
    assert piece_decoder(None)("word") == b" word"
    assert piece_decoder({"type": "BPEDecoder", "suffix": "</w>"})("low</w>") == b"low "
    assert piece_decoder({"type": "BPEDecoder", "suffix": "</w>"})("lo") == b"lo"
