"""Simulation of the serving scheduler. No jax.

Start with `simulator.py`; `scenario.py` and `workload.py` are what it runs, `cost_model.py` its clock.
"""
