"""Tables of boundaries that the host knows are made once for a stream, and owned by whoever replays them."""

import pytest
import torch

from cake.core import recording, tables
from cake.core.segments import cut
from cake.core.sequences import packed, packed_on_device

CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch):
    """Makes tables as the library would, and counts how often it was asked."""
    monkeypatch.setattr(tables, "_capturing", lambda device: False)
    tables.release()
    count = []

    def of(seqs, stream=0):
        for module in (tables, recording):
            monkeypatch.setattr(module, "stream_of", lambda device: stream)
        words = tables.plan_tables(seqs, CPU, lambda: (lambda *args: count.append(args),) * 3)
        return words, len(count)

    yield of
    tables.release()


def test_made_once(made):
    first, count = made(packed((0, 3, 70), 70))
    again, still = made(packed((0, 3, 70), 70))
    assert first is again
    assert count == still == 1


def test_each_stream_and_each_pack_has_its_own(made):
    first, _ = made(packed((0, 3, 70), 70))
    for seqs, stream in ((packed((0, 3, 70), 70), 1), (packed((0, 4, 70), 70), 0)):
        other, _ = made(seqs, stream)
        assert other is not first
    assert made(packed((0, 3, 70), 70))[1] == 3


def test_boundaries_on_a_device_are_read_every_time(made):
    seqs = packed_on_device(torch.tensor([0, 3, 70]), 70)
    first, _ = made(seqs)
    again, count = made(seqs)
    assert first is not again
    assert count == 2


def test_a_graph_owns_what_it_reads(made, monkeypatch):
    first, _ = made(packed((0, 3, 70), 70))
    monkeypatch.setattr(tables, "_capturing", lambda device: True)
    captured, count = made(packed((0, 3, 70), 70))
    assert captured is not first
    assert count == 2


def test_a_cut_call_keeps_a_bit_of_its_boundaries_free(made):
    tokens = 1 << 30
    with pytest.raises(ValueError, match=r"must have less than 2\^30 tokens, got 1073741824"):
        made(cut(packed((0, tokens), tokens), (2,)))


def test_few_are_kept(made):
    first, _ = made(packed((0, 1, 70), 70))
    for end in range(2, tables.KEPT + 2):
        made(packed((0, end, 70), 70))
    again, count = made(packed((0, 1, 70), 70))
    assert again is not first
    assert count == tables.KEPT + 2
