"""Our GGUF reader: header, quantised weights, configuration, network and tokenizer."""
