"""What a step's figures are counted from."""

from polyneuron.actors.step_meter import counted, executor_name


def test_replaced_counter_begins_at_zero() -> None:
    assert counted([5, 90, 4], [7, 30, 4]) == [2, 30, 0]


def test_places_are_named_by_unit() -> None:
    assert [executor_name(index, 2) for index in range(4)] == [
        "worker.0",
        "worker.1",
        "npu.0",
        "npu.1",
    ]
