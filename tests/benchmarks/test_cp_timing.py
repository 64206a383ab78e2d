# SPDX-License-Identifier: Apache-2.0
"""The clocks of the context-parallel benchmark, on a time that only calls and waits advance."""

from __future__ import annotations

from itertools import count

import cp_timing
import pytest

FORWARD, BACKWARD, DRAIN, MEET, MEMORY = 2.0, 5.0, 6.0, 100.0, 30.0  # seconds


class FakeClock:
    """A host of which a forward takes 2 s, behind the first meeting 32 s, and a backward 5 s; what they launched keeps
    the device for 6 s longer."""

    def __init__(self) -> None:
        self.now, self.has_work, self.calls = 0.0, False, []
        self.memory = 0.0  # what a forward takes longer
        self._states = count()

    def meet(self) -> None:
        self.memory = MEMORY if not self.calls else 0.0
        self.now += MEET
        self.calls.append("meet")

    def synchronise(self) -> None:
        self.now += DRAIN if self.has_work else 0.0
        self.has_work = False

    def agreed(self, value: float) -> float:
        self.calls.append("agreed")
        return value

    def mark(self) -> float:
        return self.now

    idle = synchronise

    def between(self, first: float, second: float) -> float:
        return (second - first) * 1e3

    def forward(self) -> int:
        self.now, self.has_work = self.now + FORWARD + self.memory, True
        state = next(self._states)
        self.calls.append(("forward", state))
        return state

    def backward(self, row: list[int]) -> None:
        for state in row:
            self.now, self.has_work = self.now + BACKWARD, True
            self.calls.append(("backward", state))


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(cp_timing.time, "perf_counter", lambda: fake.now)
    return fake


@pytest.mark.parametrize("layers", [1, 3])
def test_wall_clock_is_per_layer_of_a_row_and_each_backward_has_its_own_forward(clock, layers):
    wall, host = cp_timing.wall_ms(cp_timing.Step(clock.forward, clock.backward), clock, repeats=2, layers=layers)
    # The device's tail is paid once for a row, the meeting of the ranks is outside of it.
    assert wall == {
        "forward": pytest.approx([(FORWARD + DRAIN / layers) * 1e3] * 2),
        "backward": pytest.approx([(BACKWARD + DRAIN / layers) * 1e3] * 2),
    }
    assert host == {"forward": pytest.approx([FORWARD * 1e3] * 2), "backward": pytest.approx([BACKWARD * 1e3] * 2)}
    rows = [range(n * layers, (n + 1) * layers) for n in range(3)]  # the first one is not timed
    expected = [
        call for row in rows for phase in cp_timing.PHASES for call in ["meet", *((phase, state) for state in row)]
    ]
    assert clock.calls == expected


def test_device_time_leaves_out_warm_up_and_what_is_between_the_phases(clock):
    times = cp_timing.device_ms(cp_timing.Step(clock.forward, clock.backward), clock, warm_up=2, repeats=3)
    assert times == {"forward": [FORWARD * 1e3] * 3, "backward": [BACKWARD * 1e3] * 3}
    assert [call for call in clock.calls if call != "meet"] == [
        (phase, state) for state in range(5) for phase in cp_timing.PHASES
    ]
