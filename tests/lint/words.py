# SPDX-License-Identifier: MIT
"""One word for one thing, and it is the field's: what pages, code, messages and tests must not say. words.py [FILE]..."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOOKED_AT = (".", ":!benchmarks/results", ":!docs/Doxyfile", ":!tests/lint/words.py")
INSTEAD = {
    r"drift(s|ed|_\w+)?": "local delta",
    r"outer[ _]steps?": "outer optimizer",
    r"byte_budget": "send_budget",
    r"(held|kept|holds?|holding|keeps?) back|deferred": "dropped",
    r"rivals?": "baseline",
    r"oracles?": "invariant",
    r"to the bit|same bits": "bitwise identical",
    r"teams?": "thread block",
    r"told from": "distinguished from",
    r"seeds? of tuning": "tuning seed",
    r"take_(up|back)|foresees?|intakes?|departures?|deciders?": "the name of what it does",
    r"beside": "with, during, compared with",
    r"value times (waiting|age)|(fragments|parts) by value": "score",
}
WORDS = re.compile("|".join(rf"(?P<w{i}>\b(?:{word})\b)" for i, word in enumerate(INSTEAD)), re.IGNORECASE)


def main() -> None:
    listed = sys.argv[1:] or subprocess.run(["git", "-C", ROOT, "ls-files", *LOOKED_AT], check=True, capture_output=True,
                                            text=True).stdout.split()
    found = 0
    for name in listed:
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        for number, line in enumerate(lines, 1):
            for match in WORDS.finditer(line):
                instead = list(INSTEAD.values())[int(match.lastgroup[1:])]
                print(f"{name}:{number}: '{match[0]}': write {instead}")
                found += 1
    sys.exit(found > 0)


main()
