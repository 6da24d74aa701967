"""Public packages whose PyTorch ops run on a CPU, with and without `hotop.install()`."""
