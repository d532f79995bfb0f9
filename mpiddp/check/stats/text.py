"""Values, counts and lists as text."""

from __future__ import annotations

from collections.abc import Sequence


def format_value(value: float, unit: str) -> str:
    """Return a value with two digits and its unit: 16 MiB, 3.8 GiB, 12 GB/s, 0.2 ms, 2.1 %."""
    if unit == "s":
        return f"{_two_digits(value)} s" if abs(value) >= 1 else f"{_two_digits(value * 1e3)} ms"
    if not unit:
        return f"{_two_digits(value * 100)} %"
    step, names = multiples(unit)
    power = next((power for power in range(len(names)) if abs(value) < step**(power + 1)), len(names) - 1)
    return f"{_two_digits(value / step**power)} {names[power]}"


def multiples(unit: str) -> tuple[float, list[str]]:
    """Return the step between the multiples of a unit, and their names."""
    if unit == "B":
        return 1024.0, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    return 1000.0, [prefix + unit for prefix in ("", "k", "M", "G", "T", "P")]


def _two_digits(value: float) -> str:
    if not value or abs(value) >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits: 0.0123, 1.20, 13.2, 312, 1,840."""
    rounded = float(f"{value:.3g}")
    size = abs(rounded)
    if size >= 1:
        return f"{rounded:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"
    return f"{rounded:.3f}" if size >= 0.01 or not size else f"{rounded:.2g}"


def format_ratio(ratio: float) -> str:
    """Return a share of the median with two digits."""
    return f"{ratio:.2f}" if ratio >= 0.095 else f"{ratio:.2g}"


def format_size(size: int) -> str:
    """Return a power of two of bytes: 1 KiB, 256 MiB."""
    return format_value(size, "B").replace(".0 ", " ")


def count_text(number: int, noun: str) -> str:
    """Return a number of things: 1 pair, 12 pairs."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def limit_lines(texts: Sequence[str], limit: int, noun: str) -> list[str]:
    """Return at most `limit` texts; if there are more, the last one counts the rest."""
    shown = [*texts[:limit if len(texts) <= limit else limit - 1]]
    return shown if len(shown) == len(texts) else [*shown, f"and {count_text(len(texts) - len(shown), f'more {noun}')}"]
