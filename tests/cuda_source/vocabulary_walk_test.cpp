// How cuda_sm90a's clusters divide forward's tiles among them.
#include "templates/sm90/vocabulary_walk.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

namespace flce {
namespace {

struct Visit {
    int row_cluster;
    int tile;
};

std::vector<Visit> visits_of(int cluster, int clusters, int row_clusters, int stride, int tiles) {
    std::vector<Visit> visits;
    for (VocabularyWalk walk(cluster, clusters, row_clusters, stride); walk.next(tiles);)
        visits.push_back({walk.row_cluster_of(walk.part), walk.tile});
    return visits;
}

TEST(VocabularyWalk, AnyShare_HasEveryTileOnce) {
    for (int clusters : {1, 2, 3, 16, 57, 66, 132}) {
        for (int row_clusters : {1, 2, 3, 4, 7, 15, 32, 65, 66}) {
            if (row_clusters > clusters) continue;
            int stride = std::max(clusters * 618 / 1000, 1);
            while (std::gcd(stride, clusters) != 1) ++stride;
            for (int tiles : {1, 2, 65, 132, 133, 501}) {
                std::map<std::pair<int, int>, int> times;
                for (int cluster = 0; cluster < clusters; ++cluster) {
                    int before = 0;
                    for (const Visit& visit : visits_of(cluster, clusters, row_clusters, stride, tiles)) {
                        ++times[{visit.row_cluster, visit.tile}];
                        EXPECT_GE(visit.tile, before) << "clusters that share rows go through the vocabulary together";
                        before = visit.tile;
                    }
                }
                EXPECT_EQ(std::ssize(times), static_cast<std::ptrdiff_t>(row_clusters) * tiles);
                for (const auto& [what, count] : times) {
                    EXPECT_EQ(count, 1) << what.first << ' ' << what.second;
                    EXPECT_LT(what.first, row_clusters);
                }
            }
        }
    }
}

// Where there are fewer tiles than clusters, each has its own.
TEST(VocabularyWalk, FewTiles_HaveAClusterEach) {
    for (int row_clusters : {1, 2, 5}) {
        for (int tiles : {1, 2, 7}) {
            std::map<std::pair<int, int>, int> times;
            for (int cluster = 0; cluster < row_clusters * tiles; ++cluster) {
                const std::vector<Visit> visits = visits_of(cluster, row_clusters * tiles, row_clusters, row_clusters, tiles);
                ASSERT_EQ(visits.size(), 1U) << cluster;
                ++times[{visits[0].row_cluster, visits[0].tile}];
            }
            EXPECT_EQ(std::ssize(times), static_cast<std::ptrdiff_t>(row_clusters) * tiles);
        }
    }
}

// The next tile is `clusters` further on.
TEST(VocabularyWalk, OneClusterOfRows_DealsTilesOutInOrder) {
    for (int cluster : {0, 1, 131}) {
        VocabularyWalk walk(cluster, 132, 1, 83);
        EXPECT_FALSE(walk.has_second());
        int expected = cluster;
        for (; walk.next(501); expected += 132) {
            EXPECT_EQ(walk.tile, expected);
            EXPECT_EQ(walk.part, 0);
        }
        EXPECT_GE(expected, 501);
    }
}

}  // namespace
}  // namespace flce
