"""The list of public bug reports, and the claims that tests make on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.reports import (
    DEFAULT_KINDS,
    REPORTS,
    TESTS,
    Case,
    Claim,
    covered,
    find_claims,
    main,
    read_cases,
    render,
    unknown,
)

FILE = """\
# Reports
| ID | Source | State | Fault | Right |
|---|---|---|---|---|

## Kind 1: Scheduler
| ID | Source | State | Fault | Right |
|---|---|---|---|---|
| 1.01 | one/engine#10 (+PR#11), PR#12; other/engine.py#7, #8 | open | head -&gt; blocked | moves |
| 1.02 | one/engine PR#20 (issue #21) | merged | slot lost | kept |

## Kind 12: Text
| 12.03 | one/engine#30, other/engine.py PR#99 | closed | half a letter | whole |
| 12.04 | other/engine.py#99 | closed | twice | once |
"""


@pytest.fixture
def cases() -> list[Case]:
    return read_cases(FILE)[1]


def claim(text: str) -> Claim:
    return Claim(text, "tests/test_x.py:1")


def test_cases_are_read_with_every_report_they_name(cases: list[Case]) -> None:
    assert read_cases(FILE)[0] == {1: "Scheduler", 12: "Text"}
    assert [(case.id, case.kind, case.fault) for case in cases] == [
        ("1.01", 1, "head -> blocked"),
        ("1.02", 1, "slot lost"),
        ("12.03", 12, "half a letter"),
        ("12.04", 12, "twice"),
    ]
    one, other = "one/engine", "other/engine.py"
    assert cases[0].sources == ((one, 10), (one, 11), (one, 12), (other, 7), (other, 8))
    assert cases[1].sources == ((one, 20), (one, 21))


def test_one_claimed_report_covers_its_case(cases: list[Case]) -> None:
    assert covered([], cases) == set()
    assert covered([claim("other/engine.py#8")], cases) == {"1.01"}
    assert covered([claim("one/engine PR#20"), claim("one/engine#30")], cases) == {"1.02", "12.03"}


def test_a_report_of_two_cases_covers_the_one_that_has_no_other(cases: list[Case]) -> None:
    assert covered([claim("other/engine.py#99")], cases) == {"12.04"}


@pytest.mark.parametrize("text", ["one/engine#31", "another/engine#10", "engine#10", "one/engine 10", ""])
def test_a_claim_of_an_unlisted_report_is_told(text: str, cases: list[Case]) -> None:
    right, wrong = claim("one/engine PR#10"), claim(text)
    assert unknown([right, wrong], cases) == [wrong]
    lines = list(render({1: "Scheduler", 12: "Text"}, cases, [right, wrong], [1]))
    assert lines[-1] == f"tests/test_x.py:1: no listed report is called {text!r}"


def test_the_report_counts_by_kind_and_lists_what_is_missing(cases: list[Case]) -> None:
    lines = list(render({1: "Scheduler", 12: "Text"}, cases, [claim("one/engine#10")], [1, 12]))
    assert lines == [
        "Kind 1: Scheduler: 1 of 2 covered",
        "  1.02   one/engine PR#20 (issue #21)",
        "         slot lost",
        "Kind 12: Text: 0 of 2 covered",
        "  12.03  one/engine#30, other/engine.py PR#99",
        "         half a letter",
        "  12.04  other/engine.py#99",
        "         twice",
        "Kinds 1, 12: 1 of 4 covered, 3 without a test",
    ]


def test_claims_are_found_wherever_a_marker_may_stand(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.report('a/b#1')\n"
        "@pytest.mark.report('a/b#2')\n"
        "@pytest.mark.report(\n"
        "    'a/b PR#3')\n"
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.report('a/b#4'))])\n"
        "def test_it(x): pass\n"
        "@pytest.mark.report(NAME)\n"
        "@pytest.mark.slow\n"
        "def test_other(): pass\n",
        encoding="utf-8",
    )
    claims = find_claims(tmp_path / "tests")
    assert {(found.place, found.source) for found in claims} == {
        ("tests/unit/test_some.py:2", ("a/b", 1)),
        ("tests/unit/test_some.py:3", ("a/b", 2)),
        ("tests/unit/test_some.py:4", ("a/b", 3)),
        ("tests/unit/test_some.py:6", ("a/b", 4)),
        ("tests/unit/test_some.py:8", None),
    }


def test_the_tool_runs_on_the_real_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kinds", "all"]) == 0
    printed = capsys.readouterr().out
    assert " of 141 covered" in printed
    assert main([]) == 0
    default = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Kind ")]
    assert len(default) == len(DEFAULT_KINDS)
    with pytest.raises(SystemExit, match="2"):
        main(["--kinds", "1,77"])


def test_every_claim_in_the_tests_names_a_listed_report() -> None:
    _, listed = read_cases(REPORTS.read_text(encoding="utf-8"))
    assert [f"{wrong.place}: {wrong.text}" for wrong in unknown(find_claims(TESTS), listed)] == []
