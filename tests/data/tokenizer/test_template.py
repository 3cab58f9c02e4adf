"""The begin and the end of a text: kinds of templates against `transformers` on the same folder, and the config."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from xscale.convert.hf.tokenizer import export_tokenizer, import_tokenizer
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import open_tokenizer, prepared_folder
from xscale.data.tokenizer.byte import Byte
from xscale.data.tokenizer.huggingface import HuggingFace
from xscale.data.tokenizer.template import read_template, with_prefix

SPECIALS = ("<unk>", "<s>", "</s>", "<pad>", "[gMASK]")
UNK, BOS, EOS, PAD, SECOND = range(5)
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEXTS = ("a b c", "", "c a a d", "a</s>b <s>")


def one(single: str) -> Any:
    tokens = [(name, SPECIALS.index(name)) for name in SPECIALS if name in single]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=tokens)


BYTE_LEVEL = processors.ByteLevel(trim_offsets=False)
KINDS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    # The post-processor, and the ids before and after a text by the paper or the model's card.
    "none, as Qwen2": (None, (), ()),
    "byte level, as GPT-2": (BYTE_LEVEL, (), ()),
    "begin, as Llama 2": (one("<s> $A"), (BOS,), ()),
    "byte level and begin, as Llama 3": (processors.Sequence([BYTE_LEVEL, one("<s> $A")]), (BOS,), ()),
    "BERT": (processors.BertProcessing(("</s>", EOS), ("<s>", BOS)), (BOS,), (EOS,)),
    "RoBERTa": (processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS)), (BOS,), (EOS,)),
    "end, as T5": (one("$A </s>"), (), (EOS,)),
    "both, as BART": (one("<s> $A </s>"), (BOS,), (EOS,)),
    "two before, as ChatGLM": (one("[gMASK] <s> $A"), (SECOND, BOS), ()),
    "two behind, as XLNet": (one("$A </s> <s>"), (), (EOS, BOS)),
}


def write(folder: Path, processor: Any, **settings: Any) -> Path:
    """A folder of transformers with a tokenizer of words and letters."""
    folder.mkdir()
    words = {name: number for number, name in enumerate([*SPECIALS, *"abcd</>s"])}
    tokenizer = HfTokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    if processor is not None:
        tokenizer.post_processor = processor
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def hf(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(folder))


def opened(folder: Path, **fields: Any) -> HuggingFace:
    config = HuggingFace.Config(file=str(folder / "tokenizer.json"), **fields)
    return HuggingFace(config, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    """A prompt is the library's ids without what follows the text; a document ends with one </s>."""
    processor, prefix, suffix = KINDS[kind]
    # `add_bos_token` of the config changes nothing beside a tokenizer.json, there as here.
    folder = write(tmp_path / "hf", processor, add_bos_token=not prefix)
    tokenizer, reference = opened(folder), hf(folder)
    for text in TEXTS:
        ids = reference(text, split_special_tokens=True)["input_ids"]
        assert [*tokenizer.encode_prompt(text), *suffix] == ids
        assert tokenizer.encode_document(text) == [*prefix, *tokenizer.encode(text), EOS]
        named = reference(text)["input_ids"]
        assert [*prefix, *tokenizer.encode_with_special_tokens(text), *suffix] == named
    assert tokenizer.prefix == prefix


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_template_of_training(kind: str, add_bos: bool, tmp_path: Path) -> None:
    processor, prefix, suffix = KINDS[kind]
    tokenizer = opened(write(tmp_path / "hf", processor, add_bos_token=not add_bos), add_bos=add_bos)
    begin = (prefix or (BOS,)) if add_bos else ()
    assert tokenizer.encode_document("ab") == [*begin, *tokenizer.encode("ab"), EOS]
    out = tmp_path / "out"
    out.mkdir()
    assert export_tokenizer(tokenizer, out)[0].startswith("tokenizer: 200 random texts")
    exported = hf(out)
    assert exported("ab", split_special_tokens=True)["input_ids"] == [*begin, *tokenizer.encode("ab"), *suffix]
    pair = exported("a", "b")["input_ids"]
    assert pair[: len(begin) + 1] == [*begin, *tokenizer.encode("a")]
    section, message = import_tokenizer(out, tmp_path / "run", tokenizer.vocabulary)
    assert section is not None, message
    again = open_tokenizer(decode(DataConfig, {"tokenizer": section}))
    assert again.encode_prompt("ab") == tokenizer.encode_prompt("ab")


def test_tokenizers_that_are_trained_here(tmp_path: Path) -> None:
    """No begin unless it is asked for; then exports have it."""
    plain, begun = Byte(Byte.Config(), tmp_path), Byte(Byte.Config(add_bos=True), tmp_path)
    assert plain.encode_document("a") == [*plain.encode("a"), plain.eos]
    assert begun.encode_document("a") == [1, *plain.encode("a"), plain.eos]
    assert begun.encode_prompt("") == [1]
    endless = Byte(Byte.Config(add_eos=False), tmp_path)
    assert endless.encode_document("a") == endless.encode("a")
    assert len({plain.fingerprint, begun.fingerprint, endless.fingerprint}) == 3
    assert plain.fingerprint == "byte-100", "that of runs of before there was a choice"
    for number, tokenizer in enumerate((plain, begun)):
        out = tmp_path / str(number)
        out.mkdir()
        export_tokenizer(tokenizer, out)
        assert hf(out)("a")["input_ids"] == tokenizer.encode_prompt("a")


def test_names_of_special_tokens_in_a_text(tmp_path: Path) -> None:
    """Text in a corpus, tokens in an evaluation: the longest name at a place."""
    tokenizer = Byte(Byte.Config(sentinels=12), tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    export_tokenizer(tokenizer, out)
    reference = hf(out)
    draw = random.Random(0)
    pieces = ["</s>", "<s>", "<extra_1>", "<extra_11>", "<", "extra_1>", " ", "é", "<unused>", "<pad><mask>"]
    for _ in range(50):
        text = "".join(draw.choices(pieces, k=6))
        assert tokenizer.encode_with_special_tokens(text) == reference(text)["input_ids"], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}, "has the text 0 times"),
        ({"type": "TemplateProcessing", "single": [{"Sequence": {}}, {"Sequence": {}}]}, "has the text 2 times"),
    ],
)
def test_a_template_without_one_text_is_refused(processor: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_template(processor)


def test_a_begin_that_there_is_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", None)
    text = (folder / "tokenizer.json").read_text().replace("<s>", "<x>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.add_bos: the tokenizer has no beginning-of-text token"):
        opened(folder, add_bos=True)
    assert opened(folder, add_bos=True, bos="<x>").prefix == (BOS,)


def test_the_begin_of_a_template_is_the_beginning_of_text(tmp_path: Path) -> None:
    """A file whose token is not named <s>, such as Gemma's <bos>, says which it is by its template."""
    folder = write(tmp_path / "hf", one("[gMASK] $A"))
    text = (folder / "tokenizer.json").read_text().replace("<s>", "<x>")
    (folder / "tokenizer.json").write_text(text)
    assert opened(folder).bos == SECOND


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_replaced_and_removed(kind: str) -> None:
    processor = KINDS[kind][0]
    section = None if processor is None else json.loads(processor.__getstate__())
    suffix = KINDS[kind][2]
    replaced = read_template(with_prefix(section, [("<pad>", PAD)]))
    assert (replaced.prefix, replaced.suffix) == ((PAD,), suffix)
    removed = read_template(with_prefix(section, []))
    assert (removed.prefix, removed.suffix) == ((), suffix)


def folder_of(**fields: Any) -> str:
    return prepared_folder(decode(DataConfig, {"tokenizer": fields})).name


def test_prepared_data_keeps_its_folder_unless_its_documents_change(tmp_path: Path) -> None:
    assert folder_of(kind="byte") == folder_of(kind="byte", add_bos=False) != folder_of(kind="byte", add_bos=True)
    assert folder_of(kind="byte") != folder_of(kind="byte", add_eos=False)
    file = str(write(tmp_path / "hf", one("<s> $A")) / "tokenizer.json")
    begun = folder_of(kind="huggingface", file=file)
    assert begun == folder_of(kind="huggingface", file=file, add_bos=True)
    assert begun != folder_of(kind="huggingface", file=file, add_bos=False)


@pytest.mark.parametrize(
    "data",
    [{"split_sentences": True}, {"source": {"kind": "pairs"}}, {"source": {"kind": "labelled"}}],
)
def test_what_needs_an_end_is_refused_without(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"leave out `tokenizer\.add_eos`"):
        decode(DataConfig, {**data, "tokenizer": {"kind": "byte", "add_eos": False}})
