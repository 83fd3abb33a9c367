"""What a fault plan has the runner do to its device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.device_errors import is_out_of_memory, is_sound, out_of_memory
from jaxserve.runtime.kv_pool import KVPool
from jaxserve.runtime.step_faults import break_pages


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_pages_that_are_named_are_nan_and_no_others(dtype):
    pool = break_pages(KVPool(jnp.ones((2, 6, 2, 3, 4, 5), dtype), None), jnp.asarray([2, 5, 0, 0]))
    broken = np.isnan(np.asarray(pool.pages, np.float32)).all(axis=(0, 2, 3, 4, 5))
    whole = np.isfinite(np.asarray(pool.pages, np.float32)).all(axis=(0, 2, 3, 4, 5))
    assert broken.tolist() == [False, False, True, False, False, True]
    assert whole.tolist() == (~broken).tolist()


def test_of_eight_bits_the_scales_are_nan():
    pages, scales = jnp.ones((2, 3, 2, 1, 4, 8), jnp.int8), jnp.ones((2, 3, 2, 1, 4), jnp.float32)
    pool = break_pages(KVPool(pages, scales), jnp.asarray([1]))
    assert (pool.pages == 1).all() and np.isnan(pool.scales[:, 1]).all() and (pool.scales[:, (0, 2)] == 1).all()


def test_a_lack_of_memory_is_known_by_its_error():
    assert is_out_of_memory(out_of_memory("here")) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED"))
    assert not is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no"))


def test_deleted_arrays_are_not_sound():
    kept, gone = jnp.ones(3), jnp.ones(3)
    gone.delete()
    assert is_sound((kept, None)) and not is_sound((kept, gone))
