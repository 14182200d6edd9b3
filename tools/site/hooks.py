# SPDX-License-Identifier: MIT
"""The site is docs/ and, as its first page, README.md. What they name elsewhere in the repository gets a page of its own, so that no link
leaves the site: files as they are, folders as lists."""

import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of a Markdown link or picture.
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".hpp": "cpp", ".cuh": "cpp", ".cpp": "cpp", ".cu": "cpp", ".py": "python", ".txt": "text", ".md": "markdown", ".json": "json",
             ".yml": "yaml", ".toml": "toml"}
PICTURES = {".svg", ".png"}
LARGEST = 200_000  # bytes of a file that is shown
FIRST_PAGE = {"README.md": "index.md"}
STYLE = "style.css"


def is_elsewhere(target: str) -> bool:
    return re.match(r"[a-z]+:", target) is not None


def place_of(uri: str) -> str:
    """Of a page of the site: its file, from the repository's root."""
    for place, page in FIRST_PAGE.items():
        if uri == page:
            return place
    return f"docs/{uri}"


def uri_of(place: str) -> str:
    """Of a file or folder, from the repository's root: its page or picture in the site."""
    if place in FIRST_PAGE:
        return FIRST_PAGE[place]
    if place.startswith("docs/") and (ROOT / place).is_file():
        return place.removeprefix("docs/")
    path = ROOT / place
    if path.suffix in PICTURES:
        return f"repository/{place}"
    if place.startswith("docs/") and (ROOT / place / "index.md").exists():
        return f"{place.removeprefix('docs/')}/index.md"
    return f"repository/{place}.md" if path.suffix != ".md" else f"repository/{place}"


def targets_of(text: str, place: str):
    """What a page at that place names in the repository."""
    for match in LINK.finditer(text):
        if not is_elsewhere(match[1]):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(place), match[1]))


def shown(place: str) -> str:
    """The page of a file or folder."""
    path = ROOT / place
    if place.startswith("docs/") and path.is_dir():
        pages = sorted(path.glob("*.md"))
        titles = [page.read_text().split("\n", 1)[0].removeprefix("# ") for page in pages]
        return f"# {path.name.capitalize()}\n\n" + "\n".join(f"- [{title}]({path.name}/{page.name})" for title, page in zip(titles, pages)) + "\n"
    if path.is_dir():
        names = sorted(each.name + ("/" if each.is_dir() else "") for each in path.iterdir() if each.name not in {"__pycache__", "build"})
        return f"# {place}\n\nA folder of the repository:\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = path.read_text(errors="replace")
    if path.suffix == ".md":
        return text
    if len(text) > LARGEST:
        return f"# {place}\n\nA file of the repository, of {len(text)} bytes.\n"
    fence = "~~~~"
    return f"# {place}\n\n{fence}{LANGUAGES.get(path.suffix, 'bash' if text.startswith('#!') else 'text')}\n{text}\n{fence}\n"


def on_files(files, config):
    files.append(File.generated(config, STYLE, content=(pathlib.Path(__file__).parent / STYLE).read_text()))
    waiting = [(place_of(file.src_uri), (ROOT / place_of(file.src_uri)).read_text())
               for file in files.documentation_pages() if (ROOT / place_of(file.src_uri)).exists()]
    for place, page in FIRST_PAGE.items():
        text = (ROOT / place).read_text()
        files.append(File.generated(config, page, content=text))
        waiting.append((place, text))
    while waiting:
        place, text = waiting.pop()
        for target in targets_of(text, place):
            uri = uri_of(target)
            if not uri.startswith("repository/") or not (ROOT / target).exists() or files.get_file_from_path(uri):
                continue
            if (ROOT / target).suffix in PICTURES:
                files.append(File.generated(config, uri, content=(ROOT / target).read_bytes()))
                continue
            content = shown(target)
            files.append(File.generated(config, uri, content=content))
            if target.endswith(".md"):
                waiting.append((target, content))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    place = uri.removeprefix("repository/") if uri.startswith("repository/") else place_of(uri)

    def rewritten(match):
        if is_elsewhere(match[1]):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[1]))
        return f"]({posixpath.relpath(uri_of(target), posixpath.dirname(uri) or '.')}{match[2] or ''})"

    return LINK.sub(rewritten, markdown)
