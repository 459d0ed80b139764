# instead of "hidden_size": 4096, "vocab_size": 128256 -> "hidden_size": 64, "vocab_size": 500
