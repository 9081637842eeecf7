"""The JAX engine, for networks of flax or plain functions; the only package that imports jax, flax and optax."""

import os

# One thread computes in the same order in every process. XLA reads this once, when it starts.
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if "xla_cpu_multi_thread_eigen" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_THREAD}".strip()
