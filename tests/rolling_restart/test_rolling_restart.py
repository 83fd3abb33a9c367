"""Servers behind a plain TCP balancer are restarted one by one, and no client notices."""

import asyncio

from jaxserve.rolling_restart.balancer import Backend, Balancer
from jaxserve.rolling_restart.restart import rolling_restart
from jaxserve.testing.serving_process import ServingProcess


def test_no_request_fails_while_every_server_is_restarted(tiny_model_dir, compile_cache):
    flags = [
        *(f"--model={tiny_model_dir}", "--dtype=float32", "--max_num_seqs=8", "--max_model_len=128", "--num_pages=80"),
        *("--decode_buckets=8", "--prefill_buckets=64", "--table_width_buckets=8", "--max_num_batched_tokens=64"),
        *("--drain_delay_s=1", f"--compile_cache={compile_cache}"),
    ]
    started = []

    def start():
        started.append(ServingProcess(flags))
        return started[-1].wait_until_ready()

    try:
        servers = [start(), start()]
        before = [server.pid for server in servers]
        restarted = asyncio.run(rolling_restart(start, servers, count=1, max_tokens=40))
        assert restarted.clients.failures == []
        assert len(restarted.clients.served) == 4 and all(count > 5 for count in restarted.clients.served.values())
        assert not set(before) & {server.pid for server in servers} and all(each.poll() is None for each in servers)
    finally:
        for server in started:
            server.end()


def test_the_balancer_passes_over_servers_that_are_not_ready():
    async def answering(status, name):
        async def answer(reader, writer):
            line = await reader.readline()
            writer.write(f"HTTP/1.1 {status} x\r\n\r\n".encode() if b"/ready" in line else name)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        return server, server.sockets[0].getsockname()[1]

    async def ask(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async def check():
        good, good_port = await answering(200, b"good")
        bad, bad_port = await answering(503, b"bad")
        async with good, bad:
            backends = [Backend("127.0.0.1", port, port) for port in (bad_port, good_port)]
            async with Balancer(backends, probe_s=0.05) as balancer:
                return [await ask(balancer.port) for _ in range(6)]

    assert asyncio.run(check()) == [b"good"] * 6
