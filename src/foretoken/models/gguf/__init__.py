"""GGUF files, read by us: header, weights in few bits, configuration, network and tokenizer."""
