"""Language models without our forwards: llama.cpp, tensor parallelism over processes, exact tables."""
