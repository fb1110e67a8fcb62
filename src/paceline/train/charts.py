"""Line charts as SVG: from numbers to the coordinates that the page's template draws. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 220  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 28  # margins around the plot


@dataclass(frozen=True)
class Tick:
    """A mark at an axis: where, in SVG units, and what it says."""

    place: float
    text: str


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: for the legend.
        points: "x,y x,y ..." as SVG's polyline takes them; empty for a single value.
        last: where the last value is.
        value: the last value, as text.
        colour: index into the page's colours.
    """

    name: str
    points: str
    last: tuple[float, float]
    value: str
    colour: int


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be drawn."""

    title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def chart(title: str, series: dict[str, Sequence[tuple[float, float]]]) -> Chart | None:
    """A chart of several series over steps.

    Args:
        title: above it.
        series: by name, (step, value) in the order of steps; values that are not finite are left out.

    Returns:
        None if there is nothing to draw.
    """
    finite = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in series.items()
    }
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return None
    xs, ys = zip(*(point for points in finite.values() for point in points), strict=True)
    x_axis, y_axis = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT), Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    lines = tuple(
        _line(name, points, x_axis, y_axis, colour) for colour, (name, points) in enumerate(finite.items())
    )
    return Chart(title, lines, tuple(x_axis.ticks(whole=True)), tuple(y_axis.ticks()))


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to SVG coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """The coordinate of a value; the middle if there is only one value."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, whole: bool = False) -> Iterator[Tick]:
        """About five ticks at round values."""
        step = _round_step((self.high - self.low) / 4 or abs(self.low) or 1.0)
        step = max(1.0, step) if whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)] or [self.low]
        return (Tick(self.place(value), as_text(value)) for value in values)


def as_text(value: float) -> str:
    """A number with four digits that matter."""
    return f"{value:.4g}"


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _line(name: str, points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis, colour: int) -> Line:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in points]
    path = " ".join(f"{x:g},{y:g}" for x, y in places) if len(places) > 1 else ""
    return Line(name, path, places[-1], as_text(points[-1][1]), colour)
