"""The page in a real browser: it draws itself, answers keys, and takes no name for HTML."""

from pathlib import Path

import pytest

from polyneuron.tracing.collector import read_recording
from polyneuron.tracing.page import page_of
from polyneuron.tracing.summary import summarize
from tests.support.browser import CHROMIUM, Opened, open_page
from tests.support.made_up_timeline import MadeUp

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt install chromium")

# A browser that only dumps what it has built draws no frames.
BEFORE = "<script>window.requestAnimationFrame = (then) => setTimeout(then, 1);</script><style>"
# Waits until the page is drawn, then does what a user would and writes down what is shown.
AFTERWARDS = """<script>
const waiting = setInterval(() => {
  if (document.documentElement.dataset.state !== "ready") return;
  clearInterval(waiting);
  const root = document.documentElement.dataset, lanes = byId("lanes");
  const note = (name) => { root[name] = byId("range").textContent; };
  const press = (key) => lanes.dispatchEvent(new KeyboardEvent("keydown", { key }));
  const later = (then) => setTimeout(then, 50);
  note("first");
  press("0");
  later(() => {
    note("whole");
    press("Home");
    later(() => {
      note("home");
      press("]");
      later(() => {
        note("next");
        root.pixels = String(drawnPixels(lanes));
        if (SEARCH) root.tips = tipsOver(lanes);
      });
    });
  });
}, 20);
function tipsOver(canvas) {
  const tip = document.getElementById("tip");
  const { left, top, width, height } = canvas.getBoundingClientRect();
  const found = new Set();
  for (let y = 0; y < height; y += 8) for (let x = 96; x < width; x += 5) {
    const place = { clientX: left + x, clientY: top + y };
    canvas.dispatchEvent(new PointerEvent("pointermove", place));
    if (!tip.hidden) found.add(tip.querySelector("b").textContent.split(" · ")[0]);
  }
  return [...found].sort().join(", ");
}
function drawnPixels(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let i = 0; i < data.length; i += 44) colours.add(data.slice(i, i + 3).join());
  return colours.size;
}
</script></body>"""

RUNS = {
    "empty": MadeUp(tokens=0),
    "three_tokens": MadeUp(tokens=3),
    "no_detail": MadeUp(tokens=4, detail="steps"),
    "faults": MadeUp(tokens=60, faults=True, sequences=3, npus=1, clock="model"),
}


def opened(made: MadeUp, tmp_path: Path, width: int = 1280, *, search: bool = False) -> Opened:
    recording = read_recording(made.write(tmp_path / "run.jsonl"))
    afterwards = AFTERWARDS.replace("SEARCH", str(search).lower())
    page = page_of(recording, summarize(recording))
    page = page.replace("<style>", BEFORE).replace("</body>", afterwards)
    path = tmp_path / "page.html"
    path.write_text(page)
    return open_page(path, tmp_path / "profile", width)


@pytest.mark.parametrize("name", RUNS)
def test_page_draws_itself(name: str, tmp_path: Path) -> None:
    page = opened(RUNS[name], tmp_path)
    assert page.console == []
    assert page.attribute("data-state") == "ready"
    assert "made-up-7b" in page.text()


def test_figures_and_faults_are_shown(tmp_path: Path) -> None:
    text = opened(RUNS["faults"], tmp_path).text()
    for shown in ("model time: simulated", "Faults 3", "1 restart", "worker_lost worker.0",
                  "Time to first token", "waits for flash", "batch of 2"):  # fmt: skip
        assert shown in text


def test_keys_move_the_view(tmp_path: Path) -> None:
    page = opened(MadeUp(tokens=60, npus=1), tmp_path, width=1920)
    assert page.console == []
    shown = {name: page.attribute(f"data-{name}") or "" for name in ("first", "whole", "home")}
    assert shown["first"].startswith("steps 3 to 4 ")
    assert shown["whole"].startswith("steps 0 to 59 ")
    assert shown["home"].startswith("prefill step 0 ")
    assert (page.attribute("data-next") or "").startswith("decode step 1 ")
    assert int(page.attribute("data-pixels") or 0) > 8  # lanes are drawn, in several colours


def test_pointing_tells_what_lies_there(tmp_path: Path) -> None:
    page = opened(MadeUp(tokens=12, npus=1, reads_a_layer=4), tmp_path, search=True)
    tips = (page.attribute("data-tips") or "").split(", ")
    assert set(tips) >= {"attention", "clusters", "decode step 1", "feed_forward", "gc", "matmul",
                         "norm", "pred", "read of 8 KiB", "udc", "wait"}  # fmt: skip


def test_names_are_text(tmp_path: Path) -> None:
    attack = "<img src=x onerror=document.documentElement.dataset.hit=1>"
    page = opened(MadeUp(model=attack), tmp_path)
    assert page.attribute("data-hit") is None
    assert page.console == []
    assert attack in page.text()
