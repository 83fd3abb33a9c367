"""`python -m jaxserve.server`: serves a model over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.config.api_keys import merged_keys
from jaxserve.config.disaggregation_flags import check_disaggregation, kv_token
from jaxserve.config.flags import engine_config_from_flags, exit_with, follow_fault_plan, parse_flags
from jaxserve.config.print_config import settings_as_flagfile, settings_as_json
from jaxserve.core import RequestRecord
from jaxserve.server.log_format import operator_console, queue_logs, set_log_format
from jaxserve.server.tls import tls_files


def main(argv: Sequence[str]) -> int:
    """Parses flags and serves until a signal.

    Returns:
      The exit status.
    """
    flags = parse_flags("server", argv)
    config = engine_config_from_flags(flags)
    follow_fault_plan(flags)
    try:
        api_keys = merged_keys(flags.api_key, flags.api_key_file)
        tls = tls_files(flags.ssl_certfile, flags.ssl_keyfile)
    except ValueError as error:
        exit_with(f"--{error}")
    if flags.allow_runtime_lora_updating and not config.enable_lora:
        exit_with("--allow_runtime_lora_updating is set without --enable_lora; set both")
    if flags.log_prompts and not flags.log_requests:
        exit_with("--log_prompts is set without --log_requests, whose lines would hold the prompts; set both")
    if flags.log_prompts and flags.skip_tokenizer_init:
        exit_with("--log_prompts needs a tokenizer to write prompts with; leave out --skip_tokenizer_init")
    if flags.dry_run and config.several_processes:
        exit_with("--dry_run is set with several processes, which plan together; leave it out, or --num_processes")
    if flags.print_config:
        as_text = settings_as_json if flags.log_format == "json" else settings_as_flagfile
        with contextlib.suppress(BrokenPipeError):  # a reader like `head` has seen enough
            print(as_text("server", flags), flush=True)
        return 0
    try:
        token = kv_token(flags.kv_token_file)
        check_disaggregation(flags, token)
    except ValueError as error:
        exit_with(f"--{error}")
    set_log_format(flags.log_format)
    # jax reports every backend that is not there; what is used shows in the memory plan.
    logging.getLogger("jax").setLevel(logging.WARNING)
    # Imported after the flags are checked: jax takes seconds, a mistyped flag should not.
    from jaxserve.server.dry_run import dry_run

    if flags.dry_run:
        return dry_run(config, flags.log_format)
    from jaxserve.server.otel import SpanSink, otlp_exporter

    try:
        exporter = otlp_exporter(flags.otlp_endpoint) if flags.otlp_endpoint else None
        spans = SpanSink(exporter, lambda: engine.model_name) if exporter else None
    except ValueError as error:
        exit_with(f"--{error}")
    queue_logs("stdout", "stderr")
    process_id = config.process_id or 0
    if config.several_processes and config.process_id is None:
        from jaxserve.hosts import join_processes

        process_id = join_processes(config)
    from jaxserve.engine import AsyncEngine
    from jaxserve.server.bounded_http import http_limits
    from jaxserve.server.console import StartupDisplay
    from jaxserve.server.disaggregated import disaggregation_sides
    from jaxserve.server.host_guard import answered_hosts
    from jaxserve.server.launcher import LAST_EXIT_S, Launcher, ServerSettings
    from jaxserve.server.process import exit_later
    from jaxserve.server.request_log import RequestFeed, RequestLog
    from jaxserve.server.settings import HttpSettings
    from jaxserve.server.stats_line import StatsReporter

    http = HttpSettings(
        api_keys=api_keys,
        guard_probes=flags.guard_probes,
        allowed_origins=flags.allowed_origins,
        allowed_hosts=answered_hosts(flags.allowed_hosts, flags.host, bool(api_keys)),
        max_body_bytes=flags.max_body_bytes,
        metrics_compat=flags.metrics_compat,
        profile_dir=flags.profile_dir,
        enable_playground=flags.enable_playground,
        allow_runtime_lora_updating=flags.allow_runtime_lora_updating,
        runtime_lora_root=flags.runtime_lora_root,
    )
    settings = ServerSettings(
        host=flags.host,
        http_port=flags.http_port,
        grpc_port=flags.grpc_port,
        drain_delay_s=flags.drain_delay_s,
        drain_grace_s=flags.drain_grace_s,
        exit_on_death=flags.exit_on_death,
        http=http,
        tls=tls,
        limits=http_limits(flags),
        tool_call_parser=flags.tool_call_parser,
        kv_host=flags.kv_host,
    )
    if process_id:
        from jaxserve.server.follower import follow_leader

        return follow_leader(config, settings, flags.log_format)
    try:
        remote_prefill, prefill_server = disaggregation_sides(flags, token)
    except OSError as error:
        exit_with(f"--kv_port: prefill cannot be served on {flags.kv_host}:{flags.kv_port}: {error}")
    display = StartupDisplay(
        plan_rows=lambda: engine.engine.runner.memory_plan.rows(), console=operator_console(flags.log_format)
    )
    sinks: list[Callable[[RequestRecord], None]] = []
    if flags.log_requests:
        text_of = (lambda ids: str(engine.tokenizer.decode(ids, False))) if flags.log_prompts else None
        sinks.append(RequestLog(text_of, flags.max_log_len))
    with contextlib.ExitStack() as stack:
        if spans is not None:
            stack.callback(spans.close)
            sinks.append(spans)
        feed = stack.enter_context(RequestFeed(sinks)) if sinks else None
        engine: Any = AsyncEngine(
            config,
            progress=display.progress,
            on_request_end=feed,
            on_death=(lambda: exit_later(LAST_EXIT_S, 1)) if flags.exit_on_death else None,
            trace_buffer=flags.trace_buffer,
        )
        stack.enter_context(StatsReporter(engine, flags.stats_interval_s))

        async def serve() -> int:
            return await Launcher(engine, settings, display, remote_prefill, prefill_server).run()

        return asyncio.run(serve())


if __name__ == "__main__":
    status = main(sys.argv)
    from jaxserve.server.process import end

    end(status)
