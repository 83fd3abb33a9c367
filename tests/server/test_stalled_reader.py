"""STR-3 at its full size: 20,000 tokens for a reader that pauses for a minute, beside four that read on."""

import json
import resource
import statistics
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from tests.server.long_contexts import SLOTS, narrow_connection, serve_long_contexts, unchunked
from tests.server.running import raw_request, read_until, until

URL = "/v1/completions"
COUNT, PAUSE_S, BEFORE_S = 20_000, 60.0, 30.0
STEP_S = 0.007
STALLED = "stalled"
BODY = {"prompt": "The sea", "max_tokens": COUNT, "ignore_eos": True, "stream": True, "return_token_ids": True}
WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256}
"""A step costs the same at the beginning of an output as at its end."""
MAX_COST, MAX_SLOWDOWN = 1.15, 1.25
"""Of a token of the others in the pause, to one before and after: processor time, and the clock, which other programs
disturb."""


def peak_bytes():
    """The most memory the process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def tokens_of(events):
    """The token ids of the events of a whole stream."""
    return [token for event in events for token in event["choices"][0]["token_ids"]]


def parsed(text):
    """The events of a whole stream but its end."""
    *blocks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


class Reader(threading.Thread):
    """Reads one stream without a pause.

    Attributes:
      pieces: (instant, bytes) as they came.
    """

    def __init__(self, server, request_id):
        super().__init__()
        self._server = server
        self.request_id = request_id
        self.pieces = []

    def run(self):
        body = BODY | {"request_id": self.request_id}
        with self._server.client() as client, client.stream("POST", URL, json=body) as response:
            for piece in response.iter_raw():
                self.pieces.append((time.monotonic(), piece))

    def arrivals(self):
        """(instant, token ids) of each event."""
        rest, found = b"", []
        for at, piece in self.pieces:
            *blocks, rest = (rest + piece).split(b"\n\n")
            found += [(at, tokens_of([json.loads(block[6:])])) for block in blocks if block != b"data: [DONE]"]
        return found


@dataclass(frozen=True)
class Interval:
    """`wall` and `processor`: instants of its begin and end on the clock, and of the process's time."""

    wall: tuple[float, float]
    processor: tuple[float, float]

    @classmethod
    def of(cls, work):
        """The interval in which `work` runs."""
        wall, processor = time.monotonic(), time.process_time()
        work()
        return cls((wall, time.monotonic()), (processor, time.process_time()))

    def tokens_per_s(self, arrivals):
        """The median over its whole seconds."""
        begin, end = self.wall
        counts = [0] * int(end - begin)
        for at, tokens in arrivals:
            if 0 <= at - begin < len(counts):
                counts[int(at - begin)] += len(tokens)
        return statistics.median(counts)

    def processor_s_per_token(self, arrivals):
        """Processor time of the process for each token of one reader."""
        begin, end = self.wall
        return (self.processor[1] - self.processor[0]) / sum(len(t) for at, t in arrivals if begin <= at < end)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_str_3_a_reader_that_pauses_for_a_minute_costs_the_others_nothing(tmp_path):
    with serve_long_contexts(tmp_path / "model", COUNT + 64, page_size=64, **WINDOWED) as server:
        engine = server.engine.engine
        engine.step_s = STEP_S
        readers = [Reader(server, f"reading-{index}") for index in range(SLOTS - 1)]
        with narrow_connection(server, 32768) as stalled:
            stalled.sendall(raw_request(URL, BODY | {"request_id": STALLED}))
            data = [read_until(stalled, 1)]
            for reader in readers:
                reader.start()
            until(lambda: engine.scheduler.num_running == SLOTS, what="all run")
            stream = server.engine._streams.find(STALLED)
            ids = (STALLED, *(reader.request_id for reader in readers))
            sampled = {request_id: engine.scheduler.sequence(request_id).output_token_ids for request_id in ids}

            def read(seconds):
                end = time.monotonic() + seconds
                while time.monotonic() < end and not data[-1].endswith(b"0\r\n\r\n"):
                    data.append(stalled.recv(65536))
                    assert data[-1], "cut off"

            before = Interval.of(lambda: read(BEFORE_S))
            memory = peak_bytes()
            paused = Interval.of(lambda: time.sleep(PAUSE_S))
            grown = peak_bytes() - memory
            held = len(stream._pending[0].token_ids)
            after = Interval.of(lambda: read(BEFORE_S))
            read(600)
        for reader in readers:
            reader.join(60)
    assert tokens_of(parsed(unchunked(b"".join(data)))) == sampled[STALLED] and len(sampled[STALLED]) == COUNT
    speeds, costs = [], []
    for reader in readers:
        arrivals = reader.arrivals()
        assert [token for _, tokens in arrivals for token in tokens] == sampled[reader.request_id]
        speeds.append([interval.tokens_per_s(arrivals) for interval in (before, paused, after)])
        costs.append([interval.processor_s_per_token(arrivals) for interval in (before, paused, after)])
    speed, cost = ([statistics.median(each) for each in zip(*rows, strict=True)] for rows in (speeds, costs))
    print(f"tokens/s of one of the others before, in and after the pause: {speed}")
    print(f"processor time of a token of each, ms: {[round(1e3 * each, 2) for each in cost]}")
    print(f"{held} tokens waited in one delta; the peak of memory rose by {grown / 2**20:.1f} MiB")
    assert held > 0.5 * PAUSE_S * speed[1], "the reader was not held back"
    assert grown < 32 << 20
    assert cost[1] < MAX_COST * statistics.mean((cost[0], cost[2]))
    assert speed[1] > statistics.mean((speed[0], speed[2])) / MAX_SLOWDOWN
