"""What a failing property test prints is enough to make it fail again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

FAILING = """
import pytest
from hypothesis import Phase, given, settings, strategies as st

@settings(derandomize=False, database=None, phases=[Phase.generate])  # the example as it was drawn
@given(st.lists(st.integers(0, 1 << 48), min_size=5))
def test_that_fails_for_some_numbers(numbers):
    assert sum(number % 7 == 3 for number in numbers) < 2, numbers
"""


def test_the_printed_command_finds_the_same_example_whatever_else_is_loaded(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makepyfile(test_some=FAILING)
    first = pytester.runpytest_subprocess("-p", "no:cacheprovider").stdout.str()
    (command,) = set(re.findall(r"^python -m pytest (test_some\.py --hypothesis-seed=\d+)$", first, re.MULTILINE))
    found = re.findall(r"numbers=(\[.*?\])", first, re.DOTALL)
    assert found

    # Another module, of whose constants many would make it fail, too.
    constants = ", ".join(str(7 * number + 3) for number in range(1000, 1200))
    pytester.makepyfile(numbers_of_others=f"NUMBERS = [{constants}]")
    pytester.makepyfile(test_other="import numbers_of_others\n\ndef test_that_passes(): ...\n")
    again = pytester.runpytest_subprocess("-p", "no:cacheprovider", "test_other.py", *command.split()).stdout.str()
    assert re.findall(r"numbers=(\[.*?\])", again, re.DOTALL) == found
    assert f"python -m pytest {command}" in again
