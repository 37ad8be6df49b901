"""What steps and copies take, learnt while they run."""

from __future__ import annotations

from math import sqrt

_TOKENS = 64.0
_KV_TOKENS = 65536.0
"""Units of the two counts inside the estimator. As long as nothing tells the three terms apart, a step's time is put
down to them in proportion to the squares of its counts in these units: that of a small decode step to the constant."""
_FORGETTING = 0.996
_KNOWN_AFTER = 8
_SETTLED_AFTER = 32
"""Observations until predictions are close enough to weigh errors by."""
_PRIOR_DEVIATIONS = 6.0
"""Error of a given coefficient, in standard deviations of a step's time: 30 % for steps that vary by 5 %."""
_OUTLIER = 4.0
"""Standard deviations from which on an observation counts less."""
_GROSS = 0.25
_CHANGED_AFTER = 6
"""So many outliers in a row, off by more than _GROSS to the same side, are no accident."""
_SPREAD_RATE = 0.05
_LEAST_SPREAD = 0.005
_WIDE = 100.0
_LEAST_SLOPE_S = 1e-9
_MOST_TOKENS = 1 << 30
_COPY_MEMORY = 256.0
"""Blocks over which copies are averaged."""
_COPY_GUESS = 32.0
"""Blocks that the first guess counts for, so that it is soon forgotten."""
_SLOWEST_COPY = 8.0
"""Times the expected time that a copy can count as."""

Covariance = tuple[float, float, float, float, float, float]


class StepCost:
    """Step time ``seconds = a + b * tokens + c * kv_tokens``, fitted online.

    ``tokens`` are those a step computes, ``kv_tokens`` those its rows attend to: the sum of their lengths after the
    step. The fit is recursive least squares of relative errors, with three changes to the textbook's:

    - Only directions that an observation tells something about are forgotten (Kulhavý and Kárný, "Tracking of slowly
      varying parameters by directional forgetting", IFAC World Congress 1984). So hours of decode steps of one size
      neither blow the covariance up nor wash out what prompts have cost.
    - An error beyond four standard deviations of what was to be expected has its weight cut as in Huber's estimator:
      a stalled machine moves little. If one follows another to the same side, the machine has changed, and the fit
      starts anew from where it is.
    - The model used for predictions is the most likely one without a negative coefficient (the estimate projected
      along its covariance), while the estimate itself stays unconstrained.

    All three coefficients given (seconds, seconds per token, seconds per cached token) count as a measurement with an
    error of some 30 %; fewer are a start from which to learn the others. Raises ``ValueError`` for a negative one.
    """

    def __init__(self, a: float | None = None, b: float | None = None, c: float | None = None) -> None:
        given = (a, b, c)
        if any(value is not None and not 0 <= value < float("inf") for value in given):
            raise ValueError(f"coefficients of a step's time are seconds from 0 on, not {given}")
        self.observations = 0
        self._prior = given
        self._settled_at = 0 if None not in given else _SETTLED_AFTER
        self._outliers = 0
        """In a row: how many were too slow, or, negative, too fast."""
        self._estimate = (a or 0.0, (b or 0.0) * _TOKENS, (c or 0.0) * _KV_TOKENS)
        self._covariance: Covariance = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Upper triangle, row by row, in units in which a relative error has variance 1."""
        self._spread = 0.05
        self._effective: tuple[float, float, float] | None = None
        """The coefficients used, in the caller's units; None: to be made from the estimate."""

    @property
    def known(self) -> bool:
        """Whether predictions mean anything: all coefficients were given, or some steps observed."""
        return None not in self._prior or self.observations >= _KNOWN_AFTER

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(a, b, c): seconds per step, per token and per cached token, none negative."""
        if self._effective is None:
            a, b, c = self._projected()
            self._effective = (a, b / _TOKENS, c / _KV_TOKENS)
        return self._effective

    @property
    def token_s(self) -> float:
        """Seconds that one more prompt token adds to a step; positive."""
        return max(self.coefficients[1], _LEAST_SLOPE_S)

    def predict(self, tokens: int, kv_tokens: int) -> float:
        """Seconds that a step is going to take; 0 when nothing is known."""
        a, b, c = self._effective or self.coefficients
        return a + b * tokens + c * kv_tokens

    def tokens_within(self, seconds: float, kv_tokens: int) -> int:
        """How many tokens a step may compute to be over in ``seconds``; 0 if not even an empty one would be."""
        a, _, c = self.coefficients
        left = seconds - a - c * kv_tokens
        return min(int(left / self.token_s), _MOST_TOKENS) if left > 0 else 0

    def observe(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        """Learn from a step. One without a positive, finite time is passed over."""
        if not 0.0 < seconds < 1e9:
            return
        if not self.observations:
            self._covariance = self._first(seconds)
        self.observations += 1
        a, b, c = self._estimate
        x, y = tokens / _TOKENS, kv_tokens / _KV_TOKENS
        predicted = a + b * x + c * y
        # Errors count relative to the predicted time, so that the few long steps do not drown the many short ones;
        # relative to the time itself while predictions are wild.
        u = 1.0 / (max(predicted, 0.5 * seconds) if self.observations > self._settled_at else seconds)
        x *= u
        y *= u
        error = (seconds - predicted) * u
        p, q, r, s, t, w = self._covariance
        g, h, k = p * u + q * x + r * y, q * u + s * x + t * y, r * u + t * x + w * y
        leverage = u * g + x * h + y * k
        if not leverage > 0.0:  # rounding has worn the covariance out
            self._start_anew(seconds)
            return
        size, spread, width = abs(error), self._spread, sqrt(1.0 + leverage)
        limit = _OUTLIER * spread * width
        weight = 1.0
        if size > limit:
            weight = limit / size
            if self._has_changed(error):
                self._start_anew(seconds)
                return
        else:
            self._outliers = 0
        deviation = 1.25 * size / width  # the mean of |error| is 0.8 standard deviations
        spread += _SPREAD_RATE * (min(deviation, _OUTLIER * spread) - spread)
        self._spread = spread if spread > _LEAST_SPREAD else _LEAST_SPREAD
        gain = weight * error / (1.0 + weight * leverage)
        self._estimate = (a + g * gain, b + h * gain, c + k * gain)
        # The variance along the observation becomes v / (forgetting * (1 + v)), every other stays.
        v = weight * leverage
        shrink = (1.0 - 1.0 / (_FORGETTING * (1.0 + v))) / leverage
        self._covariance = (
            p - shrink * g * g,
            q - shrink * g * h,
            r - shrink * g * k,
            s - shrink * h * h,
            t - shrink * h * k,
            w - shrink * k * k,
        )
        self._effective = None

    def _has_changed(self, error: float) -> bool:
        """Count an outlier; whether there have been enough of its kind in a row."""
        if abs(error) < _GROSS:
            self._outliers = 0
        elif error > 0:
            self._outliers = max(self._outliers, 0) + 1
        else:
            self._outliers = min(self._outliers, 0) - 1
        return abs(self._outliers) >= _CHANGED_AFTER

    def _first(self, seconds: float) -> Covariance:
        """What was given is about right; the rest may be anything, seen from a first step of so many seconds."""
        units = (1.0, _TOKENS, _KV_TOKENS)
        p, s, w = (
            (_WIDE * seconds if value is None else _PRIOR_DEVIATIONS * value * unit + 1e-3 * seconds) ** 2
            for value, unit in zip(self._prior, units, strict=True)
        )
        return p, 0.0, 0.0, s, 0.0, w

    def _start_anew(self, seconds: float) -> None:
        """Let the next observations move the estimate as if they were the first."""
        wide = (_WIDE * seconds) ** 2
        self._covariance = wide, 0.0, 0.0, wide, 0.0, wide
        self._settled_at = self.observations + _SETTLED_AFTER
        self._outliers = 0

    def _projected(self) -> tuple[float, float, float]:
        """The most likely coefficients without a negative one, in the estimator's units."""
        estimate = list(self._estimate)
        if min(estimate) >= 0.0:
            return self._estimate
        p, q, r, s, t, w = self._covariance
        rows = [[p, q, r], [q, s, t], [r, t, w]]
        # Setting one coefficient to 0 moves the others by their regression on it; at most all three in turn.
        for _ in range(3):
            worst = min(range(3), key=lambda i: estimate[i])
            variance = rows[worst][worst]
            if estimate[worst] >= 0.0:
                break
            if not variance > 0.0:
                estimate[worst] = 0.0
                continue
            slopes = [rows[i][worst] / variance for i in range(3)]
            shift = estimate[worst]
            estimate = [value - slope * shift for value, slope in zip(estimate, slopes, strict=True)]
            estimate[worst] = 0.0
            column = rows[worst]
            rows = [[rows[i][j] - slopes[i] * column[j] for j in range(3)] for i in range(3)]
        return max(estimate[0], 0.0), max(estimate[1], 0.0), max(estimate[2], 0.0)


class CopyCost:
    """Seconds that copying blocks between device and host takes: the mean of the first blocks, then an exponentially
    weighted one."""

    def __init__(self, block_bytes: int, bytes_per_s: float = 4e9) -> None:
        """Starts from ``bytes_per_s``, until copies were seen. Raises ``ValueError`` unless both are positive."""
        if block_bytes <= 0 or not bytes_per_s > 0:
            raise ValueError(f"a block of {block_bytes} bytes at {bytes_per_s} bytes per second: both must be positive")
        self._block_s = block_bytes / bytes_per_s
        self._seen = _COPY_GUESS

    def observe(self, blocks: int, seconds: float) -> None:
        """Learn from the copies of one step. Without blocks, or a positive, finite time, they are passed over."""
        if blocks <= 0 or not 0.0 < seconds < 1e9:
            return
        # A stall counts as a slow copy, not as itself.
        observed = min(seconds / blocks, _SLOWEST_COPY * self._block_s)
        self._block_s += blocks / (self._seen + blocks) * (observed - self._block_s)
        self._seen = min(self._seen + blocks, _COPY_MEMORY)

    def seconds(self, blocks: int) -> float:
        """What copying so many blocks is going to take, one way."""
        return blocks * self._block_s
