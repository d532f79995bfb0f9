"""Figures in words: with their units, and beside those of others."""

from __future__ import annotations

from .schema import Metric

SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
RATES = ("", "k", "M", "G", "T", "P")


def in_words(value: float, unit: str) -> str:
    """Return a value in words: 16 MiB, 3.8 GiB, 12 GB/s, 0.2 ms, 2.1 %."""
    if unit == "B":
        return scaled(value, 1024, SIZES)
    if unit == "s":
        return f"{digits(value)} s" if abs(value) >= 1 else f"{digits(value * 1e3)} ms"
    return f"{digits(value * 100)} %" if not unit else scaled(value, 1000, tuple(prefix + unit for prefix in RATES))


def scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    """Return a value in the largest of these units, each `step` times the one before, of which it has one."""
    at = 0
    while abs(value) >= step and at < len(units) - 1:
        value /= step
        at += 1
    return f"{digits(value)} {units[at]}"


def digits(value: float) -> str:
    """Return a number with two digits, or all that stand before the point."""
    if not value or abs(value) >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def is_rate(metric: Metric) -> bool:
    """Whether a metric is told as a share of the others' median: what is done in a second."""
    return metric.unit.endswith("/s")


def share(ratio: float) -> str:
    """Return a share of the median, with two digits."""
    return f"{ratio:.2f}" if ratio >= 0.095 else f"{ratio:.2g}"


def counted(number: int, one: str) -> str:
    """Return a number of things: 1 pair, 12 pairs."""
    return f"{number:,} {one}" if number == 1 else f"{number:,} {one}s"
