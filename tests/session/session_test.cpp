#include <gmock/gmock.h>

#include <barrier>

#include "cache/cleanup.hpp"
#include "cache/disk_store.hpp"
#include "cache/pack_store.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/session/fake_backend.hpp"

namespace flce {
namespace {

using test::FakeMachine;
using test::small_spec;
using test::TemporaryDirectory;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

class SessionTest : public testing::Test {
protected:
    Session session(SessionOptions options = {}) {
        options.cache_dir = directory_.path();
        return SessionAccess::make(std::move(options), environment_, machine_.backends());
    }
    TemporaryDirectory directory_;
    FakeMachine machine_;
    Environment environment_;
};

TEST_F(SessionTest, SameSpec_SameKernelFromMemory) {
    Session session = this->session();
    const auto first = session.get_kernel(small_spec());
    const auto second = session.get_kernel(small_spec());
    EXPECT_EQ(first, second);
    EXPECT_EQ(machine_.made, 1);
    EXPECT_EQ(session.statistics().memory_hits, 1);
    EXPECT_EQ(session.statistics().compiled, 1);
}

TEST_F(SessionTest, LiteralWithImpliedFields_SameKernelAsNormalized) {
    Session session = this->session();
    const auto first = session.get_kernel(small_spec());
    const Spec literal{.hidden_size = 8, .vocab_size = 50, .dtype = DType::fp32, .grad_weight_dtype = DType::fp32};
    for (int i = 0; i < 3; ++i) EXPECT_EQ(session.get_kernel(literal), first);
    EXPECT_EQ(first->spec().padded_vocab_size, 50);
    EXPECT_EQ(machine_.made, 1);
}

TEST_F(SessionTest, OtherSpecPlanOrScratch_OtherKernel) {
    Session session = this->session();
    const auto base = session.get_kernel(small_spec());
    EXPECT_NE(session.get_kernel(parse_spec("D=16,V=50,dtype=fp32")), base);
    EXPECT_NE(session.get_kernel(small_spec(), {.plan = base->plan().text()}), base);
    EXPECT_NE(session.get_kernel(small_spec(), {.scratch_bytes = 32 << 20}), base);
    EXPECT_EQ(session.get_kernel(small_spec(), {.scratch_bytes = kDefaultScratchBytes}), base);
}

TEST_F(SessionTest, Limit_ScratchKeepsToItInSteps) {
    Session session = this->session();
    const Spec spec = parse_spec("D=64,V=5000");
    const auto scratch = [&](std::int64_t limit, std::int64_t num_tokens, std::int64_t given = 0) {
        return session.get_kernel(spec, {.scratch_bytes = given, .workspace_limit_bytes = limit, .num_tokens = num_tokens})
            ->plan()
            .scratch_bytes;
    };
    constexpr std::int64_t kSum = 4 * 1000 * 64;  // grad_hidden's, in fp32
    EXPECT_EQ(scratch(kSum + kDefaultScratchBytes, 1000), kDefaultScratchBytes);
    EXPECT_EQ(scratch(kSum + kDefaultScratchBytes - 1, 1000), 48 << 20);
    EXPECT_EQ(scratch(kSum + (33 << 20), 1000), 32 << 20);
    EXPECT_EQ(scratch(33 << 20, 0), 32 << 20);
    EXPECT_EQ(scratch(kSum + (33 << 20), 1000, 8 << 20), 8 << 20);
    EXPECT_EQ(scratch(std::int64_t{1} << 40, 1000), kDefaultScratchBytes) << "a CPU's kernels retain: more memory is for that";
    EXPECT_EQ(session.get_kernel(spec, {.workspace_limit_bytes = kSum + (33 << 20), .num_tokens = 1000}),
              session.get_kernel(spec, {.workspace_limit_bytes = kSum + (34 << 20), .num_tokens = 1000}));
    EXPECT_THAT([&] { scratch(kSum, 1000); },
                ThrowsMessage<PlanError>(
                    AllOf(HasSubstr("the workspace limit of 256000 bytes (workspace_limit_bytes"), HasSubstr("is too small"))));
    try {
        scratch(kSum, 1000);
    } catch (const PlanError& error) {
        const std::string message = error.what();
        const std::int64_t smallest = std::stoll(message.substr(message.find("works is ") + 9));
        EXPECT_GT(scratch(smallest, 1000), 0);
        EXPECT_THROW(scratch(smallest - 1, 1000), PlanError);
    }
    EXPECT_THROW(scratch(-1, 0), PlanError);
    EXPECT_THROW(scratch(1 << 20, -1), ArgumentError);
    EXPECT_THROW(scratch(1 << 20, std::int64_t{1} << 62), ArgumentError);
}

TEST_F(SessionTest, LimitOfALayerThatRetainsNothing_IsForScratchOfItsOneKernel) {
    machine_.gpus = {describe_device("sm_80")};
    Session session = this->session();
    const Spec spec = parse_spec("D=64,V=5000,dtype=fp16");  // retains nothing
    constexpr std::int64_t kSum = 4 * 1000 * 64;
    const KernelOptions some{.workspace_limit_bytes = kSum + (129 << 20), .num_tokens = 1000};
    const KernelOptions most{.workspace_limit_bytes = std::int64_t{1} << 40, .num_tokens = 1000};
    EXPECT_EQ(session.get_kernel(spec, some)->plan().scratch_bytes, 128 << 20);
    EXPECT_EQ(machine_.made, 2) << "it, and the CPU's that it is compared with; none only to ask it whether it retains";
    EXPECT_EQ(session.get_kernel(spec, most)->plan().scratch_bytes, 256 << 20);
    EXPECT_EQ(machine_.made, 3);
    for (const KernelOptions& options : {some, most}) {
        EXPECT_EQ(SessionAccess::plan(session, spec, machine_.gpus[0], options), session.get_kernel(spec, options)->plan());
        EXPECT_EQ(session.choose_plan(spec, machine_.gpus[0], options).plan, session.get_kernel(spec, options)->plan());
    }
}

TEST_F(SessionTest, OtherLimitWithTheSamePlan_SameKernelFromMemory) {
    Session session = this->session();
    const auto first = session.get_kernel(small_spec(), {.workspace_limit_bytes = std::int64_t{1} << 30, .num_tokens = 64});
    EXPECT_EQ(session.get_kernel(small_spec(), {.workspace_limit_bytes = std::int64_t{3} << 30, .num_tokens = 4096}), first);
    EXPECT_EQ(machine_.made, 1);
    EXPECT_EQ(session.statistics().memory_hits, 1);
}

TEST_F(SessionTest, LimitOfTheSession_HoldsForCallsWithoutOne) {
    Session session = this->session({.workspace_limit_bytes = 33 << 20});
    const Spec fp32 = parse_spec("D=64,V=5000,dtype=fp32");  // has no sum beside grad_hidden itself
    EXPECT_EQ(session.get_kernel(fp32, {.num_tokens = 1 << 20})->plan().scratch_bytes, 32 << 20);
    EXPECT_EQ(session.get_kernel(fp32, {.workspace_limit_bytes = 17 << 20})->plan().scratch_bytes, 16 << 20);
    EXPECT_THROW(this->session({.workspace_limit_bytes = -1}), PlanError);
}

TEST_F(SessionTest, SixteenThreads_OneBuild) {
    machine_.build_ms = 50;
    Session session = this->session();
    std::barrier start(16);
    std::vector<std::shared_ptr<const Kernel>> kernels(16);
    std::vector<std::jthread> threads;
    for (int i = 0; i < 16; ++i) {
        threads.emplace_back([&, i] {
            start.arrive_and_wait();
            kernels[i] = session.get_kernel(small_spec());
        });
    }
    threads.clear();
    EXPECT_EQ(machine_.made, 1);
    EXPECT_EQ(session.statistics().compiled, 1);
    EXPECT_EQ(session.statistics().memory_hits, 15);
    for (const auto& kernel : kernels) EXPECT_EQ(kernel, kernels[0]);
}

TEST_F(SessionTest, ManyThreadsManySpecs_EachBuiltOnce) {
    Session session = this->session();
    std::vector<Spec> specs;
    for (int i = 1; i <= 10; ++i) specs.push_back(parse_spec("D=" + std::to_string(8 * i) + ",V=50,dtype=fp32"));
    std::atomic<int> wrong{0};
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < 500; ++i) {
                const Spec& spec = specs[static_cast<std::size_t>(i * 3 + t) % specs.size()];
                if (!(session.get_kernel(spec)->spec() == spec)) ++wrong;
                (void)session.statistics();
            }
        });
    }
    threads.clear();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(machine_.made, 10);
}

TEST_F(SessionTest, FailedBuild_ReachesWaitersAndIsNotRemembered) {
    machine_.build_ms = 200;
    machine_.failures_left = 1;
    Session session = this->session();
    std::barrier start(4);
    std::atomic<int> failures{0};
    std::atomic<int> kernels{0};
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
            start.arrive_and_wait();
            try {
                kernels += session.get_kernel(small_spec()) != nullptr ? 1 : 0;
            } catch (const CompileError& error) {
                failures += error.log() == "line 1: ill" ? 1 : 0;
            }
        });
    }
    threads.clear();
    EXPECT_GE(failures, 1);
    EXPECT_EQ(failures + kernels, 4);
    EXPECT_NE(session.get_kernel(small_spec()), nullptr);
    EXPECT_EQ(machine_.made, 2);
}

TEST_F(SessionTest, NewSession_FromDisk) {
    (void)session().get_kernel(small_spec());
    Session second = session();
    (void)second.get_kernel(small_spec());
    EXPECT_EQ(machine_.made, 1);
    EXPECT_EQ(second.statistics().disk_hits, 1);
    EXPECT_EQ(second.statistics().compiled, 0);
    EXPECT_EQ(second.cache_dir(), directory_.path());
}

TEST_F(SessionTest, NoDiskCache_NothingWritten) {
    for (const bool by_environment : {false, true}) {
        environment_.no_disk_cache = by_environment;
        Session session = this->session({.disk_cache = by_environment});
        (void)session.get_kernel(small_spec());
        EXPECT_TRUE(session.cache_dir().empty());
        EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
    }
}

TEST_F(SessionTest, KernelOutlivesItsSession) {
    std::shared_ptr<const Kernel> kernel;
    {
        Session session = this->session();
        kernel = session.get_kernel(small_spec());
    }
    EXPECT_EQ(kernel->workspace_bytes(3), 3u * test::RecordingKernel::kBackwardBytesPerToken);
    EXPECT_EQ(kernel->spec(), small_spec());
    EXPECT_THAT(kernel->explain().reasons, testing::Contains(HasSubstr("modelled at 4096 tokens")));
}

TEST_F(SessionTest, MovedSession_KeepsItsKernels) {
    Session first = session();
    const auto kernel = first.get_kernel(small_spec());
    Session second = std::move(first);
    EXPECT_EQ(second.get_kernel(small_spec()), kernel);
}

TEST_F(SessionTest, BadSpec_SpecErrorAndNothingBuilt) {
    Session session = this->session();
    EXPECT_THROW((void)session.get_kernel(Spec{.hidden_size = 7, .vocab_size = 50}), SpecError);
    EXPECT_EQ(machine_.made, 0);
}

TEST_F(SessionTest, PlanOverride_UsedOrRefusedWithTheReason) {
    Session session = this->session();
    const auto chosen = session.get_kernel(small_spec());
    const auto same = session.get_kernel(small_spec(), {.plan = chosen->plan().text()});
    EXPECT_EQ(same->plan(), chosen->plan());
    EXPECT_THAT(same->explain().reasons, testing::Contains(HasSubstr("given by the caller")));
    EXPECT_THAT(chosen->explain().reasons, testing::Contains(HasSubstr("modelled at 4096 tokens")));
    EXPECT_THROW((void)session.get_kernel(small_spec(), {.plan = "no such plan"}), PlanError);

    Plan gpu_plan = choose_plan(small_spec(), describe_device("sm_90a"));
    EXPECT_THAT([&] { (void)session.get_kernel(small_spec(), {.plan = gpu_plan.text()}); },
                ThrowsMessage<PlanError>(AllOf(HasSubstr("is not legal for"), HasSubstr("D=8"))));
}

TEST_F(SessionTest, BadScratchOrThreads_Error) {
    EXPECT_THROW((void)session({.scratch_bytes = 0}), PlanError);
    EXPECT_THROW((void)session({.threads = -1}), ArgumentError);
    Session session = this->session();
    EXPECT_THROW((void)session.get_kernel(small_spec(), {.scratch_bytes = -1}), PlanError);
}

TEST_F(SessionTest, Prewarm_CountsAndServesLaterSessions) {
    Session session = this->session();
    const Device h100 = describe_device("sm_90a");
    const Spec spec = parse_spec("D=128,V=1000,dtype=bf16");
    const PrewarmResult first = session.prewarm(spec, h100);
    EXPECT_EQ(first.compiled, 1);
    EXPECT_EQ(first.hits, 0);
    const PrewarmResult again = session.prewarm(spec, h100);
    EXPECT_EQ(again.compiled, 0);
    EXPECT_EQ(again.hits, 1);
    EXPECT_EQ(session.statistics().compiled, 1);
    EXPECT_EQ(machine_.requests.at(0).device, h100);

    machine_.gpus = {h100};
    Session on_gpu = this->session();
    EXPECT_EQ(on_gpu.get_kernel(spec)->device_ref(), (DeviceRef{DeviceKind::cuda, 0}));
    EXPECT_EQ(on_gpu.statistics().compiled, 0);
    EXPECT_EQ(on_gpu.statistics().disk_hits, 1);
}

TEST_F(SessionTest, Prewarm_ServesEveryLimitItWasAskedForToAStrictSession) {
    machine_.gpus = {describe_device("sm_90a")};
    const Spec spec = parse_spec("D=128,V=1000,dtype=fp16");  // retains nothing
    Session builder = session({.device = "cpu"});
    Session strict = session({.device = "cuda", .strict = true});
    std::int64_t sets = 0;
    for (const std::int64_t limit : {std::int64_t{0}, std::int64_t{20} << 20, std::int64_t{40} << 20, std::int64_t{1} << 34}) {
        for (const std::int64_t num_tokens : {0, 1, 4096}) {
            const KernelOptions options{.workspace_limit_bytes = limit, .num_tokens = num_tokens};
            sets += builder.prewarm(spec, machine_.gpus[0], options).compiled;
            EXPECT_NE(strict.get_kernel(spec, options), nullptr) << limit << ", " << num_tokens;
        }
    }
    EXPECT_EQ(machine_.made, 0);
    EXPECT_GE(sets, 4);  // sets for a session's scratch, for either limit, and for the most that is of use
    // no kernel is there for another limit
    EXPECT_THROW((void)strict.get_kernel(spec, {.workspace_limit_bytes = 10 << 20}), CacheMissError);
}

TEST_F(SessionTest, PlansForAnyTokens_HoldThatOfEveryNumber) {
    Session session = this->session();
    const Device device = describe_device("sm_90a");
    for (const char* text : {"D=128,V=1000,dtype=bf16", "D=4096,V=128256,dtype=bf16", "D=128,V=1000,dtype=fp32"}) {
        const Spec spec = parse_spec(text);
        for (const std::int64_t limit : {std::int64_t{0}, std::int64_t{50} << 20, std::int64_t{100} << 20, std::int64_t{3} << 30}) {
            const KernelOptions options{.workspace_limit_bytes = limit};
            const std::vector<Plan> all = SessionAccess::plans_for_any_tokens(session, spec, device, options);
            EXPECT_GE(all.size(), limit == 0 || spec.dtype == DType::fp32 ? 1u : 3u);
            for (std::int64_t num_tokens = 1; num_tokens < 200'000; num_tokens += 1 + num_tokens / 4) {
                if (limit > 0 && spec.dtype != DType::fp32 && limit <= 4 * spec.hidden_size * num_tokens) break;
                Plan wanted;
                try {
                    wanted = SessionAccess::plan(session, spec, device, {.workspace_limit_bytes = limit, .num_tokens = num_tokens});
                } catch (const PlanError&) {
                    break;  // no plan has so little scratch
                }
                EXPECT_THAT(all, testing::Contains(wanted)) << text << " " << limit << " " << num_tokens;
            }
        }
    }
    EXPECT_THROW((void)SessionAccess::plans_for_any_tokens(session, small_spec(), device, {.workspace_limit_bytes = 1}), PlanError);
}

TEST_F(SessionTest, Missing_NamesPlansUntilTheyAreCompiled) {
    const Device device = describe_device("sm_80");
    const Spec spec = parse_spec("D=128,V=1000,dtype=fp16");  // retains nothing, so that a limit is for scratch
    Session session = this->session();
    const KernelOptions wide{.workspace_limit_bytes = std::int64_t{1} << 34};
    EXPECT_THAT(session.missing(spec, device, wide), testing::ElementsAre(HasSubstr("scratch=268435456")));
    EXPECT_THAT(session.missing(spec, device), testing::ElementsAre(HasSubstr("scratch=67108864")));
    EXPECT_EQ(machine_.compiled, 0);
    (void)session.prewarm(spec, device);
    EXPECT_TRUE(session.missing(spec, device).empty());
    EXPECT_EQ(session.missing(spec, device, wide).size(), 1u);
    (void)session.prewarm(spec, device, wide);
    EXPECT_TRUE(session.missing(spec, device, wide).empty());
    EXPECT_EQ(machine_.compiled, 2);
}

TEST_F(SessionTest, HugeLimits_AreLimitsLikeOthers) {
    Session session = this->session();
    const Spec spec = parse_spec("D=128,V=1000,dtype=bf16");
    for (const std::int64_t limit : {std::int64_t{1} << 40, std::int64_t{1} << 61, INT64_MAX}) {
        const KernelOptions options{.workspace_limit_bytes = limit, .num_tokens = 4096};
        EXPECT_EQ(session.get_kernel(small_spec(), options),
                  session.get_kernel(small_spec(), {.workspace_limit_bytes = limit, .num_tokens = 4000}));
        EXPECT_EQ(session.choose_plan(spec, describe_device("sm_90a"), options).plan.strategy, Strategy::retain);
        EXPECT_FALSE(
            SessionAccess::plans_for_any_tokens(session, spec, describe_device("sm_90a"), {.workspace_limit_bytes = limit}).empty());
    }
}

TEST_F(SessionTest, Strict_MissIsAnErrorThatNamesTheCommand) {
    machine_.gpus = {describe_device("NVIDIA H100")};
    machine_.gpus[0].name = "NVIDIA H100 80GB HBM3";
    const Spec spec = parse_spec("D=128,V=1000,dtype=bf16,tied");
    for (const bool by_environment : {false, true}) {
        environment_.strict = by_environment;
        Session strict = session({.strict = by_environment ? std::nullopt : std::optional(true)});
        EXPECT_THAT([&] { (void)strict.get_kernel(spec); },
                    ThrowsMessage<CacheMissError>(AllOf(HasSubstr("strict mode"), HasSubstr("flce prewarm --spec '" + spec.text() +
                                                                                            "' --device 'NVIDIA H100 80GB HBM3'"))));
        EXPECT_THAT([&] { (void)strict.get_kernel(spec, {.workspace_limit_bytes = 40 << 20, .num_tokens = 512}); },
                    ThrowsMessage<CacheMissError>(testing::EndsWith("--workspace-limit 41943040 --num-tokens 512")));
        EXPECT_THAT([&] { (void)strict.get_kernel(spec, {.scratch_bytes = 32 << 20}); },
                    ThrowsMessage<CacheMissError>(testing::EndsWith("--workspace 33554432")));
    }
    Session lenient = session({.strict = false});
    EXPECT_NE(lenient.get_kernel(spec), nullptr);
    EXPECT_EQ(machine_.made, 1);
    Session strict = session();
    EXPECT_NE(strict.get_kernel(spec), nullptr);
    EXPECT_EQ(strict.statistics().disk_hits, 1);
}

TEST_F(SessionTest, Strict_TierOutOfUseIsAnErrorNotAWarning) {
    environment_.strict = true;
    EXPECT_THAT([&] { (void)session({.cache_packs = {directory_.path() / "none.flcepack"}}); },
                ThrowsMessage<EnvironmentError>(AllOf(HasSubstr("packs tier"), HasSubstr("none.flcepack"))));
    std::filesystem::permissions(directory_.path(), std::filesystem::perms::others_write, std::filesystem::perm_options::add);
    EXPECT_THAT([&] { (void)session(); }, ThrowsMessage<EnvironmentError>(HasSubstr("local tier")));
    std::filesystem::permissions(directory_.path(), std::filesystem::perms::others_write, std::filesystem::perm_options::remove);
    Session remote = session({.cache_remote = "redis://127.0.0.1:1"});
    EXPECT_THAT([&] { (void)remote.get_kernel(small_spec()); },
                ThrowsMessage<EnvironmentError>(AllOf(HasSubstr("remote tier"), HasSubstr("redis://127.0.0.1:1"))));
    EXPECT_EQ(machine_.made, 0);
}

TEST_F(SessionTest, PackFromElsewhere_UsedWithoutACompilerAndPreferredToTheCpu) {
    machine_.gpus = {describe_device("h100")};
    const Spec spec = parse_spec("D=128,V=1000,dtype=bf16");
    const std::filesystem::path pack = directory_.path() / "kernels.flcepack";
    PackContents contents;
    {
        Session builder = session();
        (void)builder.get_kernel(spec);
        DiskStore store(directory_.path());
        std::string fault;
        for (const StoredFile& file : list_entries(directory_.path(), fault)) contents[file.key] = store.get(file.key).entry;
        ASSERT_EQ(contents.size(), 1u);
    }
    write_pack(pack, contents);
    machine_.nvrtc = false;
    for (const bool by_environment : {false, true}) {
        environment_.no_disk_cache = by_environment;
        environment_.cache_dir = directory_.path() / "container";
        environment_.cache_packs = by_environment ? std::vector{pack} : std::vector<std::filesystem::path>();
        Session container({SessionAccess::make({.cache_packs = by_environment ? std::vector<std::filesystem::path>() : std::vector{pack}},
                                               environment_, machine_.backends())});
        EXPECT_EQ(container.device().kind, DeviceKind::cuda);
        EXPECT_NE(container.get_kernel(spec), nullptr);
        EXPECT_EQ(container.statistics().pack_hits, 1);
        EXPECT_EQ(container.statistics().compiled, 0);
    }
    EXPECT_EQ(machine_.made, 1);
}

TEST_F(SessionTest, KeyThatCannotBeRead_Error) {
    EXPECT_THAT([&] { (void)session({.trusted_keys = {directory_.path() / "no.pem"}}); },
                ThrowsMessage<EnvironmentError>(HasSubstr("no.pem")));
    environment_.signing_key = directory_.path() / "none.pem";
    EXPECT_THAT([&] { (void)session(); }, ThrowsMessage<EnvironmentError>(HasSubstr("none.pem")));
}

TEST_F(SessionTest, RemoteCacheIsDown_KernelAllTheSame) {
    Session without = session({.cache_remote = "redis://127.0.0.1:1"});
    EXPECT_NE(without.get_kernel(small_spec()), nullptr);
    EXPECT_EQ(without.statistics().remote_faults, 1);
    EXPECT_THAT([&] { (void)session({.cache_remote = "gopher://h"}); }, ThrowsMessage<EnvironmentError>(HasSubstr("gopher")));
}

TEST_F(SessionTest, DeviceChoice_FollowsOptionThenEnvironmentThenMachine) {
    EXPECT_EQ(session().device().kind, DeviceKind::cpu);
    machine_.gpus = {describe_device("sm_80"), describe_device("sm_90a")};
    EXPECT_EQ(session().device().gpu.arch, "sm_80");
    EXPECT_EQ(session({.device = "cuda:1"}).device().gpu.arch, "sm_90a");
    EXPECT_EQ(session({.device = "cpu"}).device().kind, DeviceKind::cpu);
    environment_.device = "cuda:1";
    EXPECT_EQ(session().device().gpu.arch, "sm_90a");
    EXPECT_EQ(session({.device = "native"}).device().kind, DeviceKind::cpu);
    environment_.device.clear();
    machine_.nvrtc = false;
    EXPECT_EQ(session().device().kind, DeviceKind::cpu);
    EXPECT_EQ(session({.device = "cuda"}).device().gpu.arch, "sm_80");  // asked for by name: no silent CPU
}

TEST_F(SessionTest, DeviceNotThere_EnvironmentErrorSaysWhy) {
    EXPECT_THAT([&] { (void)session({.device = "cuda"}); }, ThrowsMessage<EnvironmentError>(HasSubstr("there is no driver")));
    machine_.gpus = {describe_device("sm_80")};
    EXPECT_THAT([&] { (void)session({.device = "cuda:1"}); }, ThrowsMessage<EnvironmentError>(HasSubstr("cuda:0 to cuda:0")));
    for (const char* name : {"cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999999999", "gpu", "sm_90a"}) {
        EXPECT_THROW((void)session({.device = name}), EnvironmentError) << name;
    }
}

TEST_F(SessionTest, NamedCpu_RunsWhereTheMachineHasItsFeatures) {
    EXPECT_EQ(session({.device = "x86-64"}).device().cpu.cpu, "x86-64");
    EXPECT_THAT([&] { (void)session({.device = "x86-64-v4"}); }, ThrowsMessage<EnvironmentError>(HasSubstr("512-bit vectors")));
    EXPECT_THAT(
        [&] { (void)session({.device = "neoverse-v2"}); },
        ThrowsMessage<EnvironmentError>(HasSubstr("a CPU of aarch64-unknown-linux-gnu; this machine's x86-64-v3 is one of x86_64")));
    machine_.cpu = "neoverse-v1";
    EXPECT_EQ(session({.device = "aarch64"}).device().cpu.cpu, "generic");
    EXPECT_EQ(session({.device = "neoverse-v1"}).device().cpu.cpu, "neoverse-v1");
    EXPECT_THAT([&] { (void)session({.device = "neoverse-v2"}); },
                ThrowsMessage<EnvironmentError>(HasSubstr("this machine is a neoverse-v1")));
}

TEST(ResolveDevice, Names_MachineOrDescription) {
    EXPECT_EQ(resolve_device("sm_90a").gpu.arch, "sm_90a");
    EXPECT_EQ(resolve_device("cpu"), resolve_device("native"));
    EXPECT_EQ(resolve_device("cpu").kind, DeviceKind::cpu);
    EXPECT_THROW((void)resolve_device("no such device"), EnvironmentError);
}

TEST(Version, IsSet) { EXPECT_FALSE(version().empty()); }

}  // namespace
}  // namespace flce
