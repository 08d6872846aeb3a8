"""The page: what is in it, how big it is, and that nothing of a timeline is taken for HTML."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.tracing.collector import read_recording
from polyneuron.tracing.packing import PackedColumn, pack_column, pack_payload
from polyneuron.tracing.page import TICK_NS, page_of, thinned
from polyneuron.tracing.summary import summarize
from tests.support.made_up_timeline import MadeUp


def made_page(made: MadeUp, tmp_path: Path, **limits: int) -> str:
    recording = read_recording(made.write(tmp_path / "run.jsonl"))
    return page_of(recording, summarize(recording), **limits)


def unpacked(text: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """As unpack.js does it."""
    content = zlib.decompress(base64.b64decode(text))
    end = 4 + int.from_bytes(content[:4], "little")
    head = json.loads(content[4:end])
    columns = {}
    for facts in head["columns"]:
        begin, end = end, end + facts["count"] * facts["planes"]
        columns[facts["name"]] = unpacked_column(facts, content[begin:end])
    assert end == len(content)
    return head, columns


def unpacked_column(facts: dict[str, Any], content: bytes) -> list[int]:
    count, planes = facts["count"], facts["planes"]
    numbers = [
        sum(content[plane * count + i] << (8 * plane) for plane in range(planes))
        for i in range(count)
    ]
    signed = [number // 2 if number % 2 == 0 else -(number + 1) // 2 for number in numbers]
    return np.cumsum(signed).tolist() if facts["delta"] else signed


def payload(page: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    found = re.search(r'id="payload">([A-Za-z0-9+/=]+)<', page)
    assert found
    return unpacked(found.group(1))


class TestPacking:
    @given(st.lists(st.integers(-(2**51), 2**51)))
    def test_numbers_come_back(self, numbers: list[int]) -> None:
        column = pack_column("any", np.array(numbers, dtype=np.int64))
        _, columns = unpacked(pack_payload({}, [column]))
        assert columns == {"any": numbers}

    def test_columns_keep_their_places(self) -> None:
        columns = [pack_column(name, np.arange(n)) for name, n in (("a", 5), ("b", 0), ("c", 2))]
        head, found = unpacked(pack_payload({"more": 1}, columns))
        assert (head["more"], found) == (1, {"a": [0, 1, 2, 3, 4], "b": [], "c": [0, 1]})

    def test_rising_times_are_told_as_differences(self) -> None:
        column: PackedColumn = pack_column("t", np.arange(0, 10**9, 10**6))
        assert column.is_delta
        assert column.planes == 3


class TestContent:
    def test_times_and_figures_are_the_files(self, tmp_path: Path) -> None:
        made = MadeUp(tokens=6, npus=1)
        head, columns = payload(made_page(made, tmp_path))
        first = made.lines[1]["t_ns"]
        steps = [line for line in made.lines if line["event"] == "step"]
        assert columns["steps.t"] == [(line["t_ns"] - first) // TICK_NS for line in steps]
        assert columns["steps.misses"] == [line["misses"] for line in steps]
        assert head["executors"] == ["npu.0", "worker.0", "worker.1"]
        told = [line for line in made.lines if line["event"] == "cluster"]
        own = [line for line in told if line["actor"] == "worker.0"]
        assert columns["clusters1.neurons"] == [line["neurons"] for line in own]
        assert [head["stages"][number] for number in columns["clusters1.stage"]] == [
            line["stage"] for line in own
        ]

    def test_unmeasured_is_told_apart_from_zero(self, tmp_path: Path) -> None:
        lines = MadeUp(tokens=3).events()
        steps = [line for line in lines if line["event"] == "step"]
        steps[1]["bytes"], steps[2]["bytes"] = None, 0
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        recording = read_recording(path)
        _, columns = payload(page_of(recording, summarize(recording)))
        assert columns["steps.bytes"][1:] == [-1, 0]

    def test_needs_nothing_else(self, tmp_path: Path) -> None:
        page = made_page(MadeUp(), tmp_path)
        assert not re.search(r"""(src|href)=|@import|url\(|https?:""", page)
        assert "default-src 'none'" in page
        assert "%" + "DATA%" not in page

    @pytest.mark.parametrize("name", ["</title><script>x()</script>", "%DATA%", "\ud800"])
    def test_names_are_no_html(self, name: str, tmp_path: Path) -> None:
        plain, page = made_page(MadeUp(), tmp_path), made_page(MadeUp(model=name), tmp_path)
        assert page.count("<script") == plain.count("<script") == 2
        assert payload(page)[0]["figures"]["run"]["model"] == name
        page.encode()


class TestSize:
    def test_record_takes_few_bytes(self, tmp_path: Path) -> None:
        """At 10 bytes a record, 1,000 tokens of a 7B with detail as usual stay below 8 MB."""
        small = MadeUp(tokens=0, layers=16, clusters=8)
        made = MadeUp(tokens=24, layers=16, clusters=8, reads_a_layer=12, npus=1)
        empty = len(made_page(small, tmp_path))
        page = made_page(made, tmp_path)
        assert payload(page)[0]["records"] > 10_000
        assert (len(page) - empty) / payload(page)[0]["records"] < 10

    def test_too_much_detail_is_thinned(self, tmp_path: Path) -> None:
        made = MadeUp(tokens=20, detail="all")
        recording = read_recording(made.write(tmp_path / "run.jsonl"))
        whole = recording.detail.num_records()
        detail = thinned(recording.detail, whole // 3)
        assert whole // 5 < detail.num_records() <= whole // 3
        kept = set(detail.ops["worker.0"].column("step").tolist())
        assert kept == set(range(0, 20, min(kept - {0})))
        assert kept >= set(detail.reads.column("step").tolist())
        head, columns = payload(page_of(recording, summarize(recording), whole // 3))
        assert (head["records"], head["records_recorded"]) == (detail.num_records(), whole)
        assert [step for step, has in zip(columns["steps.step"], columns["steps.detail"],
                                          strict=True) if has] == sorted(kept)  # fmt: skip
