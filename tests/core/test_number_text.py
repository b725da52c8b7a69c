"""Figures as text: three digits that count, units, shares, plurals."""

from __future__ import annotations

import math

from torchweld.core.number_text import (
    binary_size,
    counted,
    duration,
    figure,
    listed,
    share,
    signed,
    size,
    unit_of,
)


def test_three_digits_count_and_rounding_decides_them() -> None:
    values = (0.984, 3.2, 9.996, 12.34, 99.96, 2749.4, -1.5, math.nan)
    assert [figure(x) for x in values] == [
        *("0.98", "3.20", "10.0", "12.3", "100", "2749", "−1.50", "–"),
    ]


def test_times_and_sizes_have_the_unit_in_which_they_read_well() -> None:
    assert [duration(x) for x in (0, 0.25, 999.4, 999.6, 1000, 2.5e6)] == [
        *("0 µs", "0.25 µs", "999 µs", "1.00 ms", "1.00 ms", "2.50 s"),
    ]
    assert [size(x) for x in (0, 999, 1000, 19_000_000, 1.2e9)] == [
        *("0 B", "999 B", "1.00 kB", "19.0 MB", "1.20 GB"),
    ]
    assert [unit_of(us)[0] for us in (9_999.0, 10e3, 10e6)] == ["µs", "ms", "s"]


def test_shares() -> None:
    assert [share(x, 100) for x in (0, 0.05, 0.44, 9.96, 55, -3)] == [
        *("0 %", "<0.1 %", "0.4 %", "10 %", "55 %", "−3.0 %"),
    ]
    assert share(1, 0) == "–"


def test_words() -> None:
    assert [counted(1, "query"), counted(2, "query"), counted(1500, "launch")] == [
        *("1 query", "2 queries", "1,500 launches"),
    ]
    assert [counted(0, "op"), counted(5, "guess")] == ["0 ops", "5 guesses"]
    assert listed(["a", "b", "c"], 3) == "a, b, c"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert [signed("3"), signed("−3")] == ["+3", "−3"]


def test_sizes_of_caches_are_binary() -> None:
    sizes = (0, 1023, 1024, 48 * 1024, 1536 * 1024, 3 * 2**30, None)
    assert [binary_size(n) for n in sizes] == [
        *("0 B", "1023 B", "1 KiB", "48 KiB", "1.5 MiB", "3 GiB", "unknown"),
    ]
