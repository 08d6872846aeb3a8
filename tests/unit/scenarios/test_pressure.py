"""Events come once, last as long as they say, and add up."""

from polyneuron.scenarios.disturbance import Deed, Disturbance
from polyneuron.scenarios.pressure import Pressure
from polyneuron.scenarios.step_costs import Conditions
from polyneuron.scenarios.workload import Moment

PLAIN = Conditions()


def test_events_come_once_in_order() -> None:
    late = Disturbance(Moment(at_token=5), Deed.LOSE_READER)
    timed = Disturbance(Moment(at_ns=100), Deed.LOSE_WORKER)
    pressure = Pressure([late, timed])
    assert pressure.due(0, 0) == []
    assert pressure.due(100, 4) == [timed]
    assert pressure.due(200, 5) == [late]
    assert pressure.due(300, 6) == []


def test_slow_flash_ends_after_its_tokens() -> None:
    pressure = Pressure([Disturbance(Moment(at_token=2), Deed.SLOW_FLASH, factor=3, for_tokens=4)])
    seen = []
    for token in range(8):
        pressure.due(token, token)
        seen.append(pressure.conditions(PLAIN, token, token).flash)
    assert seen == [1, 1, 3, 3, 3, 3, 1, 1]


def test_slow_flash_ends_after_its_time() -> None:
    pressure = Pressure([Disturbance(Moment(at_ns=0), Deed.SLOW_FLASH, factor=2, for_ns=50)])
    pressure.due(0, 0)
    assert pressure.conditions(PLAIN, 49, 9).flash == 2
    assert pressure.conditions(PLAIN, 50, 9).flash == 1


def test_pressure_of_a_kind_multiplies() -> None:
    events = [
        Disturbance(Moment(at_ns=0), Deed.THROTTLE, cpu=0.5),
        Disturbance(Moment(at_ns=0), Deed.THROTTLE, cpu=0.5),
        Disturbance(Moment(at_ns=0), Deed.STALL_FLASH, stall_ns=7, every=100),
    ]
    pressure = Pressure(events)
    pressure.due(0, 0)
    now = pressure.conditions(PLAIN, 0, 0)
    assert (now.cpu, now.stall_ns, now.stall_every) == (0.25, 7, 100)
