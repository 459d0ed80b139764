# instead of 151936 -> 1009
# instead of 1024 -> 16
