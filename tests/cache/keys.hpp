// Ed25519 key pairs as PEM files, made afresh.
#pragma once

#include <filesystem>
#include <string>

#include "cache/signature.hpp"

namespace flce::test {

struct KeyPair {
    std::filesystem::path private_key;
    std::filesystem::path public_key;
};

inline KeyPair make_key_pair(const std::filesystem::path& folder, const std::string& name) {
    KeyPair pair{folder / (name + ".pem"), folder / (name + ".pub.pem")};
    write_key_pair(pair.private_key, pair.public_key);
    return pair;
}

}  // namespace flce::test
