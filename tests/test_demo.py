"""The demo's own parts; `make demo` runs the whole."""

import numpy as np
import pytest

from demo import text


def test_documents_are_real_text():
    documents = text.documents()
    assert len(documents) > 50
    assert min(map(len, documents)) >= 200


@pytest.mark.parametrize("seed", range(5))
def test_packed_rows_hold_contiguous_stretches_of_documents(seed):
    documents = text.documents()
    packed = text.pack(documents, num_tokens=512, max_segments=4, rng=np.random.default_rng(seed))
    assert packed.tokens.shape == packed.segment_ids.shape == (512,)
    ids = packed.segment_ids[packed.segment_ids > 0]
    assert 1 <= ids.max() <= 4
    assert (np.diff(ids) >= 0).all()
    for segment in range(1, ids.max() + 1):
        stretch = packed.tokens[packed.segment_ids == segment].astype(np.uint8).tobytes()
        assert any(stretch in document for document in documents)


def test_training_on_one_batch_lowers_the_loss():
    from demo.language_model import train

    rng = np.random.default_rng(0)
    batch = text.pack(text.documents(), num_tokens=128, max_segments=2, rng=rng)
    seen: list[float] = []
    trained = train([batch] * 12, max_segments=2, on_step=seen.append)
    assert trained.bits_per_byte == seen
    assert seen[-1] < seen[0] - 0.5
