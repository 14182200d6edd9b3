# SPDX-License-Identifier: MIT
"""Every number that claims a measurement is in a file under benchmarks/results, or is arithmetic: page_numbers.py [ROOT].

Looks at README.md and docs/, but for docs/decisions and the pages of a format (FORMATS). A number claims a measurement if behind it
stands a unit of time, %, kB, MB, GB, "times", "×" or "points", or, of a fraction, "of"; in a table also if such a unit stands in its
column's head. Headings, code, and sizes in bytes, KiB, MiB and Gb/s, which settings and formats have, are left out. An HTML comment
says where the numbers come from:

    <!-- numbers: overlap/results.json -->       each is a number of one of these files of benchmarks/results
    <!-- cells: network/table.md#first -->       the same, and all of a table's cell stand in one record
    <!-- rows: overlap/table.md -->              the same, and all of a table's row stand in one record
    <!-- copied: overlap/table.md -->            the head and each row stand there letter by letter
    <!-- arithmetic: 0.371 / 0.986; 1 - 0.9 -->  each value is computed here; an operand is of the page or of its files
    <!-- computed: WORDS -->                     all of it follows by the words, and nothing was measured
    <!-- cited: SOURCE -->                       somebody else has measured it
    <!-- settings: WORDS -->                     what the program is told or promises; nobody measured it

A record is a line of Markdown or text (with those behind it whose first cell is empty), or an object of JSON. FILE#WORDS takes the
records that have the words in them, in the heading or in the keys above. Where a mark names files, numbers with a decimal point are
checked as well, and in a table all numbers of cells without words; the first column has names. A number is found if one of the
file rounds to it at its digits, in its own unit or the unit's base (seconds, bytes, a share).

A mark with a blank line behind it holds to the end of its section; without one for the paragraph, list or table that follows; within
a list item or a paragraph for that. Nearer files take the place of farther ones.
"""

import ast
import bisect
import collections
import dataclasses
import functools
import itertools
import operator
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import records
from records import Record

FORMATS = {"docs/wire-format/index.md", "docs/wire-format/reading.md", "docs/bounded-loss/wire.md"}
FILES, WORDS = {"numbers", "cells", "rows", "copied"}, {"computed", "cited", "settings"}
MARK = re.compile(r"<!--\s*(numbers|cells|rows|copied|arithmetic|computed|cited|settings):\s*(.*?)\s*-->")
NUMBER = re.compile(r"(?<![\w.,^/#@])(?<!\d-)[−+-]?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?![\w^]|[.,]\d|-\d)")
UNIT = re.compile(r"\s*(%|×(?!\s*\d)|(?:GB/s|kB|MB|GB|ns|us|µs|ms|s|seconds?|minutes?|hours?|times|points?)(?![\w'’]))")
NO_CLAIM = re.compile(r"\s*[KMG](?:iB|b/s)")
CHAIN = re.compile(r"\s*(?:to|and|or|–|,|/|±|\()\s*")  # 84 to 98 %: the unit is of both
HEAD_UNIT = re.compile(r"(?:^|[\s,(|])(%|kB|MB|GB|ns|us|µs|ms|s|seconds|milliseconds)(?=$|[\s,)/])")
WORD = re.compile(r"(?!bytes|times|seconds|minutes)[A-Za-z]{4,}")
CODE = re.compile(r"(`+)(.+?)(?<!`)\1(?!`)")
# What a file may have it as, in place of the unit itself.
FACTORS = {"%": [100], "ms": [1e3], "milliseconds": [1e3], "us": [1e6, 1e3], "µs": [1e6, 1e3], "ns": [1e9, 1e3],
           "s": [1e-3], "seconds": [1e-3], "minutes": [1 / 60], "hours": [1 / 3600, 1 / 60], "kB": [1e-3], "MB": [1e-6],
           "GB": [1e-9, 1e-3], "GB/s": [1e-9, 1e-3]}
CONSTANTS = {1, 2, 8, 60, 100, 1000, 1024, 3600}


@dataclasses.dataclass(frozen=True)
class Mark:
    kind: str
    text: str

    @functools.cached_property
    def formulas(self) -> list[tuple[str, float]]:
        """Of arithmetic, each formula and its value. Raises ValueError for what is none."""
        return [(each.strip(), value(each)) for each in self.text.split(";")] if self.kind == "arithmetic" else []


@dataclasses.dataclass
class Block:
    """A paragraph, an item of a list, or a row of a table."""

    line: int
    text: str
    marks: list[Mark]
    head: list[str] | None = None  # of a table: its columns' titles

    def files(self) -> list[Mark]:
        return [mark for mark in self.marks if mark.kind in FILES]

    def words(self) -> Mark | None:
        return next((mark for mark in reversed(self.marks) if mark.kind in WORDS), None)


@dataclasses.dataclass(frozen=True)
class Claim:
    line: int
    text: str
    unit: str
    cell: int
    at: int = 0  # in its cell, or in its block

    @functools.cached_property
    def value(self) -> float:
        return abs(float(self.text.replace(",", "")))

    @functools.cached_property
    def slack(self) -> float:
        return 0.5000001 * 10 ** -len(self.text.partition(".")[2])

    def ranges(self) -> list[tuple[float, float]]:
        """From where to where a number of a file rounds to this one."""
        factors = [1, *FACTORS.get(self.unit, FACTORS.get(self.unit + "s", []))]
        return [((self.value - self.slack) / factor, (self.value + self.slack) / factor) for factor in factors]


# ---- arithmetic

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}


def value(formula: str) -> float:
    """Of numbers, + - * / ** and brackets. Raises ValueError for anything else."""
    def of(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        raise ValueError(f"'{formula.strip()}' is no arithmetic")
    try:
        return of(ast.parse(formula.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        raise ValueError(f"'{formula.strip()}' is no arithmetic") from None


# ---- the files

def named_files(root: pathlib.Path, mark: Mark) -> Iterator[tuple[str, str, list[pathlib.Path]]]:
    """Of each FILE#WORDS of a mark both, and the files. Raises ValueError for a file that is not there."""
    for each in re.split(r",\s+(?=[\w./*=-]+\.(?:json|md|txt|csv))|;\s*", mark.text):
        name, _, words = each.partition("#")
        files = sorted((root / "benchmarks/results").glob(name))
        if not files:
            raise ValueError(f"there is no benchmarks/results/{name}")
        yield name, words, files


@functools.cache
def sources(root: pathlib.Path, mark: Mark) -> list[Record]:
    """The records that a mark names. Raises ValueError for a file that is not there, or words that are in none."""
    found = []
    for name, words, files in named_files(root, mark):
        chosen = [record for file in files for record in records.of_file(file) if words in record[0]]
        if not chosen:
            raise ValueError(f"'{words}' is nowhere in benchmarks/results/{name}")
        found += chosen
    return found


@functools.cache
def bag(root: pathlib.Path, mark: Mark) -> list[float]:
    return sorted({number for _, numbers in sources(root, mark) for number in numbers})


def within(numbers: list[float], claim: Claim) -> bool:
    return any((at := bisect.bisect_left(numbers, low)) < len(numbers) and numbers[at] <= high for low, high in claim.ranges())


# ---- the pages

def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    sections: list[tuple[int, list[Mark]]] = [(0, [])]  # by the level of their heading
    fence, head, above, last_item = "", None, [], None
    for number, line in enumerate(text.splitlines(), 1):
        marks = [Mark(*each) for each in MARK.findall(line)]
        if fence or re.match(r"\s*(```|~~~)", line):
            fence = "" if fence and line.strip() == fence else fence or re.match(r"\s*(```|~~~)", line)[1]
        elif heading := re.match(r"(#+) ", line):
            level = len(heading[1])
            sections = [each for each in sections if each[0] < level] + [(level, [])]
        elif not line.strip():
            if head is None and last_item is None:
                sections[-1][1].extend(above)
            head, above, last_item = None, [], None
        elif marks and last_item is None and not MARK.sub("", line).strip():
            above.extend(marks)
        elif line.startswith("|"):
            if head is None:
                head = cells_of(line)
            elif not re.fullmatch(r"[|\s:-]+", line):
                found.append(Block(number, line, joined(sections, above, marks), head))
        elif not line.lstrip().startswith("!["):
            if last_item is None or re.match(r"\s*(?:[-*]|\d+\.) ", line):
                last_item = Block(number, "", joined(sections, above, []))
                found.append(last_item)
            last_item.text += ("\n" if last_item.text else "") + line
            last_item.marks = joined([(0, last_item.marks)], marks)
    return found


def joined(sections: list[tuple[int, list[Mark]]], *nearer: list[Mark]) -> list[Mark]:
    """All marks of a place. Nearer files take the place of farther ones, and so does what covers all numbers by words."""
    result: list[Mark] = []
    for marks in [*(each for _, each in sections), *nearer]:
        if any(mark.kind in FILES for mark in marks):
            result = [mark for mark in result if mark.kind == "arithmetic"]
        result = result + marks
    return result


def stripped(text: str) -> str:
    """Without comments, code and where links lead; places stay."""
    text = re.sub(r"<!--.*?-->", lambda match: " " * len(match[0]), text)
    text = CODE.sub(lambda match: " " * len(match[0]), text)
    text = re.sub(r"\]\([^)\s]*\)", lambda match: "]" + " " * (len(match[0]) - 1), text)
    return re.sub(r"\bdecisions? \d+", lambda match: " " * len(match[0]), text)


def claims(block: Block) -> list[Claim]:
    checked = bool(block.files())
    if block.head is None:
        return [claim for claim in claims_of(block, stripped(block.text), 0, "")
                if claim.unit or checked and "." in claim.text]
    found = []
    for index, cell in enumerate(cells_of(stripped(block.text))):
        is_sentence = WORD.search(cell) is not None
        unit = None if is_sentence or index >= len(block.head) else HEAD_UNIT.search(stripped(block.head[index]))
        found += [claim for claim in claims_of(block, cell, index, unit[1] if unit else "")
                  if (index > 0 or not checked) and (claim.unit or checked and (not is_sentence or "." in claim.text))]
    return found


def cells_of(row: str) -> list[str]:
    return row.strip().removeprefix("|").removesuffix("|").split("|")


def claims_of(block: Block, text: str, cell: int, unit_above: str) -> list[Claim]:
    found: list[Claim] = []
    matches = list(NUMBER.finditer(text))
    unit = ""
    for match, following in zip(reversed(matches), [None, *reversed(matches)]):
        behind = UNIT.match(text, match.end())
        if behind:
            unit = behind[1]
        elif match[2] and re.match(r"\s+of\b", text[match.end():]):
            unit = "of"
        elif following is None or not CHAIN.fullmatch(text[match.end():following.start()]):
            unit = ""
        is_option = re.search(r"=\s*$", text[:match.start()]) and not behind  # R = 0.95
        if not is_option and not NO_CLAIM.match(text, match.end()) and not re.fullmatch(r"0\d+", match[1]):
            line = block.line + block.text.count("\n", 0, match.start()) if cell == 0 and block.head is None else block.line
            found.append(Claim(line, match[1] + (match[2] or ""), unit or unit_above, cell, match.start(1)))
    return found[::-1]


# ---- the check

@dataclasses.dataclass
class Page:
    """What was found on it: how many numbers by kind, what is wrong, and the checks, to be asked again with other digits."""

    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)
    checks: list[tuple[Claim, Callable[[Claim], bool]]] = dataclasses.field(default_factory=list)


def check(root: pathlib.Path, page: pathlib.Path) -> Page:
    found = Page()
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(root)
    used: set[tuple[Mark, str]] = set()
    all_blocks = blocks(text)
    for block in all_blocks:
        try:
            check_block(root, name, block, found, used)
        except ValueError as error:
            found.problems.append(f"{name}:{block.line}: {error}")
    if not found.problems:
        found.problems = list(problems_of_formulas(root, name, text, all_blocks, used))
    return found


def problems_of_formulas(root: pathlib.Path, name: pathlib.Path, text: str, all_blocks: list[Block],
                         used: set[tuple[Mark, str]]) -> Iterator[str]:
    on_page = {each[1].replace(",", "") + (each[2] or "") for each in NUMBER.finditer(MARK.sub("", text))}
    for mark in dict.fromkeys(mark for block in all_blocks for mark in block.marks if mark.kind == "arithmetic"):
        files = [each for block in all_blocks if mark in block.marks for each in block.files()]
        for operand in re.findall(r"\d+(?:\.\d+)?", mark.text):
            if float(operand) not in CONSTANTS and operand not in on_page and \
                    not any(within(bag(root, each), Claim(0, operand, "", 0)) for each in files):
                yield f"{name}: {operand} of '{mark.text}' is neither on the page nor in its files"
        for formula, _ in mark.formulas:
            if (mark, formula) not in used:
                yield f"{name}: no number follows from '{formula}'"


def check_block(root: pathlib.Path, name: pathlib.Path, block: Block, found: Page, used: set[tuple[Mark, str]]) -> None:
    all_claims, files = claims(block), block.files()
    if any(mark.kind == "copied" for mark in files):
        check_copy(root, name, block, all_claims, found)
        return
    if words := block.words():
        found.counts[words.kind] += len(all_claims)
        return
    formulas = [(mark, formula, result) for mark in block.marks for formula, result in mark.formulas]

    def follows(claim: Claim) -> bool:
        return any(within([abs(result)], claim) for *_, result in formulas)

    for group in together(block, all_claims, files[0].kind if files else ""):
        for claim in group:
            # What follows from a formula need not stand in the record of the others.
            others = [each for each in group if each is not claim and not follows(each)]

            def right(other: Claim, others: list[Claim] = others) -> bool:
                return follows(other) or bool(files) and stands(root, files, others, other)

            if right(claim):
                used.update((mark, formula) for mark, formula, result in formulas if within([abs(result)], claim))
                found.counts["arithmetic" if follows(claim) else "found"] += 1
                found.checks.append((claim, right))
            else:
                found.problems.append(f"{name}:{claim.line}: {(claim.text + ' ' + claim.unit).strip()}"
                                      + (" with " + ", ".join(each.text for each in others) if files and others else "")
                                      + (f": in no record of {'; '.join(mark.text for mark in files)}" if files else
                                         ": no mark says where it comes from"))


def check_copy(root: pathlib.Path, name: pathlib.Path, block: Block, all_claims: list[Claim], found: Page) -> None:
    if block.head is None:
        raise ValueError("only rows of a table can be copied")
    files, own, head = block.files(), cells_of(MARK.sub("", block.text)), tuple(map(str.strip, block.head))
    if any(mark.kind != "copied" for mark in files):
        raise ValueError("a table that is copied has no other mark of files")

    def right(claim: Claim | None) -> bool:
        changed = list(own)
        if claim:
            cell = changed[claim.cell]
            changed[claim.cell] = cell[:claim.at] + claim.text + cell[claim.at + len(claim.text):]
        return any((head, tuple(map(str.strip, changed))) in rows(root, mark) for mark in files)

    if not right(None):
        found.problems.append(f"{name}:{block.line}: no such row is in {'; '.join(mark.text for mark in files)}")
    found.counts["copied"] += len(all_claims)
    found.checks += [(claim, right) for claim in all_claims]


@functools.cache
def rows(root: pathlib.Path, mark: Mark) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The head and the cells of each row that the mark names."""
    named = {line for words, _ in sources(root, mark) for line in words.splitlines() if line.startswith("|")}
    found = set()
    for file in {file for *_, files in named_files(root, mark) for file in files}:
        head: tuple[str, ...] = ()
        for before, line in itertools.pairwise(["", *file.read_text(encoding="utf-8").splitlines()]):
            if line.startswith("|"):
                cells = tuple(map(str.strip, cells_of(line)))
                if not before.startswith("|"):
                    head = cells
                elif line in named:
                    found.add((head, cells))
    return found


def together(block: Block, of: list[Claim], kind: str) -> list[list[Claim]]:
    """What must stand in one record."""
    if block.head is None or kind == "numbers":
        return [[claim] for claim in of]
    if kind == "rows":
        return [of]
    return [[claim for claim in of if claim.cell == cell] for cell in dict.fromkeys(claim.cell for claim in of)]


def stands(root: pathlib.Path, files: list[Mark], others: list[Claim], claim: Claim) -> bool:
    if not others:
        return any(within(bag(root, mark), claim) for mark in files)
    return any(all(within(numbers, each) for each in [claim, *others]) for mark in files for _, numbers in sources(root, mark))


def noticed(checks: list[tuple[Claim, Callable[[Claim], bool]]]) -> tuple[int, int]:
    """How many changes of a single digit would be noticed, and of how many."""
    caught = tried = 0
    for claim, ask in checks:
        for place, digit in enumerate(claim.text):
            if digit.isdigit():
                other = dataclasses.replace(claim, text=claim.text[:place] + str((int(digit) + 1) % 10) + claim.text[place + 1:])
                tried += 1
                caught += not ask(other)
    return caught, tried


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    of_docs = [page.relative_to(root) for page in sorted((root / "docs").rglob("*.md"))]
    return [root / "README.md", *(root / page for page in of_docs if page.parts[1] != "decisions" and str(page) not in FORMATS)]


def main() -> None:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    found = {page: check(root, page) for page in pages(root)}
    if problems := [problem for each in found.values() for problem in each.problems]:
        sys.exit("\n".join(problems))
    counts = sum((each.counts for each in found.values()), collections.Counter())
    caught, tried = noticed([asked for each in found.values() for asked in each.checks])
    print(f"{len(found)} pages: " + ", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    print(f"{caught} of {tried} changes of a single digit would be noticed ({100 * caught / max(tried, 1):.1f} %)")


if __name__ == "__main__":
    main()
