// Where a search begins, and what it varies, on paths that call a library.
#include "autotune/search_space.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "generator/planner.hpp"

namespace flce {
namespace {

constexpr int kVersion = 130100;

const Spec& layer() {
    static const Spec spec = parse_spec("D=2048,V=50257,dtype=bf16").normalized();
    return spec;
}

std::ptrdiff_t library_plans(const std::vector<Plan>& plans, int version) {
    return std::ranges::count_if(plans, [&](const Plan& p) { return p.path == PlanPath::cuda_lt && p.cuda.library.version == version; });
}

TEST(SeedPlans, LibraryIsHere_ItsPlansAreAmongThemOnEveryGpuWithItsVersion) {
    for (const char* gpu : {"h100", "a100", "rtx 4090", "b200"}) {
        const std::vector<Plan> seeds = seed_plans(layer(), describe_device(gpu), {}, 3, kVersion);
        EXPECT_GE(library_plans(seeds, kVersion), 2) << gpu << ": one of each strategy";
        EXPECT_EQ(library_plans(seeds, 0), 0) << gpu;
        for (const Plan& plan : seeds) EXPECT_EQ(std::ranges::count(seeds, plan), 1) << gpu << " " << plan.text();
    }
}

TEST(SeedPlans, NoLibrary_ItsPlansOnlyWhereTheyAreTheFavourite) {
    EXPECT_EQ(library_plans(seed_plans(layer(), describe_device("h100"), {}, 3), 0), 0);
    EXPECT_EQ(seed_plans(layer(), describe_device("h100"), {}, 3).front().path, PlanPath::cuda_sm90a);
    EXPECT_EQ(seed_plans(layer(), describe_device("b200"), {}, 3).front().path, PlanPath::cuda_lt);
}

TEST(Coordinates, PlanThatCallsTheLibrary_AlgorithmsInPlaceOfTheOrderOfTiles) {
    const Device device = describe_device("b200");
    Plan plan = choose_plan(layer(), device);
    ASSERT_EQ(plan.path, PlanPath::cuda_lt);
    const auto named = [&](const std::string& name) {
        const std::vector<Coordinate> all = coordinates(layer(), device, plan);
        const auto found = std::ranges::find(all, name, &Coordinate::name);
        return found == all.end() ? std::vector<Plan>{} : found->plans;
    };
    EXPECT_TRUE(named("raster").empty());
    EXPECT_TRUE(named("algorithms").empty()) << "numbers of algorithms mean nothing without a version";
    EXPECT_GE(named("forward").size(), 3U);
    plan.cuda.library.version = kVersion;
    const std::vector<Plan> algorithms = named("algorithms");
    ASSERT_EQ(algorithms.size(), 7U) << "two more of each of three products";
    EXPECT_EQ(algorithms.front(), plan);
    for (const Plan& other : algorithms) EXPECT_EQ(other.cuda.library.version, kVersion);
    const auto names = coordinate_names(DeviceKind::cuda);
    EXPECT_NE(std::ranges::find(names, "algorithms"), names.end());
}

TEST(Coordinates, DivergencesPlan_SumsInTheGradientsMemory) {
    const Device device = describe_device("h200");
    const Spec heads = parse_spec("D=2048,V=151936,teacher_hidden_size=4096").normalized();
    const std::vector<Coordinate> all = coordinates(heads, device, choose_plan(heads, device));
    const auto lent = std::ranges::find(all, "lent", &Coordinate::name);
    ASSERT_NE(lent, all.end());
    EXPECT_EQ(lent->plans.size(), 3U);
    for (const Plan& plan : lent->plans) EXPECT_TRUE(has_lent_tile(plan)) << plan.text();
    const auto names = coordinate_names(DeviceKind::cuda);
    EXPECT_NE(std::ranges::find(names, "lent"), names.end());
}

}  // namespace
}  // namespace flce
