"""Law 7, alignment; and the layout of a flat buffer for any shapes and any number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.shard import ALIGNMENT, Layout, join, neighbours

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


def tensors_of(shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@given(shapes=shapes, parts=st.sampled_from([1, 2, 3, 4, 6]), data=st.data())
def test_law_7_shards_put_together_are_the_parameters(shapes, parts, data):
    shards = data.draw(st.sampled_from([s for s in (1, 2, 3, 4, 6) if parts % s == 0]))
    tensors = tensors_of(shapes)
    layout = Layout.plan([(str(i), t) for i, t in enumerate(tensors)], parts)
    flat = torch.cat([layout.take_shard(tensors, rank, shards) for rank in range(shards)])
    assert flat.numel() == layout.padded
    assert layout.padded % (parts * ALIGNMENT) == 0
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        assert slot.offset * 2 % 16 == 0  # bytes, in fp16
        assert torch.equal(slot.of(flat), tensor)
        assert torch.equal(slot.view(flat.untyped_storage(), flat.dtype), tensor)
        pieces = [layout.piece(slot, rank, shards) for rank in range(shards)]
        assert sum(stop - start for start, stop in pieces) == tensor.numel()
    padding = torch.ones(layout.padded, dtype=torch.bool)
    for start, stop in layout.gaps():
        assert not flat[start:stop].any()
        padding[start:stop] = False
    assert padding.sum() == sum(t.numel() for t in tensors)


def test_memory_order_is_kept():
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(3, 1).expand(3, 4),
    ]
    layout = Layout.plan([(str(i), t) for i, t in enumerate(tensors)], 2)
    flat = torch.cat([layout.take_shard(tensors, rank, 2) for rank in range(2)])
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        assert torch.equal(slot.of(flat), tensor)
    assert layout.slots[0].of(flat).is_contiguous(memory_format=torch.channels_last)
    assert layout.slots[1].stride == (1, 6)


def test_neighbours_are_joined_across_padding_and_never_across_a_parameter():
    flat = torch.arange(40.0)
    a, b, c = flat[0:5], flat[8:11], flat[16:24]
    assert list(neighbours([[a, b, c]])) == [(0, 3)]
    assert join([a, b]).tolist() == list(range(11))
    assert list(neighbours([[a, c]])) == [(0, 1), (1, 2)]  # b lies between
    elsewhere = torch.zeros(40)
    assert list(neighbours([[a, b], [elsewhere[0:5], elsewhere[9:12]]])) == [
        (0, 1),
        (1, 2),
    ]  # other distances
    assert list(neighbours([[a, elsewhere[8:11]]])) == [(0, 1), (1, 2)]  # another storage
    assert list(neighbours([[]])) == []
