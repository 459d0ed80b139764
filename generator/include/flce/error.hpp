// Errors that flce throws. Every message names the field or call, the value found and what is allowed.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>

namespace flce {

/// Kind of failure that an Error is; the C ABI returns it as its status and the CLI maps it to an exit code.
enum class ErrorKind : int {
    spec = 1,         ///< the Spec (or its text) is malformed or outside the limits
    plan = 2,         ///< the Plan is malformed or not legal for this Spec and Device
    argument = 3,     ///< a tensor, workspace or number handed to a call is wrong; nothing was written
    compile = 4,      ///< NVRTC or LLVM refused generated source
    device = 5,       ///< a CUDA driver call failed
    environment = 6,  ///< a library, device or file this call needs is not there
    internal = 7,     ///< a bug in flce
    cache_miss = 8,   ///< a kernel that no cache has, where none may be compiled
};

class Error : public std::runtime_error {
public:
    Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
    [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

private:
    ErrorKind kind_;
};

class SpecError : public Error {
public:
    explicit SpecError(const std::string& message) : Error(ErrorKind::spec, message) {}
};

class PlanError : public Error {
public:
    explicit PlanError(const std::string& message) : Error(ErrorKind::plan, message) {}
};

class ArgumentError : public Error {
public:
    explicit ArgumentError(const std::string& message) : Error(ErrorKind::argument, message) {}
};

/// Carries the compiler's whole log and where the failing source was saved (empty if it could not be saved).
class CompileError : public Error {
public:
    CompileError(const std::string& message, std::string log, std::filesystem::path source_path)
        : Error(ErrorKind::compile, message), log_(std::move(log)), source_path_(std::move(source_path)) {}
    [[nodiscard]] const std::string& log() const noexcept { return log_; }
    [[nodiscard]] const std::filesystem::path& source_path() const noexcept { return source_path_; }

private:
    std::string log_;
    std::filesystem::path source_path_;
};

/// A CUDA driver call failed: which one, and its CUresult.
class DeviceError : public Error {
public:
    DeviceError(const std::string& message, std::string call, int result)
        : Error(ErrorKind::device, message), call_(std::move(call)), result_(result) {}
    [[nodiscard]] const std::string& call() const noexcept { return call_; }
    [[nodiscard]] int result() const noexcept { return result_; }

private:
    std::string call_;
    int result_;
};

class EnvironmentError : public Error {
public:
    explicit EnvironmentError(const std::string& message) : Error(ErrorKind::environment, message) {}
};

/// Nothing may be compiled (strict mode), and no tier of the cache has the kernel. The message names the command that compiles it.
class CacheMissError : public Error {
public:
    explicit CacheMissError(const std::string& message) : Error(ErrorKind::cache_miss, message) {}
};

class InternalError : public Error {
public:
    explicit InternalError(const std::string& message) : Error(ErrorKind::internal, message) {}
};

}  // namespace flce
