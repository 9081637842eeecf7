"""The paper's experiments, run and compared with what was published."""
