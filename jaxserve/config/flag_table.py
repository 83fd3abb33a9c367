"""The table of flags: every flag's name, heading, parser, help, and the commands that take it."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from absl.flags import ArgumentParser, BooleanParser

from jaxserve.config.batch_flags import BATCH_FLAGS
from jaxserve.config.bench_flags import BENCH_FLAGS, LOG_LEVELS
from jaxserve.config.convert_flags import CONVERT_FLAGS
from jaxserve.config.disaggregation_flags import DISAGGREGATION_FLAGS, SIMULATED_SPLIT_FLAGS
from jaxserve.config.engine_config import (
    ATTENTION_IMPLEMENTATIONS,
    DECODER_IMPLEMENTATIONS,
    DTYPES,
    KV_CACHE_DTYPES,
    MATMUL_IMPLEMENTATIONS,
    QUANTIZATIONS,
    WEIGHT_DTYPES,
    EngineConfig,
    SchedulerConfig,
)
from jaxserve.config.flag import Flag, flags_for
from jaxserve.config.flag_parsers import (
    ChoiceParser,
    FloatParser,
    IntParser,
    ListParser,
    RepeatedParser,
    ServiceClassParser,
    TextParser,
)
from jaxserve.config.front_flags import FRONT_OPERATION_FLAGS, SERVER_DRAIN_FLAGS, SERVER_NETWORK_FLAGS
from jaxserve.config.hosts_flags import HOSTS_FLAGS
from jaxserve.config.plan_flags import PLAN_FLAGS, PLANNED
from jaxserve.config.policy_config import BATCHINGS, POLICIES, PREEMPTIONS, RESERVATIONS, VICTIMS
from jaxserve.config.router_flags import ROUTER_FLAGS, ROUTING_FLAGS
from jaxserve.config.tool_parsers import AUTO_TOOL_CALL_PARSER, TOOL_CALL_PARSERS
from jaxserve.config.watch_flags import DEATH_FLAGS, HEADING, WATCH_FLAGS
from jaxserve.faults import ALLOW_VARIABLE

ENGINE_COMMANDS = frozenset({"server", "batch"})
"""Commands that take every engine flag."""

SIMULATED = frozenset(field.name for field in fields(SchedulerConfig)) | {
    "dtype",
    "enable_chunked_prefill",
    "memory_fraction",
    "tensor_parallel_size",
    "trace_file",
}
"""Engine flags that `simulate` takes too: the scheduler's, and those that decide sizes, chips and the trace."""
COST_MODELS = ("unit", "linear", "roofline")
CHIPS = ("v5e", "v5p", "v6e", "h100", "h200")


_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_INT, _FLOAT, _TEXT, _BOOL = IntParser(), FloatParser(), TextParser(), BooleanParser()
_COUNT, _COUNTS = IntParser(low=1), ListParser(IntParser(low=1))


def _commands_of(name: str) -> frozenset[str]:
    """That take an engine flag."""
    others = {"simulate": SIMULATED, "plan": PLANNED}
    return ENGINE_COMMANDS | {command for command, names in others.items() if name in names}


def _of_roofline(*flags: tuple[str, ArgumentParser[Any], Any, str]) -> list[Flag]:
    """What decides a roofline's times, in `simulate` and `plan`."""
    return [replace(flag, commands=flag.commands | {"plan"}) for flag in _simulate("Cost of an iteration", *flags)]


def _engine(heading: str, *flags: tuple[str, ArgumentParser[Any], str]) -> list[Flag]:
    return [
        Flag(
            name,
            heading,
            parser,
            text,
            _DEFAULTS[name],
            _commands_of(name),
        )
        for name, parser, text in flags
    ]


_server = partial(flags_for, "server")
_replay, _doctor, _simulate = partial(flags_for, "replay"), partial(flags_for, "doctor"), partial(flags_for, "simulate")
_top = partial(flags_for, "top")
_QUIET = ("log_level", ChoiceParser(LOG_LEVELS), "warning", "least level that is logged")


def _scheduler_only(*flags: tuple[str, ArgumentParser[Any], str]) -> list[Flag]:
    """Settings of the scheduler that no engine flag sets."""
    defaults = {field.name: field.default for field in fields(SchedulerConfig) if field.name not in _DEFAULTS}
    heading = "Scheduling beyond the server's flags"
    return _simulate(heading, *((name, parser, defaults[name], text) for name, parser, text in flags))


FLAGS: tuple[Flag, ...] = (
    *BATCH_FLAGS,
    *PLAN_FLAGS,
    *ROUTER_FLAGS,
    *_simulate(
        "Simulation",
        ("scenario", _TEXT, None, "scenario file: requests by iteration, and the trace they should give"),
        ("workload", _TEXT, None, "workload file: arrivals and lengths, a list of requests, or a recorded trace"),
        ("output", _TEXT, None, "write the result to this file, as JSON"),
        ("plots", _TEXT, None, "draw the run, or the sweep, into this folder; needs the plots extra"),
        ("plot_format", ChoiceParser(("svg", "png")), "svg", "of the plots"),
        ("iteration_limit", _COUNT, None, "stop after so many iterations; default: a million in a scenario"),
        ("log_level", ChoiceParser(LOG_LEVELS), "warning", "least level that is logged"),
    ),
    *_simulate(
        "Cost of an iteration",
        ("cost_model", ChoiceParser(COST_MODELS), "unit", "unit: 1 s; linear: from cost_file; roofline: of a chip"),
        ("cost_file", _TEXT, None, "coefficients of the linear model, as tools/fit_cost_model writes them"),
        ("chip", ChoiceParser(CHIPS), "h100", "of the roofline"),
        ("model_config", _TEXT, None, "the roofline's model: a config.json as in configs/models, or its directory"),
        ("weight_bits", IntParser(1, 32), None, "bits of a weight, for the roofline; default: dtype's"),
        ("kv_bits", IntParser(1, 32), None, "bits of a number in the KV cache, for the roofline; default: dtype's"),
    ),
    *_of_roofline(
        ("compute_efficiency", FloatParser(low=1e-3), 0.6, "share of the chip's FLOP/s that is reached"),
        ("memory_efficiency", FloatParser(low=1e-3), 0.8, "share of the chip's bandwidth that is reached"),
        ("overhead_s", FloatParser(low=0), 5e-4, "seconds of an iteration outside the roofline: host and launch"),
    ),
    *_simulate(
        "Cost of an iteration",
        ("host_bandwidth", FloatParser(low=1e-3), 25.0, "GB/s between a chip and the host, for swapped pages"),
    ),
    *SIMULATED_SPLIT_FLAGS,
    *_simulate(
        "Objectives and sweeps",
        ("slo_ttft_s", FloatParser(low=0), None, "most seconds from arrival to first token"),
        ("slo_itl_s", FloatParser(low=0), None, "most seconds between any two successive tokens"),
        ("slo_tpot_s", FloatParser(low=0), None, "most seconds per output token after the first"),
        ("slo_share", FloatParser(low=0), 0.99, "share of the offered requests that must meet their objectives"),
        ("rate", FloatParser(low=1e-9), None, "requests per second instead of the workload's own"),
        ("sweep_rates", ListParser(FloatParser(low=1e-9)), None, "run at each of these rates, as 1,2,4"),
        ("find_rate", _BOOL, False, "find the highest rate at which slo_share of the requests meet their objectives"),
        (
            "sweep",
            RepeatedParser(),
            None,
            "try each value of a scheduler flag, as prefill_chunk=128,256,512; given several times, all combinations;"
            " with find_rate the highest rate of each",
        ),
    ),
    *_simulate(
        "Replicas",
        ("num_replicas", _COUNT, 1, "replicas of the engine behind a router; figures are of all requests together"),
        *ROUTING_FLAGS,
    ),
    *flags_for(
        "fit_cost_model",
        "Fit",
        ("output", _TEXT, None, "write the coefficients to this file, as JSON, for simulate --cost_file"),
        _QUIET,
    ),
    *flags_for("field_figures", "Figures", ("output", _TEXT, None, "write the figures to this file, as JSON"), _QUIET),
    *_scheduler_only(
        ("arrivals_claim_slots", _BOOL, "an arrival may take a free slot ahead of the waiting queue"),
        ("max_prefill_seqs", _COUNT, "most requests with a prompt chunk in one iteration"),
        ("max_steps_ahead", IntParser(low=0), "iterations that the host plans ahead of the device"),
        ("num_host_pages", IntParser(low=0), "pages of host memory, for preemption swap and auto"),
        ("sliding_window", IntParser(low=0), "tokens that every layer of the model sees at most; 0: all"),
        (
            "group_windows",
            ListParser(IntParser(low=0)),
            "windows of groups of layers with pages of their own, as 0,512,512 (0: all); default: one group",
        ),
    ),
    *_engine(
        "Model",
        ("model", _TEXT, "smollm2-135m (demo), a Hugging Face directory, a .gguf, an Orbax directory or a hub id"),
        ("tokenizer", _TEXT, "directory or tokenizer.json, when it is not beside the weights"),
        ("chat_template", _TEXT, "file with a Jinja chat template to use instead of the model's"),
        (
            "special_tokens_in_chat",
            _BOOL,
            "special tokens written out in messages are tokens: who writes a message can end it and begin others",
        ),
        ("skip_tokenizer_init", _BOOL, "load no tokenizer: prompts must be token ids"),
        ("served_model_name", _TEXT, "name on the API; default: the model's last path component"),
        ("dtype", ChoiceParser(DTYPES), "of weights, activations and KV pages"),
        (
            "quantization",
            ChoiceParser(QUANTIZATIONS),
            "keep weights quantised: in blocks (gguf: the file's own), or with a scale per output channel",
        ),
        (
            "weight_dtype",
            ChoiceParser(WEIGHT_DTYPES),
            "of matrices, with dtype float32; auto keeps those stored in 16 bits so on one CPU device, which is exact",
        ),
        ("seed", _INT, "makes seeds drawn for requests without one repeat from run to run; default: fresh ones"),
        ("tensor_parallel_size", _INT, "devices that share the model"),
        ("attention_implementation", ChoiceParser(ATTENTION_IMPLEMENTATIONS), "of paged attention"),
        (
            "matmul_implementation",
            ChoiceParser(MATMUL_IMPLEMENTATIONS),
            "of products with weights; native_cpu packs them for the processor, auto does so on one CPU device",
        ),
        (
            "decoder_implementation",
            ChoiceParser(DECODER_IMPLEMENTATIONS),
            "of the decoder layers; native_cpu runs all of them in one call, auto does so where it can, xla never",
        ),
        ("scan_layers", _BOOL, "one compiled layer body for all layers; default: by device"),
    ),
    *_engine(
        "Context and batching",
        ("max_model_len", _INT, "most tokens, prompt and output, of a request; default: the model's limit"),
        ("max_num_seqs", _INT, "slots: requests that decode at once"),
        ("max_num_batched_tokens", _INT, "token budget of one iteration, prefill and decode together"),
        ("enable_chunked_prefill", _BOOL, "a prompt may be spread over iterations"),
        ("prefill_chunk", _COUNT, "most prompt tokens of a request in an iteration; default: the token budget"),
        ("overlap", _BOOL, "plan and dispatch an iteration before the last one's tokens are on the host"),
    ),
    *_engine(
        "Waiting queue and scheduling",
        ("max_queue_requests", _INT, "most requests that wait; more are refused"),
        ("max_queue_tokens", _INT, "most tokens, prompt and output, that wait; more are refused"),
        ("policy", ChoiceParser(POLICIES), "order of the waiting queue"),
        ("priority_aging_s", _FLOAT, "policy priority: seconds of waiting that outweigh one point of priority"),
        ("sjf_aging_tokens_per_s", _FLOAT, "policy sjf: tokens of work that a second of waiting outweighs"),
        ("edf_default_s", _FLOAT, "policy edf: deadline after arrival of a request without one"),
        ("fair_input_weight", _FLOAT, "policy fair: service counted per prompt token"),
        ("fair_output_weight", _FLOAT, "policy fair: service counted per output token"),
        ("service_classes", ServiceClassParser(), "JSON file of service classes: limits, targets and defaults"),
        ("queue_displacement", _BOOL, "an arrival at a full queue may displace a queued request of lower class"),
        ("reservation", ChoiceParser(RESERVATIONS), "pages a request must find to be admitted"),
        ("expected_quantile", _FLOAT, "reservation expected: quantile of the observed output lengths"),
        (
            "preemption",
            ChoiceParser(PREEMPTIONS),
            "what a preempted request gives up: its slot alone (pause), or its pages too, which are copied to the host"
            " (swap) or computed again (recompute); auto: the cheaper of these two",
        ),
        ("victim", ChoiceParser(VICTIMS), "whom of the lowest class a preemption hits"),
        ("max_preemptions", _INT, "a request preempted so often is not preempted again"),
        ("priority_preemption", _BOOL, "a request of higher priority may take the slot of a lower one"),
        ("long_prefill_token_threshold", _INT, "a prompt with more tokens left than this is long; 0: none is"),
        ("max_long_prefills", _INT, "most long prompts with a chunk in one iteration"),
        ("itl_target_s", _FLOAT, "prompts get what this step time leaves after decode; default: the whole budget"),
        (
            "max_decode_steps",
            _INT,
            "most decode steps of an iteration: several where no prompt is left, nobody waits but for a slot, and no"
            " row needs the host between; 1: off",
        ),
        (
            "max_arrival_delay_s",
            _FLOAT,
            "seconds that a request which arrives while such an iteration runs may lose to its further steps",
        ),
        ("batching", ChoiceParser(BATCHINGS), "continuous; static and request_dynamic are there for comparison"),
        ("batch_timeout_s", _FLOAT, "batching request_dynamic: longest wait for a batch to fill"),
    ),
    *_engine(
        "Structured output",
        ("max_grammar_bytes", _INT, "longest JSON schema, regular expression or grammar of a request"),
    ),
    *_engine(
        "KV cache and memory",
        ("page_size", _INT, "tokens per KV page; a power of two up to 256"),
        ("num_pages", _INT, "KV pages, the null page included; default: as many as memory_fraction allows"),
        ("swap_space", _FLOAT, "GiB of host memory for pages of preempted requests (preemption swap and auto)"),
        (
            "kv_cache_dtype",
            ChoiceParser(KV_CACHE_DTYPES),
            "of KV pages; auto: --dtype; int8, fp8: 8 bits and a scale per token and KV head",
        ),
        ("enable_prefix_caching", _BOOL, "keep full pages of ended requests and share them between equal beginnings"),
        ("memory_fraction", _FLOAT, "share of the free memory for weights, workspace and KV pages"),
    ),
    *_engine(
        "LoRA adapters",
        ("enable_lora", _BOOL, "requests may name a LoRA adapter as their model"),
        ("max_loras", _INT, "adapters on the device at once; memory and work grow with it"),
        ("max_lora_rank", _INT, "largest rank of an adapter; memory and work grow with it"),
        (
            "lora_modules",
            RepeatedParser(),
            "NAME=DIRECTORY of an adapter to load at the start; may be given several times",
        ),
    ),
    *_server(
        "LoRA adapters",
        (
            "allow_runtime_lora_updating",
            _BOOL,
            False,
            "adapters may be loaded and unloaded over HTTP, with a key that has no tenant",
        ),
        ("runtime_lora_root", _TEXT, "", "folder that such adapters must lie in; empty: any that the server can read"),
    ),
    *_engine(
        "Compiled shapes",
        ("decode_buckets", _COUNTS, "decode batch sizes to compile, as 1,4,8; default: chosen"),
        ("prefill_buckets", _COUNTS, "prefill token counts to compile; default: chosen"),
        ("table_width_buckets", _COUNTS, "page-table widths to compile, in pages; default: chosen"),
        ("compile_cache", _TEXT, "folder of compiled programs; empty: none; default: under the cache folder"),
    ),
    *_engine("Several hosts", *HOSTS_FLAGS),
    *_engine(HEADING, *WATCH_FLAGS),
    *DEATH_FLAGS,
    *SERVER_NETWORK_FLAGS,
    *DISAGGREGATION_FLAGS,
    Flag(
        "tool_call_parser",
        "Tools",
        ChoiceParser((AUTO_TOOL_CALL_PARSER, *TOOL_CALL_PARSERS)),
        "how the model writes tool calls; auto: as its chat template tells",
        AUTO_TOOL_CALL_PARSER,
        ENGINE_COMMANDS,
    ),
    *FRONT_OPERATION_FLAGS,
    *SERVER_DRAIN_FLAGS,
    *_server(
        "Operation",
        ("metrics_compat", ChoiceParser(("", "vllm")), "", "vllm: also export metrics under vLLM's names"),
        ("profile_dir", _TEXT, "", "folder for the traces of POST /start_profile; empty: profiling is refused"),
        ("stats_interval_s", FloatParser(low=0), 10.0, "seconds between stats lines while requests run; 0: none"),
        ("log_requests", _BOOL, False, "log a line per ended request: counts, times, finish reason, status"),
        ("log_prompts", _BOOL, False, "log_requests with the prompts' texts, cut to max_log_len"),
        ("max_log_len", _COUNT, 256, "most characters of a prompt that are logged"),
        ("trace_buffer", IntParser(low=0), 1000, "iterations kept in memory for GET /debug/trace; 0: none"),
        ("enable_playground", _BOOL, True, "serve the playground, a page to try the model, at /"),
        ("otlp_endpoint", _TEXT, None, "OTLP/HTTP collector that gets a span per request; needs the otel extra"),
        ("dry_run", _BOOL, False, "print the memory plan, without loading weights or serving, and exit"),
    ),
    *_engine(
        "Operation",
        ("trace_file", _TEXT, "write a record of every iteration to this file, as JSON lines"),
    ),
    *flags_for(
        ENGINE_COMMANDS,
        "Operation",
        (
            "fault_plan",
            _TEXT,
            None,
            f"for tests: JSON file of faults to happen; refused unless {ALLOW_VARIABLE}=1 is in the environment",
        ),
    ),
    *BENCH_FLAGS,
    *CONVERT_FLAGS,
    *_replay(
        "Replay",
        ("trace", _TEXT, None, "the file that --trace_file wrote"),
        ("output", _TEXT, None, "write the replayed trace to this file"),
        ("perfetto", _TEXT, None, "write the trace to this file in Chrome's trace event format, for ui.perfetto.dev"),
        (
            "with_trace",
            RepeatedParser(),
            None,
            "draw another engine's trace of that time and machine into perfetto too",
        ),
        _QUIET,
    ),
    *_doctor(
        "Diagnosis",
        ("trace", _TEXT, None, "the file that --trace_file wrote"),
        ("url", _TEXT, None, "a running server, as http://127.0.0.1:8000; its /metrics is read instead of a trace"),
        (
            "api_key",
            _TEXT,
            None,
            "any key of a server that guards its probes (guard_probes); better given as JAXSERVE_API_KEY",
        ),
        ("json", _BOOL, False, "print the figures and diagnoses as JSON"),
        _QUIET,
    ),
    *_top(
        "View",
        ("url", _TEXT, "http://127.0.0.1:8000", "the server to look at"),
        ("api_key", _TEXT, None, "key of the server's, without a tenant; better given as JAXSERVE_API_KEY"),
        ("interval_s", FloatParser(low=0.1), 1.0, "seconds between two frames"),
        ("once", _BOOL, False, "print one frame, of interval_s, and exit"),
        _QUIET,
    ),
)
