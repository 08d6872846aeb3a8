"""Detailed events are written out by hand: the encoder must give the same bytes."""

import json

import numpy as np
import pytest

from polyneuron.kernels.simulation import STEP_RECORD, Stage
from polyneuron.scenarios.step_detail import StepDetail, Told
from polyneuron.timeline import event_line
from polyneuron.timeline_events import parse_event

FIRST_NS, STEP, CORES = 1_000_000, 7, 3
SAMPLE = {"t_ns": 250, "ns": 40, "layer": 5, "cluster": 2, "neurons": 9, "misses": 4, "bytes": 8192}


def told(detail: StepDetail, *stages: Stage) -> list[Told]:
    records = np.zeros(len(stages), STEP_RECORD)
    for name, value in SAMPLE.items():
        records[name] = value
    records["stage"], records["core"] = stages, 1
    return detail.events(records, FIRST_NS, STEP)


def line_of(event: Told) -> str:
    return f'{{"t_ns":{event[0]},"seq":0,{event[1]}}}\n'


@pytest.mark.parametrize("stage", Stage)
def test_lines_are_what_the_encoder_writes(stage: Stage) -> None:
    events = told(StepDetail(CORES), stage)
    assert len(events) == (CORES if stage in (Stage.ATTENTION, Stage.HOT) else 1)
    for event in events:
        line = line_of(event)
        assert line == event_line(json.loads(line))
        assert parse_event(line, "t:1").t_ns == FIRST_NS + SAMPLE["t_ns"]


@pytest.mark.parametrize(("stage", "word"), [(Stage.PRED, "pred"), (Stage.UDC, "udc")])
def test_clusters_say_their_stage_and_core(stage: Stage, word: str) -> None:
    event = parse_event(line_of(told(StepDetail(CORES), stage)[0]), "t:1")
    keys = {"ns": 40, "step": 7, "layer": 5, "cluster": 2, "stage": word, "neurons": 9, "misses": 4}
    assert (event.actor, event.event, event.keys) == ("worker.1", "cluster", keys)


def test_reads_are_numbered_through_the_run() -> None:
    detail = StepDetail(CORES)
    events = [*told(detail, Stage.GIO, Stage.GC), *told(detail, Stage.UDIO)]
    reads = [parse_event(line_of(event), "t:1") for event in events]
    numbers = [read.keys["read"] for read in reads if read.event == "read"]
    assert numbers == [0, 1] and reads[0].keys["bytes"] == SAMPLE["bytes"]


def test_attention_is_an_op_of_every_core() -> None:
    events = [
        parse_event(line_of(event), "t:1")
        for event in told(StepDetail(CORES), Stage.ATTENTION, Stage.NPU)
    ]
    assert [event.actor for event in events] == ["worker.0", "worker.1", "worker.2", "npu.0"]
    assert [event.keys["op"] for event in events] == [10, 10, 10, 11]
