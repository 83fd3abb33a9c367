"""All decoder layers of a step as one call."""

from pallas_kernels.decoder_stack.api import ACTIVATIONS, StackTables, decoder_stack, is_stack

__all__ = ["ACTIVATIONS", "StackTables", "decoder_stack", "is_stack"]
