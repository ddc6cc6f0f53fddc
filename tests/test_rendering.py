"""The pages as a browser draws them: every plot, in light and dark, and nothing wider than a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import main
from pipeline.admission import Admission, load_tokenizer
from tests.outputs import commit, make_output
from tests.test_report import ROWS, some_answer
from workers.config import SamplingParams
from workers.step_times import StepTimes

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium to draw pages with")

PLOTS = [
    *("Tokens per second", "Rows under way", "Drafted tokens accepted in a step"),
    *("Acceptance by position", "Acceptance length by topic", "Lengths", "Batch fill by worker"),
]
COMPARED = [
    *("Tokens per second", "Drafted tokens accepted in a step", "Acceptance length by topic"),
    *("Lengths of answers", "Time of a sample"),
]

# The page is in a frame as wide as a screen: browsers' own windows cannot be narrow enough.
_FRAME = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<style>body {{ margin: 0 }} iframe {{ border: 0 }}</style>
<iframe id="page" width="{width}" height="6000" srcdoc="{page}"></iframe><pre id="found"></pre>
<script>
const frame = document.getElementById("page");
function look() {{
  const page = frame.contentDocument, root = page.documentElement;
  const drawn = ".scatterlayer path.js-line, .barlayer .point path, .heatmaplayer image";
  const shapes = (plot) => [...plot.querySelectorAll(drawn)].filter((shape) => {{
    const box = shape.getBoundingClientRect();
    return box.width + box.height > 4;
  }}).length;
  const cards = [...page.querySelectorAll(".plots > section")].map((card) => ({{
    title: card.querySelector("h2").textContent,
    shapes: shapes(card),
    width: card.querySelector("svg.main-svg")?.getBoundingClientRect().width ?? 0,
    room: card.querySelector(".plot").clientWidth,
    ink: getComputedStyle(card.querySelector(".xtick text, .xtitle")).fill,
  }}));
  document.getElementById("found").textContent = JSON.stringify({{
    cards,
    overflow: root.scrollWidth - root.clientWidth,
    paper: getComputedStyle(page.body).backgroundColor,
  }});
}}
frame.addEventListener("load", () => setTimeout(look, 2000));
</script>"""


def draw(page: Path, width: int, *, dark: bool) -> dict[str, Any]:
    """What a browser makes of a page."""
    framed = page.with_suffix(f".{width}.html")
    content = html.escape(page.read_text(encoding="utf-8"))
    framed.write_text(_FRAME.format(width=width, page=content), encoding="utf-8")
    assert BROWSER is not None
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=10000"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [BROWSER, *flags.split(), scheme, f"--window-size={max(width, 500)},6000"]
    command += [f"--user-data-dir={page.parent / 'browser'}", "--dump-dom", framed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout)
    assert found, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


def brightness(colour: str) -> float:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / (3 * 255)


@pytest.fixture(scope="module")
def pages(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report and a comparison, of runs of two workers."""
    tokenizer = load_tokenizer(tiny_checkpoint)
    admission = Admission(tokenizer, SamplingParams(), 60, len(tokenizer))
    folder = tmp_path_factory.mktemp("pages")
    times = StepTimes((1, 16, 32), (0.1, 0.2, 0.4))
    for name in ("a", "b"):
        config, plan = make_output(admission, folder / name, ROWS, rows_per_shard=16)
        for number, shard in enumerate(plan.shards):
            made = {"worker": f"cpu:here:{number % 2}", "max_num_seqs": 16, "step_times": times}
            commit(folder / name, plan, shard.name, config, some_answer, **made)
    assert main(["report", str(folder / "a")]) == 0
    assert main(["report", str(folder / "a"), str(folder / "b")]) == 0
    return {name: folder / "a" / f"{name}.html" for name in ("report", "compare")}


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (360, False)])
@pytest.mark.parametrize(("name", "titles"), [("report", PLOTS), ("compare", COMPARED)])
def test_every_plot_is_drawn(
    pages: dict[str, Path], name: str, titles: list[str], width: int, dark: bool
) -> None:
    found = draw(pages[name], width, dark=dark)
    assert [card["title"] for card in found["cards"]] == titles
    for card in found["cards"]:
        assert card["shapes"] >= 1, card
        assert 200 < card["width"] <= card["room"] + 1, card
        assert (brightness(card["ink"]) > 0.6) == dark, card
    assert found["overflow"] == 0
    assert (brightness(found["paper"]) < 0.3) == dark
