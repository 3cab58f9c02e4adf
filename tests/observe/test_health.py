"""Health speaks when something is ill, once, and is silent about a healthy run."""

import math

import pytest

from xscale.observe import EndReport
from xscale.observe.health import Health, starved


@pytest.fixture
def told():
    return []


@pytest.fixture
def health(told):
    return Health(told.append, steps=5)


def test_a_healthy_run_is_not_commented(health, told, step):
    for number in range(1, 200):
        health.step(step(number, loss=8 / number + 0.01 * (number % 7)))
    health.finish(EndReport(199, "done"))
    assert told == []


def _load(*shares):
    return {"blocks.1.ffn/load": list(shares)}


def test_a_starving_expert_is_named_once_and_its_return_too(health, told, step):
    hungry, fed = _load(0.3, 0.3, 0.398, 0.002), _load(0.25, 0.25, 0.25, 0.25)
    for number in range(1, 20):
        health.step(step(number, statistics=hungry))
    assert told == ["warning: step 5: blocks.1.ffn starves expert 3 of 4: less than a tenth of the mean load"]
    for number in range(20, 40):
        health.step(step(number, statistics=fed))
    assert told[1:] == ["step 20: every expert of blocks.1.ffn gets tokens again"]


def test_one_hungry_step_is_no_starvation(health, told, step):
    for number in range(1, 30):
        hungry = number % 5 == 0
        health.step(step(number, statistics=_load(0.5, 0.5, 0.0, 0.0) if hungry else _load(0.25, 0.25, 0.25, 0.25)))
    assert told == []


def test_a_layer_that_uses_few_of_its_experts_has_collapsed(health, told, step):
    for number in range(1, 10):
        health.step(step(number, statistics=_load(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)))
    assert told == ["warning: step 5: blocks.1.ffn has collapsed onto 2 of its 6 experts"]


def _drops(share, layer="blocks.1.ffn"):
    return {f"{layer}/dropped": share}


def test_heavy_drops_are_said_once_and_their_end_too(health, told, step):
    for number in range(1, 40):
        health.step(
            step(number, statistics={**_drops(0.53), **_drops(0.84, "blocks.3.ffn"), **_drops(0.02, "blocks.5.ffn")})
        )
    assert told == [
        "warning: step 10: blocks.3.ffn drops 84% of its tokens' assignments, 1 more layer over 30%; "
        "more capacity_factor keeps them, a larger aux_loss_weight spreads them"
    ]
    for number in range(40, 80):
        health.step(step(number, statistics={**_drops(0.05), **_drops(0.1, "blocks.3.ffn")}))
    assert told[1:] == ["step 49: no layer drops more than 15% of its assignments any more"]


def test_a_layer_at_the_bound_is_not_said_again_and_again(health, told, step):
    for number in range(1, 200):
        health.step(step(number, statistics=_drops(0.2 if number // 10 % 2 else 0.4)))
    assert len(told) == 1


def test_starved_is_relative_to_an_even_share():
    assert starved([0.09, 1.0, 1.0, 1.91]) == (0,)
    assert starved([0.11, 1.0, 1.0, 1.89]) == ()
    assert starved([0.0, 0.0]) == ()


def test_what_is_not_finite_is_counted_at_the_end(health, told, step):
    for number in range(1, 11):
        health.step(step(number, loss=math.nan, skipped=number))
    assert told == []
    health.finish(EndReport(10, "done"))
    assert told == ["warning: 10 steps of this process had a loss or gradient that was not finite"]


def test_steps_skipped_before_this_process_are_not_news(health, told, step):
    for number, skipped in ((21, 3), (22, 3), (23, 4)):
        health.step(step(number, skipped=skipped))
    health.finish(EndReport(23, "done"))
    assert told == ["warning: 1 step of this process had a loss or gradient that was not finite"]


def test_a_jump_of_the_loss_is_told_once(health, told, step):
    for number in range(1, 60):
        health.step(step(number, loss=3.0 + 0.01 * (number % 3)))
    for number in (60, 61):
        health.step(step(number, loss=4.5))
    assert told == ["warning: step 60: the loss jumped to 4.5000; the median of the 50 steps before is 3.0100"]


def test_a_new_run_whose_loss_falls_fast_has_no_jumps(health, told, step):
    for number in range(1, 100):
        health.step(step(number, loss=10 * math.exp(-number / 5) + 2 + 0.02 * (-1) ** number))
    assert told == []
