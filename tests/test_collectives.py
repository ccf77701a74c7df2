"""The rings against plain sums and against the backend's own collectives."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from minifsdp.collectives import Communicator, Traffic

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def whole_numbers(rank, numel, dtype):
    """Small whole numbers, so that sums are exact in every dtype and any order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


def check_all(sizes, algorithms=("ring", "native")):
    comm_rank, n = dist.get_rank(), dist.get_world_size()
    for algorithm in algorithms:
        comm = Communicator(algorithm=algorithm)
        for dtype in DTYPES:
            for size in sizes:
                shards = [whole_numbers(r, size, dtype) for r in range(n)]
                buffers = [whole_numbers(r, n * size, dtype) for r in range(n)]
                total = torch.stack([b.double() for b in buffers]).sum(0)

                gathered = torch.empty(n * size, dtype=dtype)
                comm.all_gather(gathered, shards[comm_rank]).wait()
                assert torch.equal(gathered, torch.cat(shards))

                for op, expected in (("sum", total), ("mean", total / n)):
                    chunk = torch.empty(size, dtype=dtype)
                    comm.reduce_scatter(chunk, buffers[comm_rank].clone(), op).wait()
                    ours = expected.view(n, -1)[comm_rank] if size else expected
                    torch.testing.assert_close(
                        chunk, ours.to(dtype), rtol=2e-2 if op == "mean" else 0, atol=2e-2
                    )
                    reduced = buffers[comm_rank].clone()
                    comm.all_reduce(reduced, op).wait()
                    torch.testing.assert_close(
                        reduced, expected.to(dtype), rtol=2e-2 if op == "mean" else 0, atol=2e-2
                    )

                largest = buffers[comm_rank].clone()
                comm.all_reduce(largest, "max").wait()
                assert torch.equal(largest, torch.stack(buffers).max(0).values)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_dtypes_and_sizes(ranks, n):
    ranks(n, check_all, [1, 7, 1000])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_empty_tensors(ranks, n):
    ranks(n, check_all, [0], ("ring",))


def run_example(sizes_and_ops):
    comm = Communicator()
    for numel, op in sizes_and_ops:
        buffers = [whole_numbers(r, numel, torch.float64) for r in range(comm.size)]
        reduced = buffers[comm.rank].clone()
        comm.all_reduce(reduced, op).wait()
        stacked = torch.stack(buffers)
        assert torch.equal(reduced, stacked.sum(0) if op == "sum" else stacked.max(0).values)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 4),
    sizes_and_ops=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(["sum", "max"])), min_size=1, max_size=5
    ),
)
def test_all_reduce_of_any_length(ranks, n, sizes_and_ops):
    ranks(n, run_example, sizes_and_ops)


def order_of_summation():
    """Chunk c is summed in the order c + 1, c + 2, ..., c: with numbers whose sum depends on it."""
    comm = Communicator()
    n = comm.size
    values = [1e8, 1.0, -1e8, 3.0][:n]
    chunk = torch.empty(1)
    comm.reduce_scatter(chunk, torch.full((n,), values[comm.rank])).wait()
    expected = torch.tensor(values[(comm.rank + 1) % n])
    for i in range(2, n + 1):
        expected = torch.tensor(values[(comm.rank + i) % n]) + expected
    assert chunk.item() == expected.item()
    return chunk.item()


def test_ring_sums_in_its_stated_order(ranks):
    assert len(set(ranks(4, order_of_summation))) > 1  # so the order shows


def several_under_way():
    comm = Communicator()
    n = comm.size
    outputs = [torch.empty(n * 5) for _ in range(3)]
    shards = [torch.full((5,), 10.0 * i + comm.rank) for i in range(3)]
    pending = [comm.all_gather(output, shard) for output, shard in zip(outputs, shards, strict=True)]
    for work in pending:
        work.wait()
    for i, output in enumerate(outputs):
        assert output.view(n, 5)[:, 0].tolist() == [10.0 * i + r for r in range(n)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_asynchronous_calls_overlap(ranks, n):
    ranks(n, several_under_way)


def inside_a_subgroup():
    group = dist.new_group([1, 3], use_local_synchronization=True) if dist.get_rank() in (1, 3) else None
    if group is None:
        return None
    for algorithm in ("ring", "native"):
        comm = Communicator(group, algorithm)
        out = torch.empty(2)
        comm.all_gather(out, torch.tensor([float(dist.get_rank())])).wait()
        assert out.tolist() == [1.0, 3.0]
        out = torch.empty(1)
        comm.reduce_scatter(out, torch.tensor([1.0, 2.0]) * dist.get_rank()).wait()
        assert out.item() == 4.0 * (comm.rank + 1)
    return comm.gather_text(f"rank {dist.get_rank()}")


def test_a_group_that_is_not_the_world(ranks):
    assert ranks(4, inside_a_subgroup) == [None, ["rank 1", "rank 3"], None, ["rank 1", "rank 3"]]


def count_bytes(algorithm):
    comm = Communicator(algorithm=algorithm)
    n = comm.size
    with Traffic() as traffic:
        comm.all_gather(torch.empty(n * 10), torch.zeros(10), "a").wait()
        comm.reduce_scatter(
            torch.empty(6, dtype=torch.bfloat16), torch.zeros(n * 6, dtype=torch.bfloat16), unit="b"
        ).wait()
        comm.all_reduce(torch.zeros(n * 4), unit="c").wait()
    comm.all_reduce(torch.zeros(4)).wait()  # outside: not recorded
    return traffic.frame()


@pytest.mark.parametrize("algorithm", ["ring", "native"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_law_4_traffic_is_exact(ranks, n, algorithm):
    for frame in ranks(n, count_bytes, algorithm):
        assert list(frame.name) == ["all_gather", "reduce_scatter", "all_reduce"]
        assert list(frame.unit) == ["a", "b", "c"]
        assert list(frame.dtype) == ["float32", "bfloat16", "float32"]
        assert list(frame.elements) == [n * 10, n * 6, n * 4]
        assert list(frame.sent_bytes) == [(n - 1) * 40, (n - 1) * 12, 2 * (n - 1) * 16]


def bad_calls():
    comm = Communicator()
    for call, text in (
        (lambda: comm.all_gather(torch.empty(7), torch.empty(3)), "pad it to a multiple of the 2 ranks"),
        (lambda: comm.all_gather(torch.empty(6), torch.empty(3).half()), "one dtype and device"),
        (
            lambda: comm.reduce_scatter(torch.empty(3), torch.empty(6, dtype=torch.int64)),
            "one dtype and device",
        ),
        (lambda: comm.all_reduce(torch.empty(4, 4).t()[:2]), "contiguous"),
        (lambda: comm.all_reduce(torch.empty(4), op="median"), "op must be one of"),
        (lambda: Communicator(algorithm="tree"), "'auto', 'ring' or 'native'"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_law_6_bad_calls_say_what_to_do(ranks):
    ranks(2, bad_calls)


def test_no_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        Communicator()
