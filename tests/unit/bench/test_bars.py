"""Judging bars: met, not met, and not judged on a busy machine."""

from typing import Any

import pytest

from tests.bench.bars import (
    FLOAT_PPL,
    LLAMA_CPP_PPL,
    doubt_of,
    overhead_verdict,
    perplexity_verdict,
    ratio_verdicts,
)


def bench_rows(
    ratio: float = 1.5, other_cores: float = 0.0, idle: float = 0.0
) -> list[dict[str, Any]]:
    return [
        {"engine": "polyneuron", "test": "tg128", "other_cores": 0.0, "overhead_ms": 0.3},
        {"engine": "llama.cpp", "test": "tg128", "other_cores": other_cores, "overhead_ms": None},
        {"engine": "polyneuron", "test": "pp512", "other_cores": 0.0, "overhead_ms": None},
        {"ratio": {"tg128": ratio}, "idle_cores": {"polyneuron": 0.0, "llama.cpp": idle}},
    ]


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "met"), (1.5, "met"), (0.99, "not met")])
def test_ratio_is_held_against_its_bar(ratio: float, verdict: str) -> None:
    (found,) = ratio_verdicts("1", "model", bench_rows(ratio), {"tg128": 1.0})
    assert found.cells == ("1", "model, tg128", f"{ratio:.2f}x", ">= 1.0x", verdict)


def test_ratio_beside_a_busy_process_is_not_judged() -> None:
    rows = bench_rows(11.0, other_cores=0.87)
    (found,) = ratio_verdicts("1", "model", rows, {"tg128": 1.0})
    assert found.measured == "11.00x"
    assert found.verdict == "not judged: other processes used 87% of a core"
    assert doubt_of(rows, "pp512") == ""  # the load was there in the other test only


def test_ratio_beside_a_spinning_peer_is_not_judged() -> None:
    assert doubt_of(bench_rows(idle=0.4), "tg128") == "llama.cpp was not idle: 40% of a core"


def test_overhead_is_found_in_its_row() -> None:
    assert overhead_verdict(bench_rows()).cells[2:] == ("0.300 ms", "< 0.5 ms", "met")


@pytest.mark.parametrize(
    ("ppl", "verdict"),
    [
        (LLAMA_CPP_PPL, "met"),
        (FLOAT_PPL, "met"),
        (LLAMA_CPP_PPL * 1.006, "not met"),
        (FLOAT_PPL * 0.994, "not met"),
    ],
)
def test_perplexity_has_two_bounds(ppl: float, verdict: str) -> None:
    assert perplexity_verdict(ppl).verdict == verdict
