"""The playground in headless Chromium."""

import pytest

from jaxserve.config.api_keys import ApiKey
from jaxserve.core import ChunkView, IterationView, Recording
from jaxserve.server.settings import HttpSettings
from tests.server import browser as chromium
from tests.server.browser import ENTER, Browser
from tests.server.fake_engine import FakeEngine, script
from tests.server.running import RunningServer, until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.missing() is not None, reason=chromium.missing() or "there is a browser"),
]
MARKUP = """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>&amp; é 😊"""
TITLE = "jaxserve playground"


@pytest.fixture(scope="module")
def window():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def page(fake_server, window):
    """The page of the fake server, loaded anew; it must not have complained."""
    window.open(fake_server.url)
    window.console()
    yield window
    assert window.console() == []


def ask(page, text="Hello"):
    page.type("#prompt", text + ENTER)


def ended(page, count=1):
    page.until(lambda: page.count(".assistant") == count and page.count(".running") == 0, "the answer ends")


def test_a_conversation_streams_and_is_sent_whole_with_each_message(page, fake_server):
    fake_server.engine.step_s = 0.01
    page.click("#sampling summary")
    page.type("[name=seed]", "7")
    page.type("[name=stop]", "END")
    ask(page)
    page.until(lambda: 0 < len(page.text(".assistant .text")) < 60, "a part is shown")
    assert page.count(".running") == 1 and page.run("return document.getElementById('send').disabled")
    ended(page)
    first = page.text(".assistant .text")
    assert len(first) == 256, "the page's max_tokens"
    ask(page, "again")
    ended(page, 2)
    assert bytes(fake_server.engine.submitted[1]["prompt"]).decode() == f"Hello\n{first}\nagain\n"
    assert " tokens · first after " in page.text(".assistant .meta") and page.text(".assistant .meta").endswith(
        "length"
    )
    params = fake_server.engine.submitted[0]["params"]
    assert (params.seed, params.stop, params.temperature) == (7, ("END",), 0.7)


def test_what_the_model_says_is_text_whatever_it_looks_like(page, fake_server):
    script(fake_server, MARKUP, 1)
    ask(page, "<b>bold</b>")
    ended(page)
    page.click("#colour")
    ask(page, "again")
    ended(page, 2)
    assert page.run("return [...document.querySelectorAll('.assistant .text')].map(e => e.textContent)") == [MARKUP] * 2
    assert page.count(".log img, .log script, .log b") == 0
    assert page.run("return document.title") == TITLE


def test_the_policy_would_stop_markup_that_got_in(page):
    page.run("document.body.insertAdjacentHTML('beforeend', arguments[0])", MARKUP)
    page.until(lambda: any("Content Security Policy" in line for line in page.console()), "it is blocked")
    assert page.run("return document.title") == TITLE


def test_stop_aborts_the_request(page, fake_server):
    fake_server.engine.step_s = 0.05
    ask(page)
    page.until(lambda: len(page.text(".assistant .text")) > 2, "it streams")
    page.click("#stop")
    ended(page)
    assert page.text(".assistant .meta").endswith("stopped")
    until(lambda: fake_server.engine.num_cancelled == 1, what="the engine is told")


def test_clear_ends_the_answer_and_begins_another_conversation(page, fake_server):
    fake_server.engine.step_s = 0.05
    ask(page, "one")
    page.until(lambda: len(page.text(".assistant .text")) > 2, "it streams")
    page.click("#clear")
    until(lambda: fake_server.engine.num_cancelled == 1, what="the engine is told")
    page.until(lambda: not page.run("return document.getElementById('send').disabled"), "it can be asked again")
    fake_server.engine.step_s = 0.0
    ask(page, "two")
    ended(page)
    assert bytes(fake_server.engine.submitted[-1]["prompt"]).decode() == "two\n"


def test_tokens_are_coloured_and_show_alternatives_by_pointer_and_keyboard(page, fake_server):
    script(fake_server, "ab😊", 1)
    page.click("#colour")
    ask(page)
    ended(page)
    assert page.count(".token") == 6 and page.text(".assistant .text") == "ab😊"
    assert page.count(".token.p3") == 6, "exp(-0.5) is 61 %"
    page.hover(".token")
    assert page.run("return document.getElementById('tip').hidden") is False
    assert page.text("#tip .chosen").startswith("a") and page.text("#tip .chosen").endswith("60.7 %")
    assert page.count("#tip div") >= 4
    page.run("document.getElementById('log').focus()")
    page.type("#log", "\ue014\ue014")  # right arrows
    assert page.text("#tip .chosen").startswith("b")


def test_an_error_is_told_and_the_conversation_goes_on(page, fake_server):
    fake_server.engine.max_live = 0
    ask(page)
    page.until(lambda: page.count(".error[role=alert]") == 1, "the error is shown")
    assert "the queue has 100 requests" in page.text(".error")
    ended(page)
    assert any("429" in line for line in page.console())
    fake_server.engine.max_live = 10
    ask(page, "again")
    ended(page, 2)
    assert fake_server.engine.submitted, "what failed is not sent again"


def test_the_engine_is_shown_while_it_runs_and_asked_only_while_it_is_seen(page, fake_server):
    engine = fake_server.engine
    row = IterationView(0, 0.0, 0.5, "b", (0,), ("a",), (ChunkView(1, "b", 4),), (), (), 0.0, 0, 70, 4, 5)
    engine.recorded = Recording("fake", 8, (row,), ())
    fake_server.call(engine.hold_off.clear)
    ask(page)
    page.until(lambda: page.text("#f-running") == "1 / 8", "the slot shows")
    assert page.text("#slots td.id").startswith("chatcmpl-") and "decode" in page.text("#slots")
    assert "5 + 4 of 79 pages" in page.text("#kv-text") and "1 iterations" in page.text("#grid-text")
    assert page.run("return document.getElementById('kv-owned').getBoundingClientRect().width") > 5
    fake_server.call(engine.hold_off.set)
    ended(page)
    page.hide(True)
    page.run("return new Promise(done => setTimeout(done, 300))")
    before = engine.num_views
    page.run("return new Promise(done => setTimeout(done, 2500))")
    assert engine.num_views == before
    page.hide(False)
    until(lambda: engine.num_views > before, what="it is asked again")


def test_with_keys_the_field_opens_chat_and_view(window):
    server = RunningServer(FakeEngine, HttpSettings(api_keys=(ApiKey("right"), ApiKey("a-key", "alice"))))
    try:
        window.open(server.url)
        window.until(lambda: window.text("#model") == "enter the API key", "the key is asked for")
        window.type("#api-key", "right\t")
        window.until(lambda: window.text("#model").startswith("fake · ready"), "the view opens")
        ask(window)
        ended(window)
        assert not window.run("return document.cookie || localStorage.length || sessionStorage.length || false")
        window.run("document.getElementById('api-key').value = ''")
        window.type("#api-key", "a-key\t")
        window.until(lambda: "no tenant" in window.text("#live-note"), "a tenant's key does not open the view")
        ask(window, "more")
        ended(window, 2)
        window.console()
    finally:
        server.stop()


def test_every_field_and_button_has_a_name(page):
    script = """
      return [...document.querySelectorAll('input, textarea, button')]
        .filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).map(e => e.outerHTML)
    """
    assert page.run(script) == []
    assert page.run("return document.documentElement.lang") == "en" and page.count("h1") == 1


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_follows_the_colour_scheme(fake_server, dark):
    script(fake_server, "a long word " + "x" * 80, 1)
    phone = Browser(390, 844, dark=dark)
    try:
        phone.open(fake_server.url)
        ask(phone)
        ended(phone)
        assert phone.run("return document.documentElement.scrollWidth <= window.innerWidth && window.innerWidth") == 390
        red = int(phone.run("return getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])
        assert (red < 60) is dark
        assert phone.console() == []
    finally:
        phone.close()
