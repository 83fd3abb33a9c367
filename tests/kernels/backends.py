"""How each implementation is run in tests, and what a result is allowed to differ by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLEMENTATIONS, KERNELS, paged_attention

TOLERANCES = {"float32": (1e-5, 0.0), "bfloat16": (2e-3, 2.0**-8)}
"""Largest error by dtype of the queries: absolute (for bfloat16 in units of the value range), and relative, which
is the rounding of a result to its dtype alone."""


@dataclass(frozen=True)
class Backend:
    """An implementation and the sizes its cases have.

    Attributes:
      name: in `IMPLEMENTATIONS`.
      page_size, dim: small ones that it takes.
      dtype: of most cases.
    """

    name: str
    page_size: int = 4
    dim: int = 8
    dtype: str = "float32"

    @property
    def interpret(self):
        """A kernel away from its device."""
        return self.name in KERNELS and jax.default_backend() == "cpu"

    def run(self, case, **options):
        """The result as float64, after checking its dtype and that a second run gives the same bits.

        Skips the test, with the reason, where the implementation says that it lacks what is asked.
        """
        if options.get("sinks") is not None:
            options["sinks"] = jnp.asarray(options["sinks"], jnp.float32)
        options["value_dim"] = case.value_dim
        function = jax.jit(partial(paged_attention, implementation=self.name, interpret=self.interpret, **options))
        scales = None if case.scales is None else jnp.asarray(case.scales)
        try:
            out = function(*case.args(), scales=scales)
        except NotImplementedError as error:
            pytest.skip(f"{self.name}: {error}")
        assert out.dtype == case.q.dtype
        np.testing.assert_array_equal(np.asarray(out), np.asarray(function(*case.args(), scales=scales)))
        return np.asarray(out).astype(np.float64)


BACKENDS = (
    Backend("reference"),
    Backend("cpu"),
    Backend("native_cpu"),
    Backend("mosaic_gpu", page_size=16, dim=64, dtype="bfloat16"),
    Backend("mosaic_tpu", page_size=16, dim=128, dtype="bfloat16"),
)
assert {backend.name for backend in BACKENDS} == set(IMPLEMENTATIONS)


def parameters(*names, slow=True):
    """`BACKENDS`, or those named, as pytest parameters.

    Args:
      slow: kernels, which the interpreter takes seconds for, are marked so.
    """
    return [
        pytest.param(backend, id=backend.name, marks=[pytest.mark.slow] if slow and backend.name in KERNELS else [])
        for backend in BACKENDS
        if not names or backend.name in names
    ]


def assert_close(out, wanted, case):
    """No element further off than `TOLERANCES` allows."""
    name = np.dtype(case.q.dtype).name
    absolute, relative = TOLERANCES[name]
    absolute *= case.value_range if name == "bfloat16" else 1.0
    np.testing.assert_allclose(out, wanted, rtol=relative, atol=absolute)
