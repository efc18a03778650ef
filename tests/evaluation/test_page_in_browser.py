"""The page of `realm ask` in a browser, by clicking."""

import asyncio
import os
import pathlib
import re
import threading
import urllib.parse

import pytest

from realm_jax.evaluation import server
from realm_jax.evaluation.ask import AnswerService
from tests import chromium, tiny_run
from tests.waiting import PATIENCE

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        chromium.PROGRAM is None, reason="there is no Chromium to click in"
    ),
]

QUESTION = "When was Town2 founded?"
SENTENCE = "Town5 was founded in [MASK]."


@pytest.fixture
def served(tmp_path_factory):
    """The service of the shared chain, and the address of its page."""
    root = tiny_run.finished(tmp_path_factory)
    stop, ready = threading.Event(), threading.Event()
    with AnswerService(tiny_run.ask_config(root), stop) as service:
        listener = server.open_port("127.0.0.1", 0)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread = threading.Thread(
            target=server.serve, args=(service, listener, stop, ready.set)
        )
        thread.start()
        assert ready.wait(PATIENCE)
        yield service, address
        stop.set()
        thread.join(PATIENCE)


@pytest.fixture
def pictures(tmp_path):
    """A folder for pictures of the page, to be looked at: PICTURES, if it is set."""
    folder = pathlib.Path(os.environ.get("PICTURES", tmp_path / "pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_person_asks_follows_the_link_and_fills_in_a_mask(served, pictures, tmp_path):
    service, address = served

    async def walk() -> None:
        async with chromium.opened(tmp_path / "profile") as tab:
            await tab.resize(1000, 900)
            await tab.go(address)
            await asks(tab, QUESTION)
            await tab.picture(pictures / "answer.png")
            await shows_answer(tab, service, QUESTION)
            await shows_version(tab, service)
            await links_to_itself(tab, address)
            await asks(tab, SENTENCE)
            await tab.picture(pictures / "mask.png")
            await shows_documents_of_a_mask(tab, service)
            await tab.resize(380, 800)
            await tab.picture(pictures / "narrow.png")
            assert await tab.value("document.documentElement.scrollWidth") <= 380

    asyncio.run(walk())


def test_a_link_on_the_page_of_another_site_is_followed(served, tmp_path):
    service, address = served
    link = f"{address}?{urllib.parse.urlencode({'question': QUESTION})}"
    foreign = f'<a href="{link}">see</a> <img src="{link}">'

    async def walk() -> None:
        async with chromium.opened(tmp_path / "profile") as tab:
            await tab.go(f"data:text/html,{urllib.parse.quote(foreign)}")
            await tab.click("a")
            await tab.loaded()
            await shows_answer(tab, service, QUESTION)

    asyncio.run(walk())


async def asks(tab, question):
    """Types a question in place of the one that is there, and clicks the button."""
    await tab.click("input")
    await tab.value("document.querySelector('input').select()")
    await tab.type(question)
    await tab.click("button")
    await tab.loaded()


async def shows_answer(tab, service, question):
    answer = service.answer(question).answer
    assert await tab.texts(".answer") == [answer.text]
    titles = [document.title for document in answer.documents]
    assert await tab.texts(".sources h3") == titles
    marked = await tab.texts("mark")
    assert len(marked) >= 1
    assert set(marked) == {answer.text}


async def shows_version(tab, service):
    version = service.version.describe()
    (footer,) = await tab.texts("footer")
    assert f"Index {version['index_step']}-{version['index_attempt']}," in footer
    assert re.search(r"\d (s|min|h)( \d+ (s|min))? old", footer)
    assert version["fingerprint"][:12] in footer


async def links_to_itself(tab, address):
    before = await tab.texts("body")
    await tab.click(".link")
    await tab.loaded()
    where = urllib.parse.urlsplit(await tab.value("location.href"))
    assert f"{where.scheme}://{where.netloc}/" == address
    assert urllib.parse.parse_qs(where.query) == {"question": [QUESTION]}
    assert await tab.value("document.querySelector('input').value") == QUESTION
    after = await tab.texts("body")
    ages = [re.sub(r"[\d.]+ (s|min|h).* old", "", text) for text in (*before, *after)]
    assert ages[0] == ages[1]


async def shows_documents_of_a_mask(tab, service):
    answer = service.answer(SENTENCE).answer
    titles = await tab.texts(".sources h3")
    assert titles == [document.title for document in answer.documents]
    assert "No document" in titles
    shown = await tab.texts(".sources dd")
    assert len(shown) == 3 * len(titles)
    chances = [document.answer_probability for document in answer.documents]
    for text, chance in zip(shown[1::3], chances, strict=True):
        if chance >= 0.001:
            assert text.startswith(f"{chance:.3f}")
