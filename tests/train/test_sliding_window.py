"""`xscale eval --window`: perplexity of long texts by overlapping windows, against transformers and literal loops."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.train.test_load_run import MODEL, call
from tests.train.tiny import recipe, run
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.evaluate.evaluate_run import evaluate_run, evaluation_data
from xscale.evaluate.sliding_window import evaluate_windows, windows_of
from xscale.run.load_run import load_run

DOUBLE = {"compute": "float64", "master": "float64"}
TRAIN = {"steps": 2, "batch_size": 6, "micro_batch_size": 3, "eval_every": 0}
LEARNED = {**MODEL, "position": "learned"}
TEXT = "".join(f"def number_{index}(x): return x * {index * 37 % 101}\n" for index in range(7))


def trained(folder: Path, model: Any = MODEL, **sections: Any) -> Path:
    """Train a little on twenty short files of different lengths; return the run's folder."""
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(TEXT[number : number * 3 + 40], encoding="utf-8")
    data = {"source": {"kind": "text", "paths": [str(folder / "texts")]}, **sections.pop("data", {})}
    train = {**TRAIN, **sections.pop("train", {})}
    assert run(recipe(folder, model=model, precision=DOUBLE, data=data, train=train, **sections)) == EXIT_DONE
    return folder / "run"


def printed(*words: object) -> dict[str, Any]:
    """The JSON that a command prints, among progress on standard error."""
    text = call(*words)
    result: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.rindex('{"step"'))[0]
    return result


def documents(folder: Path) -> list[list[int]]:
    """The run's validation documents as ids."""
    loaded = load_run(folder)
    with evaluation_data(loaded) as data:
        assert data is not None
        split = data.batches.loader.data.split  # type: ignore[attr-defined]
        return [split.indexed.document(split.first + number).tolist() for number in range(split.documents)]


def literal(model: Any, texts: list[list[int]], window: int, stride: int) -> tuple[float, int]:
    """The loop of transformers' documentation over each text, with the exact count of its targets: nats, targets."""
    nats, count = 0.0, 0
    for text in texts:
        ids, previous = torch.tensor([text]), 0
        for begin in range(0, len(text), stride):
            end = min(begin + window, len(text))
            labels = ids[:, begin:end].clone()
            labels[:, : -(end - previous)] = -100
            scored = int((labels[:, 1:] != -100).sum())
            if scored:
                nats += float(model(ids[:, begin:end], labels=labels).loss) * scored
                count += scored
            previous = end
            if end == len(text):
                break
    return nats, count


def test_equal_to_the_loop_of_transformers_on_the_exported_model(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    folder = trained(tmp_path)
    text = tmp_path / "long.txt"
    text.write_text(TEXT, encoding="utf-8")
    call("checkpoint", "export", folder, tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64).eval()
    ids = [*load_run(folder).tokenizer.encode(TEXT), 2]
    result = printed("eval", folder, "--window", 32, "--stride", 12, "--data", text)
    with torch.no_grad():
        nats, count = literal(model, [ids], 32, 12)
    assert (result["window"], result["stride"], result["tokens"]) == (32, 12, count == len(ids) - 1 and count)
    assert result["loss"] == pytest.approx(nats / count, abs=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-6)
    # The first byte and the end of the document are no target and no text.
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / (len(TEXT) - 1), abs=1e-6)


def test_each_document_by_itself(tmp_path: Path) -> None:
    """More context lowers no number of targets, and a window as long as the longest document is one pass over each."""
    folder = trained(tmp_path)
    texts, model = documents(folder), load_run(folder).model.eval()

    def score(ids: Tensor) -> float:
        from xscale.nn.tokens import Tokens

        logits = model(Tokens.from_ids(ids[None, :-1]), None, None)[0]
        return float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))

    with torch.no_grad():
        expected = sum(score(torch.tensor(text)) for text in texts if len(text) > 1)
    longest = max(map(len, texts))
    result = evaluate_windows(folder, longest, longest)
    assert result["tokens"] == sum(len(text) - 1 for text in texts)
    assert result["loss"] == pytest.approx(expected / result["tokens"], rel=1e-12)
    default = printed("eval", folder, "--window", 16)
    assert (default["window"], default["stride"], default["tokens"]) == (16, 8, result["tokens"])
    assert default["loss"] != pytest.approx(result["loss"], rel=1e-6)


def test_windows_of_a_text() -> None:
    """Each token but the first is scored once, with at least window - stride tokens before it in its window."""
    for length in range(1, 30):
        for window in range(2, 9):
            for stride in range(1, window + 1):
                scored = []
                for item in windows_of(0, length, window, stride):
                    assert 0 <= item.begin < item.scored < item.end <= length
                    assert item.end - item.begin <= window
                    for token in range(item.scored, item.end):
                        assert token - item.begin >= (1 if item.begin == 0 or stride == window else window - stride)
                        scored.append(token)
                apart = set(range(0, length, stride)) if stride == window else {0}
                assert scored == [token for token in range(length) if token not in apart]


def evaluated(folder: Path) -> dict[str, Any]:
    return evaluate_windows(folder, 24, 8, 23)


def test_processes_share_the_windows(tmp_path: Path, pool: Pool) -> None:
    folder = trained(tmp_path)
    single = evaluated(folder)
    for result in pool.run(evaluated, 2, folder):
        assert result == pytest.approx(single, rel=1e-12)


def test_documents_that_see_each_other_are_one_text(tmp_path: Path) -> None:
    folder = trained(tmp_path, data={"cross_documents": True})
    assert evaluate_windows(folder, 16, 8)["tokens"] == sum(map(len, documents(folder))) - 1


def test_the_average_of_the_weights(tmp_path: Path) -> None:
    folder = trained(tmp_path, train={"ema_decay": 0.9})
    plain, average = (printed("eval", folder, "--window", 16, *words) for words in ([], ["--ema"]))
    assert plain["loss"] != average["loss"]
    assert evaluate_run(folder, None)["loss"] != pytest.approx(average["loss"], rel=1e-3)


def test_refusals(tmp_path: Path) -> None:
    folder = trained(tmp_path, LEARNED)
    with pytest.raises(ConfigError, match=r"--stride: is 9, and windows of 8 tokens would leave tokens out\. Take 1 "):
        call("eval", folder, "--window", 8, "--stride", 9)
    with pytest.raises(ConfigError, match=r"--stride: is the distance of sliding windows\. Add --window"):
        call("eval", folder, "--stride", 9)
    with pytest.raises(ConfigError, match=r"--window: is 1, and a token needs one before it"):
        call("eval", folder, "--window", 1)
    with pytest.raises(ConfigError, match=r"--window: prints another curve or number than --bleu"):
        call("eval", folder, "--window", 8, "--bleu")
    with pytest.raises(
        ConfigError, match=r"--window: 33 tokens are more than the position 'learned' .*at most 32, the"
    ):
        call("eval", folder, "--window", 33)


def test_models_that_are_not_causal_are_refused(tmp_path: Path) -> None:
    encoder = {**MODEL, "kind": "encoder"}
    folder = trained(tmp_path, encoder, objective={"kind": "masked"})
    with pytest.raises(ConfigError, match=r"--window: the model 'encoder' is not causal: .*Use the run of a decoder"):
        call("eval", folder, "--window", 8)


@pytest.mark.parametrize("router", ["switch", "expert_choice"])
def test_routing_by_later_tokens_is_refused(router: str, tmp_path: Path) -> None:
    ffn = {"kind": "moe", "experts": 2, "expert": {"kind": "gated", "hidden": 48}, "router": router}
    block = {**MODEL["stack"]["block"], "ffn": {**ffn, "allow_noncausal_routing": True}}
    folder = trained(tmp_path, {**MODEL, "stack": {"depth": 1, "block": block}})
    if router == "switch":
        assert evaluate_windows(folder, 16, 8, 5)["tokens"] > 0
    else:
        with pytest.raises(ConfigError, match=r"--window: model\.stack\.\S+router: the router 'expert_choice' routes"):
            call("eval", folder, "--window", 8)
