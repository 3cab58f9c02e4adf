"""Modules that moved are found by their old names, as plugins and scripts import them."""

import importlib
import importlib.machinery
import importlib.util
import sys
import warnings

import pytest

from xscale.core.moved_modules import MOVES, MovedModules

OLD = sorted(MovedModules().moved)
BELOW_OLD = tuple(f"{old}." for old in OLD)


@pytest.fixture(autouse=True)
def forget() -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith(BELOW_OLD)]:
        del sys.modules[name]


@pytest.mark.parametrize("old", OLD)
def test_the_new_place_exists(old: str) -> None:
    new = MovedModules().new_name(old)
    assert new is not None
    assert importlib.util.find_spec(new) is not None, new
    package = importlib.import_module(old.rpartition(".")[0])
    assert importlib.machinery.PathFinder.find_spec(old, package.__path__) is None, f"there is a {old} again"


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("xscale.train.tasks", "xscale.evaluate.tasks", "lm_eval_model_of_run"),
        ("xscale.train.generate", "xscale.generate.generate", "encode_prompt"),
        ("xscale.nn.moe.router.router", "xscale.nn.ffn.moe.router.router", "Router"),
        ("xscale.data.prepare", "xscale.data.corpus.prepare", "prepare"),
    ],
)
def test_an_old_name_works_and_says_the_new_one(old: str, new: str, name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(new), name)
    assert [str(one.message) for one in caught if f"{old} is now" in str(one.message)] == [
        f"{old} is now {new}; the old name will be refused in the next version"
    ]


def test_the_base_class_of_norms_is_where_it_was() -> None:
    package = importlib.import_module("xscale.nn.norm")
    assert package.Norm is importlib.import_module("xscale.nn.norm.norm").Norm


def test_an_unknown_name_is_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'xscale\.train\.nothing'"):
        importlib.import_module("xscale.train.nothing")


def test_no_module_moved_twice() -> None:
    assert len(OLD) == sum(len(names.split()) for _, _, names in MOVES)
