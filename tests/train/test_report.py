"""The page that shows a run: what it says, that it stands alone, and that a browser draws it."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from paceline.train import charts, report
from paceline.train.callbacks import TrainerCallback
from paceline.train.clock import PHASES, Clock
from paceline.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.models import Points, Regression, settings


def train(rank: int, world_size: int, folder: Path) -> None:
    args = settings(
        folder, max_steps=6, learning_rate=0.05, eval_strategy="steps", eval_steps=3, run_name="<b>bold</b>"
    )
    Trainer(Regression(), args, train_dataset=Points(40), eval_dataset=Points(9)).train()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(train, 2, folder, backend=None)
    return folder / report.NAME


def test_says_what_happened(page: Path) -> None:
    text = page.read_text()
    for title in ("Training loss", "Learning rate", "Gradient norm", "Samples per second", "eval_loss"):
        assert f"<figcaption>{title}</figcaption>" in text
    assert "Regression with 33 parameters" in text
    assert "rank 0" in text and "rank 1" in text
    for phase in PHASES:
        assert len(re.findall(rf"{phase} \d+\.\d %", text)) == 2
    assert re.search(r"<code>learning_rate</code></td><td><code><b>0.05</b>", text)
    assert "<td>torch</td>" in text and "<td>backend</td>" in text


def test_stands_alone_and_escapes(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text
    assert not re.search(r"""(src|href)\s*=|url\(|@import""", text)
    assert "<b>bold</b>" not in text and "&lt;b&gt;bold&lt;/b&gt;" in text


def test_a_browser_draws_it(page: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    picture = tmp_path / "page.png"
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    shot = [*command, f"--screenshot={picture}", "--window-size=1100,1600", page.as_uri()]
    subprocess.run(shot, capture_output=True, timeout=100, check=True)
    assert picture.stat().st_size > 10_000
    dumped = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, timeout=100, check=True
    )
    assert dumped.stdout.decode().count("<polyline") >= 5


def test_lines_go_through_their_points() -> None:
    drawn = charts.chart("t", {"a": [(0, 0.0), (10, 5.0), (20, 10.0)], "b": [(0, float("nan")), (20, 2.5)]})
    assert drawn is not None
    right, bottom = charts.WIDTH - charts.RIGHT, charts.HEIGHT - charts.BOTTOM
    middle = f"{(charts.LEFT + right) / 2:g},{(charts.TOP + bottom) / 2:g}"
    assert drawn.lines[0].points == f"{charts.LEFT},{bottom} {middle} {right},{charts.TOP}"
    assert (drawn.lines[1].points, drawn.lines[1].value) == ("", "2.5")
    assert [tick.text for tick in drawn.x_ticks] == ["0", "5", "10", "15", "20"]
    assert [tick.text for tick in drawn.y_ticks] == ["0", "5", "10"]


@pytest.mark.parametrize("values", [[3.0], [3.0, 3.0], [0.0, 0.0], [-1e-9, 1e9], [1e-12, 2e-12]])
def test_any_numbers_give_a_well_formed_chart(values: list[float]) -> None:
    drawn = charts.chart("t", {"a": list(enumerate(values))})
    assert drawn is not None and drawn.y_ticks
    sizes = {
        "name": "n",
        "model": "m",
        "ended": "e",
        "facts": [],
        "changed": [],
        "unchanged": [],
        "versions": [],
    }
    text = report.render({**sizes, "charts": [drawn], "ranks": [[100 / len(PHASES)] * len(PHASES)]})
    svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    assert ElementTree.fromstring(svg).tag == "svg"


def test_nothing_to_draw_is_no_chart() -> None:
    assert charts.chart("t", {"a": [], "b": [(1, float("inf"))]}) is None


def test_waiting_is_counted_once() -> None:
    own, of_wrapper = SimpleNamespace(waited_s=1.0), SimpleNamespace(waited_s=0.0)
    clock = Clock([own])
    clock.watch(SimpleNamespace(reducer=SimpleNamespace(peers=of_wrapper)))
    clock.watch(nn.Linear(1, 1))  # a wrapper that does not say
    with clock.compute:
        own.waited_s += 2.0
        of_wrapper.waited_s += 3.0
    with clock.evaluation:
        of_wrapper.waited_s += 4.0
    data, compute, waiting, optimizer, aside, other = clock.shares()
    assert (data, waiting, optimizer) == (0.0, 9.0, 0.0)
    assert 0.0 <= other < 1.0
    assert compute < 0.0 and aside < 0.0  # nobody really waited: what was waiting is taken off


def train_and_look(rank: int, world_size: int, folder: Path) -> float:
    trainer = Trainer(Regression(), settings(folder, max_steps=3), train_dataset=Points(24))

    class Late(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            waits.append(trainer.model_wrapped.reducer.peers.waited_s)
            time.sleep(0.2 if rank else 0.0)

    waits: list[float] = []
    trainer.add_callback(Late)
    trainer.train()
    return waits[-1]


def test_what_the_wrapper_waited_is_known(tmp_path: Path) -> None:
    waited, _ = run_ranks(train_and_look, 2, tmp_path)
    assert waited > 0.0
