// Payloads of cache entries, tried as far as this machine can: `flce cache verify --load` asks this of each entry.
#pragma once

#include <memory>
#include <string>

#include "cache/artifact_cache.hpp"

namespace flce {

class PayloadCheck {
public:
    PayloadCheck();
    ~PayloadCheck();
    PayloadCheck(const PayloadCheck&) = delete;
    PayloadCheck& operator=(const PayloadCheck&) = delete;

    struct Result {
        std::string fault;    ///< why the payload cannot be used; empty: nothing was found
        bool loaded = false;  ///< whether the payload was loaded like in a session; false: it was read only, since it is for another
                              ///< machine
    };
    /// Checks the payload as its metadata describes it. A cubin is read (architecture, kernels), and loaded where there is a GPU of its
    /// architecture. An object is linked where this process has its architecture, else read. A compiler's name is read. Throws DeviceError
    /// for a fault of a GPU.
    [[nodiscard]] Result check(const Artifact& artifact);

private:
    struct Gpus;
    std::unique_ptr<Gpus> gpus_;  // opened when the first cubin is met
};

}  // namespace flce
