"""The report in a real browser: no complaint, nothing asked of the network, no sideways scrolling on a phone."""

from __future__ import annotations

import pytest

from coral_core.report.evaluation_page import evaluation_html
from tests.fakes.browser import browser_tab, chromium
from tests.fakes.report_cases import evaluation

PROGRAM = chromium()
pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser_tab(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Six policies, long names, hostile names: what strains a page most."""
    models = ("phi-4", "organisation/" + "a-very-long-name-" * 6, '"><script>document.title="taken"</script>')
    document, tables = evaluation(
        policies=("coral", "coral_paper", "homo_joint", "homo", "cauchy", "helix"), models=models, epochs=12
    )
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(evaluation_html(document, tables, time="2026-05-01T00:00:00+00:00"), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_fits_and_complains_of_nothing(tab, page, width, dark):
    tab.open(page, width=width, dark=dark)
    root = "document.documentElement"
    tab.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert tab.value(f"{root}.scrollWidth") <= tab.value(f"{root}.clientWidth") <= width
    asked = [request["request"]["url"] for request in tab.of_kind("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    assert not tab.of_kind("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert tab.value("document.title") == "Evaluation of made-up"


@pytest.mark.parametrize(("dark", "colour"), [(False, "rgb(255, 255, 255)"), (True, "rgb(20, 25, 31)")])
def test_the_page_is_as_light_as_its_reader_likes(tab, page, dark, colour):
    tab.open(page, width=1280, dark=dark)
    assert tab.value("getComputedStyle(document.body).backgroundColor") == colour


def test_charts_can_be_read_on_a_phone(tab, page):
    """Letters of charts at least 9 px high, none of them outside its chart."""
    tab.open(page, width=360)
    script = """
      Array.from(document.querySelectorAll('svg.chart')).flatMap(svg => {
        const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
        return Array.from(svg.querySelectorAll('text')).map(text => {
          const box = text.getBoundingClientRect();
          return [text.textContent, 12 * scale, frame.left - box.left, box.right - frame.right];
        });
      }).filter(([, size, left, right]) => size < 9 || left > 1 || right > 1)
    """
    assert tab.value(script) == []
