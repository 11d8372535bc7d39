"""Hypothesis strategies for KDA: few shapes, so that little is compiled, and every value drawn from a seed."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from reference.cases import KDA, Case

#: The small named cases; tests draw from these so that one compilation serves many examples.
SMALL = ("plain", "short", "softplus", "bounded", "segments")
#: Mean log decays in nats, from long memory to far beyond a chunk's float32 range.
DECAYS = (0.02, 1.0, 5.0, 40.0)

seeds = st.integers(0, 2**31 - 1)


@st.composite
def cases(draw: st.DrawFn, names: tuple[str, ...] = SMALL) -> Case:
    """A small case with some strength of decay."""
    return dataclasses.replace(KDA[draw(st.sampled_from(names))], decay=draw(st.sampled_from(DECAYS)))
