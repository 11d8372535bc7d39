"""The one table of tolerances for KDA and the comparison that uses it.

An error is the root mean square of the difference over that of the float64 reference. NaN or infinity never passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_BF16 = {
    "output": 5e-3,
    "final_state": 5e-3,
    "gate": 1.5e-2,
    "beta": 1.5e-2,
    "a_log": 1.5e-2,
    "delta_time_bias": 1.5e-2,
}

#: Largest relative RMS error by type of the inputs and by what is compared: output, final_state or an input's gradient.
TOLERANCES: dict[str, dict[str, float]] = {
    "float32": dict.fromkeys(("output", "final_state"), 2e-5),
    "bfloat16": _BF16,
}
_GRADIENT = {"float32": 2e-5, "bfloat16": 8e-3}


def tolerance(dtype: str, what: str) -> float:
    """The table's entry, or that of any other gradient."""
    return TOLERANCES[dtype].get(what, _GRADIENT[dtype])


def relative_rms(actual: Any, expected: Any) -> float:
    """Relative RMS error; infinity if ``actual`` holds anything that is not finite."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not np.isfinite(actual).all():
        return np.inf
    if expected.size == 0:
        return 0.0
    # Below float32's range there is nothing to compare; zero is as good as 1e-300 there.
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / max(np.sqrt(np.mean(expected**2)), 1e-30))


def assert_close(actual: Any, expected: Any, dtype: str, what: str) -> None:
    """Fails with the figures if ``actual`` is farther from the reference than the table allows."""
    error, limit = relative_rms(actual, expected), tolerance(dtype, what)
    assert error <= limit, f"{what}: relative RMS error {error:.3g}, allowed {limit:.3g} for {dtype}"
