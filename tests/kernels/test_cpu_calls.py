"""Custom calls whose bodies numba compiles: items on several threads, errors, and code that is linked nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")
from numba import carray, njit

from pallas_kernels.common import cpu_calls
from pallas_kernels.common.cpu_values import pointer_i32


@njit
def plan_items(frame, threads):
    """An item for each number; a first number of -2 is refused."""
    address, sizes = cpu_calls.argument(frame, 0)
    if carray(pointer_i32(address), (sizes[0],))[0] == -2:
        raise MemoryError
    return np.full(1, sizes[0], np.int64)


@njit
def run_item(frame, plan, item):
    """Doubles a number; -1 is refused."""
    address, sizes = cpu_calls.argument(frame, 0)
    x = carray(pointer_i32(address), (sizes[0],))
    if x[item] == -1:
        raise MemoryError
    carray(pointer_i32(cpu_calls.result(frame, 0)), (sizes[0],))[item] = 2 * x[item]


@pytest.fixture(scope="module")
def double():
    name = "tests.double"
    cpu_calls.register(name, plan_items, run_item)
    return lambda x: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_every_item_is_done(double, size):
    x = jnp.arange(size, dtype=jnp.int32)
    np.testing.assert_array_equal(double(x), 2 * np.arange(size))


@pytest.mark.parametrize("numbers", [[-1], [3, -1, 4], [*range(500), -1], [-2], [-2, 1]], ids=len)
def test_an_error_of_the_body_is_one_of_the_call_and_the_next_call_is_done(double, numbers):
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="a native CPU kernel failed"):
        double(jnp.asarray(numbers, jnp.int32)).block_until_ready()
    np.testing.assert_array_equal(double(jnp.asarray([5, 6], jnp.int32)), [10, 12])


def test_bodies_are_called_by_address_so_their_code_is_compiled_once(double):
    """Linked into their caller, they would be compiled again in every process."""
    task = next(each for each in reversed(cpu_calls._kept) if "tests.double.run_item" in _code(each))
    defined = [line for line in _code(task).splitlines() if line.startswith("define")]
    assert defined and not any("plan_items" in line or "run_item" in line for line in defined), defined
    assert any(line.startswith("declare") and "tests.double.run_item" in line for line in _code(task).splitlines())


def _code(kept):
    return kept.inspect_llvm() if hasattr(kept, "native_name") else ""
