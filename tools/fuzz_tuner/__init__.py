"""The fuzzer of the tuner: drawn ops and tactics, right and wrong; against the op without it."""
