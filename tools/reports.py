"""Which of the public bug reports in ``tests/data/public-bug-reports.md`` are guarded by a test.

    python -m tools.reports [--kinds 1,2,5 | all]

The file lists *cases*: a fault, and the reports it was met in. A test claims reports with
``@pytest.mark.report("owner/repo#number")``, one marker per report; a case counts as covered when one of its
reports is claimed. Claims of reports that the file doesn't list are shown, too: they are typing errors.
"""

from __future__ import annotations

import argparse
import ast
import html
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "tests" / "data" / "public-bug-reports.md"
TESTS = ROOT / "tests"
DEFAULT_KINDS = (1, 2, 3, 5, 6, 7, 8, 9, 11)
"""Those within reach of the features there are."""

Source = tuple[str, int]
"""(owner/repo, number): issues and pull requests of a repository share their numbers."""

_SOURCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)?[ (+]*(?:PR|issue)?[ ]*#(?P<number>\d+)")
_CLAIM = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?: PR)?#(?P<number>\d+)")
_KIND = re.compile(r"## Kind (?P<number>\d+): (?P<title>.+)")
_ROW = re.compile(r"\| (?P<id>(?P<kind>\d+)\.\d+) \| (?P<source>[^|]*) \| [^|]* \| (?P<fault>[^|]*) \|")


@dataclass(frozen=True)
class Case:
    """One row of the file."""

    id: str
    kind: int
    sources: tuple[Source, ...]
    source_text: str
    fault: str


@dataclass(frozen=True)
class Claim:
    """One marker in the tests."""

    text: str
    place: str
    """``path:line``."""

    @property
    def source(self) -> Source | None:
        """None when the text is no ``owner/repo#number`` (or ``owner/repo PR#number``)."""
        match = _CLAIM.fullmatch(self.text)
        return None if match is None else (match["repo"], int(match["number"]))


def read_cases(text: str) -> tuple[dict[int, str], list[Case]]:
    """(kind number -> title, cases) of the file. A source without a repository is of the one named before it."""
    kinds: dict[int, str] = {}
    cases: list[Case] = []
    for line in text.splitlines():
        if match := _KIND.fullmatch(line):
            kinds[int(match["number"])] = match["title"]
        elif match := _ROW.match(line):
            sources: list[Source] = []
            repo = ""
            for mention in _SOURCE.finditer(match["source"]):
                repo = mention["repo"] or repo
                sources.append((repo, int(mention["number"])))
            fault = html.unescape(match["fault"]).strip()
            cases.append(Case(match["id"], int(match["kind"]), tuple(sources), match["source"].strip(), fault))
    return kinds, cases


def find_claims(tests: Path) -> list[Claim]:
    """Every ``pytest.mark.report("...")`` in the test files, wherever it stands in them."""
    claims = []
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.report":
                place = f"{path.relative_to(tests.parent)}:{node.lineno}"
                text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
                claims.append(Claim(text if isinstance(text, str) else ast.unparse(node), place))
    return claims


def unknown(claims: Iterable[Claim], cases: Iterable[Case]) -> list[Claim]:
    """Claims of reports that no case names."""
    known = {source for case in cases for source in case.sources}
    return [claim for claim in claims if claim.source not in known]


def covered(claims: Iterable[Claim], cases: Sequence[Case]) -> set[str]:
    """Ids of the cases whose fault a test guards against.

    A report named by several cases speaks for those alone that have no report of their own."""
    claimed = {claim.source for claim in claims}
    mentions = Counter(source for case in cases for source in set(case.sources))
    found = set()
    for case in cases:
        own = [source for source in case.sources if mentions[source] == 1]
        if claimed.intersection(own or case.sources):
            found.add(case.id)
    return found


def render(
    kinds: dict[int, str], cases: Sequence[Case], claims: Sequence[Claim], wanted: Sequence[int]
) -> Iterator[str]:
    """The report, line by line."""
    done = covered(claims, cases)
    of_kind = defaultdict(list)
    for case in cases:
        of_kind[case.kind].append(case)
    total = missing_total = 0
    for kind in wanted:
        missing = [case for case in of_kind[kind] if case.id not in done]
        total += len(of_kind[kind])
        missing_total += len(missing)
        yield f"Kind {kind}: {kinds[kind]}: {len(of_kind[kind]) - len(missing)} of {len(of_kind[kind])} covered"
        for case in missing:
            yield f"  {case.id:<5}  {case.source_text}"
            yield f"         {case.fault}"
    names = ", ".join(map(str, wanted))
    yield f"Kinds {names}: {total - missing_total} of {total} covered, {missing_total} without a test"
    for claim in unknown(claims, cases):
        yield f"{claim.place}: no listed report is called {claim.text!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.reports", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--kinds",
        default=",".join(map(str, DEFAULT_KINDS)),
        help="numbers of kinds, separated by commas, or 'all' (default: %(default)s)",
    )
    chosen = parser.parse_args(arguments).kinds
    kinds, cases = read_cases(REPORTS.read_text(encoding="utf-8"))
    by_name = {str(number): number for number in sorted(kinds)}
    wanted = [by_name.get(name.strip(), 0) for name in (by_name if chosen == "all" else chosen.split(","))]
    if 0 in wanted:
        parser.error(f"--kinds must be numbers out of {', '.join(by_name)}, or 'all', not {chosen!r}")
    print("\n".join(render(kinds, cases, find_claims(TESTS), wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
