"""Routes of a run are recorded by its evaluation, and replayed by runs on any layout or refused before a step."""

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.distributed import Pool
from tests.train.test_layouts import DOUBLE, one_rank, same
from tests.train.tiny import losses, metrics, recipe, run
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.data.routes.read import RouteFile
from xscale.data.routes.write import RoutedSequence, RouteWriter, write_routes
from xscale.evaluate.evaluate_run import evaluate_run
from xscale.evaluate.record_routes import BatchRoutes
from xscale.generate.decoders import GrowingDecoder
from xscale.generate.generate_text import generate_text
from xscale.nn.ffn.moe.replay import RECORDER
from xscale.nn.tokens import Tokens
from xscale.run.load_run import load_run
from xscale.run.route_replay import number_routes, route_layout

MIXTURE = "stack.blocks.1.ffn.part"
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": {"zero": {"stage": 1}, "mesh": {"ep": 2}},
    "cp": {"mesh": {"cp": 2}},
    "tp_sp": {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
    "pp": {"mesh": {"pp": 2}},
    "recompute": {"zero": {"stage": 3}, "recompute": {"every": 1}},
}


def model(replay: Any = None, **router: Any) -> dict[str, Any]:
    """Dropout, jitter and a capacity: the routes of a forward are not those of another one."""
    mixture = {
        "kind": "moe",
        "experts": 4,
        "capacity_factor": 1.25,
        "router": {"kind": "topk", "top_k": 2, "jitter": 0.3, "bias_update_rate": 0.01, **router},
        "expert": {"kind": "gated", "hidden": 32},
        "replay": replay,
    }
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "gated", "hidden": 48}, "dropout": 0.1}
    return {
        "kind": "decoder",
        "width": 32,
        "stack": {"depth": 2, "block": block, "rules": [{"every": 2, "at": 1, "ffn": mixture}]},
    }


def replaying(folder: Path, name: str, file: str = "routes", weights: str = "recomputed", **sections: Any) -> Any:
    sections = {"model": model({"file": str(folder / file), "weights": weights}), "precision": DOUBLE, **sections}
    return recipe(folder, name, **sections)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six steps, and the routes of all that it reads."""
    folder = tmp_path_factory.mktemp("recorded")
    assert run(recipe(folder, "first", model=model(), precision=DOUBLE)) == EXIT_DONE
    evaluate_run(folder / "first", 8, record_routes=folder / "routes", training_samples=48)
    return folder


def changed(
    folder: Path, name: str, change: Callable[[int, RoutedSequence], RoutedSequence | None], **layout: Any
) -> str:
    """Write the file of routes again with some sequences changed or left out, and return its name."""
    routes = RouteFile(folder / "routes")
    header = routes.header
    writer = RouteWriter(folder / name, replace(header.layout, **layout), 1 << 16, header.weights)
    number = 0
    for texts in routes._texts.values():
        for text in texts:
            found = routes.find(text.ids, text.sample, text.start)
            assert found is not None
            sequence = change(number, RoutedSequence(text.ids, found[0].copy(), found[1], text.sample, text.start))
            number += 1
            if sequence is not None:
                writer.add(sequence)
    writer.close()
    return name


def as_it_is(number: int, sequence: RoutedSequence) -> RoutedSequence:
    return sequence


def test_an_evaluation_is_recorded_and_replayed_bit_for_bit(recorded: Path) -> None:
    routes = RouteFile(recorded / "routes")
    assert routes.header.layout.layers == (MIXTURE,)
    assert routes.header.tokens == (48 + 8) * 32
    assert evaluate_run(recorded / "first", 8, replay_routes=recorded / "routes") == evaluate_run(recorded / "first", 8)


def test_one_changed_id_is_seen(recorded: Path) -> None:
    """Negative control: one expert of one token of the evaluation."""

    def change(number: int, sequence: RoutedSequence) -> RoutedSequence:
        if sequence.sample == 0 and sequence.start == 0:
            unused = next(expert for expert in range(1, 5) if expert not in sequence.routes[0, 0])
            sequence.routes[0, 0, 1] = unused
        return sequence

    file = recorded / changed(recorded, "one_id", change)
    plain = evaluate_run(recorded / "first", 8)
    assert evaluate_run(recorded / "first", 8, replay_routes=file)["loss"] != plain["loss"]


@pytest.fixture(scope="module")
def replayed(recorded: Path) -> Path:
    """The folder, with a run of one process that replays."""
    assert run(replaying(recorded, "alone")) == EXIT_DONE
    return recorded


def test_a_run_that_replays_says_what_its_routers_would_have_chosen(replayed: Path) -> None:
    assert "router replay: 1,792 tokens" in (replayed / "alone" / "log.txt").read_text()
    steps = [line for line in metrics(replayed, "alone") if "loss" in line]
    replaced = [line[f"{MIXTURE}/replaced"] for line in steps]
    assert 0.1 < max(replaced) < 1
    assert losses(replayed, "alone") != losses(replayed, "first")
    assert run(replaying(replayed, "again")) == EXIT_DONE
    assert losses(replayed, "again") == losses(replayed, "alone")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "ep" else [pytest.mark.long]) for name in LAYOUTS]
)
def test_every_layout_replays_the_numbers_of_one_process(layout: str, replayed: Path, pool: Pool) -> None:
    sections = {"model": model({"file": str(replayed / "routes")}), "precision": DOUBLE, "parallel": LAYOUTS[layout]}
    assert pool.run(one_rank, 2, replayed, layout, **sections) == [EXIT_DONE] * 2
    same(replayed, layout, "alone", 1e-9)


@pytest.mark.long
def test_a_run_resumes_on_another_layout(replayed: Path, pool: Pool) -> None:
    sections = {"model": model({"file": str(replayed / "routes")}), "precision": DOUBLE}
    stopped = {"parallel": LAYOUTS["cp"], "train": {"stop_after": 3}}
    pool.run(one_rank, 2, replayed, "resumed", **sections, **stopped)
    assert pool.run(one_rank, 2, replayed, "resumed", **sections, parallel=LAYOUTS["tp_sp"]) == [EXIT_DONE] * 2
    for one, other in zip(losses(replayed, "resumed"), losses(replayed, "alone"), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_recorded_weights_are_used(replayed: Path) -> None:
    assert run(replaying(replayed, "weights", weights="recorded")) == EXIT_DONE
    assert losses(replayed, "weights")[0] != losses(replayed, "alone")[0]


def without_one(number: int, sequence: RoutedSequence) -> RoutedSequence | None:
    return None if sequence.sample == 5 and sequence.start == 0 else sequence


def beyond(number: int, sequence: RoutedSequence) -> RoutedSequence:
    sequence.routes[-1, 0, 0] = 9
    return sequence


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a missing text": (without_one, {}, r"has no routes for sample 5, tokens 0 to \d+"),
    "an id beyond the experts": (beyond, {}, r"to expert 8 in layer stack.blocks.1.ffn.part, which has 4"),
    "another top_k": (as_it_is, {"top_k": (1,)}, r"has 1 experts of a token \(top_k\) in stack.* and the model 2"),
    "other experts": (as_it_is, {"experts": (8,)}, r"has 8 experts in stack.blocks.1.ffn.part, and the model 4"),
    "another model": (as_it_is, {"model": "0123"}, r"is of another model"),
    "another layer": (as_it_is, {"layers": ("stack.blocks.0.ffn",)}, r"where the model has stack.blocks.1.ffn.part"),
    "another tokenizer": (as_it_is, {"tokenizer": "0123"}, r"was recorded with another tokenizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_does_not_fit_is_refused_before_the_first_step(name: str, recorded: Path) -> None:
    change, layout, sentence = REFUSED[name]
    folder = f"refused {name}"
    file = changed(recorded, folder + ".routes", change, **layout)
    with pytest.raises(ConfigError, match=sentence):
        run(replaying(recorded, folder, file))
    assert not (recorded / folder / "metrics.jsonl").exists()


def test_files_that_are_none_are_refused(recorded: Path) -> None:
    (recorded / "cut").write_bytes((recorded / "routes").read_bytes()[:-100])
    for file, sentence in (("cut", "is cut short"), ("nowhere", "cannot be read: No such file")):
        with pytest.raises(ConfigError, match=sentence):
            run(replaying(recorded, "none", file))


def test_every_rank_refuses_a_text_that_one_of_them_misses(recorded: Path, pool: Pool) -> None:
    file = changed(recorded, "missing", without_one)
    sections = {"model": model({"file": str(recorded / file)}), "precision": DOUBLE}
    assert pool.run(refused, 2, recorded, "missing_run", **sections) == [True, True]


def refused(folder: Path, name: str, **sections: Any) -> bool:
    """Whether this rank refuses the run with the sample that one of the ranks has."""
    try:
        run(recipe(folder, name, **sections))
    except ConfigError as error:
        return "has no routes for sample 5" in str(error)
    return False


def test_ranks_record_to_one_file(recorded: Path, pool: Pool) -> None:
    pool.run(record, 2, recorded)
    one, two = RouteFile(recorded / "routes"), RouteFile(recorded / "of_two")
    assert (one.header.tokens, one.header.sequences) == (two.header.tokens, two.header.sequences)
    for texts in one._texts.values():
        for text in texts:
            found, expected = two.find(text.ids, text.sample, text.start), one.find(text.ids, text.sample, text.start)
            assert found is not None
            assert expected is not None
            np.testing.assert_array_equal(found[0], expected[0])
    assert not list(recorded.glob("of_two.*"))


def record(folder: Path) -> None:
    """Evaluate and record with the other ranks."""
    evaluate_run(folder / "first", 8, record_routes=folder / "of_two", training_samples=48)


def test_a_full_disk_loses_the_recording_and_not_the_evaluation(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: RouteWriter, sequence: RoutedSequence) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    plain = evaluate_run(recorded / "first", 8)
    monkeypatch.setattr(RouteWriter, "add", full)
    assert evaluate_run(recorded / "first", 8, record_routes=recorded / "lost") == plain
    printed = capsys.readouterr()
    assert printed.err.count("no routes are recorded") == 1
    assert "No space left on device" in printed.err
    assert not list(recorded.glob("lost*"))


def test_a_model_without_routes_is_refused(recorded: Path) -> None:
    block = {"mixer": {"kind": "attention", "heads": 4}, "ffn": {"kind": "gated", "hidden": 48}}
    dense = {"kind": "decoder", "width": 32, "stack": {"depth": 1, "block": block}}
    sections = {"train": {"steps": 1, "eval_every": 0}}
    assert run(recipe(recorded, "dense", model=dense, **sections)) == EXIT_DONE
    with pytest.raises(ConfigError, match="the model has no mixtures"):
        evaluate_run(recorded / "dense", 1, record_routes=recorded / "of_dense")


def test_generation_uses_the_experts_of_a_text_and_refuses_others(recorded: Path) -> None:
    prompt, written = "import os", 6
    text = generate_text(recorded / "first", prompt, written, 0.0, None, 0)
    loaded = load_run(recorded / "first")
    layout = route_layout(loaded.model, loaded.tokenizer.fingerprint, "test")
    number_routes(loaded.model, layout, replaying=False)
    ids = torch.tensor(loaded.tokenizer.encode(text))
    routes = BatchRoutes(layout)
    loaded.model.eval()
    loaded.model(Tokens.from_ids(ids[None], signals={RECORDER: routes}))
    chosen = routes.arrays(len(ids))[0] - 1
    layers, experts = layout.layers, layout.experts[0]
    write_routes(recorded / "of_text", [(ids.numpy(), chosen)], layers=layers, experts=experts)
    again = generate_text(recorded / "first", prompt, written, 0.0, None, 0, replay_routes=recorded / "of_text")
    assert again == text
    write_routes(recorded / "others", [(ids.numpy(), (chosen + 1) % 4)], layers=layers, experts=experts)
    with patch.object(GrowingDecoder, "next_logits", logged(GrowingDecoder.next_logits, seen := [])):
        for file in ("of_text", "others"):
            with suppress(ConfigError):
                generate_text(recorded / "first", prompt, written, 0.0, None, 0, replay_routes=recorded / file)
    assert not torch.allclose(seen[0], seen[written]), "the given experts are used"
    with pytest.raises(ConfigError, match=r"has no routes for token 7 of the text, id \d+"):
        generate_text(recorded / "first", "import sys", written, 0.0, None, 0, replay_routes=recorded / "of_text")


def logged(call: Any, seen: list[torch.Tensor]) -> Any:
    """A method that keeps what it returns."""

    def keep(self: Any, *inputs: Any) -> torch.Tensor:
        seen.append(call(self, *inputs))
        return seen[-1]

    return keep
