"""What a pause costs the code after it: CPU time of a short piece of work, back to back and after 5 ms of sleep.

    python -m benchmarks.after_sleep

On a shared machine others use the caches meanwhile. It is the floor under ``ropeway bench overhead``, whose steps sleep
while the timer device is busy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

_REPEATS = 300
_SLEEP_S = 0.005


def ten_numpy_calls(a: np.ndarray, b: np.ndarray) -> None:
    """Columns of 64 entries, as the scheduler's."""
    c = a + b
    d = a[b]
    e = c > d
    e.any()
    np.flatnonzero(e)
    c[e]
    i = a * 2
    j = i >> 1
    np.minimum(i, j)
    c.astype(np.int32)


def fifty_additions() -> int:
    total = 0
    for x in range(50):
        total += x
    return total


def median_us(work: Callable[[], object], sleep_s: float) -> float:
    """Median microseconds of this thread's CPU time."""
    times = []
    for _ in range(_REPEATS):
        if sleep_s:
            time.sleep(sleep_s)
        began = time.thread_time_ns()
        work()
        times.append((time.thread_time_ns() - began) / 1000)
    return statistics.median(times)


def main() -> None:
    a = np.arange(64)
    b = a[::-1].copy()
    for name, work in (("ten numpy calls", lambda: ten_numpy_calls(a, b)), ("fifty additions", fifty_additions)):
        print(
            f"{name}: {median_us(work, 0):.1f} us back to back, {median_us(work, _SLEEP_S):.1f} us after 5 ms of sleep"
        )


if __name__ == "__main__":
    main()
