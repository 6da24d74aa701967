"""The demo: a small transformer whose ops are registered several ways, compared and timed."""
