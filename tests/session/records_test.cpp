// Plan that a session takes: the caller's, a record's, the cost model's.
#include <gmock/gmock.h>

#include <set>

#include "records/record_store.hpp"
#include "runtime/plan_choice.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/cache/log_capture.hpp"
#include "tests/session/fake_backend.hpp"

namespace flce {
namespace {

using test::FakeMachine;
using test::LogCapture;
using test::TemporaryDirectory;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

const Spec& layer() {
    static const Spec spec = parse_spec("D=256,V=5000,dtype=fp32").normalized();
    return spec;
}
const Device& cpu() {
    static const Device device = describe_device("x86-64-v3");
    return device;
}

class SessionRecordsTest : public testing::Test {
protected:
    Session session(SessionOptions options = {}) {
        options.cache_dir = directory_.path();
        return SessionAccess::make(std::move(options), environment_, machine_.backends());
    }
    /// A candidate that is not the first choice.
    static Plan plan(std::size_t which) { return candidate_plans(layer(), cpu()).at(which); }
    void record(std::int64_t num_tokens, const std::string& plan) {
        Record record{.key = record_key(layer(), cpu(), {.num_tokens = num_tokens})};
        record.candidates[plan].times_ms["run"] = {3.5};
        (void)RecordStore({.directory = directory_.path() / "records", .shipped = false}).save(record);
    }
    TemporaryDirectory directory_;
    FakeMachine machine_;
    Environment environment_;
};

TEST_F(SessionRecordsTest, Record_BeforeTheCostModel) {
    record(4096, plan(2).text());
    const auto kernel = session().get_kernel(layer());
    EXPECT_EQ(kernel->plan(), plan(2));
    EXPECT_THAT(kernel->explain().reasons, Contains(HasSubstr("plan: measured: best of 1 at 4096 tokens (")));
    EXPECT_THAT(kernel->explain().reasons, Contains(HasSubstr("measured at 4096 tokens: forward + backward 3.5 ms")));
    EXPECT_THAT(kernel->explain().reasons, Not(Contains(HasSubstr("modelled")))) << "one source of times";
    EXPECT_THAT(session({.use_records = false}).get_kernel(layer())->explain().reasons,
                Contains(HasSubstr("plan: the cost model's first choice")));
    EXPECT_EQ(session({.use_records = false}).get_kernel(layer())->plan(), plan(0));
    environment_.no_records = true;
    EXPECT_EQ(session().get_kernel(layer())->plan(), plan(0));
}

TEST_F(SessionRecordsTest, ExplicitPlan_BeforeTheRecord) {
    record(4096, plan(2).text());
    const auto kernel = session().get_kernel(layer(), {.plan = plan(1).text()});
    EXPECT_EQ(kernel->plan(), plan(1));
    EXPECT_THAT(kernel->explain().reasons, Contains(HasSubstr("given by the caller")));
}

TEST_F(SessionRecordsTest, NumTokens_NearestBucketsPlan) {
    record(64, plan(1).text());
    record(8192, plan(2).text());
    Session session = this->session();
    EXPECT_EQ(session.get_kernel(layer(), {.num_tokens = 1})->plan(), plan(1));
    EXPECT_EQ(session.get_kernel(layer(), {.num_tokens = 200})->plan(), plan(1));
    EXPECT_EQ(session.get_kernel(layer(), {.num_tokens = 100'000})->plan(), plan(2));
    EXPECT_EQ(session.get_kernel(layer())->plan(), plan(2));  // not known: 4096
    EXPECT_EQ(machine_.made, 2);
}

TEST_F(SessionRecordsTest, NoRecord_OneKernelForEveryNumberOfTokens) {
    Session session = this->session();
    const auto kernel = session.get_kernel(layer());
    for (const std::int64_t tokens : {1, 500, 5000, 50'000}) EXPECT_EQ(session.get_kernel(layer(), {.num_tokens = tokens}), kernel);
    EXPECT_EQ(machine_.made, 1);
}

// The record's kernels could not retain for this layer, and these can: a comparison of then says nothing of today's plans.
TEST_F(SessionRecordsTest, RecordOfBeforeALayerCouldBeRetained_IsOutdated) {
    const Spec spec = parse_spec("D=2304,V=256000,dtype=bf16,softcap=30").normalized();
    const Device device = describe_device("NVIDIA H200");
    Plan retaining = choose_plan(spec, device, {.num_tokens = 4096});
    ASSERT_EQ(retaining.strategy, Strategy::retain);
    retaining.cuda.raster = 4;
    Plan recomputing = retaining;
    recomputing.strategy = Strategy::recompute;
    const auto chosen = [&](const std::string& kernel_version, const std::vector<Plan>& compared) {
        const TemporaryDirectory directory;
        RecordStore records({.directory = directory.path(), .shipped = false});
        Record record{.key = record_key(spec, device, {.num_tokens = 4096})};
        if (!kernel_version.empty()) record.key.kernel_version = kernel_version;
        double ms = 1;
        for (const Plan& plan : compared) record.candidates[plan.text()].times_ms["run"] = {ms++};
        (void)records.save(record);
        return plan_for({.spec = spec, .device = device, .request = {.num_tokens = 4096}}, records).plan;
    };
    EXPECT_EQ(chosen("another", {recomputing}).strategy, Strategy::retain);
    EXPECT_EQ(chosen("another", {recomputing, retaining}), recomputing) << "both were compared";
    EXPECT_EQ(chosen("another", {retaining}), retaining) << "tiles age better than times";
    EXPECT_EQ(chosen("", {recomputing}), recomputing) << "of these kernels";
}

TEST_F(SessionRecordsTest, IllegalPlan_OneWarningAndTheNextChoice) {
    Plan bad = plan(1);
    bad.cpu.micro_m = 1000;
    record(4096, bad.text());
    const LogCapture log;
    Session session = this->session();
    EXPECT_EQ(session.get_kernel(layer())->plan(), plan(0));
    EXPECT_EQ(session.get_kernel(layer(), {.num_tokens = 64})->plan(), plan(0));
    EXPECT_EQ(log.warnings(), 1);
    EXPECT_THAT(log.text(), HasSubstr("is not legal"));
    record(64, "no plan at all");
    EXPECT_EQ(this->session().get_kernel(layer())->plan(), plan(0));
    EXPECT_EQ(log.warnings(), 2);
}

// A limit on memory is no fault of the record: explain tells its cost, and nothing is printed on stderr.
TEST_F(SessionRecordsTest, PlanWithoutRoomInTheLimit_SaidInExplainAlone) {
    const Spec spec = parse_spec("D=2048,V=151936,dtype=bf16").normalized();
    const Device device = describe_device("NVIDIA H200");
    RecordStore records({.shipped = true});
    const LogCapture log;
    const PlanQuery query{.spec = spec, .device = device, .request = {.scratch_bytes = 3'000'000, .num_tokens = 4096}};
    const PlanAnswer answer = plan_for(query, records);
    EXPECT_EQ(log.warnings(), 0) << log.text();
    EXPECT_THAT(answer.source, HasSubstr("measured: best usable one of "));
    EXPECT_THAT(answer_reasons(query, answer), Contains(testing::AllOf(HasSubstr("shipped with flce"), HasSubstr("3000000 bytes"))));
    const PlanQuery roomy{.spec = spec, .device = device, .request = {.num_tokens = 4096}};
    EXPECT_TRUE(plan_for(roomy, records).passed_over.empty());
}

TEST_F(SessionRecordsTest, RecordThatLies_ItsBestLegalPlan) {
    Plan bad = plan(1);
    bad.cpu.micro_m = 1000;
    Record lies{.key = record_key(layer(), cpu(), {.num_tokens = 4096})};
    for (const auto& [text, ms] : {std::pair{bad.text(), 0.0001}, {"garbage", 0.0002}, {plan(2).text(), 3.5}, {plan(1).text(), 4.0}}) {
        lies.candidates[text].times_ms["run"] = {ms};
    }
    (void)RecordStore({.directory = directory_.path() / "records", .shipped = false}).save(lies);
    const LogCapture log;
    const auto kernel = session().get_kernel(layer());
    EXPECT_EQ(kernel->plan(), plan(2));
    EXPECT_THAT(kernel->explain().reasons, Contains(HasSubstr("measured at 4096 tokens: forward + backward 3.5 ms")));
    EXPECT_EQ(log.warnings(), 1);
}

TEST_F(SessionRecordsTest, RecordOfOtherThreads_NotTaken) {
    record(4096, plan(2).text());
    ASSERT_GT(cpu().cpu.cores, 1);
    EXPECT_EQ(session().choose_plan(layer(), cpu()).plan, plan(2));
    EXPECT_EQ(session({.threads = cpu().cpu.cores}).choose_plan(layer(), cpu()).plan, plan(2));
    EXPECT_EQ(session({.threads = 1}).choose_plan(layer(), cpu()).plan, plan(0));
    environment_.num_threads = 1;
    EXPECT_EQ(session().choose_plan(layer(), cpu()).plan, plan(0));
}

TEST_F(SessionRecordsTest, OtherScratch_TilesOfTheRecordBytesOfTheCall) {
    record(4096, plan(2).text());
    const auto kernel = session().get_kernel(layer(), {.scratch_bytes = 32 << 20});
    Plan expected = plan(2);
    expected.scratch_bytes = 32 << 20;
    EXPECT_EQ(kernel->plan(), expected);
}

TEST_F(SessionRecordsTest, AllExponentialsInTheirOwnMemory_RecordsOfThatAlone) {
    const Spec spec = parse_spec("D=1024,V=65536,dtype=bf16").normalized();
    const Device h200 = describe_device("h200");
    constexpr std::int64_t kLimit = std::int64_t{4} << 30;
    const auto candidates = candidate_plans(spec, h200);
    const auto save = [&](std::int64_t limit, const Plan& plan) {
        Record record{.key = record_key(spec, h200, {.workspace_limit_bytes = limit, .num_tokens = 4096})};
        record.candidates[plan.text()].times_ms["run"] = {3.5};
        (void)RecordStore({.directory = directory_.path() / "records", .shipped = false}).save(record);
    };
    const auto chosen = [&](std::int64_t limit) {
        return session().choose_plan(spec, h200, {.workspace_limit_bytes = limit, .num_tokens = 4096}).plan;
    };
    const Plan apart = choose_plan(spec, h200, {.workspace_limit_bytes = kLimit, .num_tokens = 4096});
    save(0, candidates.at(3));
    EXPECT_EQ(chosen(0), candidates.at(3));
    EXPECT_EQ(chosen(128 << 20), candidates.at(3)) << "a limit that grad_weight's memory is lent under";
    EXPECT_EQ(chosen(kLimit), apart) << "the record says nothing of that";
    save(kLimit, candidates.at(5));
    EXPECT_EQ(chosen(0), candidates.at(3));
    EXPECT_EQ(chosen(kLimit), candidates.at(5));
    EXPECT_EQ(chosen(2 * kLimit), candidates.at(5));
}

TEST_F(SessionRecordsTest, LimitWithJustRoomForAllExponentials_IsNotRoundedBelowThem) {
    const Spec spec = parse_spec("D=4096,V=128256,dtype=bf16").normalized();
    constexpr std::int64_t kNeeded = 2LL * 8192 * 128256 + 4LL * 8192 * 4096 + kDefaultScratchBytes;
    constexpr std::int64_t kSlack = 32 << 20;  // ends of blocks, and the numbers kept of each row
    Session session = this->session({.use_records = false});
    const auto columns = [&](std::int64_t limit) {
        return session.choose_plan(spec, describe_device("h200"), {.workspace_limit_bytes = limit, .num_tokens = 8192})
            .plan.cuda.grad_weight.block_n;
    };
    EXPECT_EQ(columns(kNeeded - kSlack), 192);
    EXPECT_EQ(columns(kNeeded + kSlack), 256);
    EXPECT_EQ(columns(std::int64_t{1} << 40), 256);
}

TEST_F(SessionRecordsTest, LimitOfASpecWithImpliedFields_SamePlanInSessionAndPrewarming) {
    machine_.gpus = {describe_device("NVIDIA H200")};
    const Spec spec =
        parse_spec("D=128,V=1001,dtype=bf16,layout=hidden_major");  // rows that the copy engine cannot read: nothing is retained
    Spec implied = spec;
    implied.padded_vocab_size = 0;
    const auto candidates = candidate_plans(spec.normalized(), machine_.gpus[0]);
    ASSERT_EQ(candidates.front().path, PlanPath::cuda_sm80);
    for (const auto& [limit, which] : {std::pair{std::int64_t{1} << 30, 1}, {std::int64_t{1} << 40, 2}}) {
        Record record{.key = record_key(spec.normalized(), machine_.gpus[0], {.workspace_limit_bytes = limit, .num_tokens = 4096})};
        record.candidates[candidates.at(static_cast<std::size_t>(which)).text()].times_ms["run"] = {3.5};
        (void)RecordStore({.directory = directory_.path() / "records", .shipped = false}).save(record);
    }
    const KernelOptions options{.scratch_bytes = kDefaultScratchBytes, .workspace_limit_bytes = std::int64_t{1} << 30, .num_tokens = 4096};
    Session session = this->session();
    EXPECT_EQ(session.get_kernel(implied, options)->plan(), candidates.at(1));
    EXPECT_EQ(SessionAccess::plan(session, implied, machine_.gpus[0], options), candidates.at(1));
}

TEST_F(SessionRecordsTest, Prewarm_CompilesWhatTheSessionAsksFor) {
    record(64, plan(1).text());
    record(4096, plan(2).text());
    Session session = this->session();
    for (const std::int64_t tokens : {64, 4096}) {
        EXPECT_EQ(session.prewarm(layer(), cpu(), {.num_tokens = tokens}).compiled, 1);
        (void)session.get_kernel(layer(), {.num_tokens = tokens});
    }
    EXPECT_EQ(machine_.made, 0);
    EXPECT_EQ(machine_.requests.at(0).plan, plan(1));
    EXPECT_EQ(machine_.requests.at(1).plan, plan(2));
}

TEST_F(SessionRecordsTest, RecordWrittenMeanwhile_SessionStaysWithItsAnswer) {
    Session session = this->session();
    EXPECT_EQ(session.choose_plan(layer(), cpu()).plan, plan(0));
    record(4096, plan(2).text());
    EXPECT_EQ(session.choose_plan(layer(), cpu()).plan, plan(0));
    EXPECT_EQ(this->session().choose_plan(layer(), cpu()).plan, plan(2));
}

TEST_F(SessionRecordsTest, RecordsDirectory_EnvironmentThenBesideTheCache) {
    EXPECT_EQ(session().records_dir(), directory_.path() / "records");
    environment_.records_dir = "/elsewhere";
    EXPECT_EQ(session().records_dir(), "/elsewhere");
    environment_.no_records = true;
    EXPECT_EQ(session().records_dir(), "");
}

TEST_F(SessionRecordsTest, FurtherRecords_OptionThenEnvironmentBeforeTheUsers) {
    record(4096, plan(1).text());
    const TemporaryDirectory team;
    Record other{.key = record_key(layer(), cpu(), {.num_tokens = 4096})};
    other.candidates[plan(2).text()].times_ms["run"] = {9};
    (void)RecordStore({.directory = team.path(), .shipped = false}).save(other);
    EXPECT_EQ(session({.records = {team.path()}}).choose_plan(layer(), cpu()).plan, plan(2));
    environment_.records = {team.path()};
    EXPECT_EQ(session().choose_plan(layer(), cpu()).plan, plan(2));
    EXPECT_EQ(session({.records = {directory_.path() / "records"}}).choose_plan(layer(), cpu()).plan, plan(1));
}

TEST_F(SessionRecordsTest, PlanDigest_OfSpecsAndPlansInAnyOrder) {
    Session session = this->session();
    const auto a = session.get_kernel(layer());
    const auto b = session.get_kernel(parse_spec("D=64,V=100,dtype=fp32"));
    const auto other = session.get_kernel(layer(), {.plan = plan(1).text()});
    using Kernels = std::vector<std::shared_ptr<const Kernel>>;
    EXPECT_EQ(plan_digest(Kernels{a, b}), plan_digest(Kernels{b, a}));
    EXPECT_EQ(plan_digest(Kernels{a, b}), plan_digest(Kernels{b, a, a}));
    EXPECT_NE(plan_digest(Kernels{a, b}), plan_digest(Kernels{a}));
    EXPECT_NE(plan_digest(Kernels{a}), plan_digest(Kernels{other}));
    EXPECT_EQ(plan_digest(Kernels{a}).size(), 64U);
    // A digest is equal in another process, or on another rank.
    EXPECT_EQ(plan_digest(Kernels{this->session().get_kernel(layer())}), plan_digest(Kernels{a}));
    EXPECT_THROW((void)plan_digest(Kernels{nullptr}), ArgumentError);
}

}  // namespace
}  // namespace flce
