"""Padding behind the text of samples: a padded sample has the numbers that it has alone, by all mixers and cores."""

from tests.conformance.checked import each_case
from tests.conformance.test_mixer import marks
from xscale.conformance.attention import mixer_padding as suite
from xscale.conformance.check import Arguments, Check


@each_case(suite, marks=marks)
def test_it_keeps_what_it_declares(check: Check, arguments: Arguments) -> None:
    check(*arguments)
