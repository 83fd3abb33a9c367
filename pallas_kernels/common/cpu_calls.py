"""Custom calls of XLA's CPU backend whose bodies numba compiles.

XLA calls a handler with one pointer, the call frame (`xla/ffi/api/c_api.h` among jaxlib's headers, API version 0).
`register` makes a handler out of two jitted functions: one says how many items a call has, the other does an item.
Items are shared among XLA's own threads: the handler gives its pool a task that takes items, and takes items itself,
so a call ends even if the pool never gets to the task.
"""

from __future__ import annotations

import hashlib
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.common import cpu_values
from pallas_kernels.common.cpu_values import OPTIONS, pointer_i32, pointer_i64


def _can_keep(function: Any) -> bool:
    """Whether there is a place on disk for compiled functions: beside the package, or in the user's cache."""
    try:
        njit(cache=True)(function)
    except RuntimeError:
        return False
    return True


KEPT = OPTIONS | {"cache": _can_keep(lambda: None)}
"""For the functions given to `register`, whose compiled code, with all that they call, is kept on disk.

numba looks for it by the text of the function's own file and what the function encloses: enclose `source_version`.
"""


def source_version(*files: str) -> int:
    """A number that changes with the text of these files, this one and `cpu_values`, and jaxlib."""
    texts = [Path(file).read_bytes() for file in (__file__, cpu_values.__file__, *files)]
    return int(hashlib.sha256(b"".join([*texts, jaxlib.__version__.encode()])).hexdigest()[:15], 16)


# Words (8 bytes) of XLA_FFI_CallFrame.
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS, _FRAME_WORDS = 1, 2, 3, 9, 14, 15
_METADATA = 1  # XLA_FFI_Extension_Metadata
_F32, _BYTES_F32 = 11, 4  # XLA_FFI_DataType_F32

# Words of a call's control block: the two that threads write, items taken and items done, each on a cache line of its
# own, and what they only read.
_TAKEN, _DONE, _FRAME, _PLAN, _FAILED, _CONTROL_WORDS = 0, 8, 16, 17, 18, 24
_NUM_CONTROLS = 256
_SPINS = 2000
"""Looks at the items done before the processor is offered to others."""

_lock = threading.Lock()
_registered: set[str] = set()
_kept: list[Any] = []
"""What XLA holds addresses of."""


def _api_word(name: str) -> int:
    """Word of a function in XLA_FFI_Api, by the header that this jaxlib ships."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    body = header[header.index("struct XLA_FFI_Api {") :]
    names = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", body[: body.index("};")])
    return 6 + names.index(name)  # after sizes, version and the internal API


_ERROR_CREATE = _api_word("XLA_FFI_Error_Create")
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_MESSAGE = np.frombuffer(b"a native CPU kernel failed: out of memory\0", np.uint8).copy()
_SCHEDULE = _api_word("XLA_FFI_ThreadPool_Schedule")
_NUM_THREADS = _api_word("XLA_FFI_ThreadPool_NumThreads")


def _atomic(operation: str) -> Any:
    @intrinsic
    def change(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw(operation, pointer, args[1], "seq_cst")

        return types.int64(types.int64, types.int64), generate

    return change


atomic_add = _atomic("add")
"""Adds to the word at an address; returns what it was."""

atomic_set = _atomic("xchg")
"""Writes the word at an address; returns what it was."""


@intrinsic
def atomic_get(typing: Any, address: Any) -> Any:
    """The word at an address, as other threads left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _call(typing: Any, function: Any, argument: Any) -> Any:
    """Calls the C function at an address with one pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.call(builder.inttoptr(args[0], ir.FunctionType(word, [word]).as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), generate


@njit(inline="always")
def words(address, count):
    """int64[count] at an address."""
    return carray(pointer_i64(address), (count,))


@njit(inline="always")
def argument(frame, index):
    """Address and sizes int64[rank] of an argument's buffer."""
    buffer = words(words(frame[_ARGUMENTS], index + 1)[index], 6)
    return buffer[3], words(buffer[5], buffer[4])


@njit(inline="always")
def result(frame, index):
    """Address of a result's buffer."""
    return words(words(frame[_RESULTS], index + 1)[index], 6)[3]


@njit(inline="always")
def result_bytes(frame, index):
    """Size of a result's buffer of float32 or bfloat16."""
    buffer = words(words(frame[_RESULTS], index + 1)[index], 6)
    sizes = words(buffer[5], buffer[4])
    count = _BYTES_F32 if buffer[2] & 0xFFFFFFFF == _F32 else 2
    for size in sizes:
        count *= size
    return count


@njit(inline="always")
def _answers_metadata(frame):
    """Whether the call asks for the API's version and not for work; then it is answered."""
    if frame[_EXTENSION] == 0:
        return False
    extension = words(frame[_EXTENSION], 4)
    if extension[1] & 0xFFFFFFFF != _METADATA:
        return False
    metadata = carray(pointer_i32(extension[3]), (9,))
    metadata[6] = 0  # major version
    metadata[7] = 1  # minor version
    metadata[8] = 0  # traits
    return True


def _make_controls() -> int:
    """Address of a kernel's control blocks. The first counts those given out in turn; the others are reused.

    A task that the pool runs late finds a block whose items are all taken, or helps the call that has it now, which is
    one of the same kernel.
    """
    size = 8 * _CONTROL_WORDS
    blocks = np.zeros((_NUM_CONTROLS + 1) * _CONTROL_WORDS, np.int64)
    _kept.append(blocks)
    return -(-blocks.ctypes.data // size) * size


_WORDS = types.Array(types.int64, 1, "C")


def _by_address(symbol: str, function: Any, *arguments: Any) -> Any:
    """A jitted function of arguments of these types that callers call by its address, under a name of the linker's.

    A call of `function` itself would link its code into that of the caller, and LLVM would then compile all of it
    again, in every process, although it is kept on disk.
    """
    function.compile(arguments)
    compiled = function.overloads[arguments]
    binding.add_symbol(symbol, compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
    _kept.append(function)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        convention, returned = context.call_conv, signature.return_type
        kind = convention.get_function_type(returned, signature.args)
        callee = cgutils.get_or_insert_function(builder.module, kind, symbol)
        status, value = convention.call_function(builder, callee, returned, signature.args, args)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return value

    typed = compiled.signature.return_type(*arguments), generate

    @intrinsic
    def call_with_two(typing: Any, first: Any, second: Any) -> Any:
        return typed

    @intrinsic
    def call_with_three(typing: Any, first: Any, second: Any, third: Any) -> Any:
        return typed

    return {2: call_with_two, 3: call_with_three}[len(arguments)]


@njit
def _no_items(plan, item):
    return 0


def register(name: str, plan_items: Any, run_item: Any, items_before: Any = _no_items) -> None:
    """Makes a custom call `name` of XLA's CPU backend, unless there is one already; from any thread.

    Args:
      name: of the target.
      plan_items: jitted `plan_items(frame, threads) -> int64[1 + N]`: the number of items, then what `run_item`
        needs; the array lives until the last item is done.
      run_item: jitted `run_item(frame, plan, item)`, on any thread; `plan` is the array's address.
      items_before: jitted `items_before(plan, item)`: an item begins when so many items, the first ones, are done.
        At most `item`; never falling.
    """
    with _lock:
        if name not in _registered:
            _register(name, plan_items, run_item, items_before)
            _registered.add(name)


@njit(**OPTIONS)
def _wait(control, count):
    """Until `count` items are done. Items are taken in order, so those are with threads that run them."""
    spins = 0
    while atomic_get(control + 8 * _DONE) < count:
        spins += 1
        if spins % _SPINS == 0:
            _sched_yield()


def _register(name: str, plan_items: Any, run_item: Any, items_before: Any) -> None:
    plan_items = _by_address(f"{name}.plan_items", plan_items, _WORDS, types.int64)
    run_item = _by_address(f"{name}.run_item", run_item, _WORDS, types.int64, types.int64)
    items_before = _by_address(f"{name}.items_before", items_before, types.int64, types.int64)
    controls = _make_controls()
    arguments = np.asarray([32, 0, _MESSAGE.ctypes.data, _INTERNAL])  # XLA_FFI_Error_Create_Args
    _kept.append(arguments)
    error_arguments = arguments.ctypes.data

    @cfunc(types.int64(types.int64))
    def task(control):
        block = words(control, _CONTROL_WORDS)
        while True:
            ticket = atomic_add(control + 8 * _TAKEN, 1)  # items there are << 32 | items taken
            item = ticket & 0xFFFFFFFF
            if item >= ticket >> 32:
                return 0
            try:
                _wait(control, items_before(block[_PLAN], item))
                run_item(words(block[_FRAME], _FRAME_WORDS), block[_PLAN], item)
            except Exception:
                block[_FAILED] = 1
            atomic_add(control + 8 * _DONE, 1)

    task_address = task.address

    @njit(**OPTIONS)
    def run(frame_address, frame, api):
        """Whether every item was done."""
        threads = np.ones(1, np.int64)
        request = np.zeros(5, np.int64)
        request[0] = 32  # bytes of XLA_FFI_ThreadPool_NumThreads_Args
        request[2] = frame[_CONTEXT]
        request[3] = threads.ctypes.data
        _call(api[_NUM_THREADS], request.ctypes.data)
        plan = plan_items(frame, threads[0])
        count = plan[0]
        if count <= 1 or threads[0] == 1:
            for item in range(count):
                run_item(frame, plan.ctypes.data, item)
            return plan[0] == count  # the plan lives until here
        control = controls + 8 * _CONTROL_WORDS * (1 + atomic_add(controls, 1) % (_NUM_CONTROLS - 1))
        block = words(control, _CONTROL_WORDS)
        block[_FRAME] = frame_address
        block[_PLAN] = plan.ctypes.data
        block[_FAILED] = 0
        atomic_set(control + 8 * _DONE, 0)
        atomic_set(control + 8 * _TAKEN, count << 32)
        request[0] = 40  # bytes of XLA_FFI_ThreadPool_Schedule_Args
        request[3] = task_address
        request[4] = control
        for _ in range(min(threads[0], count) - 1):
            _call(api[_SCHEDULE], request.ctypes.data)
        _call(task_address, control)
        _wait(control, count)
        return plan[0] == count and block[_FAILED] == 0

    @cfunc(types.int64(types.int64))
    def handler(frame_address):
        frame = words(frame_address, _FRAME_WORDS)
        if _answers_metadata(frame):
            return 0
        api = words(frame[_API], _NUM_THREADS + 1)
        done = False
        try:
            done = run(frame_address, frame, api)
        except Exception:
            done = False
        if done:
            return 0
        error = carray(pointer_i64(error_arguments), (4,))
        return _call(api[_ERROR_CREATE], error.ctypes.data)

    _kept.extend((task, handler))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
