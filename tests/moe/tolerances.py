"""The one table of what a result of the exchange may be off by.

Rows, scales, counts and sources are exact. What is summed has a bound for every single element::

    roundings * (unit_roundoff(dtype) * magnitude + half its smallest number) + float32_steps * 2**-24 * magnitude

with the magnitude the sum of the absolute values of all terms. ``roundings`` counts the places where a value is
stored in the 16-bit (or 32-bit) type. A result that is not a number never passes.
"""

import numpy as np

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
HALF_THE_SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150}

# How often a value is rounded to the rows' type on its way. A per-rank sum is stored once more before it is sent.
ROUNDINGS = {
    "output": 2,
    "d_expert_rows": 2,  # the cotangent, the scaled row
    "d_tokens": 4,  # those, the expert's own backward, the sum
    "d_weights": 1,
}


def allowed(quantity: str, dtype: str, magnitude: np.ndarray, terms: int) -> np.ndarray:
    """The bound for each element, given the magnitude of its terms and how many there are."""
    rounding = UNIT_ROUNDOFF[dtype] * magnitude + HALF_THE_SMALLEST[dtype]
    return ROUNDINGS[quantity] * rounding + (terms + 2) * 2.0**-24 * magnitude


def check(quantity: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray, where: str) -> None:
    """Asserts that every element is within its bound; names the first that is not."""
    assert got.shape == want.shape, f"{where}: {quantity} has shape {got.shape}, expected {want.shape}"
    bad = ~(np.abs(got.astype(np.float64) - want) <= bound)
    if bad.any():
        first = tuple(int(index) for index in np.argwhere(bad)[0])
        raise AssertionError(
            f"{where}: {quantity}{list(first)} is {got[first]}, expected {want[first]} within {bound[first]:.3g} "
            f"({int(bad.sum())} of {bad.size} elements are off)"
        )
