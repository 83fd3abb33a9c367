"""EngineConfig: every setting of an engine, checked together before anything is loaded.

One frozen dataclass holds what the flags of `jaxserve.config.flags` set, so the server, the offline
`LLM` class, batch jobs and tests start an engine the same way. Names follow vLLM where one exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config.checks import at_least, not_negative, one_of, positive
from jaxserve.config.hosts_config import check_hosts
from jaxserve.config.policy_config import POLICY_FIELDS, SWAPPING_PREEMPTIONS, PolicyConfig

DTYPES = ("float32", "bfloat16")
WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8")
ATTENTION_IMPLEMENTATIONS = ("auto", "reference", "cpu", "native_cpu", "mosaic_gpu", "mosaic_tpu")
MATMUL_IMPLEMENTATIONS = ("auto", "xla", "native_cpu")
DECODER_IMPLEMENTATIONS = ("auto", "xla", "native_cpu")
DISAGGREGATIONS = ("none", "prefill", "decode")
QUANTIZATIONS = ("gguf", "int8", "int4", "int8_channel", "fp8")
MAX_PAGE_SIZE = 256
MAX_LORA_RANK = 512
MAX_GROUPS = 255
"""Most groups of layers."""


def first_page_seen(num_tokens: int, window: int, page_size: int) -> int:
    """The first page that the token after `num_tokens` sees under a window (0: none)."""
    return max(num_tokens + 1 - window, 0) // page_size if window else 0


@dataclass(frozen=True, slots=True)
class SchedulerConfig(PolicyConfig):
    """Limits the scheduler works under, all counts, and its policies.

    Attributes:
      max_num_seqs: slots.
      max_num_batched_tokens: token budget of one iteration, prefill and decode together.
      prefill_chunk: most prompt tokens of one request in one iteration.
      page_size: tokens in a page.
      num_pages: pages in the pool, the null page 0 included.
      num_host_pages: pages of host memory for swapped requests; needed, and used, by "swap" and "auto" alone.
      max_model_len: most tokens (prompt + output) of one request.
      max_queue_requests, max_queue_tokens: bounds of the waiting queue (tokens: prompt + max output).
      max_prefill_seqs: most requests with a prompt chunk in one iteration.
      max_steps_ahead: plans that may be in flight when the next one is made.
      arrivals_claim_slots: an arrival may take a free slot ahead of the waiting queue.
      sliding_window: tokens that a query sees in every layer at most, its own included: pages of older ones are given
        back while their request runs; 0: some layer sees all.
      group_windows: where layers lie in several groups of equal size with pages of their own, the window of each, 0: it
        sees all; groups of one window stand together. Empty: all layers are one group, under `sliding_window`.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    prefill_chunk: int = 512
    page_size: int = 16
    num_pages: int = 513
    num_host_pages: int = 0
    max_model_len: int = 1024
    max_queue_requests: int = 256
    max_queue_tokens: int = 1 << 20
    max_prefill_seqs: int = 8
    max_steps_ahead: int = 0
    arrivals_claim_slots: bool = False
    sliding_window: int = 0
    group_windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        at_least("prefill_chunk", self.prefill_chunk, 1)
        at_least("max_model_len", self.max_model_len, 2)
        at_least("max_queue_requests", self.max_queue_requests, 0)
        at_least("max_queue_tokens", self.max_queue_tokens, 0)
        at_least("max_prefill_seqs", self.max_prefill_seqs, 1)
        check_page_size(self.page_size)
        if self.num_pages < 2:
            raise ValueError(
                f"num_pages is {self.num_pages}; it must be at least 2: page 0 is the null page and holds no tokens"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs} and max_num_batched_tokens is {self.max_num_batched_tokens};"
                " every slot needs one token per iteration, so max_num_seqs must be at most max_num_batched_tokens"
            )
        at_least("max_steps_ahead", self.max_steps_ahead, 0)
        at_least("num_host_pages", self.num_host_pages, 0)
        at_least("sliding_window", self.sliding_window, 0)
        self._check_groups()
        self.check_policies()
        if (self.preemption in SWAPPING_PREEMPTIONS) != (self.num_host_pages > 0):
            raise ValueError(
                f"num_host_pages is {self.num_host_pages} and preemption is {self.preemption!r}; it must be at least 1"
                " with preemption swap or auto, which copy pages to the host, and 0 without"
            )

    def _check_groups(self) -> None:
        object.__setattr__(self, "group_windows", tuple(self.group_windows or ()))
        windows = self.group_windows
        if not windows:
            return
        ordered = [window for window in dict.fromkeys(windows) for _ in range(windows.count(window))]
        if not 2 <= len(windows) <= MAX_GROUPS or min(windows) < 0 or list(windows) != ordered:
            raise ValueError(
                f"group_windows is {windows}; it must have 2 to {MAX_GROUPS} numbers of at least 0, equal ones side by"
                " side; for one group set sliding_window"
            )
        if self.sliding_window:
            raise ValueError(f"sliding_window is {self.sliding_window} and group_windows is {windows}; set one of them")

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each group of layers the tokens that a query sees, its own included; 0: all."""
        return self.group_windows or (self.sliding_window,)

    @property
    def pages_per_seq(self) -> int:
        """Pages of a sequence of `max_model_len` tokens, in one group of layers."""
        return -(-self.max_model_len // self.page_size)

    @property
    def most_pages_per_seq(self) -> int:
        """Pages that a sequence holds at once, at most, in all groups of layers together."""
        count = max(min(self.prefill_chunk, self.max_num_batched_tokens), self.max_decode_steps)
        return sum(min(self.pages_per_seq, self.pages_spanned(count, window)) for window in self.windows)

    def pages_needed(self, num_tokens: int) -> int:
        """Pages without which a sequence of `num_tokens` cannot run, in all groups of layers together."""
        pages, chunk = -(-num_tokens // self.page_size), min(self.prefill_chunk, self.max_num_batched_tokens)
        return sum([min(pages, self.pages_spanned(chunk, window)) if window else pages for window in self.windows])

    def pages_spanned(self, num_tokens: int, window: int) -> int:
        """Pages that `num_tokens` successive tokens and all that they see under a window (0: none) lie in, at most."""
        if not window:
            return self.pages_per_seq
        return -(-(window + num_tokens - 2) // self.page_size) + 1


@dataclass(frozen=True, slots=True)
class EngineConfig(PolicyConfig):
    """Settings of one engine; None means "choose from the model and the machine".

    Attributes:
      model: `smollm2-135m`, a Hugging Face directory, a .gguf file, an Orbax directory or a hub id.
      tokenizer: directory or tokenizer.json when it is not beside the weights.
      chat_template: file with a Jinja chat template to use instead of the model's.
      special_tokens_in_chat: special tokens written out in messages are recognised, not only the chat template's.
      skip_tokenizer_init: load no tokenizer; prompts must be token ids and texts stay empty.
      served_model_name: name on the API; the model's last path component when None.
      seed: makes the seeds drawn for requests without one repeat from run to run; None: fresh ones.
      dtype: of weights and activations, and of KV pages unless `kv_cache_dtype` says otherwise.
      quantization: keeps weights quantised in memory: "gguf", the blocks of a GGUF file; "int8" and "int4", in blocks
        of 32 made at load; "int8_channel" and "fp8" (float8_e4m3fn) with a scale per output channel. None: weights are
        of `dtype`.
      weight_dtype: of matrices that are not quantised, if `dtype` is float32: "auto" keeps those that the checkpoint
        has in 16 bits so where they are packed (one CPU device), which changes no result.
      max_model_len: most tokens of a request; the model's own limit when None.
      memory_fraction: share of the device's free memory that weights, workspace and KV may use.
      num_pages: KV pages; sized from memory when None.
      swap_space: GiB of host memory for the pages of swapped requests (preemption "swap" and "auto").
      max_grammar_bytes: longest schema, expression or grammar of a request.
      overlap: plan and dispatch an iteration before the last one's tokens are on the host.
      kv_cache_dtype: of KV pages; "auto" is `dtype`, "fp8" is float8_e4m3fn. int8 and fp8 keep a float32 scale
        per token and KV head.
      enable_prefix_caching: on unless set.
      enable_lora: requests may name a LoRA adapter; layers then run one by one.
      max_loras: adapters on the device at once.
      max_lora_rank: largest rank of one.
      lora_modules: adapters to load at the start, each as NAME=DIRECTORY.
      decode_buckets, prefill_buckets, table_width_buckets: compiled shapes (slots, tokens, pages); chosen when None.
      scan_layers: one compiled layer body for all layers; None: off on CPU (no weight copies), on elsewhere.
      compile_cache: folder of compiled programs; "" leaves jax's own setting; None: under the cache folder.
      num_processes, process_id, coordinator_address: of several hosts, as `jax.distributed.initialize` has them.
      distributed: what is None of these three comes from the environment.
      control_address: where process 0 takes the other processes' connections; None: the port after the coordinator's.
      host_token_file: with the token they share; None: it is in the environment, see `hosts_config`.
      host_timeout_s: seconds after which a process that gives no sign of life is lost.
      step_timeout_s: seconds without a step, while there is work, until the engine is stuck; 0: never.
      stuck_exit_s: further seconds until a stuck engine is dead; 0: never.
      startup_timeout_s: seconds without progress until a start has failed; 0: never.
      crash_dump_dir: folder for a trace of the last iterations of an engine that dies; None: none is kept.
      disaggregation: "prefill" computes prompts for other engines, "decode" has prompts computed by others, "none"
        neither.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    chat_template: str | None = None
    special_tokens_in_chat: bool = False
    skip_tokenizer_init: bool = False
    served_model_name: str | None = None
    dtype: str = "bfloat16"
    quantization: str | None = None
    weight_dtype: str = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    prefill_chunk: int | None = None
    enable_chunked_prefill: bool = True
    page_size: int = 16
    num_pages: int | None = None
    swap_space: float = 4.0
    memory_fraction: float = 0.8
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    max_queue_requests: int = 256
    max_queue_tokens: int = 1 << 20
    enable_prefix_caching: bool = True
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    lora_modules: tuple[str, ...] = ()
    overlap: bool = True
    max_grammar_bytes: int = 1 << 17
    attention_implementation: str = "auto"
    matmul_implementation: str = "auto"
    decoder_implementation: str = "auto"
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    table_width_buckets: tuple[int, ...] | None = None
    scan_layers: bool | None = None
    compile_cache: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    coordinator_address: str | None = None
    distributed: bool = False
    control_address: str | None = None
    host_token_file: str | None = None
    host_timeout_s: float = 30.0
    trace_file: str | None = None
    step_timeout_s: float = 60.0
    stuck_exit_s: float = 60.0
    startup_timeout_s: float = 1800.0
    crash_dump_dir: str | None = None
    disaggregation: str = "none"

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        check_page_size(self.page_size)
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; it must be in (0, 1]")
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.num_pages is not None:
            at_least("num_pages", self.num_pages, 2)
        if self.prefill_chunk is not None:
            at_least("prefill_chunk", self.prefill_chunk, 1)
        positive("swap_space", self.swap_space)
        at_least("max_grammar_bytes", self.max_grammar_bytes, 1)
        one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        one_of("attention_implementation", self.attention_implementation, ATTENTION_IMPLEMENTATIONS)
        one_of("matmul_implementation", self.matmul_implementation, MATMUL_IMPLEMENTATIONS)
        one_of("decoder_implementation", self.decoder_implementation, DECODER_IMPLEMENTATIONS)
        if self.quantization is not None:
            one_of("quantization", self.quantization, QUANTIZATIONS)
        one_of("weight_dtype", self.weight_dtype, WEIGHT_DTYPES)
        if self.dtype != "float32" and self.weight_dtype not in ("auto", self.dtype):
            raise ValueError(
                f"weight_dtype is {self.weight_dtype} and dtype is {self.dtype}; with this dtype weights are of it too:"
                " leave weight_dtype out, or use dtype float32"
            )
        one_of("disaggregation", self.disaggregation, DISAGGREGATIONS)
        for name in ("step_timeout_s", "stuck_exit_s", "startup_timeout_s"):
            not_negative(name, getattr(self, name))
        self._check_lora()
        check_hosts(self)
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 2)
        self.scheduler_config(max_model_len=self.max_model_len or 2, num_pages=self.num_pages or 2)

    def _check_lora(self) -> None:
        at_least("max_loras", self.max_loras, 1)
        at_least("max_lora_rank", self.max_lora_rank, 1)
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ValueError(f"max_lora_rank is {self.max_lora_rank}; it must be at most {MAX_LORA_RANK}")
        object.__setattr__(self, "lora_modules", tuple(self.lora_modules or ()))
        if self.lora_modules and not self.enable_lora:
            raise ValueError("lora_modules is set without enable_lora; set both")
        for module in self.lora_modules:
            name, equals, path = module.partition("=")
            if not (name and equals and path):
                raise ValueError(f"lora_modules has {module!r}; it must be NAME=DIRECTORY")
        if len(self.lora_modules) > self.max_loras:
            raise ValueError(
                f"lora_modules has {len(self.lora_modules)} adapters and max_loras is {self.max_loras}; raise max_loras"
            )

    @property
    def several_processes(self) -> bool:
        """Whether this process is one of several that hold the model together."""
        return self.distributed or (self.num_processes or 1) > 1

    @property
    def swaps(self) -> bool:
        """Whether a preempted request's pages may go to the host."""
        return self.preemption in SWAPPING_PREEMPTIONS

    @property
    def moves_kv(self) -> bool:
        """Whether K/V comes from other engines or goes to them."""
        return self.disaggregation != "none"

    def scheduler_config(
        self, *, max_model_len: int, num_pages: int, num_host_pages: int | None = None, windows: tuple[int, ...] = (0,)
    ) -> SchedulerConfig:
        """The scheduler's share, once context length and pool sizes are known.

        Args:
          num_host_pages: None: as few as the preemption mode allows.
          windows: of the model's groups of layers, see `SchedulerConfig.windows`.

        Raises:
          ValueError: chunked prefill is off and the token budget cannot hold a whole prompt.
        """
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_model_len is {max_model_len};"
                " without chunked prefill the token budget must hold a whole prompt"
            )
        chunk = self.prefill_chunk or self.max_num_batched_tokens
        if not self.enable_chunked_prefill:
            chunk = self.max_num_batched_tokens
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk=min(chunk, self.max_num_batched_tokens),
            page_size=self.page_size,
            num_pages=num_pages,
            num_host_pages=int(self.swaps) if num_host_pages is None else num_host_pages,
            max_model_len=max_model_len,
            max_queue_requests=self.max_queue_requests,
            max_queue_tokens=self.max_queue_tokens,
            max_steps_ahead=int(self.overlap),
            sliding_window=windows[0] if len(windows) == 1 else 0,
            group_windows=windows if len(windows) > 1 else (),
            **{name: getattr(self, name) for name in POLICY_FIELDS},
        )


def check_page_size(page_size: int) -> None:
    """Raises ValueError unless `page_size` is a power of two in [1, 256]."""
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(f"page_size is {page_size}; it must be a power of two from 1 to {MAX_PAGE_SIZE}")
