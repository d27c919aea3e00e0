"""What a page of boards shows, read back from its HTML."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """The panels of a page's final HTML by title, the text in each, and the links between boards."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.panels: dict[str, dict[str, str]] = {}
        self.links: dict[str, str] = {}
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        if "data-panel-id" in found:
            self.panels[found["data-title"]] = found | {"text": ""}
        if tag == "a":
            self.links[found.get("href", "")] = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.panels:
            self.panels[next(reversed(self.panels))]["text"] += data
