"""Snapshots that a machine pulls: exact, whole or as a delta, and nothing else is taken for them."""

import numpy as np
import pytest
import torch

from weights.pull import BLOCK_WORDS, LocalAndPulled, PullTransport, apply_delta, digest_of, encode_delta
from weights.shm import ShmTransport
from weights.transport import ParameterSpec

SPECS = [ParameterSpec("a", torch.bfloat16, (300, 7)), ParameterSpec("b", torch.float32, (5,))]


def payload(seed, num_words=50_000):
    return np.random.default_rng(seed).integers(0, 1 << 16, num_words, dtype=np.uint16).view(np.uint8)


def changed(base, share, seed):
    words, rng = base.view(np.uint16).copy(), np.random.default_rng(seed)
    where = rng.random(len(words)) < share
    words[where] ^= rng.integers(1, 1 << 16, where.sum(), dtype=np.uint16)
    return words.view(np.uint8)


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.5, 1.0])
def test_a_delta_gives_the_very_bytes_of_the_new_snapshot(share):
    base = payload(0)
    new = changed(base, share, 1)
    delta, copy = encode_delta(3, base, new), base.copy()
    apply_delta(delta, 3, copy)
    assert digest_of(copy) == digest_of(new)
    if share == 0.01:
        assert len(delta) < 0.04 * len(new), "about six bytes for each of a hundredth of the words"


def test_a_snapshot_of_several_blocks_has_the_gaps_of_each_counted_from_its_start():
    base = np.zeros(2 * (BLOCK_WORDS + 5), np.uint8)
    new = base.copy()
    new.view(np.uint16)[[0, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 4]] = [1, 2, 3, 4]
    apply_delta(encode_delta(0, base, new), 0, base)
    assert (base == new).all()


@pytest.mark.parametrize(
    ("mend", "why"),
    [
        (lambda delta: delta[:10], "a broken delta"),
        (lambda delta: delta[:-3], "a broken delta"),
        (lambda delta: delta[:30] + bytes(20) + delta[50:], "delta|block"),
        (lambda delta: b"", "a broken delta"),
    ],
)
def test_a_delta_that_is_cut_or_garbled_is_refused(mend, why):
    base = payload(0)
    with pytest.raises(ValueError, match=why):
        apply_delta(mend(encode_delta(0, base, changed(base, 0.01, 1))), 0, base.copy())


def test_a_delta_for_another_base_or_size_is_refused():
    base = payload(0)
    delta = encode_delta(3, base, changed(base, 0.01, 1))
    with pytest.raises(ValueError, match="a delta for version 3, 50000 words; here is 4, 50000"):
        apply_delta(delta, 4, base.copy())
    with pytest.raises(ValueError, match="here is 3, 10"):
        apply_delta(delta, 3, payload(0, 10))


def parameters(value):
    return [(spec.name, torch.full(spec.shape, float(value))) for spec in SPECS]


def test_whoever_has_a_kept_version_gets_a_delta_and_all_others_the_whole():
    transport = PullTransport(SPECS)
    for version in range(3):
        transport.stage(version, [("a", torch.ones(300, 7)), ("b", torch.full((5,), float(version)))])
    is_delta, stream = transport.open(2, 1)
    assert is_delta and len(stream) < transport.num_bytes / 10
    assert [transport.open(2, base)[0] for base in (None, 2, 7)] == [False] * 3


def test_old_snapshots_go_unless_a_worker_reads_them():
    transport = PullTransport(SPECS)
    first = transport.stage(0, parameters(0))
    transport.acquire(5, first)
    for version in range(1, 6):
        transport.stage(version, parameters(version))
    assert not transport.open(0, None)[0]
    transport.release(5, first)
    transport.stage(6, parameters(6))
    with pytest.raises(ValueError, match="no snapshot of version 0 is left"):
        transport.open(0, None)


def test_beside_a_local_transport_each_worker_reads_by_its_own():
    both = LocalAndPulled(ShmTransport(SPECS), PullTransport(SPECS), num_own=1)
    staged = both.stage(4, parameters(1.5))
    both.announce(staged)
    (local,), (pulled,) = both.messages(0, staged), both.messages(1, staged)
    assert local["buffer"] == staged.buffer and pulled["digest"] and "paths" not in both.init_info(1)
    for worker in (0, 1):
        both.acquire(worker, staged)
        both.release(worker, staged)
    assert both.free_buffer() is not None
