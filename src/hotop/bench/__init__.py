"""The benchmarks behind ``python -m hotop bench``."""
