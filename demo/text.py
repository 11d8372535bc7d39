"""Real text: this repository's own documents and the Python standard library's, packed into one row of bytes."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_REPOSITORY = Path(__file__).resolve().parent.parent
_PATTERNS = ("*.md", "docs/*.md", "ops/**/*.py", "reference/**/*.py")


@dataclass(frozen=True)
class PackedText:
    """One row of packed documents.

    Attributes:
        tokens: bytes, int32 [T].
        segment_ids: document of each byte, int32 [T], 1-based; 0 is padding.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray


def documents() -> list[bytes]:
    """Every document of at least 200 bytes, in a fixed order."""
    files = [file for pattern in _PATTERNS for file in sorted(_REPOSITORY.glob(pattern))]
    files += sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = (file.read_bytes() for file in files)
    return [text for text in texts if len(text) >= 200]


def pack(texts: list[bytes], num_tokens: int, max_segments: int, rng: np.random.Generator) -> PackedText:
    """Packs a random stretch of random documents, one behind the other, until ``num_tokens`` or ``max_segments``.

    Returns:
        The packed row; what the documents do not fill is padding.
    """
    tokens = np.zeros(num_tokens, np.int32)
    segment_ids = np.zeros(num_tokens, np.int32)
    start = 0
    for segment in range(1, max_segments + 1):
        text = texts[rng.integers(len(texts))]
        length = min(int(rng.integers(100, 2 * num_tokens // max_segments)), len(text), num_tokens - start)
        offset = int(rng.integers(len(text) - length + 1))
        tokens[start : start + length] = np.frombuffer(text, np.uint8, length, offset)
        segment_ids[start : start + length] = segment
        start += length
        if start == num_tokens:
            break
    return PackedText(tokens, segment_ids)
