"""The report in a real browser: nothing complains, every chart is drawn, and it can be read on everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.report.build import build_report
from tests.report.made_run import make_run

DESKTOP = {"viewport": {"width": 1200, "height": 900}}
PHONE = {"viewport": {"width": 360, "height": 780}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
SETTINGS = {"light": DESKTOP, "dark": {**DESKTOP, "color_scheme": "dark"}, "phone": PHONE}


@pytest.fixture(scope="module")
def page_of(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`page_of(setting)`: the report opened so, with what the browser complained of and asked for."""
    folder = tmp_path_factory.mktemp("report")
    report = build_report(read_log(make_run(folder / "run")))
    path = folder / "report.html"
    path.write_text(report.html, encoding="utf-8")
    contexts: dict[str, Any] = {}

    def open_page(setting: str) -> Any:
        if setting not in contexts:
            context = browser.new_context(**SETTINGS[setting])
            page = context.new_page()
            page.complaints, page.asked, page.charts = [], [], report.charts
            page.on("console", lambda message: page.complaints.append(message.text))
            page.on("pageerror", lambda error: page.complaints.append(str(error)))
            page.on("request", lambda request: page.asked.append(request.url))
            page.goto(path.as_uri())
            page.wait_for_function("document.documentElement.dataset.charts === 'drawn'")
            contexts[setting] = page
        return contexts[setting]

    yield open_page
    for page in contexts.values():
        page.context.close()


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_complains_and_nothing_is_fetched(page_of: Any, setting: str) -> None:
    page = page_of(setting)
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.title() != "harmed"
    assert page.evaluate("document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_chart_is_drawn(page_of: Any, setting: str) -> None:
    page = page_of(setting)
    drawn = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll('.chart')].map((place) => {
      const marks = [...place.querySelectorAll('.trace .point path, .trace path.js-line')];
      const box = place.querySelector('.main-svg').getBoundingClientRect();
      return [place.id, [marks.filter((m) => m.getAttribute('d')).length, box.width, place.clientWidth]];
    }))""")
    assert list(drawn) == list(page.charts)
    for name, (marks, width, room) in drawn.items():
        assert marks > 0, name
        assert 0.9 * room <= width <= room + 1, name


@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_wider_than_the_screen(page_of: Any, setting: str) -> None:
    page = page_of(setting)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = false; })")
    assert wide <= screen


def contrast(page: Any, selector: str, behind: str = "body") -> float:
    """WCAG 2.2's contrast ratio of the text of one element to the ground of another."""
    colours = page.evaluate(
        """([selector, behind]) => {
             const style = getComputedStyle(document.querySelector(selector));
             const text = selector.includes('text') ? style.fill : style.color;
             return [text, getComputedStyle(document.querySelector(behind)).backgroundColor];
           }""",
        [selector, behind],
    )
    luminances = []
    for colour in colours:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    low, high = sorted(luminances)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("setting", "is_dark"), [("light", False), ("dark", True)])
def test_light_and_dark_can_be_read(page_of: Any, setting: str, is_dark: bool) -> None:
    page = page_of(setting)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == is_dark
    for selector in ("body", "p", "figcaption", "nav a", ".outcome strong", ".chart .xtick text", "footer", "summary"):
        assert contrast(page, selector) >= 4.5, selector
    assert contrast(page, "dt", ".figures div") >= 4.5
    assert contrast(page, ".sample p", ".sample") >= 4.5


def test_keyboard_reaches_everything_in_order(page_of: Any) -> None:
    page = page_of("light")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    skip = page.evaluate("[document.activeElement.className, document.activeElement.getBoundingClientRect().left]")
    assert skip == ["skip", 0], "the first stop is the way past the links, and can be seen"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    opened = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    region = page.evaluate("[document.activeElement.getAttribute('role'), document.activeElement.ariaLabel]")
    assert region == ["region", opened], "the table behind a chart opens and can be scrolled by keys"
    tops, stops = [], 0
    while page.evaluate("document.activeElement !== document.body") and stops < 100:
        tops.append(page.evaluate("document.activeElement.getBoundingClientRect().top + scrollY"))
        page.keyboard.press("Tab")
        stops += 1
    assert tops == sorted(tops), "in the order of the page"
    count = page.evaluate("document.querySelectorAll('summary, pre[tabindex]').length")
    assert stops >= count - 1


def test_landmarks_and_names(page_of: Any) -> None:
    page = page_of("light")
    count = "(selector) => document.querySelectorAll(selector).length"
    for landmark in ("header", "main", "footer", "nav[aria-label]", "h1", "html[lang]", "title"):
        assert page.evaluate(count, landmark) == 1, landmark
    unnamed = page.evaluate("""() => ['aria-labelledby', 'aria-describedby'].flatMap((name) =>
      [...document.querySelectorAll(`[${name}]`)].filter((element) =>
        !document.getElementById(element.getAttribute(name))?.textContent.trim()).map((element) => element.id))""")
    assert unnamed == []
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))")
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    assert page.evaluate(count, "th:not([scope])") == 0


def test_it_prints_on_paper(page_of: Any) -> None:
    page = page_of("dark")
    pdf = page.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF")
    assert 3 <= pdf.count(b"/Type /Page\n") <= 20
    page.emulate_media(media="print")
    ground, links = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('nav')).display]"
    )
    page.emulate_media(media="screen", color_scheme="dark")
    assert (ground, links) == ("rgb(255, 255, 255)", "none"), "black on white, without links, whatever the screen has"
