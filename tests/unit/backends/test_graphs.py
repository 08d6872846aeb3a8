"""Which shapes graphs are made for, and when."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.backends.backend import Capabilities, Graph, ShapeBucket
from polyneuron.backends.graphs import IDLE_USES, MAX_UNPACKED, GraphCache, row_runs, token_bucket
from polyneuron.backends.native import NativeBackend, NativeGraph
from polyneuron.errors import BackendError
from polyneuron.kernels.quant import StorageType

TIMEOUT_S = 10.0
SMALL = ShapeBucket(8, 64, 32, StorageType.Q4)


class Compiler(NativeBackend):
    """Compiles when it is told to; refuses 13 columns."""

    def __init__(self, max_graphs: int | None = None) -> None:
        self.may_go = threading.Event()
        self.compiled: list[ShapeBucket] = []
        self._max_graphs = max_graphs

    def capabilities(self) -> Capabilities:
        """As `Backend`."""
        return replace(super().capabilities(), max_graphs=self._max_graphs)

    def compile(self, bucket: ShapeBucket) -> NativeGraph:
        """As `Backend`."""
        assert self.may_go.wait(TIMEOUT_S)
        if bucket.cols == 13:
            raise BackendError("13 is unlucky")
        self.compiled.append(bucket)
        return super().compile(bucket)


def until_there(cache: GraphCache, compiler: Compiler, bucket: ShapeBucket) -> Graph:
    """The graph once its compilation has ended."""
    compiler.may_go.set()
    cache._graphs[bucket].exception(TIMEOUT_S)
    graph = cache.get(bucket)
    assert graph is not None
    return graph


@given(st.integers(1, 600), st.integers(1, 512))
def test_token_buckets_hold_the_tokens(num_tokens: int, max_tokens: int) -> None:
    num_tokens = min(num_tokens, max_tokens)
    assert num_tokens <= token_bucket(num_tokens, max_tokens) <= max_tokens


@given(st.integers(1, 20_000), st.integers(1, 50_000))
def test_runs_cover_all_rows_once(num_rows: int, cols: int) -> None:
    runs = row_runs(num_rows, cols)
    assert all(rows * cols <= MAX_UNPACKED or rows == 32 for _, rows in runs)
    ends = [first + rows for first, rows in runs]
    assert [first for first, _ in runs] == [0, *ends[:-1]]
    assert num_rows <= ends[-1] < num_rows + 32
    assert len({rows for _, rows in runs}) <= 5


class TestCompiling:
    def test_nothing_is_waited_for(self) -> None:
        compiler = Compiler()
        cache = GraphCache(compiler, waits=False)
        assert cache.get(SMALL) is None
        graph = until_there(cache, compiler, SMALL)
        assert cache.get(SMALL) is graph
        assert compiler.compiled == [SMALL]
        cache.close()

    def test_larger_one_does_meanwhile(self) -> None:
        compiler = Compiler()
        cache = GraphCache(compiler, waits=False)
        large = replace(SMALL, tokens=32)
        cache.get(large)
        graph = until_there(cache, compiler, large)
        compiler.may_go.clear()
        assert cache.get(SMALL) is graph
        assert cache.get(replace(SMALL, rows=32)) is None
        assert cache.get(replace(SMALL, tokens=128)) is None
        assert until_there(cache, compiler, SMALL) is not graph
        cache.close()

    def test_at_once_where_results_must_not_depend_on_time(self) -> None:
        compiler = Compiler()
        compiler.may_go.set()
        cache = GraphCache(compiler, waits=True)
        assert cache.get(SMALL) is not None
        assert cache.get(replace(SMALL, tokens=32)) is not cache.get(SMALL)
        cache.close()

    @pytest.mark.parametrize("waits", [False, True])
    def test_failure_is_raised(self, waits: bool) -> None:
        compiler = Compiler()
        compiler.may_go.set()
        cache = GraphCache(compiler, waits=waits)
        bad = replace(SMALL, cols=13)
        with pytest.raises(BackendError, match="unlucky"):
            if cache.get(bad) is None:
                until_there(cache, compiler, bad)
        cache.close()


class TestRoom:
    def test_no_more_than_the_device_keeps(self) -> None:
        compiler = Compiler(max_graphs=2)
        compiler.may_go.set()
        cache = GraphCache(compiler, waits=True)
        shapes = [replace(SMALL, rows=rows) for rows in (32, 64, 128)]
        assert [cache.get(shape) is not None for shape in shapes] == [True, True, False]
        cache.close()

    def test_idle_one_makes_room(self) -> None:
        compiler = Compiler(max_graphs=1)
        compiler.may_go.set()
        cache = GraphCache(compiler, waits=True)
        other = replace(SMALL, rows=32)
        assert cache.get(SMALL) is not None
        for _ in range(IDLE_USES):
            assert cache.get(other) is None
        assert cache.get(other) is not None
        assert cache.get(SMALL) is None
        cache.close()
