#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Every number of a measurement in the pages' prose is a claim of docs/claims.toml, and every claim holds: its text stands on its page, each
number is what the records give in its unit, rounded as it is written, and the comparison goes the way that the text says."""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/tools"))
import tables  # noqa: E402

UNITS = {"%": 100, "points": 100, "ms": 1e3, "µs": 1e6, "ns": 1e9, "kB": 1e-3, "MB": 1e-6, "GB": 1e-9, "s": 1, "×": 1, "times": 1, "seconds": 1}
MOST = {"README.md": 8}  # numbers of claims; three on other pages
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBER = re.compile(rf"(?<![\w.,/-])[−-]?(?:(?P<count>\d+|{'|'.join(WORDS)})(?= seeds?\b)"
                    r"|(?P<digits>\d[\d,]*(?:\.\d+)?)(?:\s?(?P<unit>" + "|".join(UNITS) + r")(?!\w| \d))?)(?!\w|\.\d)")
# What the first of these words in a text says about the first side of `holds`.
DIRECTIONS = {"<": "less|lower|shorter|fewer|faster|quicker|better|below|nearer|gains|only", ">": "more|higher|longer|slower|worse|above|farther|loses",
              "=": "no difference|no significant|within noise|same|ties"}
DIRECTION = re.compile("|".join(rf"(?P<{name}>\b(?:{DIRECTIONS[sign]})\b)" for name, sign in (("below", "<"), ("above", ">"), ("level", "="))))
SIGNS = {"below": "<", "above": ">", "level": "="}


def prose(text: str) -> str:
    """The text without code, tables, links' targets and what is generated, a paragraph a line."""
    text = tables.MARKED.sub("", text)
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\s*\|.*$|^#.*$|<!--.*?-->", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`", text))
    return re.sub(r"[ \n]+", " ", re.sub(r"\n\s*\n", "\x00", text)).replace("\x00", "\n")


def is_measured(found: re.Match) -> bool:
    return bool(found["count"] or found["unit"] or "." in found["digits"])


def problems_of(claim: dict, text: str, rows: dict) -> list[str]:
    where = f"{claim['page']}: {claim['text']!r}"
    said = prose(claim["text"])
    if said not in text:
        return [f"{where} does not stand there"]
    expressions = [claim["value"]] if isinstance(claim["value"], str) else claim["value"]
    holds = claim.get("holds", "")
    used = {name: rows[name] for name in set(re.findall(r"\w+", " ".join([*expressions, holds]))) & set(rows)}
    scope = {name: eval(row["is"], vars(tables)) for name, row in used.items()}
    found = [each for each in NUMBER.finditer(said) if is_measured(each) and each[0] not in claim.get("settings", [])]
    problems = [f"{where} does not name {row['says']!r}, which its {name} is" for name, row in used.items() if row["says"] not in claim["text"]]
    if len(found) != len(expressions):
        return [*problems, f"{where} has {len(found)} numbers and {len(expressions)} values"]
    for number, expression in zip(found, expressions):
        value = eval(expression, {"abs": abs, "len": len, "max": max, "min": min}, scope)
        written = number["digits"] or number["count"]
        if number["count"]:
            expected = written if written.isdigit() and int(written) == value else dict(enumerate(WORDS)).get(value)
        else:
            digits = len(written.partition(".")[2])
            expected = f"{UNITS.get(number['unit'], 1) * value:,.{digits}f}" if "," in written else f"{UNITS.get(number['unit'], 1) * value:.{digits}f}"
        if written != expected:
            problems.append(f"{where}: {number[0]} should be {expected}, by {expression}")
    way = DIRECTION.search(said)
    if holds:
        if not eval(holds, {"abs": abs, "max": max, "min": min}, scope):
            problems.append(f"{where}: {holds} does not hold")
        if way and set(re.findall(r"[<>=]", re.sub("[<>]=", "=", holds))) != {SIGNS[way.lastgroup]}:
            problems.append(f"{where}: {way[0]!r} is not the direction of {holds}")
    elif way:
        problems.append(f"{where}: {way[0]!r} compares, and there is no `holds`")
    return problems


def check(claims: dict, pages: dict[str, str]) -> list[str]:
    """What is wrong with the claims, and with the numbers of the pages, by their paths."""
    problems = []
    texts = {page: prose(text) for page, text in pages.items()}
    for claim in claims["claim"]:
        if claim["page"] not in texts:
            problems.append(f"{claim['page']}, of a claim, is not there")
        else:
            problems += problems_of(claim, texts[claim["page"]], claims["rows"])
    for page, text in texts.items():
        values = [claim["value"] for claim in claims["claim"] if claim["page"] == page]
        numbers = sum(1 if isinstance(value, str) else len(value) for value in values)
        if numbers > MOST.get(page, 3):
            problems.append(f"{page} has {numbers} measured numbers in its prose: a table has them better")
        for known in [*(claim["text"] for claim in claims["claim"] if claim["page"] == page), *claims["settings"]]:
            text = text.replace(prose(known), " ¶ ")
        problems += [f"{page}: {each[0]!r} is measured, and no claim: …{text[max(0, each.start() - 40):each.end() + 30]}…"
                     for each in NUMBER.finditer(text) if is_measured(each)]
    return problems


def read() -> tuple[dict, dict[str, str]]:
    claims = tomllib.loads((ROOT / "docs/claims.toml").read_text())
    names = [path.relative_to(ROOT).as_posix() for path in tables.pages()]
    return claims, {name: (ROOT / name).read_text() for name in names if not name.startswith("docs/decisions/")}


def main() -> int:
    problems = check(*read())
    print(*problems, sep="\n", file=sys.stderr)
    return len(problems) > 0


if __name__ == "__main__":
    sys.exit(main())
