"""Keys that overrides set: by path, by the index of an entry, in all entries, by what a part is; and refusals."""

import re
from typing import Any

import pytest

from xscale.api import load_recipe
from xscale.core.compose import COMMAND_LINE, SCHEMA, Composed, compose_mapping, configs_folder, dump
from xscale.core.config import decode, encode
from xscale.core.config_keys.keys import read_keys
from xscale.core.errors import ConfigError
from xscale.core.key_words.others_words import NAMES_ELSEWHERE, OTHERS_WAYS, OTHERS_WORDS
from xscale.recipe import Recipe

MIXTURE = {"kind": "moe", "experts": 8, "shared": "gated", "capacity_factor": 1.25, "router": {"kind": "switch"}}
RULES = "model.stack.rules"
FFN = f"{RULES}[0].ffn"
RECIPE: dict[str, Any] = {
    "model": {
        "kind": "decoder",
        "stack": {
            "block": {"ffn": {"kind": "gated", "hidden": 512}},
            "rules": [
                {"every": 4, "ffn": MIXTURE},
                {"every": 4, "at": 2, "ffn": {**MIXTURE, "capacity_factor": 1.5}},
                {"every": 4, "at": 1, "mixer": {"kind": "attention", "heads": 2}},
            ],
        },
    },
    "optimizer": {"kind": "adamw", "groups": [{"match": "a"}, {"match": "b"}]},
}
"""Dense blocks, two rules with mixtures, and one with a mixer only."""


def composed(*overrides: str, recipe: dict[str, Any] = RECIPE) -> Composed:
    return compose_mapping(recipe, list(overrides))


def changes(before: Any, now: Any, path: str = "") -> dict[str, Any]:
    """Path -> value of each leaf of `now` that is not in `before`."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {
            key: value
            for name in now
            for key, value in changes(before.get(name), now[name], f"{path}.{name}".lstrip(".")).items()
        }
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return {key: value for index, pair in pairs for key, value in changes(*pair, f"{path}[{index}]").items()}
    return {} if before == now else {path: now}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{FFN}.capacity_factor=2", {f"{FFN}.capacity_factor": 2}),
        (f"{RULES}.1.ffn.capacity_factor=2", {f"{RULES}[1].ffn.capacity_factor": 2}),
        (f"{RULES}[*].every=8", {f"{RULES}[{index}].every": 8 for index in range(3)}),
        (f"{RULES}[].every=8", {f"{RULES}[{index}].every": 8 for index in range(3)}),
        (f"{RULES}[*].ffn.experts=4", {f"{RULES}[{index}].ffn.experts": 4 for index in range(2)}),
        ("rules[*].ffn.experts=4", {f"{RULES}[{index}].ffn.experts": 4 for index in range(2)}),
        ("rules.1.ffn.experts=4", {f"{RULES}[1].ffn.experts": 4}),
        ("rules[1].ffn.experts=4", {f"{RULES}[1].ffn.experts": 4}),
        ("moe.experts=4", {f"{RULES}[{index}].ffn.experts": 4 for index in range(2)}),
        ("ffn.moe.experts=4", {f"{RULES}[{index}].ffn.experts": 4 for index in range(2)}),
        ("rules[1].moe.experts=4", {f"{RULES}[1].ffn.experts": 4}),
        ("switch.jitter=0.1", {f"{RULES}[{index}].ffn.router.jitter": 0.1 for index in range(2)}),
        (f"{RULES}[2].mixer.heads=4", {f"{RULES}[2].mixer.heads": 4}),
        (f"{RULES}[2]={{at: 3}}", {f"{RULES}[2].at": 3}),
        ("optimizer.groups[1].match=c", {"optimizer.groups[1].match": "c"}),
    ],
)
def test_an_override_sets_these_keys_and_no_other(override: str, expected: dict[str, Any]) -> None:
    before = encode(decode(Recipe, composed().data))
    now = encode(decode(Recipe, composed(override).data))
    assert changes(before, now) == expected


def test_parts_and_lists_at_their_defaults_are_set_too() -> None:
    core = "model.stack.block.mixer.core.soft_cap"
    changed = encode(decode(Recipe, composed(f"{core}=30").data))
    assert changes(encode(decode(Recipe, composed().data)), changed) == {core: 30}
    muon = composed("optimizer.kind=muon", "optimizer.ns_coefficients[1]=-4.0")
    assert decode(Recipe, muon.data).optimizer.ns_coefficients == (3.4445, -4.0, 2.0315)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{RULES}[3].every=2", f"{RULES} has 3 entries, counted from 0. There is {RULES}[0] to {RULES}[2]."),
        (
            f"{RULES}.ffn.experts=4",
            f"whose entries have keys and not the list. Give {RULES}[0] to {RULES}[2], or all entries by "
            f"{RULES}[*]: '{RULES}[*].ffn.experts=VALUE'.",
        ),
        (
            f"{RULES}[*].ffn.expert_count=4",
            f"no entry of {RULES} has the key ffn.expert_count. Did you mean",
        ),
        (f"{RULES}[0.ffn.experts=4", "'rules[0' is no part of a key"),
        ("train.steps[0]=4", "train.steps is no list"),
        (f"{RULES}[\u00b2].every=2", "'rules[\u00b2]' is no part of a key"),
        (f"{RULES}[{'9' * 5000}].every=2", "is no part of a key"),
        (f"{RULES}.{'9' * 5000}.every=2", "whose entries have keys and not the list"),
        (
            "data.blend[0].weight=2",
            "data.blend has no entries in this recipe. Give the whole list",
        ),
        ("moe.capacity_facter=4", "there is no such config key. Did you mean moe.capacity_factor"),
        ("nsa.window=4", "this recipe has no core nsa, whose key it is. `xscale explain nsa.window` says where"),
        ("hash.kind=topk", "this recipe has no router hash"),
        ("moe.hidden=4", f"may mean several keys of this recipe. Give the one that you mean: {FFN}.expert.hidden"),
        (f"{RULES}[0].ffn.expertz[0]=4", f"{FFN} has no key 'expertz'. Did you mean 'expert'?"),
    ],
)
def test_an_override_that_means_nothing_names_what_would_work(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(override)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_the_python_interface_takes_them() -> None:
    recipe = load_recipe("quickstart", overrides=["moe.capacity_factor=2", "model.stack.rules[0].ffn.experts=4"])
    ffn = recipe.model.stack.rules[0].ffn  # type: ignore[attr-defined]
    assert (ffn.capacity_factor, ffn.experts) == (2, 4)


def test_a_misspelt_section_is_left_to_the_schema() -> None:
    with pytest.raises(ConfigError, match=r"trian: unknown key\. Did you mean 'train'"):
        decode(Recipe, composed("trian.steps=3").data)


def test_one_object_at_several_places_is_set_at_one() -> None:
    """YAML's aliases make such objects."""
    rule = {"every": 2, "ffn": MIXTURE}
    stack = {"stack": {"rules": [rule, rule]}}
    data = composed(f"{RULES}[0].every=3", f"{FFN}.experts=2", recipe={"model": {"kind": "decoder", **stack}}).data
    first, second = data["model"]["stack"]["rules"]
    assert (first["every"], first["ffn"]["experts"]) == (3, 2)
    assert (second["every"], second["ffn"]["experts"]) == (2, 8)
    assert rule == {"every": 2, "ffn": MIXTURE}


def test_the_kind_of_a_part_is_set_by_what_is_above_it() -> None:
    rules = composed("moe.router.kind=sinkhorn").data["model"]["stack"]["rules"]
    assert [rule["ffn"]["router"] for rule in rules[:2]] == [{"kind": "sinkhorn"}] * 2
    assert composed("moe.kind=dense").data["model"]["stack"]["rules"][1]["ffn"] == {"kind": "dense"}


def test_later_overrides_see_what_earlier_ones_chose() -> None:
    recipe = decode(Recipe, composed("model.stack.block.ffn.kind=moe", "moe.experts=3").data)
    ffns = [recipe.model.stack.block.ffn, *(rule.ffn for rule in recipe.model.stack.rules[:2])]  # type: ignore[attr-defined]
    assert [ffn.experts for ffn in ffns] == [3, 3, 3]


def test_the_origin_of_an_entry_is_said() -> None:
    made = composed(f"{RULES}[0].every=3")
    assert made.origin[f"{RULES}.0.every"] == COMMAND_LINE
    assert f"0.every: {COMMAND_LINE}" in dump(encode(decode(Recipe, made.data)), made.origin)
    with pytest.raises(ConfigError, match=r"model\.stack\.rules\.0\.every \(command line\): must be >= 1, got 0"):
        decode(Recipe, (made := composed(f"{RULES}[0].every=0")).data, made.origin)


def test_the_keys_that_are_set_by_what_a_part_is_are_listed() -> None:
    assert composed("moe.experts=3").resolved == {
        "moe.experts": [f"{RULES}[{index}].ffn.experts" for index in range(2)]
    }
    assert composed(f"{RULES}[0].every=3", "train.steps=3").resolved == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.depth=3", "model.depth (command line): unknown key. Did you mean 'model.stack.depth'"),
        ("learning_rate=1", "learning_rate (command line): unknown key. Did you mean 'optimizer.lr'?"),
        ("n_layer=4", "Did you mean 'model.stack.depth'"),
        ("train.stpes=3", "Did you mean 'steps'?"),
        ("max_iters=100", "Did you mean 'train.steps'?"),
        ("per_device_train_batch_size=2", "Did you mean 'train.micro_batch_size'?"),
        ("clip_grad=1", "Did you mean 'train.clip_grad_norm'?"),
        ("lr_scheduler_type=cosine", "Did you mean 'schedule'?"),
        ("min_lr=1e-5", "Did you mean 'schedule.min_lr_ratio'?"),
        ("warmup=10", "Did you mean 'schedule.warmup_steps'?"),
        ("eval_interval=5", "Did you mean 'train.eval_every'?"),
        ("save_steps=5", "Did you mean 'checkpoint.every_steps'?"),
        ("logging_steps=5", "Did you mean 'observe.every_steps'?"),
        ("block_size=64", "Did you mean 'data.sequence_length'?"),
        ("vocab_size=64", "Did you mean 'data.tokenizer.vocabulary'?"),
        ("d_ff=64", "Did you mean 'model.stack.block.ffn.hidden'?"),
        ("num_experts_per_tok=2", "Did you mean 'moe.router.top_k'?"),
        ("router_aux_loss_coef=2", "Did you mean 'moe.router.aux_loss_weight'?"),
        ("top_k=2", "Did you mean 'moe.router.top_k', of a mixture, or"),
        ("tensor_model_parallel_size=2", "Did you mean 'parallel.mesh.tp'?"),
        ("expert_parallel=2", "Did you mean 'parallel.mesh.ep'?"),
        ("tp=2", "Did you mean 'parallel.mesh.tp'?"),
        ("output_dir=x", "Did you mean 'run.dir'?"),
        ("epochs=3", "A run has train.steps steps"),
        ("gradient_accumulation_steps=2", "It follows from train.batch_size"),
        ("gradient_checkpointing=true", "Write parallel.recompute.every=1."),
        ("resume_from_checkpoint=x", "The same command resumes its run"),
        ("bf16=true", "Write precision.compute=bfloat16."),
        ("fsdp=true", "Write parallel.zero.stage=3."),
        ("dataset=c4", "Write 'data.source={kind: text, paths: [FILES]}'"),
        ("model.num_layers=2", "Did you mean 'model.stack.depth'?"),
        ("model.stack.n_layer=2", "Did you mean 'model.stack.depth'?"),
        ("optimizer.learning_rate=1", "Did you mean 'optimizer.lr'?"),
        ("train.max-steps=2", "Did you mean 'train.steps'?"),
        ("precision.compute=bf16", "got 'bf16'. Did you mean 'bfloat16'?"),
        ("precision=bf16", "is a section with keys of its own, got 'bf16'. Write precision.compute=bfloat16."),
        ("data=x.txt", "got 'x.txt'. Write 'data.source={kind: text, paths: [FILES]}'"),
        ("zzz=3", "unknown key. Known: about, checkpoint, data"),
    ],
)
def test_an_unknown_key_leads_to_the_one_that_is_meant(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Recipe, (made := composed(override)).data, made.origin)
    assert said in str(caught.value)


def test_the_words_of_other_trainers_lead_to_keys_that_there_are() -> None:
    keys = read_keys(configs_folder() / SCHEMA)
    assert [path for path in NAMES_ELSEWHERE if not keys.find(path)] == []
    assert not OTHERS_WORDS.keys() & keys.words
    assert not OTHERS_WORDS.keys() & OTHERS_WAYS.keys()
    named = {path for way in OTHERS_WAYS.values() for path in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", way)}
    assert {"train.steps", "parallel.zero.stage", "moe.router.top_k"} <= named
    assert [path for path in named if not keys.find(path)] == []
