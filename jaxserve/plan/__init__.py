"""`python -m jaxserve.plan`: would a model fit a slice of accelerators, and how fast could it be? Without the hardware.

Three kinds of figures, which are never mixed up:

- arithmetic: bytes of weights, KV pages and slot state follow from shapes and sharding rules, on a mesh of devices
  that are names only (`targets.AbsentDevice`). No compiler is needed.
- compiled: the engine's own steps, compiled for the target by its own compiler (libtpu, or XLA's for CUDA), tell
  temporary and output memory, and the collectives that will run. Their argument bytes check the arithmetic.
- roofline: bounds on speed, by `jaxserve.sim.roofline`, the cost model of `simulate`. Nothing was run.
"""
