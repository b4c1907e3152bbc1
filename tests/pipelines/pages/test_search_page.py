"""The page that `search --html` writes, read back by an HTML parser that this
project did not write.
"""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipelines import build_index
from pipelines.progress.wording import printable
from tests.pipelines.conftest import write_photo


class Page(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.text = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)

    def references(self):
        """Every address that a browser would load."""
        names = ("src", "href", "srcset", "data", "action", "poster")
        return [
            value
            for _, attributes in self.tags
            for name in names
            if (value := attributes.get(name))
        ]


@pytest.fixture(scope="module")
def index(tmp_path_factory, tiny_bundle):
    folder = tmp_path_factory.mktemp("pages")
    for seed in range(6):
        write_photo(folder / "photos" / f"{seed}.jpg", seed)
    write_photo(folder / "photos" / "<img src=x onerror=alert(1)>.jpg", 6)
    (folder / "photos" / "0.txt").write_text("a <b>red</b> canoe")
    build_index(
        folder / "photos",
        folder / "photos.edje",
        tiny_bundle,
        engine="inline",
        threads=1,
    )
    (folder / "photos" / "5.jpg").unlink()
    return folder / "photos.edje"


def page_of(index, run, tmp_path, query="a dog", *options):
    out = run.ok(
        "search", index, query, "-k", "7", "--html", tmp_path / "page.html", *options
    )
    return Page((tmp_path / "page.html").read_text()), out


def test_the_answer_comes_first_and_both_orders_show_every_photo(index, run, tmp_path):
    page, out = page_of(index, run, tmp_path)
    text = " ".join(page.text)
    assert text.count("a <b>red</b> canoe") == text.count("missing: no such file") == 2
    assert "0.jpg  a <b>red</b> canoe\n" in out
    assert "untrained" in text
    assert "photos.edje, 7 images, bf16 tokens" in text
    printed = [line.split()[1] for line in out.splitlines()[1:]]
    shown = [
        line.split(",")[0].removeprefix("row ")
        for line in map(str.strip, page.text)
        if line.startswith("row ")
    ]
    assert (len(shown), shown[:7]) == (14, printed)
    top = Path(out.splitlines()[1].split("  ")[-1]).name
    before = shown[7:].index(printed[0]) + 1
    moved = f"Re-ranking moved {top} from {before} to the top"
    assert (moved if before > 1 else f"{top} is first before") in text
    kinds = [reference.partition(",")[0] for reference in page.references()]
    assert kinds == ["data:image/jpeg;base64"] * 12
    assert "url(" not in (tmp_path / "page.html").read_text()


def test_queries_and_names_are_escaped(index, run, tmp_path):
    page, _ = page_of(index, run, tmp_path, "</title><script>alert(1)</script>")
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert not [name for _, named in page.tags for name in named if name[:2] == "on"]
    text = "".join(page.text)
    assert "</title><script>alert(1)</script>" in text
    assert "<img src=x onerror=alert(1)>.jpg" in text
    page, _ = page_of(index, run, tmp_path, "a dog", "--where", "width > 9999")
    assert "No photo passes the filter." in "".join(page.text)


def test_joiners_and_marks_of_direction_are_kept(index, run, tmp_path):
    """Words in Persian and Hebrew, and a family of emoji."""
    spelt = "\u0645\u06cc\u200c\u062e \u05dd!\u200f \U0001f468\u200d\U0001f469"
    page, _ = page_of(index, run, tmp_path, spelt)
    assert f"“{spelt}”" in page.text
    automatic = [
        tag for tag, attributes in page.tags if attributes.get("dir") == "auto"
    ]
    # the query, and the name and the captions of each of 7 hits in both orders
    assert automatic == ["h1", *["div"] * 28]
    # The last two change the order of the letters after them.
    assert printable("\x1b[2J\x9b\u202e\u2067") == r"\x1b[2J\x9b\u202e\u2067"
