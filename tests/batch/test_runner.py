"""The runner over a scripted engine: order, window, refusals, stops."""

import asyncio
import json

import pytest

from jaxserve.batch.records import parse_request
from jaxserve.batch.runner import BatchRunner, EngineStoppedError
from jaxserve.core import EngineDeadError, EngineStuckError, RejectedError, Rejection, RequestFailedError
from jaxserve.server.service import GenerationService
from tests.batch.lines import chat, completion
from tests.server.fake_engine import FakeEngine
from tests.server.running import until_async


class Run:
    """Lines through a runner.

    Attributes:
      read: lines that the runner has taken.
      results: what it has written.
      most: most lines between reading and writing.
    """

    def __init__(self, lines, window=4, in_order=False, **engine):
        self.engine = FakeEngine()
        for name, value in engine.items():
            setattr(self.engine, name, value)
        self.read, self.most, self.results = 0, 0, []
        self._lines = lines
        self.runner = BatchRunner(GenerationService(self.engine), self.results.append, window, in_order)

    async def run(self):
        await self.runner.run(self._taken())
        return self

    def _taken(self):
        for number, line in enumerate(self._lines, 1):
            self.read += 1
            self.most = max(self.most, self.read - len(self.results))
            yield parse_request(number, (line if isinstance(line, str) else json.dumps(line)).encode())

    @property
    def ids(self):
        return [result.custom_id for result in self.results]

    @property
    def codes(self):
        return {result.custom_id: result.error and result.error.code for result in self.results}


def run(lines, **settings):
    return asyncio.run(Run(lines, **settings).run())


LENGTHS = {"a": 60, "b": 1, "c": 30, "d": 1, "e": 10, "f": 1}
LINES = [completion(name, max_tokens=length) for name, length in LENGTHS.items()]


def test_results_come_as_they_end():
    assert run(LINES, window=3).ids == ["b", "d", "e", "f", "c", "a"]


def test_results_come_in_the_order_of_the_input_when_asked():
    done = run([*LINES[:3], "{", *LINES[3:]], window=3, in_order=True)
    assert done.ids == ["a", "b", "c", None, "d", "e", "f"]


@pytest.mark.parametrize("in_order", [False, True])
def test_no_more_lines_are_held_than_the_window(in_order):
    done = run([completion(str(index), max_tokens=1 + index % 7) for index in range(200)], in_order=in_order)
    assert len(done.results) == 200
    assert done.most <= 4 + 1, "the window, and the line that waits to enter it"


def test_bodies_of_all_routes_are_rendered():
    response = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"input": "x", "max_output_tokens": 4},
    }
    done = run([completion("a", "x"), chat("b", "x"), response])
    bodies = {result.custom_id: result.response["body"] for result in done.results}
    assert bodies["a"]["object"] == "text_completion" and bodies["a"]["choices"][0]["text"] == "qrst"
    assert bodies["b"]["object"] == "chat.completion" and bodies["b"]["usage"]["completion_tokens"] == 4
    assert bodies["c"]["object"] == "response" and bodies["c"]["status"] == "incomplete"
    assert all(result.response["request_id"] == result.response["body"]["id"] for result in done.results)


def test_a_refused_request_has_the_answer_of_http_and_an_error():
    done = run([completion("a", temperature=-1), completion("b", model="gpt-4"), completion("c", [1] * 200)])
    assert {r.custom_id: r.response["status_code"] for r in done.results} == {"a": 400, "b": 404, "c": 400}
    first = done.results[0]
    assert first.response["body"]["error"]["param"] == "temperature"
    assert first.error.message == "line 1: " + first.response["body"]["error"]["message"]
    assert done.codes == {"a": "invalid_request_error", "b": "model_not_found", "c": "context_length_exceeded"}


def test_a_request_that_fails_or_expires_is_an_error_line():
    failed = run([completion("a")], fail_after=1, fault=RequestFailedError("broken"))
    expired = run([completion("a")], expire_after=1)
    assert failed.results[0].response["status_code"] == 500 and failed.codes == {"a": "request_failed"}
    assert expired.results[0].response["status_code"] == 504 and expired.codes == {"a": "deadline_exceeded"}


def test_a_full_queue_makes_lines_wait():
    done = run([completion(str(index)) for index in range(20)], window=10, max_live=2)
    assert set(done.codes.values()) == {None} and len(done.results) == 20


@pytest.mark.parametrize(("state", "ends_well"), [("ready", True), ("stuck", False), ("dead", False)])
def test_an_engine_that_is_held_is_waited_for_until_the_watchdog_says_that_it_is_stuck(state, ends_well):
    async def check():
        job = Run([completion(str(index)) for index in range(5)], window=2)
        submit_all, refusals = job.engine.submit_all, iter(range(20))

        def held(submissions):
            number = next(refusals, None)
            if number is not None:
                if number == 10:
                    job.engine.state = state
                raise EngineStuckError("what it does holds its state")
            return submit_all(submissions)

        job.engine.submit_all = held
        if ends_well:
            await job.run()
            assert sorted(job.ids) == list("01234") and set(job.codes.values()) == {None}
        else:
            with pytest.raises(EngineStoppedError):
                await job.run()
        assert (next(refusals, None) is None) == ends_well

    asyncio.run(check())


def test_a_refusal_without_anybody_to_wait_for_is_the_answer():
    done = run([completion("a"), completion("b")], max_live=0)
    assert done.codes == {"a": "queue_full_requests", "b": "queue_full_requests"}
    assert done.results[0].response["status_code"] == 429


def test_a_displaced_request_is_begun_again():
    async def check():
        run = Run([completion("a")], fail_after=1, fault=RejectedError(Rejection("displaced", "higher class", 1.0)))
        submit_all = run.engine.submit_all

        def submit_and_heal(submissions):
            if run.engine.submitted:
                run.engine.fail_after = None
            return submit_all(submissions)

        run.engine.submit_all = submit_and_heal
        return await run.run()

    done = asyncio.run(check())
    assert len(done.engine.submitted) == 2 and done.codes == {"a": None}


def test_a_dead_engine_ends_the_run_without_results_for_what_was_in_progress():
    async def check():
        run = Run([completion("a", max_tokens=1), *LINES[2:]], fail_after=2, fault=EngineDeadError("it died"))
        with pytest.raises(EngineStoppedError, match="it died"):
            await run.run()
        return run

    done = asyncio.run(check())
    assert set(done.ids) <= {"a", "d", "f"} and set(done.codes.values()) == {None}
    assert not done.engine.live, "nothing is left running"


def test_after_a_stop_what_runs_ends_and_nothing_begins():
    async def check():
        run = Run([completion(str(index), max_tokens=3) for index in range(50)])
        run.engine.hold_off.clear()
        running = asyncio.create_task(run.run())
        await until_async(lambda: len(run.engine.live) == 4)
        run.runner.stop(grace_s=20.0)
        run.engine.hold_off.set()
        return await running

    done = asyncio.run(check())
    assert sorted(done.ids) == ["0", "1", "2", "3"] and set(done.codes.values()) == {None}


def test_past_the_grace_what_runs_is_aborted_and_unwritten():
    async def check():
        run = Run([completion("a", max_tokens=1), completion("b", max_tokens=3)], step_s=0.01)
        running = asyncio.create_task(run.run())
        await until_async(lambda: run.ids == ["a"])
        run.engine.hold_off.clear()
        run.runner.stop(grace_s=0.05)
        return await running

    done = asyncio.run(check())
    assert done.ids == ["a"] and not done.engine.live and done.engine.num_cancelled == 1
