"""Language models that no forward of ours runs: llama.cpp, tensor parallelism over processes, exact tables."""
