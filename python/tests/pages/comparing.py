# instead of num_tokens=4096, hidden_size=2048, vocab_size=151936 -> rounds=3, memory=False, num_tokens=16, hidden_size=64, vocab_size=500
