#include "generator/spec_file.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "flce/error.hpp"

namespace flce {

std::string read_spec_file(std::string_view path) {
    constexpr std::size_t kMostBytes = 1U << 20;
    const std::string name(path);
    errno = 0;
    std::ifstream file(name, std::ios::binary);
    std::string text(kMostBytes + 1, '\0');
    if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (!file.is_open() || file.bad() || (file.fail() && !file.eof())) {
        throw EnvironmentError("spec file '" + name + "' cannot be read: " + (errno != 0 ? std::strerror(errno) : "not a regular file"));
    }
    text.resize(static_cast<std::size_t>(file.gcount()));
    if (text.size() > kMostBytes) throw SpecError("spec file '" + name + "' has more than 1 MiB; a spec is a small JSON object");
    return text;
}

}  // namespace flce
