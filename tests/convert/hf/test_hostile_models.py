"""Models of a hub whose files are odd or hostile: one sentence, in bounds of memory, and no half-made run folder."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.bounds import bounded, listing
from tests.faults.dying import save_step
from tests.faults.planted_entries import dangling_link, fifo, link_to_file, link_to_folder
from xscale.commands.checkpoints.import_hf import import_run
from xscale.convert.hf.special_ids import GENERATION, IDS, ORIGIN, export_generation_config, kept_special_ids
from xscale.core.errors import ConfigError
from xscale.data.tokenizer.huggingface import HuggingFace

Change = Callable[[Path], None]
WIDTH, VOCABULARY = 16, 320


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, imported once so that what the library loads lazily is loaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("hub") / "model"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(["some text to learn from " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": 10**30}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    said: list[str] = []
    assert import_run(folder, folder.parent / "run", None, [], say=said.append) == 0
    assert any("tokenizer: imported, " in line for line in said), "\n".join(said)
    return folder


def edited(name: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return change


def config(**changes: Any) -> Change:
    return edited("config.json", **changes)


def written(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


class Runs:
    """Pickled, it names a function that would run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/xscale-was-run",)


def pickled(content: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return change


def torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def repeated(folder: Path) -> None:
    """Weights that are one number each in the file, and terabytes when they are used."""
    weights = {"model.embed_tokens.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}
    pickled(weights)(folder)


def fifo_for_generation(folder: Path) -> None:
    (folder / GENERATION).unlink(missing_ok=True)
    os.mkfifo(folder / GENERATION)


ONE = "config.json"
CONFIGS: dict[str, tuple[Change, str]] = {
    "layers without end": (config(num_hidden_layers=10**9), "num_hidden_layers: 1000000000 is more than the tensors"),
    "words without end": (config(vocab_size=2**62), "vocab_size: 4611686018427387904 is more than the tensors"),
    "a width without end": (config(hidden_size=10**12), "hidden_size: 1000000000000 is more than the tensors"),
    "heads without end": (config(num_attention_heads=10**9), "num_attention_heads: 1000000000 is more than"),
    "positions without end": (config(max_position_embeddings=2**40), "max_position_embeddings: 1099511627776 is more"),
    "experts in layers": (
        config(model_type="mixtral", num_local_experts=60_000, num_hidden_layers=1000),
        "1000 layers of 60000 experts are more than the 21 tensors can be",
    ),
    "no heads": (config(num_attention_heads=0), "num_attention_heads: must be >= 1, got 0"),
    "no key heads": (config(num_key_value_heads=0), "num_key_value_heads: must be >= 1, got 0"),
    "fewer layers than none": (config(num_hidden_layers=-1), "num_hidden_layers: must be >= 1, got -1"),
    "text for a number": (config(hidden_size="wide"), "hidden_size: must be an integer, got 'wide'"),
    "a list for a number": (config(hidden_size=[16]), "hidden_size: must be an integer, got '[16]'"),
    "a fraction for a number": (config(hidden_size=16.5), "hidden_size: must be an integer, got '16.5'"),
    "a truth for a number": (config(vocab_size=True), "vocab_size: must be an integer, got 'True'"),
    "an object for a norm": (config(rms_norm_eps={}), ""),
    "text for a norm": (config(rms_norm_eps="small"), ""),
    "text for positions": (config(rope_parameters="rope"), ""),
    "positions of an unknown kind": (config(rope_parameters={"rope_type": "nope", "rope_theta": 1.0}), ""),
    "heads that do not divide": (config(num_attention_heads=3), ""),
    "another width": (config(hidden_size=32), ""),
    "another number of layers": (config(num_hidden_layers=3), "it has no tensor model.layers.2."),
    "another vocabulary": (config(vocab_size=VOCABULARY + 1), "tensor shapes do not match"),
    "a model type that is none": (config(model_type="nope"), ""),
    "a model type that is a list": (config(model_type=["llama"]), ""),
    "no model type": (written(ONE, b"{}"), ""),
    "code of its own": (config(auto_map={"AutoConfig": "code.Config"}, model_type="own"), ""),
    "a config nested deeply": (written(ONE, b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "it is nested too deeply"),
    "a config nested a little too deeply": (written(ONE, b"[" * 200 + b"]" * 200), "it is nested too deeply"),
    "a config that is a list": (written(ONE, b"[1]"), "it is not an object of JSON"),
    "a config that is torn": (written(ONE, b'{"a'), "is not a config of transformers"),
    "a config that is binary": (written(ONE, b"\xff\xfe\x00"), "is not a config of transformers"),
    "an empty config": (written(ONE, b""), "is not a config of transformers"),
    "an integer of 5,000 digits": (written(ONE, b'{"vocab_size": ' + b"9" * 5000 + b"}"), "an integer of 5000 digits"),
    "generation settings nested deeply": (
        written(GENERATION, b"[" * 100_000),
        f"{GENERATION}: the file is not a config",
    ),
    "generation settings that are a list": (written(GENERATION, b"[1]"), f"{GENERATION}: the file is not a config"),
    "generation settings that are torn": (written(GENERATION, b'{"a'), f"{GENERATION}: the file is not a config"),
    "an id of 31 digits": (written(GENERATION, b'{"eos_token_id": ' + b"9" * 31 + b"}"), f"{GENERATION}: the file is"),
    "generation settings in a FIFO": (fifo_for_generation, f"{GENERATION}: the file is not a config"),
    "a padding id beyond the words": (config(pad_token_id=4_000_000_000), ""),
    "a torn file of weights": (torn, "model.safetensors: the file cannot be read"),
    "a file of weights that is none": (written("model.safetensors", b"\xff" * 100), "the file cannot be read"),
    "a header without end": (written("model.safetensors", b"\xff" * 7 + b"\x00{}"), "the file cannot be read"),
    "an index of other folders": (
        written("model.safetensors.index.json", b'{"weight_map": {"a": "../x"}}'),
        "leaves its",
    ),
    "an index of many thousand files": (
        written(
            "model.safetensors.index.json",
            json.dumps({"weight_map": {str(n): f"{n}.x" for n in range(20_000)}}).encode(),
        ),
        "it names 20000 files",
    ),
    "an index that is a list": (written("model.safetensors.index.json", b"[]"), "the file is not an index of tensors"),
    "a pickle that runs": (pickled({"a": Runs()}), "it names posix.system, which no file of tensors does"),
    "a pickle of a class": (pickled({"a": pickle.PickleBuffer}), "it names pickle.PickleBuffer, which no file"),
    "a pickle of a list": (pickled([1, 2]), "it is not a dictionary of tensors"),
    "tensors that repeat a byte": (repeated, "is larger than its bytes in the file"),
    "tensors that are sparse": (pickled({"a": torch.zeros(3, 3).to_sparse()}), "a tensor that is not plain"),
    "tensors without values": (pickled({"a": torch.zeros(3, device="meta")}), "a tensor that is not plain"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_model_is_a_sentence(name: str, good: Path, tmp_path: Path) -> None:
    change, sentence = CONFIGS[name]
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    change(folder)
    before = listing(tmp_path)
    with pytest.raises(ConfigError) as refused, bounded():
        import_run(folder, tmp_path / "run", None, [], say=lambda line: None)
    said = str(refused.value)
    assert sentence in said
    assert "weights_only" not in said
    assert "allowlist" not in said
    assert all(len(str(problem).splitlines()) == 1 and len(str(problem)) < 900 for problem in refused.value.problems)
    assert listing(tmp_path) == before
    assert not Path("/tmp/xscale-was-run").exists()


def tokenizer(**changes: Any) -> Change:
    return edited("tokenizer.json", **changes)


def vocabulary(**words: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"] |= words
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return change


def replaced(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: Any, of: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", of: steps}


PANICS = {"type": "Split", "pattern": {"Regex": r"(a|aa)+\x01"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PADDING = {
    "strategy": {"Fixed": 10**9},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "</s>",
}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2000,
    "pair": [],
    "special_tokens": {},
}
BACKTRACKS = {"type": "Split", "pattern": {"Regex": r"(.+)+\x01"}, "behavior": "Isolated", "invert": False}
TOKENIZERS: dict[str, tuple[Change, str]] = {
    "an id of four billion": (vocabulary(beyond=4_000_000_000), "the token id 4000000000"),
    "an id below none": (vocabulary(beyond=-1), "the token id -1"),
    "an id that is a text": (vocabulary(beyond="x"), "the token id x"),
    "an added id of four billion": (
        tokenizer(added_tokens=[{"id": 4 * 10**9, "content": "x", "special": True}]),
        "the token id 4000000000",
    ),
    "an added id beside the file": (written("added_tokens.json", b'{"a": 4000000000}'), "the token id 4000000000"),
    "an added id in the settings": (
        edited("tokenizer_config.json", added_tokens_decoder={"4000000000": {"content": "x"}}),
        "the token id 4000000000",
    ),
    "a normaliser that doubles 40 times": (
        tokenizer(normalizer=sequence(*[replaced("aa", String="a")] * 40)),
        "its normalizer can make more than 1000 characters of one",
    ),
    "a normaliser that fills gaps": (
        tokenizer(normalizer=sequence(*[replaced("x" * 40, Regex="")] * 2)),
        "its normalizer can make more than 1000",
    ),
    "a normaliser with a long text": (
        tokenizer(normalizer=replaced("x" * 10**6, String="a")),
        "has 1000000 characters",
    ),
    "normalisers in normalisers": (
        tokenizer(normalizer=sequence(sequence(*[replaced("aa", String="a")] * 20))),
        "its normalizer can make more than 1000",
    ),
    "a pre-tokeniser of bytes of bytes": (
        tokenizer(pre_tokenizer=sequence(*[BYTES] * 9, of="pretokenizers")),
        "its pre_tokenizer can make more than 1000",
    ),
    "a decoder that doubles 40 times": (
        tokenizer(decoder=sequence(*[replaced("aa", String="a")] * 40, of="decoders")),
        "its decoder can make more than 1000",
    ),
    "padding without end": (
        tokenizer(padding=PADDING),
        "its padding.strategy is 1000000000",
    ),
    "a regular expression that panics": (tokenizer(pre_tokenizer=PANICS), "retry-limit-in-match over"),
    "a regular expression that backtracks": (tokenizer(pre_tokenizer=BACKTRACKS), ""),
    "a regular expression that is none": (tokenizer(normalizer=replaced("", Regex="(")), ""),
    "a tokenizer nested deeply": (written("tokenizer.json", b"[" * 100_000), "nested too deeply"),
    "a tokenizer that is torn": (written("tokenizer.json", b'{"version'), ""),
    "a tokenizer that is empty": (written("tokenizer.json", b"{}"), ""),
    "settings that are a list": (written("tokenizer_config.json", b"[1]"), ""),
    "settings nested deeply": (written("tokenizer_config.json", b'{"a":' * 10_000), "nested too deeply"),
    "a class of its own": (
        edited("tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]}),
        "",
    ),
    "a template without end": (
        tokenizer(post_processor=TEMPLATE),
        "its post_processor adds more than 1000 tokens",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_left_out_in_a_sentence(
    name: str, good: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The weights are imported; the tokenizer is not, unless it is harmless; or all of it is refused."""
    change, sentence = TOKENIZERS[name]
    folder, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(good, folder)
    change(folder)
    before = listing(tmp_path)
    said: list[str] = []
    with bounded():
        try:
            assert import_run(folder, run, None, [], say=said.append) == 0
        except ConfigError as error:
            said.append(str(error))
            assert listing(tmp_path) == before
        else:
            assert (run / "config.yaml").is_file()
            assert (run / "tokenizer").exists() == any("tokenizer: imported" in line for line in said)
    assert sentence in "\n".join(said)
    assert not sentence or not any("tokenizer: imported" in line for line in said)
    assert all(len(line.splitlines()) == 1 and len(line) < 900 for line in said), said
    assert "panicked" not in capfd.readouterr().err


def test_a_tokenizer_that_panics_later_is_a_sentence(good: Path, tmp_path: Path) -> None:
    """A text may reach what the first one did not."""
    file = tmp_path / "tokenizer.json"
    content = json.loads((good / "tokenizer.json").read_text())
    late = {"type": "Split", "pattern": {"Regex": r"(q|qq)+\x01"}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps(content | {"pre_tokenizer": late}))
    opened = HuggingFace(HuggingFace.Config(file=str(file)), tmp_path)
    for act in (opened.encode, opened.encode_with_offsets):
        with pytest.raises(ConfigError, match=r"cannot use this tokenizer\.json on a text: Onig: Regex search error"):
            act("q" * 80)


def test_a_folder_that_was_there_keeps_what_it_had(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")

    def full(*_: Any, **__: Any) -> None:
        raise ConfigError(str(run), "the disk is full")

    monkeypatch.setattr("xscale.run.init_run.write_config", full)
    before = listing(run)
    with pytest.raises(ConfigError, match="the disk is full"):
        import_run(good, run, None, [], say=lambda line: None)
    assert listing(run) == before


@pytest.mark.parametrize("kind", [link_to_file, link_to_folder, dangling_link, fifo], ids=lambda kind: kind.__name__)
def test_what_an_import_kept_is_read_through_no_link(kind: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """An export writes it, and may be published: a file that a link of the run folder names must not get there."""
    path = save_step(tmp_path / "run" / "checkpoints", 1)
    (tmp_path / "outside" / "folder").mkdir(parents=True)
    (tmp_path / "outside" / "file").write_text('{"mine": 1}')
    (tmp_path / "run" / ORIGIN).mkdir()
    for name in (IDS, GENERATION):
        kind(tmp_path / "run" / ORIGIN / name, tmp_path / "outside")
    with pytest.raises(ConfigError, match=rf"{IDS}: the file cannot be read.*not a file"):
        kept_special_ids(path)
    with pytest.raises(ConfigError, match=rf"{GENERATION}: the file cannot be read.*not a file"):
        export_generation_config(path, tmp_path, same_tokenizer=True)
    assert not (tmp_path / GENERATION).exists()


def test_no_export_reads_a_folder_elsewhere(tmp_path: Path) -> None:
    path = save_step(tmp_path / "run" / "checkpoints", 1)
    (tmp_path / "outside").mkdir()
    for name in (IDS, GENERATION):
        (tmp_path / "outside" / name).write_text('{"mine": 1}')
    (tmp_path / "run" / ORIGIN).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match=r"cannot be read: this is a symbolic link, not a folder"):
        kept_special_ids(path)
    with pytest.raises(ConfigError, match=r"cannot be read: this is a symbolic link, not a folder"):
        export_generation_config(path, tmp_path, same_tokenizer=True)
    assert not (tmp_path / GENERATION).exists()


@pytest.mark.parametrize("name", ["transformers", "tokenizer", "checkpoints", "config.yaml"])
def test_an_import_writes_nothing_elsewhere(name: str, good: Path, tmp_path: Path) -> None:
    """A link in the folder that is to become the run, dangling too."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match=rf"{name}: this is a symbolic link"):
        import_run(good, tmp_path / "run", None, [], say=lambda _: None)
    assert not (tmp_path / "outside").exists()
