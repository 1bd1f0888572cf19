"""A line chart as SVG, without scripts: colours come from the page's style sheet, numbers appear on hovering."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

# Small, so that text can still be read where a phone shrinks it.
_WIDTH: Final = 520
_HEIGHT: Final = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 104, 14, 46
_LABEL_GAP: Final = 16
_MAX_X_TICKS: Final = 5
_NUM_Y_TICKS: Final = 5
_LOGARITHMIC_FROM: Final = 20


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Attributes:
        name: written at the end of the line.
        style: class of its elements, for which the style sheet has colour and dashes.
        points: pairs of x and y, in ascending order of x.
    """

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axes:
    """Titles and axes of a chart.

    Attributes:
        title: the chart's title, for people who cannot see it.
        x_title: text below the x axis.
        show_x, show_y: convert a number on the axis to text.
        is_log_y: whether the y axis is logarithmic; values of 0 and below are then not drawn.
    """

    title: str
    x_title: str
    show_x: Callable[[float], str]
    show_y: Callable[[float], str]
    is_log_y: bool = False


class _Scale:
    """Converts values to places in the chart, in pixels."""

    def __init__(self, series: Sequence[Series], *, is_log_y: bool) -> None:
        xs = sorted({x for line in series for x, _ in line.points})
        self.xs = xs
        self._is_log = xs[-1] > _LOGARITHMIC_FROM * xs[0]
        self._first, self._last = self._place(xs[0]), self._place(xs[-1])
        ys = [y for line in series for _, y in line.points]
        self._is_log_y = is_log_y
        self.y_ticks = _powers(ys) if is_log_y else _multiples(max(ys, default=0.0))

    def x(self, value: float) -> float:
        """Pixels from the left."""
        width = _WIDTH - _LEFT - _RIGHT
        if self._last == self._first:
            return _LEFT + width / 2
        return _LEFT + width * (self._place(value) - self._first) / (self._last - self._first)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        low, high, at = self.y_ticks[0], self.y_ticks[-1], value
        if self._is_log_y:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (at - low) / (high - low)

    def _place(self, value: float) -> float:
        return math.log(value) if self._is_log else value


def line_chart(series: Sequence[Series], axes: Axes) -> str:
    """An ``svg`` element. There must be at least one point, and every x be above 0."""
    if axes.is_log_y:
        series = [Series(line.name, line.style, [(x, y) for x, y in line.points if y > 0]) for line in series]
        series = [line for line in series if line.points]
    scale = _Scale(series, is_log_y=axes.is_log_y)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(axes.title)}">',
        *_grid(scale, axes),
        *(element for line in series for element in _line(line, scale, axes)),
        *_labels(series, scale),
        "</svg>",
    ]
    return "\n".join(parts)


def _grid(scale: _Scale, axes: Axes) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value in scale.y_ticks:
        y = scale.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(axes.show_y(value))}</text>'
    for value in _spread(scale.xs):
        x = scale.x(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(axes.show_x(value))}</text>'
    middle = (_LEFT + right) / 2
    yield f'<text class="tick" x="{middle:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(axes.x_title)}</text>'


def _line(line: Series, scale: _Scale, axes: Axes) -> Iterator[str]:
    points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line.points)
    yield f'<polyline class="line {line.style}" points="{points}"/>'
    for x, y in line.points:
        place = f'cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="4"'
        text = escape(f"{line.name} at {axes.show_x(x)}: {axes.show_y(y)}")
        yield f'<circle class="dot {line.style}" {place}><title>{text}</title></circle>'


def _labels(series: Sequence[Series], scale: _Scale) -> Iterator[str]:
    """Names at the ends of the lines, pushed apart so that none covers another."""
    lines = sorted(series, key=lambda line: line.points[-1][1])
    places: list[float] = []
    for line in lines:
        places.append(min(scale.y(line.points[-1][1]), (places or [math.inf])[-1] - _LABEL_GAP))
    highest = -math.inf
    for line, place in zip(reversed(lines), reversed(places), strict=True):
        highest = max(place, _TOP, highest + _LABEL_GAP)
        x = scale.x(line.points[-1][0]) + 10
        yield f'<text class="name {line.style}" x="{x:.1f}" y="{highest + 4:.1f}">{escape(line.name)}</text>'


def _spread(values: Sequence[float]) -> Sequence[float]:
    step = -(-len(values) // _MAX_X_TICKS)
    return values[::step]


def _multiples(largest: float) -> Sequence[float]:
    step = _nice_step(largest)
    return [tick * step for tick in range(max(1, math.ceil(largest / step - 1e-9)) + 1)]


def _powers(values: Sequence[float]) -> Sequence[float]:
    """Powers of ten around all values, which are above 0."""
    lowest = math.floor(math.log10(min(values)))
    highest = max(lowest + 1, math.ceil(math.log10(max(values)) - 1e-9))
    return [10.0**power for power in range(lowest, highest + 1)]


def _nice_step(largest: float) -> float:
    """A round number, five of which cover ``largest``."""
    if largest <= 0:
        return 1.0
    rough = largest / _NUM_Y_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
