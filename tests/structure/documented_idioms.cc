// Every option struct of the public headers, initialised as documentation and examples do: some members by name, the others left out.
// Compiled with -Wall -Wextra -Werror by documented_idioms.cmake, which is where a member without an initialiser is a warning.
#include <flce/flce.hpp>

namespace {

[[maybe_unused]] void options() {
    flce::Session session({.device = "cpu"});
    flce::Session strict({.disk_cache = false, .strict = true});
    const flce::Spec spec{.hidden_size = 64, .vocab_size = 1000};
    const auto kernel = session.get_kernel(spec, {.num_tokens = 4});
    (void)session.get_kernel({.hidden_size = 64, .vocab_size = 1000, .softcap = 30, .outputs = {.lse = true}},
                             {.plan = kernel->plan().text()});
    (void)flce::choose_plan(spec, kernel->device(), {.num_tokens = 4096});
    (void)flce::Device{.kind = flce::DeviceKind::cpu};
    (void)flce::GpuProperties{.sm_count = 132};
    (void)flce::CpuProperties{.cores = 2};
    (void)flce::CudaPlan{.raster = 4};
    (void)flce::CpuPlan{.micro_m = 6};
    (void)flce::Plan{.path = flce::PlanPath::cpu};
    (void)flce::TensorView{.ndim = 1};
    (void)flce::DeviceRef{.index = 1};
    kernel->forward({.hidden = {}, .retained = {.data = nullptr}}, {.bytes = 0});
    kernel->backward({.weight = {}, .grad_hidden = {}}, {.bytes = 0}, {.handle = nullptr});
}

}  // namespace
