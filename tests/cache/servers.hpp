// Real cache servers on loopback, started by the test and gone with it. Where one is not installed, name and reason for GTEST_SKIP.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cache/cache_test_support.hpp"
#include "tests/cache/certificates.hpp"

namespace flce::test {

/// A port of 127.0.0.1 that nobody listens on just now.
[[nodiscard]] int free_port();

/// A child process that dies with this one.
class ServerProcess {
public:
    /// Starts `command` in `folder`, its output in `folder`/log, and waits until it accepts connections on `port`. Throws with the log
    /// otherwise.
    ServerProcess(const std::vector<std::string>& command, const std::filesystem::path& folder, int port,
                  const std::vector<std::string>& environment = {});
    ~ServerProcess();
    /// Asks the server to end and waits until it has: it then writes its log of requests that it has answered.
    void finish();
    ServerProcess(const ServerProcess&) = delete;
    ServerProcess& operator=(const ServerProcess&) = delete;

private:
    pid_t child_ = -1;
};

/// A server with a folder of its own.
struct Server {
    TemporaryDirectory folder;
    int port = free_port();
    std::vector<std::string> command;
    std::unique_ptr<ServerProcess> process;
    std::string url;

    void start() { process = std::make_unique<ServerProcess>(command, folder.path(), port); }
    void stop() { process.reset(); }
    void finish() { process->finish(); }
};

/// Null, and the reason in `why`, where the program is not installed.
[[nodiscard]] std::unique_ptr<Server> start_redis(std::string& why, const std::string& password = "");

struct NginxOptions {
    Certificate tls;          ///< https with this; none: http
    std::string redirect_to;  ///< "http://host:port": where all requests are sent; empty: nowhere
};
/// With dav, plain PUT and GET. folder/requests has a line for each: method, login and S3's token as they came ("-": none).
[[nodiscard]] std::unique_ptr<Server> start_nginx(std::string& why, const NginxOptions& options = {});
/// moto's S3, with an empty bucket "kernels". It checks signatures: only the access key in `server.access_key` may do anything.
struct S3Server : Server {
    std::string access_key;
    std::string secret_key;
};
[[nodiscard]] std::unique_ptr<S3Server> start_s3(std::string& why);

/// A server that does as it is told: `serve` is called with each connection's socket, in a thread of its own.
class ScriptedServer {
public:
    explicit ScriptedServer(std::function<void(int socket)> serve);
    ~ScriptedServer();
    ScriptedServer(const ScriptedServer&) = delete;
    ScriptedServer& operator=(const ScriptedServer&) = delete;
    [[nodiscard]] int port() const { return port_; }
    [[nodiscard]] int connections() const { return connections_; }

private:
    std::function<void(int)> serve_;
    int listener_ = -1;
    int port_ = 0;
    std::atomic<int> connections_{0};
    std::thread thread_;
};

}  // namespace flce::test
