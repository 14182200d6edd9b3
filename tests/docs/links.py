# SPDX-License-Identifier: MIT
"""Every link within the repository leads somewhere: links.py [ROOT].

Looks at README.md, CONTRIBUTING.md, SECURITY.md and docs/: that the file or directory of each relative link is there;
docs.site looks at their anchors. Of all other files it looks at the pages that they name, as in "see docs/cpp.md".
"""

import os
import pathlib
import re
import sys
import urllib.parse

SKIPPED = {".git", "build", "results", "__pycache__"}
SUFFIXES = {".hpp", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".cmake", ".txt", ".toml", ".md", ".sh", ""}
FENCE = re.compile(r"^\s*(`{3,}|~{3,})(.*)$")
CODE = re.compile(r"(`+)(.+?)(?<!`)\1(?!`)")
INLINE = re.compile(r"\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s+\".*\")?\s*$")
HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src)=\"([^\"]*)\"", re.IGNORECASE)
NAMED_PAGE = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.md")


def lines_outside_of_blocks(text: str) -> list[tuple[int, str]]:
    """The lines that are no code and no comment, with their numbers."""
    kept = []
    fence = ""
    for number, line in enumerate(re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL).splitlines(), 1):
        match = FENCE.match(line)
        if fence:
            if match and match[1].startswith(fence) and not match[2].strip():
                fence = ""
        elif match and not (match[1][0] == "`" and "`" in match[2]):
            fence = match[1]
        else:
            kept.append((number, line))
    return kept


def problems_of_links(page: pathlib.Path, root: pathlib.Path) -> list[str]:
    problems = []
    for number, line in lines_outside_of_blocks(page.read_text(encoding="utf-8")):
        bare = CODE.sub(lambda match: "`" + "x" * len(match[2]) + "`", line)
        for target in INLINE.findall(bare) + REFERENCE.findall(bare) + HTML.findall(bare):
            if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE):
                continue
            where = f"{page.relative_to(root)}:{number}: {target}"
            path = urllib.parse.unquote(target).partition("#")[0]
            if path.startswith("/"):
                problems.append(f"{where}: a path from the root of the file system")
                continue
            file = pathlib.Path(os.path.normpath(page.parent / path)) if path else page
            if not file.is_relative_to(root):
                problems.append(f"{where}: outside of the repository")
            elif not file.exists():
                problems.append(f"{where}: there is no {file.relative_to(root)}")
    return problems


def problems_of_names(root: pathlib.Path) -> list[str]:
    """Pages that comments and messages name."""
    problems = []
    for directory, directories, names in os.walk(root):
        directories[:] = sorted(set(directories) - SKIPPED)
        for name in sorted(names):
            file = pathlib.Path(directory, name)
            if file.suffix not in SUFFIXES or file.is_symlink():
                continue
            for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                problems += [f"{file.relative_to(root)}:{number}: there is no {named}"
                             for named in NAMED_PAGE.findall(line) if not (root / named).exists()]
    return problems


def main() -> None:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    pages = [*(root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted((root / "docs").rglob("*.md"))]
    problems = [problem for page in pages for problem in problems_of_links(page, root)] + problems_of_names(root)
    if problems:
        sys.exit("\n".join(problems))
    print(f"the links of {len(pages)} pages lead somewhere")


main()
