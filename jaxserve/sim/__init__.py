"""Simulation, replay and diagnosis: what runs the scheduler or reads its trace without a device. No jax."""
