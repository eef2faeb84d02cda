"""Check that links, anchors, images and scripts of built pages lead to something: python docs/check_links.py FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page refers to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses and the names of a tag."""
        for key, value in attrs:
            if key in ("href", "src") and value:
                self.targets.append(value)
            if value and (key == "id" or (key == "name" and tag == "a")):
                self.anchors.add(value)


def broken_links(folder: Path) -> Iterator[str]:
    """Yield a line for every address inside a folder of pages that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for target in page.targets:
            address = urlsplit(target)
            if address.scheme or address.netloc:
                continue  # outside, which no build asks for
            found = (path.parent / unquote(address.path)).resolve() if address.path else path
            anchor = unquote(address.fragment)
            missing = not found.exists()
            if missing or (anchor and found in pages and anchor not in pages[found].anchors):
                yield f"{path.relative_to(folder.resolve())}: {target}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/check_links.py FOLDER")
    lines = list(broken_links(Path(sys.argv[1])))
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(f"{len(lines)} links lead nowhere" if lines else 0)
