"""What a soak makes of a server that dies, answers half, or fails requests: a breach, unless faults are allowed."""

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web

from jaxserve.soak.findings import Findings
from jaxserve.soak.kinds import Sizes
from jaxserve.soak.probes import COMMON, PROBES, Probes
from jaxserve.soak.run import Subject, soak
from jaxserve.soak.schedule import Shape
from jaxserve.soak.watch import Limits, Watch

KV = {"pages_free": 3, "pages_cached": 1, "pages_owned": 0, "pages_total": 4}
TOTALS = {"offered": 2, "completed": 2, "rejected": 0, "expired": 0, "aborted": 0, "failed": 0}
STATE = {"num_requests_running": 0, "num_requests_waiting": 0, "kv": KV, "totals": TOTALS}
METRICS = {
    "compiles_total": 5,
    "process_resident_memory_bytes": 1e6,
    "process_threads": 9,
    "asyncio_tasks": 4,
    "process_open_fds": 20,
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0,
    "request_success_total": 2,
    "requests_rejected_total": 0,
    "requests_offered_total": 2,
}


class Scripted:
    """A server whose answers are its attributes.

    Attributes:
      state: of /debug/state, an object or a text; metrics: by name.
      completion: of /v1/completions: a status and a body, or None: the connection breaks.
      url: within `session`.
    """

    def __init__(self):
        self.state, self.metrics, self.completion, self.url = STATE, dict(METRICS), None, ""

    async def _state(self, _):
        if isinstance(self.state, str):
            return web.Response(text=self.state, content_type="application/json")
        return web.json_response(self.state)

    async def _metrics(self, _):
        return web.Response(text="".join(f"jaxserve:{name} {value}\n" for name, value in self.metrics.items()))

    async def _complete(self, request):
        if self.completion is None:
            request.transport.abort()
        status, body = self.completion or (500, {})
        return web.json_response(body, status=status)

    async def _health(self, _):
        return web.Response()

    @contextlib.asynccontextmanager
    async def session(self):
        app = web.Application()
        app.router.add_get("/debug/state", self._state)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with aiohttp.ClientSession(self.url) as session:
                yield session
        finally:
            await runner.cleanup()


def without(document, key):
    return {name: value for name, value in document.items() if name != key}


LACKING = [
    *({"state": without(STATE, key)} for key in STATE),
    *({"state": STATE | {"kv": without(KV, key)}} for key in KV),
    *({"state": STATE | {"totals": without(TOTALS, key)}} for key in TOTALS),
    *({"metrics": without(METRICS, key)} for key in METRICS),
    {"metrics": {}},
    {"state": []},
    {"state": '{"num_requests_run'},
]


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("change", LACKING, ids=map(str, range(len(LACKING))))
def test_an_answer_that_lacks_a_part_is_one_that_did_not_come(change, faults):
    server, findings = Scripted(), Findings(faults_allowed=faults)

    async def watch():
        async with server.session() as session:
            watching = Watch(session, findings, Limits())
            await watching.start()
            await watching.rest()
            assert not findings.num_breaches and len(watching.rests) == 1
            for name, value in change.items():
                setattr(server, name, value)
            await watching.rest()
            await watching._look(watching._state), await watching._look(watching._read_metrics)
            await watching.stop()
            assert watching.last.keys() == METRICS.keys(), "what is reported at the end is whole"

    asyncio.run(watch())
    assert {breach.rule for breach in findings.breaches} == (set() if faults else {"watch"})
    if faults:
        assert findings.outcomes["watch"]["not answered"] >= 1


def test_a_server_that_has_refused_nobody_is_clean():
    server, findings = Scripted(), Findings()
    del server.metrics["requests_rejected_total"]

    async def watch():
        async with server.session() as session:
            watching = Watch(session, findings, Limits())
            await watching.start()
            await watching.rest()
            await watching.stop()

    asyncio.run(watch())
    assert not findings.num_breaches


def test_what_does_not_add_up_is_a_breach_though_faults_are_allowed():
    server, findings = Scripted(), Findings(faults_allowed=True)

    async def watch():
        async with server.session() as session:
            watching = Watch(session, findings, Limits())
            await watching.start()
            server.state = STATE | {"totals": TOTALS | {"offered": 3}, "kv": KV | {"pages_free": 2}}
            await watching._look(watching._state)
            await watching.stop()

    asyncio.run(watch())
    assert {"conservation", "pages"} <= {breach.rule for breach in findings.breaches}


def choices(number, *, ids=(1, 2, 3)):
    """An answer of a probe, whose second token is far likelier than any other."""
    top = [{"a": -0.1, "b": -9.0}] * len(ids)
    return [
        {"index": index, "token_ids": list(ids), "logprobs": {"top_logprobs": top}}
        for index in range(PROBES[number].get("n", 1))
    ]


def probed(completion, *, faults, number=0, **more):
    """Findings of a probe that was learnt and is then answered so."""
    server, findings = Scripted(), Findings(faults_allowed=faults)

    async def probe():
        async with server.session() as session:
            probes = Probes(session, findings)
            probes._solo = [choices(each) for each in range(len(PROBES))]
            server.completion = completion
            await probes.check(number, **more)

    assert COMMON["return_token_ids"]
    asyncio.run(probe())
    return findings


@pytest.fixture(autouse=True)
def few_tries(monkeypatch):
    monkeypatch.setattr("jaxserve.soak.probes.TRIES", 1)


@pytest.mark.parametrize("completion", [None, (500, {}), (503, {}), (504, {})], ids=str)
def test_a_probe_may_fail_under_faults_alone(completion):
    assert [breach.rule for breach in probed(completion, faults=False).breaches] == ["probe"]
    findings = probed(completion, faults=True)
    assert not findings.num_breaches and sum(findings.outcomes["probe"].values()) == 1


@pytest.mark.parametrize("completion", [None, (500, {})], ids=str)
def test_the_last_probes_are_answered_also_under_faults(completion):
    findings = probed(completion, faults=True, must_answer=True)
    assert [breach.rule for breach in findings.breaches] == ["probe"]


def test_a_server_that_answers_nobody_does_not_pass_for_one_under_faults():
    server = Scripted()

    def alive():
        """It breaks once the probes are known."""
        server.state, server.metrics, server.completion = {}, {}, (500, {})
        return True

    async def run():
        async with server.session():
            subject = Subject(server.url, "127.0.0.1:1", alive)
            return await soak(subject, 0, Shape(0.4, rate=1, mixed_s=0.2, burst=1, storm=1), Sizes(), Limits(), True)

    server.completion = (200, {"choices": choices(0)})
    soaked = asyncio.run(run())
    assert {"idle-clean", "probe"} <= {breach.rule for breach in soaked.findings.breaches}


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("ids", [(1, 2, 4), (1, 2), (), (1, 2, 3, 4)])
@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_probe_never_has_other_ids(number, ids, faults):
    findings = probed((200, {"choices": choices(number, ids=ids)}), faults=faults, number=number)
    assert [breach.rule for breach in findings.breaches] == ["probe"]
    assert findings.outcomes["probe"] == {"other ids": 1}


@pytest.mark.parametrize("faults", [False, True])
def test_a_probe_that_is_refused_as_a_bad_request_is_a_breach(faults):
    assert [breach.rule for breach in probed((400, {}), faults=faults).breaches] == ["probe"]


def test_a_probe_with_its_ids_is_well():
    findings = probed((200, {"choices": choices(5)}), faults=False, number=5)
    assert not findings.num_breaches and findings.outcomes["probe"] == {"same ids": 1}
