#include "cache/private_folder.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "flce/error.hpp"

namespace flce {
namespace {

TEST(PrivateFolder, IsItsOwnersAloneAndGoesWithIt) {
    std::filesystem::path path;
    {
        const PrivateFolder folder("test");
        const PrivateFolder other("test");
        path = folder.path();
        EXPECT_NE(path, other.path());
        EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms::owner_all);
        std::ofstream(path / "file") << "text";
    }
    EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(PrivateFolder, NoPlaceForIt_SaysWhatToSet) {
    const char* const before = std::getenv("TMPDIR");
    const std::string kept = before != nullptr ? before : "";
    ::setenv("TMPDIR", "/nonexistent", 1);
    EXPECT_THROW(PrivateFolder("test"), EnvironmentError);
    before != nullptr ? ::setenv("TMPDIR", kept.c_str(), 1) : ::unsetenv("TMPDIR");
}

}  // namespace
}  // namespace flce
