"""A report's page as a browser reads it, for the tests of reports."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects the tags, the text and what would be fetched, and fails where elements do not close in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []
        assert "script" not in self.tags

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        links = [value or "" for name, value in attrs if name in {"src", "href", "data", "srcset"}]
        self.fetched += [link for link in links if not link.startswith("#")]
        self._open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
