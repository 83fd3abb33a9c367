"""Signs of life go on whatever befalls one of them."""

import time

from jaxserve.hosts.pulse import Pulse


def test_a_beat_that_fails_is_logged_and_the_next_one_comes(caplog):
    beats = []

    def beat():
        beats.append(None)
        if len(beats) < 3:
            raise ValueError("of the beat")

    pulse = Pulse(0.02, beat)
    pulse.start()
    end = time.monotonic() + 10
    while len(beats) < 4:
        assert time.monotonic() < end, "the beats ended"
        time.sleep(0.001)
    pulse.stop()
    fault = "a sign of life failed; the next one will be tried"
    assert [each.getMessage() for each in caplog.records] == [fault, fault]
    assert pulse.now >= 4
