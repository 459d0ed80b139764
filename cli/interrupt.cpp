#include "cli/interrupt.hpp"

#include <csignal>
#include <initializer_list>

namespace flce::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;

extern "C" void on_signal(int) { g_interrupted = 1; }

}  // namespace

void handle_interrupts() {
    struct sigaction action{};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESETHAND;  // the second one has its default meaning
    sigemptyset(&action.sa_mask);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        struct sigaction before{};
        sigaction(signal, nullptr, &before);
        if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // a signal that nohup has turned off stays off
    }
}

bool interrupted() noexcept { return g_interrupted != 0; }

void stop_if_interrupted() {
    if (interrupted()) throw Interrupted();
}

}  // namespace flce::cli
