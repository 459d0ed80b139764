#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* 0, or 1 with what failed in `failure`. */
int run_parallel_client(char* failure, size_t capacity);

#ifdef __cplusplus
}
#endif
