"""Looking for the minimum of a function that can only be evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Point = NDArray[np.float64]


def nelder_mead(
    value: Callable[[Point], float],
    start: Sequence[float],
    *,
    step: float,
    tolerance: float,
    most_evaluations: int,
) -> tuple[Point, float]:
    """The best point found, float64 [n], and its value: the simplex search of Nelder and Mead ("A Simplex Method for
    Function Minimization", The Computer Journal 7, 1965), begun at ``start`` with edges of ``step`` along each axis. It
    ends when no edge is longer than ``tolerance`` along any axis, or with the iteration that reaches
    ``most_evaluations``. Raises ``ValueError`` for an empty start."""
    origin = np.array(start, dtype=np.float64)
    if not len(origin):
        raise ValueError("a search needs at least one coordinate to vary")
    corners = [origin, *(origin + step * axis for axis in np.eye(len(origin)))]
    heights = [value(corner) for corner in corners]
    evaluations = len(corners)
    while evaluations < most_evaluations and float(np.ptp(corners, axis=0).max()) > tolerance:
        order = np.argsort(heights, kind="stable")
        corners, heights = [corners[i] for i in order], [heights[i] for i in order]
        worst = corners[-1]
        middle = np.mean(corners[:-1], axis=0)
        tried = middle + (middle - worst)
        height = value(tried)
        evaluations += 1
        if height < heights[0]:
            further = middle + 2.0 * (middle - worst)
            further_height = value(further)
            evaluations += 1
            if further_height < height:
                tried, height = further, further_height
        elif height >= heights[-2]:
            toward = tried if height < heights[-1] else worst
            nearer = middle + 0.5 * (toward - middle)
            nearer_height = value(nearer)
            evaluations += 1
            if nearer_height >= min(height, heights[-1]):  # everybody draws towards the best
                corners = [corners[0], *(corners[0] + 0.5 * (corner - corners[0]) for corner in corners[1:])]
                heights = [heights[0], *(value(corner) for corner in corners[1:])]
                evaluations += len(origin)
                continue
            tried, height = nearer, nearer_height
        corners[-1], heights[-1] = tried, height
    best = int(np.argmin(heights))
    return corners[best], heights[best]
