#include <dlpack/dlpack.h>
#include <gmock/gmock.h>

#include <barrier>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "flce/flce.h"
#include "flce/flce.hpp"
#include "records/record_store.hpp"
#include "tests/c_api/c_client.h"
#include "tests/cache/cache_test_support.hpp"

namespace flce {
namespace {

using test::TemporaryDirectory;
using testing::HasSubstr;

static_assert(FLCE_BF16 == FLCE_DTYPE(kDLBfloat, 16) && FLCE_FP16 == FLCE_DTYPE(kDLFloat, 16) && FLCE_FP32 == FLCE_DTYPE(kDLFloat, 32) &&
              FLCE_INT32 == FLCE_DTYPE(kDLInt, 32) && FLCE_INT64 == FLCE_DTYPE(kDLInt, 64) && FLCE_UINT64 == FLCE_DTYPE(kDLUInt, 64));
static_assert(static_cast<int>(FLCE_CPU) == static_cast<int>(kDLCPU) && static_cast<int>(FLCE_CUDA) == static_cast<int>(kDLCUDA));

class CApi : public testing::Test {
protected:
    CApi() {
        flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
        const std::string directory = directory_.path().string();
        options.device = "cpu";
        options.cache_dir = directory.c_str();
        if (flce_session_create(&options, &session_) != FLCE_OK) throw std::runtime_error(flce_last_error());
    }
    ~CApi() override { flce_session_release(session_); }

    flce_kernel* kernel(const char* spec = "D=8,V=11,dtype=fp32", const flce_kernel_options* options = nullptr) {
        flce_kernel* result = nullptr;
        EXPECT_EQ(flce_get_kernel(session_, spec, options, &result), FLCE_OK) << flce_last_error();
        return result;
    }
    template <class Call>
    static std::string text(const Call& call) {
        std::size_t needed = 0;
        EXPECT_EQ(call(nullptr, 0, &needed), FLCE_OK) << flce_last_error();
        std::string result(needed, '\0');
        EXPECT_EQ(call(result.data(), result.size(), nullptr), FLCE_OK);
        result.pop_back();
        return result;
    }
    static std::string kernel_text(const flce_kernel* kernel, int which) {
        return text(
            [&](char* buffer, std::size_t size, std::size_t* needed) { return flce_kernel_text(kernel, which, buffer, size, needed); });
    }

    TemporaryDirectory directory_;
    flce_session* session_ = nullptr;
};

TEST_F(CApi, CallArgumentsJson_SaysWhereFieldsLie) {
    const auto json = nlohmann::json::parse(text(flce_call_arguments_json));
    const auto offset = [&](const char* structure, std::string_view field) {
        for (const auto& described : json.at(structure).at("fields")) {
            if (described.at("name") == field) return described.at("offset").get<std::size_t>();
        }
        ADD_FAILURE() << structure << " has no " << field;
        return std::size_t{0};
    };
    EXPECT_EQ(json.at("forward").at("size"), sizeof(flce_forward_args));
    EXPECT_EQ(json.at("backward").at("size"), sizeof(flce_backward_args));
    EXPECT_EQ(offset("forward", "hidden"), offsetof(flce_forward_args, hidden));
    EXPECT_EQ(offset("forward", "reduction"), offsetof(flce_forward_args, reduction));
    EXPECT_EQ(offset("forward", "invalid_label"), offsetof(flce_forward_args, invalid_label));
    EXPECT_EQ(offset("backward", "grad_bias"), offsetof(flce_backward_args, grad_bias));
    EXPECT_EQ(offset("backward", "retained_place"), offsetof(flce_backward_args, retained_place));
    // Bytes of all fields, whose sizes follow from their types: none is left out.
    const std::map<std::string, std::size_t> bytes{{"tensor", 8}, {"pointer", 8}, {"size", 8}, {"int64", 8}, {"int32", 4}};
    for (const char* structure : {"forward", "backward"}) {
        std::size_t sum = 0;
        for (const auto& field : json.at(structure).at("fields")) sum += bytes.at(field.at("type"));
        EXPECT_EQ(sum, json.at(structure).at("size")) << structure;
    }
    for (const auto& tensor : json.at("tensors")) {
        EXPECT_FALSE(tensor.at("elements").empty());
        EXPECT_FALSE(tensor.at("extent").empty());
    }
}

TEST_F(CApi, PlanDigest_OfSpecsAndPlansAsInCpp) {
    const auto digest = [](std::vector<const flce_kernel*> kernels) {
        return text([&](char* buffer, std::size_t size, std::size_t* needed) {
            return flce_plan_digest(kernels.data(), kernels.size(), buffer, size, needed);
        });
    };
    flce_kernel* first = kernel();
    flce_kernel* second = kernel("D=8,V=12,dtype=fp32");
    EXPECT_EQ(digest({first, second}), digest({second, first}));
    EXPECT_NE(digest({first}), digest({second}));
    EXPECT_EQ(digest({first}).size(), 64U);
    Session session({.device = "cpu", .cache_dir = directory_.path()});
    EXPECT_EQ(plan_digest(std::vector{session.get_kernel(parse_spec("D=8,V=11,dtype=fp32"))}), digest({first}));
    std::size_t needed = 0;
    EXPECT_EQ(flce_plan_digest(nullptr, 1, nullptr, 0, &needed), FLCE_ERROR_ARGUMENT);
    const flce_kernel* none = nullptr;
    EXPECT_EQ(flce_plan_digest(&none, 1, nullptr, 0, &needed), FLCE_ERROR_ARGUMENT);
    flce_kernel_release(first);
    flce_kernel_release(second);
}

TEST_F(CApi, FromC_ForwardAndBackward) { EXPECT_EQ(c_client_trains_on_cpu(directory_.path().c_str()), 0); }
TEST_F(CApi, FromC_Teacher) { EXPECT_EQ(c_client_distils_on_cpu(directory_.path().c_str()), 0); }
TEST_F(CApi, FromC_NullPointers) { EXPECT_EQ(c_client_null_pointers_are_errors(directory_.path().c_str()), 0); }
TEST_F(CApi, FromC_TextSizes) { EXPECT_EQ(c_client_text_sizes(), 0); }
TEST_F(CApi, FromC_StructSizes) { EXPECT_EQ(c_client_struct_sizes(directory_.path().c_str()), 0); }

TEST_F(CApi, ErrorKinds_AreTheStatus) {
    flce_kernel* kernel = nullptr;
    EXPECT_EQ(flce_get_kernel(session_, "D=7,V=11", nullptr, &kernel), FLCE_ERROR_SPEC);
    EXPECT_EQ(kernel, nullptr);
    flce_kernel_options options = FLCE_KERNEL_OPTIONS_INIT;
    options.plan = "nonsense";
    EXPECT_EQ(flce_get_kernel(session_, "D=8,V=11,dtype=fp32", &options, &kernel), FLCE_ERROR_PLAN);
    flce_session_options elsewhere = FLCE_SESSION_OPTIONS_INIT;
    elsewhere.device = "no such device";
    flce_session* session = nullptr;
    EXPECT_EQ(flce_session_create(&elsewhere, &session), FLCE_ERROR_ENVIRONMENT);
    EXPECT_THAT(flce_last_error(), HasSubstr("no such device"));
    EXPECT_STREQ(flce_last_error_log(), "");
}

TEST_F(CApi, LastError_IsTheThreadsOwn) {
    std::size_t needed = 0;
    EXPECT_EQ(flce_spec_text("D=7,V=11", nullptr, 0, &needed), FLCE_ERROR_SPEC);
    const std::string mine = flce_last_error();
    std::thread([] {
        EXPECT_STREQ(flce_last_error(), "");
        EXPECT_EQ(flce_session_default(nullptr), FLCE_ERROR_ARGUMENT);
    }).join();
    EXPECT_EQ(flce_last_error(), mine);
    EXPECT_EQ(flce_spec_text("D=8,V=11", nullptr, 0, &needed), FLCE_OK);
    EXPECT_EQ(flce_last_error(), mine);  // success leaves it
}

TEST_F(CApi, PathsThatAreNoUtf8_MessagesAreAndPathsAreTheirBytes) {
    const std::string odd = (directory_.path() / "caf\xe9 \xff").string();
    flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
    options.device = "cpu";
    options.cache_dir = odd.c_str();
    flce_session* session = nullptr;
    ASSERT_EQ(flce_session_create(&options, &session), FLCE_OK) << flce_last_error();
    const std::string returned =
        text([&](char* buffer, std::size_t size, std::size_t* needed) { return flce_session_cache_dir(session, buffer, size, needed); });
    EXPECT_EQ(returned, odd);
    flce_kernel* kernel = nullptr;
    EXPECT_EQ(flce_get_kernel(session, "D=8,V=11,dtype=fp32", nullptr, &kernel), FLCE_OK) << flce_last_error();
    flce_kernel_release(kernel);
    EXPECT_TRUE(std::filesystem::exists(odd));
    EXPECT_EQ(flce_get_kernel(session, ("@" + odd).c_str(), nullptr, &kernel), FLCE_ERROR_ENVIRONMENT);
    EXPECT_THAT(flce_last_error(), HasSubstr("caf\\xe9 \\xff"));
    EXPECT_EQ(flce_get_kernel(session, "D=8,V=\xff", nullptr, &kernel), FLCE_ERROR_SPEC);
    EXPECT_THAT(flce_last_error(), HasSubstr("\\xff"));
    flce_session_release(session);
}

TEST_F(CApi, KernelTexts_SameAsTheCppApi) {
    flce_kernel* handle = kernel();
    EXPECT_EQ(parse_spec(kernel_text(handle, FLCE_TEXT_SPEC)), parse_spec("D=8,V=11,dtype=fp32"));
    EXPECT_EQ(parse_spec_json(kernel_text(handle, FLCE_TEXT_SPEC_JSON)), parse_spec("D=8,V=11,dtype=fp32"));
    const std::string plan = kernel_text(handle, FLCE_TEXT_PLAN);
    EXPECT_EQ(parse_plan(plan).text(), plan);
    EXPECT_TRUE(nlohmann::json::accept(kernel_text(handle, FLCE_TEXT_PLAN_JSON)));
    EXPECT_TRUE(nlohmann::json::accept(kernel_text(handle, FLCE_TEXT_DEVICE_JSON)));
    EXPECT_THAT(kernel_text(handle, FLCE_TEXT_EXPLAIN), testing::AllOf(HasSubstr("plan: " + plan), HasSubstr("modelled at 4096 tokens")));
    const auto why = nlohmann::json::parse(kernel_text(handle, FLCE_TEXT_EXPLAIN_JSON));
    EXPECT_EQ(why.at("plan"), plan);
    EXPECT_GE(why.at("reasons").size(), 1u);
    std::size_t needed = 0;
    EXPECT_EQ(flce_kernel_text(handle, 99, nullptr, 0, &needed), FLCE_ERROR_ARGUMENT);

    flce_kernel_options options = FLCE_KERNEL_OPTIONS_INIT;
    options.plan = plan.c_str();
    options.scratch_bytes = 32 << 20;
    flce_kernel* replayed = kernel("D=8,V=11,dtype=fp32", &options);
    EXPECT_EQ(kernel_text(replayed, FLCE_TEXT_PLAN), plan);
    flce_kernel_release(replayed);
    flce_kernel_release(handle);
}

TEST_F(CApi, Limit_OfACallWithItsTokens) {
    flce_kernel_options options = FLCE_KERNEL_OPTIONS_INIT;
    options.workspace_limit_bytes = 4 * 1000 * 8 + (33 << 20);
    options.num_tokens = 1000;
    flce_kernel* limited = kernel("D=8,V=11,dtype=bf16", &options);
    EXPECT_THAT(kernel_text(limited, FLCE_TEXT_PLAN), HasSubstr("scratch=33554432"));
    flce_kernel_release(limited);
    // A caller of version 2, whose struct ends before the limit.
    options.struct_size = offsetof(flce_kernel_options, workspace_limit_bytes);
    flce_kernel* other = kernel("D=8,V=11,dtype=bf16", &options);
    EXPECT_THAT(kernel_text(other, FLCE_TEXT_PLAN), HasSubstr("scratch=67108864"));
    flce_kernel_release(other);
}

TEST_F(CApi, Session_DeviceCacheAndStatistics) {
    flce_kernel_release(kernel());
    flce_kernel_release(kernel());
    flce_statistics statistics = FLCE_STATISTICS_INIT;
    EXPECT_EQ(flce_session_statistics(session_, &statistics), FLCE_OK);
    EXPECT_GE(statistics.compiled, 1);
    EXPECT_GE(statistics.memory_hits, 1);
    EXPECT_EQ(statistics.disk_faults, 0);
    int32_t type = 0;
    int32_t index = -1;
    EXPECT_EQ(flce_session_device(session_, &type, &index), FLCE_OK);
    EXPECT_EQ(type, FLCE_CPU);
    EXPECT_EQ(index, 0);
    EXPECT_EQ(text([&](char* b, std::size_t s, std::size_t* n) { return flce_session_cache_dir(session_, b, s, n); }), directory_.path());
    EXPECT_TRUE(
        nlohmann::json::accept(text([&](char* b, std::size_t s, std::size_t* n) { return flce_session_device_json(session_, b, s, n); })));
}

TEST_F(CApi, Prewarm_ThenNothingIsCompiled) {
    flce_prewarm_result result = FLCE_PREWARM_RESULT_INIT;
    ASSERT_EQ(flce_prewarm(session_, "D=16,V=11,dtype=fp32", "cpu", nullptr, &result), FLCE_OK) << flce_last_error();
    EXPECT_GE(result.compiled, 1);
    ASSERT_EQ(flce_prewarm(session_, "D=16,V=11,dtype=fp32", "cpu", nullptr, &result), FLCE_OK);
    EXPECT_EQ(result.compiled, 0);
    EXPECT_GE(result.hits, 1);
}

TEST_F(CApi, TierStatistics_CountWhatEachTierDid) {
    flce_kernel* first = kernel();
    flce_kernel* again = kernel();
    flce_tier_statistics memory = FLCE_TIER_STATISTICS_INIT;
    flce_tier_statistics local = FLCE_TIER_STATISTICS_INIT;
    flce_tier_statistics remote = FLCE_TIER_STATISTICS_INIT;
    ASSERT_EQ(flce_session_tier_statistics(session_, FLCE_TIER_MEMORY, &memory), FLCE_OK);
    ASSERT_EQ(flce_session_tier_statistics(session_, FLCE_TIER_LOCAL, &local), FLCE_OK);
    ASSERT_EQ(flce_session_tier_statistics(session_, FLCE_TIER_REMOTE, &remote), FLCE_OK);
    EXPECT_EQ(memory.hits, 1);
    EXPECT_EQ(local.hits + local.misses, 1);
    EXPECT_EQ(local.stored, local.misses);
    EXPECT_EQ(local.faults, 0);
    EXPECT_EQ(remote.hits + remote.misses + remote.faults + remote.stored, 0);
    EXPECT_EQ(flce_session_tier_statistics(session_, 4, &remote), FLCE_ERROR_ARGUMENT);
    EXPECT_THAT(flce_last_error(), HasSubstr("tier is 4"));
    flce_kernel_release(first);
    flce_kernel_release(again);
}

TEST_F(CApi, SessionOptions_HaveAllThatThoseOfCppHave) {
    const Spec spec = parse_spec("D=16,V=1100,dtype=fp32").normalized();
    Session session({.device = "cpu", .disk_cache = false, .use_records = false});
    const std::string other = candidate_plans(spec, session.device()).at(1).text();
    const std::string cache = directory_.path().string() + "/cache";
    const std::string record = directory_.path().string() + "/measured.json";
    Record measured{.key = record_key(spec, session.device(), {})};
    measured.candidates[other].times_ms["run"] = {1.5};
    write_record_file(record, measured);
    const char* const missing[] = {"/nowhere/kernels.flcepack"};
    const char* const key[] = {"/nowhere/key.pem"};
    const char* const records[] = {record.c_str()};

    flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
    options.device = "cpu";
    options.cache_dir = cache.c_str();
    const auto reasons = [&] {
        flce_session* opened = nullptr;
        flce_kernel* made = nullptr;
        EXPECT_EQ(flce_session_create(&options, &opened), FLCE_OK) << flce_last_error();
        EXPECT_EQ(flce_get_kernel(opened, spec.text().c_str(), nullptr, &made), FLCE_OK) << flce_last_error();
        const std::string why = kernel_text(made, FLCE_TEXT_EXPLAIN);
        flce_kernel_release(made);
        flce_session_release(opened);
        return why;
    };
    options.records = records;
    options.num_records = 1;
    EXPECT_THAT(reasons(), HasSubstr(record));
    options.no_records = 1;
    EXPECT_THAT(reasons(), testing::Not(HasSubstr(record)));

    options.strict = 1;
    const auto refusal = [&] {
        flce_session* opened = nullptr;
        flce_kernel* made = nullptr;
        const bool refused =
            flce_session_create(&options, &opened) != FLCE_OK || flce_get_kernel(opened, "D=24,V=11,dtype=fp32", nullptr, &made) != FLCE_OK;
        EXPECT_TRUE(refused);
        flce_session_release(opened);
        return std::string(flce_last_error());
    };
    options.cache_packs = missing;
    options.num_cache_packs = 1;
    EXPECT_THAT(refusal(), HasSubstr(missing[0]));
    options.num_cache_packs = 0;
    options.cache_remote = "gopher://nowhere";
    EXPECT_THAT(refusal(), HasSubstr("gopher://nowhere"));
    options.cache_remote = "";
    options.trusted_keys = key;
    options.num_trusted_keys = 1;
    EXPECT_THAT(refusal(), HasSubstr(key[0]));
    options.trusted_keys = nullptr;
    EXPECT_THAT(refusal(), HasSubstr("options.trusted_keys is NULL"));
}

TEST_F(CApi, HfConfig_IsReadAsTheCommandReadsIt) {
    const std::string layer = text([](char* buffer, std::size_t size, std::size_t* needed) {
        return flce_hf_config_spec(R"({"hidden_size":60,"vocab_size":50,"logits_soft_cap":30.0,"torch_dtype":"bfloat16"})", buffer, size,
                                   needed);
    });
    EXPECT_EQ(layer, "D=64,V=50,dtype=bf16,tied,softcap=30");
    std::size_t needed = 0;
    EXPECT_EQ(flce_hf_config_spec("{}", nullptr, 0, &needed), FLCE_ERROR_SPEC);
    EXPECT_THAT(flce_last_error(), HasSubstr("hidden_size is missing"));
}

TEST_F(CApi, StrictSession_MissHasAStatusOfItsOwn) {
    flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
    options.device = "cpu";
    const std::string cache = directory_.path().string() + "/strict";
    options.cache_dir = cache.c_str();
    options.strict = 1;
    flce_session* strict = nullptr;
    ASSERT_EQ(flce_session_create(&options, &strict), FLCE_OK) << flce_last_error();
    flce_kernel* handle = nullptr;
    EXPECT_EQ(flce_get_kernel(strict, "D=16,V=11,dtype=fp32", nullptr, &handle), FLCE_ERROR_CACHE_MISS);
    EXPECT_THAT(flce_last_error(), HasSubstr("flce prewarm --spec 'D=16,V=11,dtype=fp32'"));
    EXPECT_EQ(handle, nullptr);
    ASSERT_EQ(flce_prewarm(strict, "D=16,V=11,dtype=fp32", "cpu", nullptr, nullptr), FLCE_OK) << flce_last_error();
    EXPECT_EQ(flce_get_kernel(strict, "D=16,V=11,dtype=fp32", nullptr, &handle), FLCE_OK) << flce_last_error();
    flce_kernel_release(handle);
    flce_session_release(strict);
    options.strict = 2;
    EXPECT_EQ(flce_session_create(&options, &strict), FLCE_ERROR_ARGUMENT);
}

TEST_F(CApi, BadTensorCodes_NamedArguments) {
    flce_kernel* handle = kernel();
    flce_tensor hidden{};
    hidden.device_type = FLCE_CPU;
    hidden.dtype = FLCE_DTYPE(5, 64);  // complex
    flce_forward_args args = FLCE_FORWARD_ARGS_INIT;
    args.hidden = &hidden;
    EXPECT_EQ(flce_kernel_forward(handle, &args, nullptr, 0, nullptr), FLCE_ERROR_ARGUMENT);
    EXPECT_THAT(flce_last_error(), HasSubstr("hidden.dtype is 0x540 (DLPack code 5, 64 bits)"));
    hidden.dtype = FLCE_FP32;
    hidden.device_type = 13;
    EXPECT_EQ(flce_kernel_forward(handle, &args, nullptr, 0, nullptr), FLCE_ERROR_ARGUMENT);
    EXPECT_THAT(flce_last_error(), HasSubstr("hidden.device_type is 13"));
    hidden.device_type = FLCE_CPU;
    args.reduction = 4;
    EXPECT_EQ(flce_kernel_forward(handle, &args, nullptr, 0, nullptr), FLCE_ERROR_ARGUMENT);
    EXPECT_THAT(flce_last_error(), HasSubstr("reduction is 4"));
    flce_kernel_release(handle);
}

TEST_F(CApi, ManyThreads_RetainReleaseAndGet) {
    flce_kernel* shared = kernel();
    std::barrier start(8);
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t) {
        flce_kernel_retain(shared);
        threads.emplace_back([&] {
            start.arrive_and_wait();
            for (int i = 0; i < 100; ++i) {
                flce_kernel* own = nullptr;
                if (flce_get_kernel(session_, "D=8,V=11,dtype=fp32", nullptr, &own) != FLCE_OK) std::abort();
                flce_kernel_retain(own);
                flce_kernel_release(own);
                flce_kernel_release(own);
            }
            flce_kernel_release(shared);
        });
    }
    flce_kernel_release(shared);
}

}  // namespace
}  // namespace flce
