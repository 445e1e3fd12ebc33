"""Reports in a browser: no errors, nothing wider than a phone or a desktop, light and dark."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from browser import browser, shown
from report_plans import priced

from autopar import Plan, Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser() is None, reason="there is no Chromium to render pages (apt-get install chromium)"),
]


def _reports() -> dict[str, Report]:
    by_hand = Plan.from_split({f"a_module.with_a_long_name.{i}": i for i in range(12)}, n_microbatches=24)
    return {
        "priced": priced(n_layers=40).report(price_per_device_hour=2.5, command="autopar plan " + "x" * 300),
        "by hand": by_hand.report(),
    }


@pytest.mark.parametrize("name", ["priced", "by hand"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_page_has_no_errors_and_no_horizontal_overflow(name: str, width: int, tmp_path: Path) -> None:
    found = shown(_reports()[name].save(tmp_path / "page.html"), width)
    assert found["console"] == []
    assert found["wide"] == []
    assert isinstance(found["width"], int)
    assert found["width"] <= width


def test_what_scrolls_sideways_has_a_shadow_at_its_edges_and_names_stay_whole(tmp_path: Path) -> None:
    plan = priced()
    longer = {name: f"a-node-with-a-name:{i}:H100-SXM" for i, name in enumerate(plan.devices)}
    stages = tuple(dataclasses.replace(one, devices=tuple(longer[name] for name in one.devices)) for one in plan.stages)
    report = dataclasses.replace(plan, stages=stages, devices=tuple(longer.values())).report()
    for width in (390, 1000):
        found = shown(report.save(tmp_path / "page.html"), width)
        assert found["broken"] == []
        scrolling = found["scrolling"]
        assert isinstance(scrolling, list)
        assert scrolling or width > 390
        for attached in scrolling:
            assert attached == "local, local, scroll, scroll", "covers that move, over shadows that stay"


def test_the_background_follows_the_readers_colour_scheme(tmp_path: Path) -> None:
    page = _reports()["by hand"].save(tmp_path / "page.html")
    assert shown(page, 390)["background"] != shown(page, 390, dark=True)["background"]


def test_an_error_on_a_page_and_a_wide_element_are_found(tmp_path: Path) -> None:
    """The checks above can fail."""
    page = tmp_path / "page.html"
    text = _reports()["by hand"].save(page).read_text()
    wide = '<div style="width:2000px;height:1px"></div><script>console.error("broken")</script></main>'
    page.write_text(text.replace("</main>", wide))
    found = shown(page, 390)
    assert found["console"]
    assert found["wide"]
