#include "tests/cache/servers.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <pwd.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace flce::test {
namespace {

namespace fs = std::filesystem;

sockaddr_in loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

bool accepts(int port) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = loopback(port);
    const bool connected = ::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    ::close(socket);
    return connected;
}

/// Where `program` is: what the set-up unpacked, or the system's.
fs::path find_program(const std::string& program) {
    const char* path = std::getenv("PATH");
    const std::string unpacked = fmt::format("{}/.tools/servers/usr", FLCE_SOURCE_DIR);
    const std::string folders = fmt::format("{0}/bin:{0}/sbin:{1}:/usr/sbin:/usr/local/sbin", unpacked, path == nullptr ? "" : path);
    for (std::size_t start = 0; start < folders.size();) {
        const std::size_t end = std::min(folders.find(':', start), folders.size());
        const fs::path candidate = fs::path(folders.substr(start, end - start)) / program;
        if (::access(candidate.c_str(), X_OK) == 0) return candidate;
        start = end + 1;
    }
    return {};
}

constexpr const char* kHowToInstall = "tools/setup.sh --servers installs it";

}  // namespace

int free_port() {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    if (::bind(socket, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
        ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
        throw std::runtime_error("no port on loopback");
    }
    ::close(socket);
    return ntohs(address.sin_port);
}

ServerProcess::ServerProcess(const std::vector<std::string>& command, const fs::path& folder, int port,
                             const std::vector<std::string>& environment) {
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const std::string log = (folder / "log").string();
    const pid_t parent = ::getpid();
    child_ = ::fork();
    if (child_ == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != parent) ::_exit(1);
        const int output = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        ::dup2(output, 1);
        ::dup2(output, 2);
        // Libraries that were unpacked beside a server.
        const std::string libraries =
            fmt::format("LD_LIBRARY_PATH={0}/x86_64-linux-gnu:{0}/aarch64-linux-gnu", FLCE_SOURCE_DIR "/.tools/servers/usr/lib");
        if (command[0].starts_with(FLCE_SOURCE_DIR "/.tools/servers/")) ::putenv(const_cast<char*>(libraries.c_str()));
        for (const std::string& variable : environment) ::putenv(const_cast<char*>(variable.c_str()));
        if (::chdir(folder.c_str()) == 0) ::execv(arguments[0], arguments.data());
        ::_exit(127);
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!accepts(port)) {
        if (::waitpid(child_, nullptr, WNOHANG) == child_) {
            child_ = -1;
            throw std::runtime_error(fmt::format("{} ended: {}", command[0], read_file(log)));
        }
        if (std::chrono::steady_clock::now() > deadline)
            throw std::runtime_error(fmt::format("{} does not listen: {}", command[0], read_file(log)));
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

ServerProcess::~ServerProcess() {
    if (child_ < 0) return;
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
}

void ServerProcess::finish() {
    if (child_ < 0) return;
    ::kill(child_, SIGTERM);
    ::waitpid(std::exchange(child_, -1), nullptr, 0);
}

std::unique_ptr<Server> start_redis(std::string& why, const std::string& password) {
    const fs::path program = find_program("redis-server");
    if (program.empty()) return why = fmt::format("redis-server is not installed; {}", kHowToInstall), nullptr;
    auto server = std::make_unique<Server>();
    server->command = {program, "--port", std::to_string(server->port), "--bind", "127.0.0.1", "--save", "", "--appendonly",
                       "no",    "--dir",  server->folder.path()};
    if (!password.empty()) server->command.insert(server->command.end(), {"--requirepass", password});
    server->start();
    server->url = password.empty() ? fmt::format("redis://127.0.0.1:{}", server->port)
                                   : fmt::format("redis://:{}@127.0.0.1:{}/2", password, server->port);
    return server;
}

std::unique_ptr<Server> start_nginx(std::string& why, const NginxOptions& options) {
    const fs::path program = find_program("nginx");
    if (program.empty()) return why = fmt::format("nginx is not installed; {}", kHowToInstall), nullptr;
    auto server = std::make_unique<Server>();
    const fs::path& folder = server->folder.path();
    fs::create_directory(folder / "data");
    const bool tls = !options.tls.certificate.empty();
    const std::string certificate =
        tls ? fmt::format("ssl_certificate {}; ssl_certificate_key {};", options.tls.certificate.string(), options.tls.key.string()) : "";
    const std::string answer = options.redirect_to.empty() ? "dav_methods PUT; create_full_put_path on;"
                                                           : fmt::format("return 302 {}$request_uri;", options.redirect_to);
    // One process, as the user who runs the tests.
    write_file(folder / "nginx.conf",
               fmt::format("daemon off; master_process off; pid {0}/pid; error_log {0}/log; events {{}}\n"
                           "http {{ log_format credentials '$request_method $http_authorization $http_x_amz_security_token';\n"
                           "  access_log {0}/requests credentials;\n"
                           "  client_body_temp_path {0}/body; proxy_temp_path {0}/p; fastcgi_temp_path {0}/f;\n"
                           "  uwsgi_temp_path {0}/u; scgi_temp_path {0}/s;\n"
                           "  server {{ listen 127.0.0.1:{1}{2}; {3} root {0}/data; client_max_body_size 512m;\n"
                           "    location / {{ {4} }} }} }}\n",
                           folder.string(), server->port, tls ? " ssl" : "", certificate, answer));
    server->command = {program, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "log"};
    server->start();
    server->url = fmt::format("{}://127.0.0.1:{}/cache", tls ? "https" : "http", server->port);
    return server;
}

std::unique_ptr<S3Server> start_s3(std::string& why) {
    const fs::path script = fs::path(FLCE_SOURCE_DIR) / "tests/cache/s3_server.py";
    const fs::path python = find_program("python3");
    const fs::path moto = fs::path(FLCE_SOURCE_DIR) / ".tools/moto";
    if (python.empty() || !fs::exists(script)) return why = "there is no python3, or the sources are not here", nullptr;
    const std::string path = fmt::format("PYTHONPATH={}", moto.string());
    if (::system(fmt::format("{} {} -c 'import moto, flask' >/dev/null 2>&1", path, python.string()).c_str()) != 0) {
        return why = fmt::format("moto is not installed; {}", kHowToInstall), nullptr;
    }
    auto server = std::make_unique<S3Server>();
    const fs::path& folder = server->folder.path();
    server->process =
        std::make_unique<ServerProcess>(std::vector<std::string>{python, script, std::to_string(server->port), folder / "keys.json"},
                                        folder, server->port, std::vector<std::string>{path, "PYTHONDONTWRITEBYTECODE=1"});
    const auto keys = nlohmann::json::parse(read_file(folder / "keys.json"));
    server->access_key = keys.at("access_key");
    server->secret_key = keys.at("secret_key");
    server->url = "s3://kernels/some/prefix";
    return server;
}

ScriptedServer::ScriptedServer(std::function<void(int)> serve) : serve_(std::move(serve)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    if (::bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) != 0 || ::listen(listener_, 16) != 0 ||
        ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
        throw std::runtime_error("no server on loopback");
    }
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] {
        std::vector<std::jthread> connections;
        while (true) {
            const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
            if (socket < 0) return;
            ++connections_;
            connections.emplace_back([this, socket] {
                serve_(socket);
                ::close(socket);
            });
        }
    });
}

ScriptedServer::~ScriptedServer() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
}

}  // namespace flce::test
