/* Checks written in C, run by c_api_test.cpp. Each returns 0, or the line of c_client.c whose check failed. */
#ifndef FLCE_TESTS_C_API_C_CLIENT_H_
#define FLCE_TESTS_C_API_C_CLIENT_H_

#ifdef __cplusplus
extern "C" {
#endif

int c_client_trains_on_cpu(const char* cache_dir);
int c_client_distils_on_cpu(const char* cache_dir);
int c_client_null_pointers_are_errors(const char* cache_dir);
int c_client_text_sizes(void);
int c_client_struct_sizes(const char* cache_dir);

#ifdef __cplusplus
}
#endif

#endif
