"""Other libraries' KDA, for static profiles beside ours: the same shapes, the same model, the same run."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.kda_cases import Attention

#: What is in the names of a peer's kernels of the backward pass and of no others.
BACKWARD = r"recompute|_bwd_|_dhu_"
INSTALL = (
    "tokamax is not installed. It needs Python 3.12 or newer, so give it an environment of its own:\n"
    "  python3.12 -m venv PEER && PEER/bin/pip install tokamax==0.0.17 libtpu==0.0.52 && PEER/bin/pip install -e .\n"
    "and run this command with PEER/bin/python"
)


def missing(name: str) -> str | None:
    """What to install for a peer, or None if it is there."""
    return None if importlib.util.find_spec(name) else INSTALL


def load(name: str, rematerialize: bool = False) -> Attention:
    """The peer's operator with the signature of ours; it takes the same arguments under the same names."""
    options = importlib.import_module(f"{name}.config")
    if rematerialize:  # its public function has no argument for this
        kernels = importlib.import_module(f"{name}._src.ops.kda.pallas_mosaic_tpu")
        chosen = kernels.Config(rematerialize_for_backward=True)
        operator: Any = kernels.PallasMosaicTpuKimiDeltaAttention(config=chosen)
    else:
        public = importlib.import_module(f"{name}.ops").kimi_delta_attention
        operator = functools.partial(public, implementation="mosaic")

    def attention(*arguments: Any, **keywords: Any) -> Any:
        # Its choices are made for the device at hand, which is not the one compiled for; stored ones are not of use.
        with options.cross_compile(True), options.autotuning_cache_miss_fallback("heuristics"):
            return operator(*arguments, **keywords)

    return attention
