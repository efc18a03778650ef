"""The Debian Administrator's Handbook as articles: one book in many languages.

    apt-get download debian-handbook && dpkg-deb -x debian-handbook_*.deb handbook

puts its pages into `handbook/usr/share/doc/debian-handbook/html/LANGUAGE`. What nobody
has translated yet stands there in English, and is left out.

    python -m bench.handbook handbook/usr/share/doc/debian-handbook/html --output FOLDER

writes en.jsonl, fr.jsonl and ru.jsonl. The questions that were written from the text
are in `bench/handbook_questions`.
"""

import html.parser
import json
import pathlib
import re
from collections.abc import Iterator

from bench.command import make_parser, one_line_errors
from realm_jax.errors import BadInputError

QUESTIONS = pathlib.Path(__file__).parent / "handbook_questions"
LOCALES = {"en": "en-US", "fr": "fr-FR", "ru": "ru-RU"}

_HEADINGS = ("h1", "h2", "h3", "h4")
_SKIPPED = ("pre", "table", "script", "style")
_MIN_CHARACTERS = 300
_FRENCH = re.compile(
    r"\b(?:le|la|les|des|est|une|un|dans|pour|que|qui|sur|avec|par|sont|ce|cette|du|au"
    r"|aux|il|ne|pas|plus)\b"
)
_ENGLISH = re.compile(
    r"\b(?:the|of|and|to|is|in|that|for|it|with|are|this|be|on|as|can|which)\b"
)


def main() -> None:
    """Writes the articles of each language."""
    parser = make_parser(__doc__)
    parser.add_argument("handbook", type=pathlib.Path, help="the package's folder html")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="a folder")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    for language in LOCALES:
        write_articles(flags.handbook, language, flags.output / f"{language}.jsonl")


def write_articles(handbook: pathlib.Path, language: str, path: pathlib.Path) -> None:
    """Writes the book in one of `LOCALES`, from the package's `html`, as JSON lines."""
    pages = sorted((handbook / LOCALES[language]).glob("*.html"))
    if not pages:
        raise BadInputError(
            f"expected pages of the handbook in {handbook / LOCALES[language]}, got "
            "none; unpack Debian's package debian-handbook, and name its folder html"
        )
    with path.open("w") as file:
        for page in pages:
            for number, (title, paragraphs) in enumerate(_sections(page)):
                kept = [text for text in paragraphs if _is_in(language, text)]
                text = "\n\n".join(kept)
                if len(text) < _MIN_CHARACTERS:
                    continue
                article = {"id": f"{page.stem}-{number}", "title": title, "text": text}
                file.write(json.dumps(article, ensure_ascii=False) + "\n")


def _sections(page: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    parser = _Parser()
    parser.feed(page.read_text())
    parser.end_paragraph()
    yield from parser.sections


class _Parser(html.parser.HTMLParser):
    """Collects headings, and the paragraphs below each."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[tuple[str, list[str]]] = []
        self._within = ""
        self._skipped = 0
        self._texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if tag in _SKIPPED:
            self._skipped += 1
        elif tag in _HEADINGS or tag == "p" or (tag == "div" and "para" in classes):
            self.end_paragraph()
            self._within = tag if tag in _HEADINGS else "p"

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIPPED:
            self._skipped -= 1
        elif tag in (*_HEADINGS, "p", "div", "li"):
            self.end_paragraph()
            self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within and not self._skipped:
            self._texts.append(data)

    def end_paragraph(self) -> None:
        """Files the text since the last tag under its section."""
        text = re.sub(r"\s+", " ", "".join(self._texts)).strip()
        self._texts = []
        if text and self._within in _HEADINGS:
            title = re.sub(r"^[\dA-Z]+(\.\d+)*\.\s*", "", text)
            self.sections.append((title, []))
        elif text and self.sections:
            self.sections[-1][1].append(text)


def _is_in(language: str, paragraph: str) -> bool:
    """Says whether a paragraph is in a language, and not left in English."""
    if language == "ru":
        letters = [letter for letter in paragraph if letter.isalpha()]
        cyrillic = sum("\u0400" <= letter <= "\u04ff" for letter in letters)
        return cyrillic > 0.55 * len(letters)
    french = len(_FRENCH.findall(paragraph.lower()))
    english = len(_ENGLISH.findall(paragraph.lower()))
    return french > english if language == "fr" else english >= french


if __name__ == "__main__":
    with one_line_errors():
        main()
