"""The flags of `python -m jaxserve.bench`: some are of every measurement, most of one or two."""

from __future__ import annotations

from dataclasses import fields

from absl.flags import BooleanParser

from jaxserve.config.engine_config import DTYPES, QUANTIZATIONS, WEIGHT_DTYPES, EngineConfig
from jaxserve.config.flag import Flag, flags_for
from jaxserve.config.flag_parsers import ChoiceParser, FloatParser, IntParser, ListParser, RepeatedParser, TextParser
from jaxserve.config.policy_config import POLICIES

LOG_LEVELS = ("debug", "info", "warning", "error")
LOAD_ARRIVALS = ("batch", "poisson", "gamma", "constant", "ramp")

_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_TEXT, _BOOL, _COUNT, _COUNTS = TextParser(), BooleanParser(), IntParser(low=1), ListParser(IntParser(low=1))
_MS, _RATE = FloatParser(low=0), FloatParser(low=1e-9)

BENCH_FLAGS: tuple[Flag, ...] = (
    *flags_for(
        "bench",
        "Measurement",
        (
            "model",
            _TEXT,
            _DEFAULTS["model"],
            "demo name, directory, .gguf, Orbax directory or hub id; host_work, connections, outages: or tiny",
        ),
        (
            "dtypes",
            ListParser(ChoiceParser(DTYPES)),
            DTYPES,
            "dtypes to measure; compare_modes: one, bfloat16; host_work: bfloat16",
        ),
        (
            "quantizations",
            ListParser(ChoiceParser(("none", *QUANTIZATIONS))),
            ("none",),
            "offline, machine: forms of the weights to measure, offline in turns; see the server's quantization",
        ),
        (
            "weight_dtypes",
            ListParser(ChoiceParser(WEIGHT_DTYPES)),
            ("auto",),
            "machine: dtypes of matrices to measure, see the server's weight_dtype",
        ),
        (
            "slots",
            _COUNTS,
            (1, 8, 32),
            "slot counts to measure; compare_modes: one, 8; machine, buckets, host_work: 8,32",
        ),
        ("prompt_tokens", _COUNT, 32, "tokens of each prompt"),
        ("output_tokens", IntParser(low=2), 64, "tokens of each output"),
        ("requests_per_slot", _COUNT, 3, "requests of a run, in slots; decode_steps: 1, so that none waits"),
        ("runs", _COUNT, 3, "runs of each figure; the median is reported; compare_modes: 5"),
        ("overlap", _BOOL, _DEFAULTS["overlap"], "offline, decode_steps, host_work: as the server's flag"),
        (
            "max_decode_steps",
            _COUNTS,
            None,
            "offline: as the server's flag, 1; decode_steps: values to compare, each with the first, 1,8",
        ),
        ("adapters", ListParser(IntParser(low=0)), (0, 1, 4), "lora: numbers of adapters in a batch to measure"),
        ("lora_rank", _COUNT, 16, "lora: rank of the adapters"),
        ("policies", ListParser(ChoiceParser(POLICIES)), POLICIES, "scheduler: orders of the waiting queue to measure"),
        ("running", _COUNTS, (8, 64, 256, 1024), "scheduler: numbers of running requests to measure"),
        (
            "waiting",
            ListParser(IntParser(low=0)),
            (0, 1000, 100_000),
            "scheduler: numbers of waiting requests to measure",
        ),
        (
            "page_share",
            FloatParser(low=0.01),
            0.5,
            "preemption: KV pages, as a share of what the slots' longest requests need together",
        ),
        ("connections", IntParser(low=1), 2000, "connections: connections, streams and calls open at once"),
        ("streams", _COUNTS, (256,), "sse: numbers of streams open at once to measure"),
        ("iterations", _COUNT, 500, "scheduler: iterations of each figure; the median is reported"),
        ("simulated_requests", _COUNT, 10_000, "simulation: requests of its workload"),
        ("context", _COUNT, 200, "machine: tokens of context per row of the decode step"),
        (
            "settings",
            RepeatedParser(),
            None,
            "quality, offline: flags of jaxserve.server, as '--dtype=bfloat16 --quantization=int8'; several times:"
            " offline measures them in turns, quality compares the others with the first",
        ),
        ("text", _TEXT, None, "quality: a text file; default: configs/texts/alice.txt"),
        ("window", IntParser(low=2), 1024, "quality: tokens that are read in one go; the first half are not scored"),
        ("output", _TEXT, None, "write the figures to this file, as JSON"),
        ("log_level", ChoiceParser(LOG_LEVELS), "warning", "least level that is logged"),
    ),
    *flags_for(
        "bench",
        "Servers (serve, overload, compare)",
        ("url", _TEXT, None, "serve, overload: an OpenAI-compatible server, as http://127.0.0.1:8000"),
        (
            "server",
            _TEXT,
            None,
            "serve, overload: start this server instead; flags of jaxserve.server, or a whole command in which {port}"
            " stands for the port",
        ),
        ("api_key", _TEXT, None, "key sent as bearer token; better given as JAXSERVE_API_KEY"),
        ("served_model", _TEXT, None, "model named in requests; default: the first that the server lists"),
        ("a", _TEXT, None, "compare: the first server, as for --server"),
        ("b", _TEXT, None, "compare: the second server, as for --server"),
        ("a_url", _TEXT, None, "compare: the first server, running already"),
        ("b_url", _TEXT, None, "compare: the second server, running already"),
        ("pairs", IntParser(low=5), 5, "compare: runs of each server, in turns"),
        ("one_at_a_time", _BOOL, False, "compare: start a server for each of its runs: for little memory"),
        ("start_timeout_s", FloatParser(low=1), 600.0, "seconds a server may take until it is ready"),
    ),
    *flags_for(
        "bench",
        "Load (serve, overload, compare, compare_modes; buckets: the workload)",
        (
            "workload",
            _TEXT,
            None,
            "w1, w2, w3 (serve), or a file as simulate --workload reads; default: drawn requests, or w1 (buckets,"
            " host_work)",
        ),
        ("num_requests", _COUNT, None, "requests of a run; default: the workload's, or 64"),
        (
            "prompt_lengths",
            _TEXT,
            None,
            "of drawn requests: a number or KIND:FIELD=VALUE,..., as uniform:low=20,high=200 or"
            " lognormal:median=250,sigma=1,max=4000; default: prompt_tokens",
        ),
        ("output_lengths", _TEXT, None, "of drawn requests, likewise; default: output_tokens"),
        ("vocab_size", IntParser(low=2), 256, "token ids of drawn prompts are below this"),
        ("seed", IntParser(low=0), 0, "of every draw"),
        (
            "arrivals",
            ChoiceParser(LOAD_ARRIVALS),
            None,
            "batch: all at once; poisson, gamma, constant: at each of the rates; ramp: poisson, its rate growing evenly"
            " from the rate to ramp_to; default: the workload's own instants, or poisson with rates",
        ),
        ("rates", ListParser(_RATE), None, "requests per second; several: a run at each"),
        ("cv", _RATE, 3.0, "gamma: coefficient of variation of the gaps; above 1 bursty"),
        ("ramp_to", _RATE, None, "ramp: the last rate"),
        ("factors", ListParser(_RATE), None, "rates as factors of the capacity, as 0.5,0.8,1,1.2; overload: 1,2,5,20"),
        ("capacity", _RATE, None, "requests per second; default with factors: measured first, all requests at once"),
        ("long_prompt_every", IntParser(low=0), 0, "every so-manieth request gets a long prompt; 0: none; w3: 10"),
        ("long_prompt_tokens", _COUNT, 2000, "tokens of the long prompts"),
        ("warmup_requests", IntParser(low=0), 8, "requests before each setting that are not counted"),
        ("return_token_ids", _BOOL, False, "ask for token ids, so that a token without text is an event too"),
        ("request_timeout_s", FloatParser(low=0.1), 600.0, "seconds after which a request has failed"),
        ("slo_ttft_ms", _MS, None, "most milliseconds from arrival to first token"),
        ("slo_itl_ms", _MS, None, "most milliseconds between any two successive tokens of a request"),
        ("slo_tpot_ms", _MS, None, "most milliseconds per output token after the first"),
        ("plots", _TEXT, None, "draw the runs into this folder; needs the plots extra"),
        ("plot_format", ChoiceParser(("svg", "png")), "svg", "of the plots"),
    ),
)
