#include "tests/cli/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <stdexcept>

extern char** environ;

namespace flce::test {
namespace {

std::vector<std::string> child_environment(const ProcessOptions& options) {
    std::map<std::string, std::string> variables;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string text = *entry;
        const auto equals = text.find('=');
        // Where NVRTC and the driver lie is the machine's business; everything else would make tests depend on the caller.
        const std::string name = text.substr(0, equals);
        if (name.starts_with("FLCE_") && name != "FLCE_NVRTC" && name != "FLCE_LIBCUDA") continue;
        variables[name] = text.substr(equals + 1);
    }
    variables["FLCE_CACHE_DIR"] = shared_cache().string();
    for (const auto& [name, value] : options.environment) variables[name] = value;
    std::vector<std::string> result;
    for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
    return result;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
    std::vector<char*> result;
    for (std::string& text : strings) result.push_back(text.data());
    result.push_back(nullptr);
    return result;
}

void drain(int out, int err, ProcessResult& result, pid_t child, const ProcessOptions& options) {
    const auto start = std::chrono::steady_clock::now();
    bool interrupted = options.interrupt_after_ms == 0;
    std::array<pollfd, 2> streams{{{out, POLLIN, 0}, {err, POLLIN, 0}}};
    int open = 2;
    while (open > 0) {
        ::poll(streams.data(), streams.size(), 20);
        if (!interrupted && std::chrono::steady_clock::now() - start > std::chrono::milliseconds(options.interrupt_after_ms)) {
            ::kill(child, SIGINT);
            interrupted = true;
        }
        for (std::size_t i = 0; i < streams.size(); ++i) {
            if (streams[i].fd < 0 || (streams[i].revents & (POLLIN | POLLHUP)) == 0) continue;
            std::array<char, 65536> buffer{};
            const ssize_t count = ::read(streams[i].fd, buffer.data(), buffer.size());
            if (count > 0) {
                (i == 0 ? result.out : result.err).append(buffer.data(), static_cast<std::size_t>(count));
            } else if (count == 0) {
                streams[i].fd = -1;
                --open;
            }
        }
    }
}

}  // namespace

/// The flce beside the test binary, where both were moved or installed together; else the build tree's.
std::filesystem::path flce_program() {
    std::error_code error;
    const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
    const auto beside = self.parent_path() / "flce";
    if (!error && std::filesystem::exists(beside, error)) return beside;
    return FLCE_CLI_PATH;
}

std::vector<std::string> with_faults(const std::vector<std::string>& faults) {
    std::vector<std::string> arguments{"--worker", (flce_program().parent_path() / "flce_faulty_worker").string()};
    for (const std::string& fault : faults) {
        arguments.emplace_back("--worker");
        arguments.push_back(fault);
    }
    return arguments;
}

nlohmann::json ProcessResult::json() const { return nlohmann::json::parse(out, nullptr, false); }

ProcessResult run_flce(const std::vector<std::string>& arguments, const ProcessOptions& options) {
    std::vector<std::string> command{options.program.empty() ? flce_program().string() : options.program.string()};
    command.insert(command.end(), arguments.begin(), arguments.end());
    std::vector<std::string> environment = child_environment(options);
    const auto argv = pointers(command);
    const auto envp = pointers(environment);
    std::array<int, 2> out{};
    std::array<int, 2> err{};
    if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    const pid_t child = ::fork();
    if (child < 0) throw std::runtime_error("fork failed");
    if (child == 0) {
        ::dup2(out[1], 1);
        ::dup2(err[1], 2);
        if (!options.out.empty() && ::dup2(::open(options.out.c_str(), O_WRONLY | O_CLOEXEC), 1) != 1) ::_exit(127);
        if (options.out_closed) ::close(1);
        if (!options.directory.empty() && ::chdir(options.directory.c_str()) != 0) ::_exit(127);
        ::execve(argv[0], argv.data(), envp.data());
        ::_exit(127);
    }
    ::close(out[1]);
    ::close(err[1]);
    ProcessResult result;
    drain(out[0], err[0], result, child, options);
    ::close(out[0]);
    ::close(err[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    return result;
}

TemporaryFolder::TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "flce-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
}

const std::filesystem::path& shared_cache() {
    static const TemporaryFolder folder;
    return folder.path();
}

}  // namespace flce::test
